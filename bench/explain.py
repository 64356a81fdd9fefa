"""The first divergence of a pair of runs: both are replayed up to the step where they part, and walked through it.

1. replay the reference, the candidate and the float64 referee up to that step (`common.harness.replay`);
2. lay the walks side by side, and name the first place (`common.harness.divergence`);
3. where a compiler hid the modules, run the compiled engine stage by stage, and name the stage (`stages`).

The outcome becomes part of the run's report, which `show` prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.judge import REFEREE
from bench.progress import watch
from bench.stages import Bisection, bisect, stage_jobs
from common.harness.compare import expected_grade, referee_job
from common.harness.divergence import Finding, PlaceRow, WalkComparison, compare_walks
from common.harness.grades import ErrorBound, Grade
from common.harness.launch import Ranks
from common.harness.records import RunRecord, row_of
from common.harness.replay import Replayed, replay, walkable
from common.harness.report import ParityReport
from common.job import JobConfig


@dataclass(frozen=True)
class Explanation:
    """Why a pair of runs differs.

    Attributes:
        reference, candidate: engine names.
        step: the first that differs.
        asked, passed: of the pair's report.
        rows: every place of that step; none for a pair whose bits are equal.
        finding: the first divergence in the walk; None if there was none, since the compiler brought it in.
        bisection: of the compiled side; None if nothing is compiled, or the walk, which is not, has found it.
        notes: what has to be known to read it.
    """

    reference: str
    candidate: str
    step: int
    asked: str
    passed: bool
    rows: tuple[PlaceRow, ...]
    finding: Finding | None
    bisection: Bisection | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Explanation:
        """The one that `dataclasses.asdict` described."""
        finding = data["finding"]
        if finding is not None:
            row = row_of(PlaceRow, finding["row"])
            finding = row_of(Finding, finding | {"row": row})
            finding = replace(finding, index=tuple(finding.index), causes=tuple(finding.causes))
        return cls(
            **data
            | {
                "rows": tuple(row_of(PlaceRow, row) for row in data["rows"]),
                "finding": finding,
                "bisection": data["bisection"] and Bisection.from_dict(data["bisection"]),
                "notes": tuple(data["notes"]),
            }
        )


def explain(
    ranks: Ranks, job: JobConfig, report: ParityReport, records: Sequence[RunRecord], timeout_s: float
) -> Explanation:
    """Replay the pair of `report` up to the step where bits first differ, if any do, and find out where.

    Args:
        ranks: open.
        job: what the pair ran.
        report: the judge's.
        records: of both sides, to see whether the replay is what was recorded.
        timeout_s: for each engine.
    """
    first = report.first_divergence
    step = first.step if first else 0  # a gradient that only one side has differs from the start
    reference, candidate = report.reference, report.candidate
    if first is None and report.passed:
        return Explanation(reference, candidate, step, str(report.asked), passed=True, rows=(), finding=None)
    jobs = {name: walkable(name, job) for name in (reference, candidate)} | {REFEREE: referee_job(job)}
    replayed: dict[str, Replayed] = {}
    with watch(list(jobs), step + 1, show=ranks.is_main) as watcher:
        for name, its_job in jobs.items():
            engine, on_progress = "single" if name == REFEREE else name, watcher.begin(name)
            replayed[name] = replay(ranks, engine, its_job, step, on_progress=on_progress, timeout_s=timeout_s)
    divergence = _compare(replayed, report, jobs)
    bisection = None
    if divergence.finding is None or not divergence.finding.breaks_promise:  # else it is there without a compiler
        # the candidate is taken apart, or, if nothing compiles that, the reference
        taken, other = (candidate, reference) if stage_jobs(candidate, job) else (reference, candidate)
        bits, short = report.asked is Grade.BITWISE, replace(job, steps=step + 1)
        bisection = bisect(ranks, taken, other, short, bits=bits, timeout_s=timeout_s)
    return Explanation(
        reference=reference,
        candidate=candidate,
        step=step,
        asked=str(report.asked),
        passed=report.passed,
        rows=divergence.rows,
        finding=divergence.finding,
        bisection=bisection,
        notes=tuple(_notes(replayed, jobs, job, records, step)),
    )


def _compare(replayed: dict[str, Replayed], report: ParityReport, jobs: dict[str, JobConfig]) -> WalkComparison:
    reference, candidate = replayed[report.reference], replayed[report.candidate]
    ours = jobs[report.candidate]
    grade = expected_grade(
        jobs[report.reference],
        report.reference,
        report.candidate,
        candidate_job=ours,
    )
    bitwise = report.asked is Grade.BITWISE and grade is Grade.BITWISE
    bound = ErrorBound.of(
        Grade.COMPILER if report.asked is Grade.BITWISE else report.asked,
        ours,
        reference_ranks=len(reference.walks),
        candidate_ranks=len(candidate.walks),
    )
    return compare_walks(reference.walks, candidate.walks, replayed[REFEREE].walks[0], bound, bitwise=bitwise)


def _notes(
    replayed: dict[str, Replayed],
    jobs: dict[str, JobConfig],
    job: JobConfig,
    records: Sequence[RunRecord],
    step: int,
) -> list[str]:
    notes = []
    for record in records:
        name = record.engine
        if jobs[name] != job:
            notes.append(
                f"{name} is walked uncompiled, since a compiled graph calls no modules: {_changed(job, jobs[name])}"
            )
        elif replayed[name].digests != record.grad_digests[step]:
            notes.append(
                f"the replay of {name} has other gradients than its record: it is not the same from run to run, or "
                "code or machine are other ones"
            )
    return notes


def _changed(job: JobConfig, walked: JobConfig) -> str:
    """The options in which two jobs differ, in words."""
    before, after = job.to_dict(), walked.to_dict()
    return ", ".join(f"{name} {after[name] or 'none'}" for name in after if after[name] != before[name])
