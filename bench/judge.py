"""Which runs of a comparison are judged against each other, and what fails the whole of it.

Judged are: each candidate against the reference; `compiled` against `eager`, which is what the project is for; and any
other two candidates that can be asked for equal bits. Besides, each engine's collectives against those of its plan, and
its bytes at the end of each phase against closed formulas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from common.engine import SHORT_NAMES, import_path
from common.harness import peers
from common.harness.compare import Grade, ParityReport, compare_runs, expected_grade, referee_job
from common.harness.instruments.collectives import BACKWARD
from common.harness.memory_record import PREDICTED, START, MemoryPoint, PredictedPoint
from common.harness.records import Run, RunRecord
from common.job import JobConfig

REFEREE = "float64"
"""What the referee's run is called in tables and files; its engine is `single`."""

PEERS = {"rounded-1": peers.PEERS[0], "rounded-2": peers.PEERS[1]}
"""What the peers' runs are called in files, and their engines; no table holds them."""

_MAIN_PAIR = (SHORT_NAMES["eager"], SHORT_NAMES["compiled"])
_MOST_TRUSTED_FIRST = tuple(
    SHORT_NAMES[name] for name in ("single", "ddp", "torch-fsdp2", "torch-fsdp2-prefetch", "eager", "compiled")
)

Pair = tuple[str, str]
"""Reference and candidate, by engine name."""


def judged_pairs(job: JobConfig, reference: str, engines: Sequence[str]) -> list[Pair]:
    """The pairs to judge, the main one first."""
    pairs = [(reference, engine) for engine in engines]
    for pair in combinations(sorted(engines, key=lambda engine: (_trust(engine), engine)), 2):
        if _is_main(pair) or expected_grade(job, *pair) is Grade.BITWISE:
            pairs.append(pair)
    return sorted(pairs, key=lambda pair: not _is_main(pair))


def needs_referee(job: JobConfig, pairs: Sequence[Pair], grade: Grade | None = None) -> bool:
    """Whether one of the pairs is judged by its distance to float64; `grade` as for `judge`."""
    return any((grade or expected_grade(job, *pair)) is not Grade.BITWISE for pair in pairs)


def judging_jobs(job: JobConfig) -> dict[str, JobConfig]:
    """The runs that judging `job` by float64 takes: the referee, and the peers where there is more than one step."""
    return {REFEREE: referee_job(job)} | (dict.fromkeys(PEERS, job) if job.steps > 1 else {})


def engine_of(name: str) -> str:
    """The engine of the run called `name`."""
    return "single" if name == REFEREE else PEERS.get(name, name)


def judge(pairs: Sequence[Pair], runs: Mapping[str, Run], grade: Grade | None = None) -> list[ParityReport]:
    """A report for each pair.

    Args:
        runs: by name: that of the engine, `REFEREE` and those of `PEERS`, as far as there are any.
        grade: what to ask of each; None is the strictest that the pair can keep.
    """
    return [judge_pair(runs[reference], runs[engine], runs, grade) for reference, engine in pairs]


def judge_pair(reference: Run, candidate: Run, runs: Mapping[str, Run], grade: Grade | None = None) -> ParityReport:
    """A report on two runs; of `runs` the referee and the peers count."""
    others = [runs[name] for name in PEERS if name in runs]
    return compare_runs(reference, candidate, runs.get(REFEREE), peers=others, grade=grade)


def is_main(report: ParityReport) -> bool:
    """Whether this is `compiled` against `eager`."""
    return _is_main((report.reference, report.candidate))


@dataclass(frozen=True)
class CollectiveRow:
    """One kind of collective in one phase, counted and predicted.

    Attributes:
        predicted_count, predicted_bytes: None if no formula covers the engine and model.
        ok: whether they agree; None if there is nothing to agree with.
    """

    engine: str
    phase: str
    kind: str
    count: int
    bytes: int
    predicted_count: int | None
    predicted_bytes: int | None
    ok: bool | None


def collective_rows(engine: str, record: RunRecord) -> list[CollectiveRow]:
    """What was counted beside what was predicted, the missing and the unexpected too."""
    counted = {(each.phase, each.kind): each for each in record.collectives}
    predicted = {(each.phase, each.kind): each for each in record.predicted or []}
    rows = []
    for key in [*counted, *(key for key in predicted if key not in counted)]:
        have, want = counted.get(key), predicted.get(key)
        count, size = (have.count, have.bytes) if have else (0, 0)
        if record.predicted is None:
            rows.append(CollectiveRow(engine, *key, count, size, None, None, None))
            continue
        want_count, want_size = (want.count, want.bytes) if want else (0, 0)
        ok = (count, size) == (want_count, want_size)
        rows.append(CollectiveRow(engine, *key, count, size, want_count, want_size, ok))
    return rows


