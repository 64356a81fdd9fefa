"""What `bench` measured, and what it says: raw turns of every engine, and the row that each is summed up in.

A row's figures are medians over turns. Two engines are compared turn by turn, each with the turn that the other took
beside it; where the middle half of these ratios has 1 in it, nothing is said about which is faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.judge import collective_rows
from common.engine import SHORT_NAMES
from common.harness.records import RunRecord
from common.harness.report import ParityReport
from common.harness.stopwatch import TimedStep, TimedTurn
from common.job import JobConfig

FASTER, SLOWER, SAME = "faster", "slower", "within spread"

Turns = Sequence[Sequence[TimedTurn]]
"""[turn][rank] of one engine."""


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of at least one value."""
        values = sorted(values)
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True)
class BenchRow:
    """One engine on one job and link.

    Attributes:
        engine: by name.
        backend: what ran its compute; fusion is no merit of sharding.
        failures: why its figures do not count: the engine disagrees with the reference, or its collectives are not
            those of the plan. With one, the figures below are None.
        step_s: one step, the slowest rank's.
        tokens_per_s: of the whole batch.
        compute_s: one step on the free link.
        busy_s: how long the link was occupied in one step.
        exposed_s: how long ranks slept in the link, their mean: communication that compute did not hide.
        hidden: the share of `busy_s` that compute did hide.
        edges_s: of `busy_s`, what no schedule hides: the first gather and the last reduction.
        bound_s: what no schedule goes below: `max(compute_s + edges_s, busy_s)`.
        efficiency: `bound_s` over `step_s`.
        peak_bytes: most live bytes of any rank.
        collectives: operations of one step.
        first_step_s: the first step, compilation included.
        speed: step of the first engine over this one's, turn by turn; above 1 is faster than it.
        verdict: `FASTER`, `SLOWER` or `SAME` as the first engine; None for itself.
    """

    engine: str
    backend: str
    failures: tuple[str, ...] = ()
    step_s: Spread | None = None
    tokens_per_s: float | None = None
    compute_s: float | None = None
    busy_s: float | None = None
    exposed_s: float | None = None
    hidden: float | None = None
    edges_s: float | None = None
    bound_s: float | None = None
    efficiency: float | None = None
    peak_bytes: int | None = None
    collectives: int | None = None
    first_step_s: float | None = None
    speed: Spread | None = None
    verdict: str | None = None


def bench_rows(
    job: JobConfig,
    records: Mapping[str, RunRecord],
    reports: Sequence[ParityReport],
    turns: Mapping[str, Turns],
    reference: str,
) -> list[BenchRow]:
    """A row per timed engine; the first that agrees with the reference is what the others are compared with."""
    rows: list[BenchRow] = []
    base: str | None = None
    for engine, taken in turns.items():
        failures = _failures(engine, records[engine], reports, reference)
        backend = job.backend if SHORT_NAMES.get(engine, engine) == SHORT_NAMES["compiled"] else "eager"
        if failures:
            rows.append(BenchRow(engine, backend, failures))
            continue
        base = base or engine
        rows.append(_row(engine, backend, job, records[engine], taken, None if base == engine else turns[base]))
    return rows


def _failures(engine: str, record: RunRecord, reports: Sequence[ParityReport], reference: str) -> tuple[str, ...]:
    found = [
        f"{engine} against {reference}: asked {report.asked}, reached {report.reached or 'none'}"
        for report in reports
        if (report.reference, report.candidate) == (reference, engine) and not report.passed
    ]
    astray = [row for row in collective_rows(engine, record) if row.ok is False]
    found += [f"{engine}: {row.kind} in {row.phase} is not what the plan predicts" for row in astray]
    return tuple(found)


def _row(engine: str, backend: str, job: JobConfig, record: RunRecord, turns: Turns, base: Turns | None) -> BenchRow:
    steps = per_turn(turns, lambda step: step.step_s, max)
    step = Spread.of(steps)
    compute_s = statistics.median(per_turn(turns, lambda step: step.step_s, max, free=True))
    busy_s = statistics.median(per_turn(turns, lambda step: step.busy_s, max))
    edges_s = statistics.median(per_turn(turns, lambda step: step.edges_s, max))
    exposed_s = statistics.median(per_turn(turns, lambda step: step.exposed_s, statistics.fmean))
    bound_s = max(compute_s + edges_s, busy_s)
    speed = None
    if base is not None:
        theirs = per_turn(base, lambda step: step.step_s, max)
        speed = Spread.of(their / own for their, own in zip(theirs, steps, strict=True))
    return BenchRow(
        engine,
        backend,
        step_s=step,
        tokens_per_s=job.batch * job.seq / step.median,
        compute_s=compute_s,
        busy_s=busy_s,
        exposed_s=exposed_s,
        hidden=max(0.0, 1 - exposed_s / busy_s) if busy_s else None,
        edges_s=edges_s,
        bound_s=bound_s,
        efficiency=bound_s / step.median,
        peak_bytes=max(peak.peak_bytes for peak in record.memory),
        collectives=sum(count.count for count in record.collectives),
        first_step_s=record.first_step_s,
        speed=speed,
        verdict=None if speed is None else verdict_of(speed),
    )


def per_turn(
    turns: Turns,
    figure: Callable[[TimedStep], float],
    over_ranks: Callable[[Iterable[float]], float],
    *,
    free: bool = False,
) -> list[float]:
    """One figure per turn: taken over the ranks of each step, then the median of the turn's steps."""
    found = []
    for ranks in turns:
        steps = zip(*(turn.free if free else turn.loaded for turn in ranks), strict=True)
        found.append(statistics.median(over_ranks([figure(step) for step in same]) for same in steps))
    return found


def verdict_of(speed: Spread) -> str:
    """What the ratios allow to be said."""
    if speed.low > 1:
        return FASTER
    return SLOWER if speed.high < 1 else SAME
