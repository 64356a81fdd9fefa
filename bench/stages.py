"""A compiled engine stage by stage, each judged like the whole: which stage brings a difference in, or costs memory.

    uncompiled         the parametrization alone, or an engine whose blocks are not compiled
    traced             the graph, without any pass that can be left out
    bucket_gathers     and each further pass of the job in the pipeline's order, on top of those before
    ...
    inductor           the whole, compiled by Inductor

All but the last run under aot_eager, which computes what the graph says. The last is the job itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from bench.judge import engine_of, judge_pair, judging_jobs, off_plan
from bench.progress import watch
from common.engine import compilers_of
from common.harness.launch import Ranks
from common.harness.records import Run, row_of
from common.harness.replay import walkable
from common.harness.report import ParityReport
from common.harness.train import run_job
from common.job import PASSES, JobConfig

UNCOMPILED, TRACED, AOT_EAGER, INDUCTOR = "uncompiled", "traced", "aot_eager", "inductor"


@dataclass(frozen=True)
class StageRow:
    """One stage, judged.

    Attributes:
        asked, reached, margin, passed: as in `ParityReport`.
        params_differ: gradients, over all steps, that are not those of the reference in bits.
        peak_bytes: the most of any rank.
        collectives: of one step on rank 0.
        reason: why it did not pass; None if it did.
    """

    stage: str
    asked: str
    reached: str | None
    margin: float | None
    passed: bool
    params_differ: int
    peak_bytes: int | None
    collectives: int
    reason: str | None


@dataclass(frozen=True)
class Bisection:
    """A compiled engine, taken apart.

    Attributes:
        engine, reference: what was judged against what.
        bits: whether equal bits were asked of the whole.
        rows: its stages, in the order in which they build on each other.
    """

    engine: str
    reference: str
    bits: bool
    rows: tuple[StageRow, ...]

    @property
    def guilty(self) -> str | None:
        """The first stage that does not pass; if none fails and bits were asked, the first that changes some."""
        failing = next((row.stage for row in self.rows if not row.passed), None)
        if failing is not None or not self.bits:
            return failing
        return self.changing

    @property
    def changing(self) -> str | None:
        """The first stage that changes a bit, as it may where no equal bits are asked."""
        return next((row.stage for row in self.rows if row.params_differ), None)

    @property
    def lines(self) -> list[str]:
        """What was found: who brings a difference in, and what each stage adds to the peak."""
        found = f"{self.engine} against {self.reference}, stage by stage: "
        if self.guilty is not None:
            reason = next(row.reason for row in self.rows if row.stage == self.guilty)
            lines = [f"{found}{self.guilty} brings a difference in" + (f": {reason}" if reason else "")]
        else:
            lines = [f"{found}none brings a difference in that its grade does not allow"]
        for before, after in pairwise(self.rows):
            if before.peak_bytes and after.peak_bytes and after.peak_bytes != before.peak_bytes:
                change = after.peak_bytes - before.peak_bytes
                lines.append(f"{self.engine}, {after.stage}: peak {change:+,} bytes, {change / before.peak_bytes:+.1%}")
        return lines

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Bisection:
        """The one that `dataclasses.asdict` described."""
        return cls(**data | {"rows": tuple(row_of(StageRow, row) for row in data["rows"])})


def stage_jobs(engine: str, job: JobConfig) -> dict[str, JobConfig]:
    """By stage, the job to run; none for an engine that nothing compiles."""
    compilers = compilers_of(engine, job)
    if not compilers.all:
        return {}
    jobs = {UNCOMPILED: walkable(engine, job)}
    if compilers.model is None:
        backends = (AOT_EAGER, INDUCTOR) if job.block_backend == INDUCTOR else (AOT_EAGER,)
        return jobs | {backend: replace(job, block_backend=backend) for backend in backends}
    traced = replace(job, backend=AOT_EAGER)
    left_out = list(PASSES)
    jobs[TRACED] = replace(traced, disabled_passes=tuple(left_out))
    for name in PASSES:
        if name not in job.disabled_passes:
            left_out.remove(name)
            jobs[name] = replace(traced, disabled_passes=tuple(left_out))
    return jobs | ({INDUCTOR: job} if job.backend == INDUCTOR else {})


def bisect(
    ranks: Ranks,
    engine: str,
    reference: str,
    job: JobConfig,
    *,
    bits: bool,
    known: Mapping[str, Run] | None = None,
    timeout_s: float = 600.0,
) -> Bisection | None:
    """Run `engine` stage by stage and judge each against `reference`, in the grade that it can keep.

    Args:
        ranks: open.
        bits: whether equal bits are asked of the whole.
        known: runs of `job` that there are already, by name as for `bench.judge.judge`.
        timeout_s: for each stage.

    Returns:
        None for an engine that nothing compiles.
    """
    stages = stage_jobs(engine, job)
    if not stages:
        return None
    runs = dict(known or {})
    jobs = {name: its_job for name, its_job in ({reference: job} | judging_jobs(job)).items() if name not in runs}
    rows = []
    with watch([*jobs, *(f"{engine}, {stage}" for stage in stages)], job.steps, show=ranks.is_main) as watcher:
        for name, its_job in jobs.items():
            runs[name] = run_job(ranks, engine_of(name), its_job, on_progress=watcher.begin(name), timeout_s=timeout_s)
        for stage, its_job in stages.items():
            on_progress = watcher.begin(f"{engine}, {stage}")
            run = run_job(ranks, engine, its_job, on_progress=on_progress, timeout_s=timeout_s)
            rows.append(_row(stage, run, judge_pair(runs[reference], run, runs)))
    return Bisection(engine, reference, bits, tuple(rows))


def _row(name: str, run: Run, report: ParityReport) -> StageRow:
    record = run[0]
    astray = off_plan({name: record})
    return StageRow(
        stage=name,
        asked=str(report.asked),
        reached=report.reached and str(report.reached),
        margin=report.margin,
        passed=report.passed and not astray,
        params_differ=sum(step.params_differ for step in report.steps),
        peak_bytes=max((peak.peak_bytes for peak in record.memory), default=None),
        collectives=sum(each.count for each in record.collectives),
        reason=next(iter((*report.reasons, *astray)), None),
    )