@dataclass(frozen=True)
class MemoryRow:
    """Live bytes of one rank at one moment, measured and predicted; `predicted` is None if there is nothing of it."""

    engine: str
    rank: int
    point: MemoryPoint
    predicted: PredictedPoint | None

    @property
    def wrong(self) -> list[str]:
        """The classes of which there are other bytes than predicted."""
        if self.predicted is None:
            return []
        pairs = ((name, getattr(self.point, name), getattr(self.predicted, name)) for name in PREDICTED)
        return [name for name, found, expected in pairs if expected is not None and found != expected]

    @property
    def ok(self) -> bool | None:
        """Whether they agree; None if there is nothing to agree with."""
        return None if self.predicted is None else not self.wrong


def memory_rows(engine: str, record: RunRecord) -> list[MemoryRow]:
    """Each moment on each rank, what was measured beside what was predicted."""
    rows = []
    for rank, memory in enumerate(record.memory):
        predicted = {point.at: point for point in memory.predicted or []}
        rows += [MemoryRow(engine, rank, point, predicted.get(point.at)) for point in memory.points]
    return rows


def failures(reports: Sequence[ParityReport], records: Mapping[str, RunRecord]) -> list[str]:
    """Why parity does not hold, a line each; none if it does."""
    found = []
    for report in reports:
        if not report.passed:
            reached = report.reached or "none"
            why = "; ".join((*report.reasons[:1], *report.causes[:1])) or "no reason given"
            pair = f"{report.candidate} against {report.reference}"
            found.append(f"{pair}: asked {report.asked}, reached {reached}: {why}")
    return found + off_plan(records)


def off_plan(records: Mapping[str, RunRecord]) -> list[str]:
    """Collectives that are not those of the plan, and bytes that are not those of the formulas, a line each."""
    found = []
    for engine, record in records.items():
        found += [f"{engine}: {what}: {cause}" for what, cause in collective_failures(engine, record)]
        found += _memory_failures(engine, record)
    return found


def _memory_failures(engine: str, record: RunRecord) -> list[str]:
    """The classes whose bytes are not as predicted, one line for each, with the first place."""
    places: dict[str, list[MemoryRow]] = {}
    for row in memory_rows(engine, record):
        for name in row.wrong:
            places.setdefault(name, []).append(row)
    found = []
    for name, (first, *more) in places.items():
        moment = "at the start" if first.point.at == START else f"after {first.point.at}"
        found.append(
            f"{engine}: memory, {name} {moment} on rank {first.rank}: the formula predicts "
            f"{getattr(first.predicted, name)} bytes, measured {getattr(first.point, name)}"
            + (f"; and {len(more)} more" if more else "")
        )
    return found


def collective_failures(engine: str, record: RunRecord) -> list[tuple[str, str]]:
    """The collectives that are not those of the plan: what was counted, and the likely cause."""
    return [
        (
            f"{row.kind} in {row.phase}: the plan predicts {row.predicted_count} with {row.predicted_bytes} bytes, "
            f"counted {row.count} with {row.bytes}",
            collective_cause(row),
        )
        for row in collective_rows(engine, record)
        if row.ok is False
    ]


def collective_cause(row: CollectiveRow) -> str:
    """What the difference between counted and predicted suggests."""
    assert row.predicted_count is not None and row.predicted_bytes is not None
    if not row.predicted_count:
        return "sent, and in no plan"
    if not row.count:
        again = (row.phase, row.kind) == (BACKWARD, "all_gather")
        return "weights are kept after forward, not gathered again" if again else "never sent"
    if row.count == row.predicted_count:
        return (
            "another dtype" if row.predicted_bytes in (2 * row.bytes, row.bytes / 2) else "other parameters, or padding"
        )
    if row.count < row.predicted_count:
        return "messages are merged, or left out"
    return (
        "messages are not bucketed" if row.bytes == row.predicted_bytes else "something is gathered twice, or reduced"
    )


def _is_main(pair: Pair) -> bool:
    return tuple(map(import_path, pair)) == _MAIN_PAIR


def _trust(engine: str) -> int:
    """The place of an engine among those that may stand as a reference; the user's own come last."""
    path = import_path(engine)
    return _MOST_TRUSTED_FIRST.index(path) if path in _MOST_TRUSTED_FIRST else len(_MOST_TRUSTED_FIRST)
