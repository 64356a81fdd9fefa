"""What `bench` measured, and what it says: raw turns of every engine, and the row that each is summed up in.

A row's figures are medians over turns. Two engines are compared turn by turn, each with the turn that the other took
beside it.

[Note: when a verdict is given]
Two engines that are equally fast win each turn with probability 1/2. One is called faster only if that would give so
lopsided a count in at most one case of 20 (the sign test, two-sided), and if the middle half of the ratios has no 1 in
it. So fewer than 6 turns never give a verdict, and 7 do if all of them agree.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from bench.judge import failures
from common.engine import NO_COMPILER, compilers_of, is_own
from common.harness.records import RunRecord
from common.harness.report import ParityReport
from common.harness.stopwatch import TimedStep, TimedTurn
from common.job import JobConfig

FASTER, SLOWER, SAME = "faster", "slower", "within spread"
CHANCE = 0.05
"""See [Note: when a verdict is given]."""

TurnsByRank = Sequence[Sequence[TimedTurn]]
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
        backend: what ran its compute, see `computed_by`; fusion is no merit of sharding.
        failures: why its figures do not count: the engine disagrees with the reference, or its collectives are not
            those of the plan. With one, the figures below are None.
        asked, reached, margin: the grade against the reference, as in a `ParityReport`; None where nothing is judged.
        step_s: one step, the slowest rank's.
        tokens_per_s: of the whole batch; None where one rank stands for all, and for a task with batches of its own.
        compute_s: one step on the free link; None on a transport that is not emulated, since no free one moves data
            as it does. Where nothing moves at all it is the step.
        busy_s: how long the link was occupied in one step.
        exposed_s: how long ranks slept in the link, their mean: communication that compute did not hide. This and
            what follows from it is None on gloo itself, which has no time model.
        stalled_s: how long ranks waited for others to issue an operation, their mean.
        moving_s: how long ranks copied and summed for the link, their mean; part of compute here.
        hidden: the share of `busy_s` that compute did hide.
        edges_s: of `busy_s`, what no schedule hides: the first gather and the last reduction.
        bound_s: what no schedule goes below: `max(compute_s + edges_s, busy_s)`.
        efficiency: `bound_s` over `step_s`.
        peak_bytes: most live bytes of any rank.
        collectives: operations of one step.
        first_step_s: the first step, compilation included.
        speed: step of the first engine over this one's, turn by turn; above 1 is faster than it. None for itself, and
            if the first has no figures.
        verdict: `FASTER`, `SLOWER` or `SAME` as the first engine.
    """

    engine: str
    backend: str
    failures: tuple[str, ...] = ()
    asked: str | None = None
    reached: str | None = None
    margin: float | None = None
    step_s: Spread | None = None
    tokens_per_s: float | None = None
    compute_s: float | None = None
    busy_s: float | None = None
    exposed_s: float | None = None
    stalled_s: float | None = None
    moving_s: float | None = None
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
    reports: Mapping[str, ParityReport],
    turns: Mapping[str, TurnsByRank],
    *,
    has_model: bool = True,
) -> list[BenchRow]:
    """A row per timed engine; the first is what the others are compared with.

    Args:
        job: what all of them ran.
        records: by engine.
        reports: by engine, against the reference; empty where nothing can be judged.
        turns: by engine, in the order of the rows.
        has_model: whether the link has a time model; gloo itself has none.
    """
    rows: list[BenchRow] = []
    base: TurnsByRank | None = None
    for engine, taken in turns.items():
        row = BenchRow(engine, computed_by(engine, job))
        if reports:
            report = reports[engine]
            row = replace(row, asked=report.asked.value, reached=report.reached and report.reached.value)
            row = replace(row, margin=report.margin)
        found = failures([reports[engine]] if reports else [], {engine: records[engine]})
        if found:
            rows.append(replace(row, failures=tuple(found)))
            continue
        rows.append(_with_figures(row, job, records[engine], taken, base, has_model))
        if len(rows) == 1:
            base = taken
    return rows


def computed_by(engine: str, job: JobConfig) -> str:
    """What ran an engine's compute: a backend for the whole model, or one for each of its blocks."""
    compilers = compilers_of(engine, job)
    if is_own(engine) and compilers.all:
        return "unknown"  # it may or may not do what the job says
    return f"{compilers.blocks} per block" if compilers.blocks else compilers.model or NO_COMPILER


def _with_figures(
    row: BenchRow, job: JobConfig, record: RunRecord, turns: TurnsByRank, base: TurnsByRank | None, has_model: bool
) -> BenchRow:
    """The row with all that was measured."""
    steps = per_turn(turns, lambda step: step.step_s, max)
    compute = _compute(turns) if job.is_judged else steps
    step = Spread.of(steps)
    row = replace(
        row,
        step_s=step,
        tokens_per_s=job.batch * job.seq / step.median if job.is_judged and job.seq else None,
        compute_s=statistics.median(compute) if compute else None,
        peak_bytes=max(peak.peak_bytes for peak in record.memory),
        collectives=sum(count.count for count in record.collectives),
        first_step_s=record.first_step_s,
    )
    if has_model:
        row = _with_link(row, turns)
    if base is None:
        return row
    ratios = [their / own for their, own in zip(per_turn(base, lambda step: step.step_s, max), steps, strict=True)]
    return replace(row, speed=Spread.of(ratios), verdict=verdict_of(ratios))


def _compute(turns: TurnsByRank) -> list[float]:
    """Steps on the free link by turn, none where there were none."""
    return per_turn(turns, lambda step: step.step_s, max, free=True) if turns[0][0].free else []


def _with_link(row: BenchRow, turns: TurnsByRank) -> BenchRow:
    """The row with what its steps did on the link."""
    assert row.step_s is not None and row.compute_s is not None
    busy_s = statistics.median(per_turn(turns, lambda step: step.busy_s, max))
    edges_s = statistics.median(per_turn(turns, lambda step: step.edges_s, max))
    exposed_s, stalled_s, moving_s = (
        statistics.median(per_turn(turns, figure, statistics.fmean))
        for figure in (attrgetter("exposed_s"), attrgetter("stalled_s"), attrgetter("moving_s"))
    )
    bound_s = max(row.compute_s + edges_s, busy_s)
    return replace(
        row,
        busy_s=busy_s,
        exposed_s=exposed_s,
        stalled_s=stalled_s,
        moving_s=moving_s,
        hidden=max(0.0, 1 - exposed_s / busy_s) if busy_s else None,
        edges_s=edges_s,
        bound_s=bound_s,
        efficiency=bound_s / row.step_s.median,
    )


def per_turn(
    turns: TurnsByRank,
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


def verdict_of(ratios: Sequence[float]) -> str:
    """What the ratios of all turns allow to be said; see [Note: when a verdict is given]."""
    spread = Spread.of(ratios)
    ahead = sum(ratio > 1 for ratio in ratios)
    rarer = min(ahead, len(ratios) - ahead)
    chance = 2 * sum(math.comb(len(ratios), wins) for wins in range(rarer + 1)) / 2 ** len(ratios)
    if chance > CHANCE or spread.low <= 1 <= spread.high:
        return SAME
    return FASTER if spread.low > 1 else SLOWER
