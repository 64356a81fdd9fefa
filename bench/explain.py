"""The first divergence of a pair of runs: both are replayed up to the step where they part, and walked through it.

1. replay the reference, the candidate and the float64 referee up to that step (`common.harness.replay`); where bits may
   differ and do so harmlessly, search for the first step that is out of proportion;
2. lay the walks side by side, and name the first place (`common.harness.divergence`);
3. where a compiler hid the modules, run the compiled engine stage by stage, and name the stage (`stages`).

The outcome becomes part of the run's report, which `show` prints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.judge import REFEREE
from bench.progress import watch
from bench.stages import Bisection, bisect, stage_jobs
from common.engine import is_own
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
        step: the one that was walked: the first that differs, or, where rounding may, is out of proportion.
        asked, passed: of the pair's report.
        rows: every place of that step; none for a pair whose bits are equal.
        finding: the first divergence in the walk, or what differs by rounding; None if nothing does.
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
    """Replay the pair of `report` up to the step where they part, if they do, and find out where.

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

    grade = expected_grade(jobs[reference], reference, candidate, candidate_job=jobs[candidate])
    bitwise = report.asked is Grade.BITWISE and grade is Grade.BITWISE

    def walk_at(step: int) -> _Walked:
        return _walk(ranks, report, jobs, step, bitwise=bitwise, timeout_s=timeout_s)

    walked = walk_at(step)
    if walked.is_sound and not report.passed and not bitwise:
        # rounding differs from step 0 on; what broke the promise may have come later
        walked = _first_unsound(walk_at, step, report) or walked
    bisection = None
    if walked.is_sound:  # else it is there without a compiler
        # the candidate is taken apart, or, if nothing compiles that, the reference
        taken, other = (candidate, reference) if stage_jobs(candidate, job) else (reference, candidate)
        bits, steps = report.asked is Grade.BITWISE, walked.step + 1 if report.passed else job.steps
        bisection = bisect(ranks, taken, other, replace(job, steps=steps), bits=bits, timeout_s=timeout_s)
    return Explanation(
        reference=reference,
        candidate=candidate,
        step=walked.step,
        asked=str(report.asked),
        passed=report.passed,
        rows=walked.comparison.rows,
        finding=walked.comparison.finding,
        bisection=bisection,
        notes=tuple(_notes(walked.replayed, jobs, job, records, walked.step)),
    )


@dataclass(frozen=True)
class _Walked:
    """One step, walked on both sides and by the referee."""

    step: int
    replayed: dict[str, Replayed]
    comparison: WalkComparison

    @property
    def is_sound(self) -> bool:
        """Whether nothing in it is out of proportion."""
        return self.comparison.finding is None or not self.comparison.finding.breaks_promise


def _walk(
    ranks: Ranks, report: ParityReport, jobs: dict[str, JobConfig], step: int, *, bitwise: bool, timeout_s: float
) -> _Walked:
    replayed: dict[str, Replayed] = {}
    with watch(list(jobs), step + 1, show=ranks.is_main) as watcher:
        for name, its_job in jobs.items():
            engine, on_progress = "single" if name == REFEREE else name, watcher.begin(name)
            replayed[name] = replay(ranks, engine, its_job, step, on_progress=on_progress, timeout_s=timeout_s)
    reference, candidate = replayed[report.reference].walks, replayed[report.candidate].walks
    bound = ErrorBound.of(
        Grade.COMPILER if report.asked is Grade.BITWISE else report.asked,
        jobs[report.candidate],
        reference_ranks=len(reference),
        candidate_ranks=len(candidate),
    )
    comparison = compare_walks(reference, candidate, replayed[REFEREE].walks[0], bound, bitwise=bitwise)
    return _Walked(step, replayed, comparison)


def _first_unsound(walk_at: Callable[[int], _Walked], sound: int, report: ParityReport) -> _Walked | None:
    """The first step after `sound` that is not, by halving; None if none is found.

    What is wrong in a step usually leaves wrong parameters to all later ones. Where the last is sound all the same, the
    one whose loss is furthest off is tried.
    """
    last = len(report.steps) - 1
    if sound == last:
        return None
    found = walk_at(last)
    if found.is_sound:
        suspect = max(report.steps, key=lambda row: row.loss_diff).step
        found = walk_at(suspect) if sound < suspect < last else found
        return None if found.is_sound else found
    while found.step - sound > 1:
        middle = walk_at((sound + found.step) // 2)
        if middle.is_sound:
            sound = middle.step
        else:
            found = middle
    return found


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
            why = "it may be compiled" if is_own(name) else "a compiled graph calls no modules"
            notes.append(f"{name} is walked uncompiled, since {why}: {_changed(job, jobs[name])}")
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
