"""Runs shared between tests: each job is run once per engine and session, however many claims rest on it."""

from __future__ import annotations

from collections.abc import Callable

from common.harness.grades import referee_job
from common.harness.launch import RankPool
from common.harness.peers import PEERS
from common.harness.records import CollectiveCount, Run
from common.harness.train import run_job
from common.job import JobConfig


class Runs:
    """Runs jobs on the pool and remembers the outcome."""

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool
        self._done: dict[tuple[str, JobConfig], Run] = {}

    def __call__(self, engine: str, job: JobConfig) -> Run:
        """The record and step-0 gradients of `engine` on `job`."""
        key = (engine, job)
        if key not in self._done:
            self._done[key] = run_job(self._pool, engine, job, timeout_s=300)
        return self._done[key]

    def referee(self, job: JobConfig) -> Run:
        """The float64 run of `job` on one process."""
        return self("single", referee_job(job))

    def peers(self, job: JobConfig) -> list[Run]:
        """The runs of `job` from weights that were rounded once more."""
        return [self(engine, job) for engine in PEERS]


def counts(run: Run, *, keep: Callable[[CollectiveCount], bool] = lambda _: True) -> dict[tuple[str, str], int]:
    """Collectives of one step by (phase, kind)."""
    return {(c.phase, c.kind): c.count for c in run[0].collectives if keep(c)}
