"""Runs shared between tests: each job is run once per engine and session, however many claims rest on it."""

from __future__ import annotations

from collections.abc import Callable

from common.harness.grades import referee_job
from common.harness.instruments.trace import Trace
from common.harness.launch import RankPool
from common.harness.peers import PEERS
from common.harness.records import CollectiveCount, Run
from common.harness.train import assemble, run_ranks
from common.job import JobConfig

LLAMA, GPT, GPT_TIED = (f"{name},n_layers=1" for name in ("llama-debug", "gpt-debug", "gpt-debug-tied"))
"""One block between two ends: where ranks, dtypes or packing are the claim, since tracing takes as long as a model is
deep."""
TRACED_INDUCTOR = JobConfig(model=LLAMA, seq=32, link="1ms,150MB/s")
"""The one job under Inductor that is both judged and traced, by tests of two files."""


class Runs:
    """Runs jobs on the pool and remembers the outcome."""

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool
        self._done: dict[tuple[str, JobConfig], Run] = {}
        self._traces: dict[tuple[str, JobConfig], list[Trace]] = {}

    def __call__(self, engine: str, job: JobConfig, *, profile: bool = False) -> Run:
        """The record and step-0 gradients of `engine` on `job`; with `profile`, `traces` will not run it again."""
        key = (engine, job)
        if key not in self._done or (profile and key not in self._traces):
            results = run_ranks(self._pool, engine, job, profile=profile, timeout_s=300)
            self._done[key] = assemble(engine, job, results)
            if profile:
                self._traces[key] = [result.trace for result in results if result is not None and result.trace]
        return self._done[key]

    def traces(self, engine: str, job: JobConfig) -> list[Trace]:
        """A step of `engine` on `job`, traced after the judged ones, of each rank."""
        self(engine, job, profile=True)
        return self._traces[engine, job]

    def referee(self, job: JobConfig) -> Run:
        """The float64 run of `job` on one process."""
        return self("single", referee_job(job))

    def peers(self, job: JobConfig) -> list[Run]:
        """The runs of `job` from weights that were rounded once more."""
        return [self(engine, job) for engine in PEERS]


def counts(run: Run, *, keep: Callable[[CollectiveCount], bool] = lambda _: True) -> dict[tuple[str, str], int]:
    """Collectives of one step by (phase, kind)."""
    return {(c.phase, c.kind): c.count for c in run[0].collectives if keep(c)}
