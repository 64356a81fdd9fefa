"""Time engines turn by turn, so that several can take turns at one machine.

`time_engine` on each rank of an engine that has ranks of its own, in phases:

1. a whole run of `train`: what is timed afterwards is the very model that was judged; on request one step is traced;
2. sleep until it is this engine's turn: all others sleep meanwhile;
3. a turn: some steps on the free link, which is compute alone, then some on the link that was asked for;
4. again from 2, until there are no more turns.

`time_engines` does the same with all engines side by side in the same ranks: phase 1 for one engine after the other,
then their turns in a loop. Ranks come together before each, so that none is timed while a late one is still busy.

What a step costs is read from the clock; what of it was communication that compute did not hide is read from the link,
which knows how long a rank slept in it, and varies far less.

[Note: what no schedule hides]
The first gather of a step has no compute before it to hide behind, and the last reduction none after it; nor can a step
be shorter than its link is busy. So no schedule takes less than `max(compute + edges, busy)`, the bound that a step is
held against.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from common.engine import load_engine
from common.errors import ConfigError
from common.harness.launch import OnProgress, Progress, RankContext
from common.harness.link import PRESETS, LinkChoice, LogEntry, Meter, emulate, way_of
from common.harness.rank import set_initial_state
from common.harness.train import RankResult, Training, as_rank_of, train
from common.job import JobConfig
from common.ranges import GATHER, REDUCE

READY, TURN = "ready", "turn"
"""Phases that a rank reports: it waits for its first turn; it has done its n-th."""
_TURN, _END = b"t", b"e"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How an engine is timed.

    Attributes:
        link: what its collectives travel on.
        steps: timed per turn on each of the two links, after one that is not.
        timeout_s: how long an operation on the link waits for a rank.
        profile: trace a step on the link, before the first turn.
    """

    link: LinkChoice
    steps: int
    timeout_s: float
    profile: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps per turn: expected at least 1, found {self.steps}")


@dataclass(frozen=True)
class TimedStep:
    """One step on one rank, in seconds.

    Attributes:
        step_s: forward, backward and optimizer, by the clock.
        exposed_s: slept until operations ended.
        stalled_s: waited until other ranks had issued theirs.
        moving_s: spent on copies and sums, which a network card would do elsewhere.
        busy_s: how long the busiest link was occupied.
        edges_s: first gather and last reduction; see [Note: what no schedule hides].
    """

    step_s: float
    exposed_s: float
    stalled_s: float
    moving_s: float
    busy_s: float
    edges_s: float


@dataclass(frozen=True)
class TimedTurn:
    """One turn on one rank: steps on the free link, if the one asked for is emulated too, and steps on that one."""

    free: tuple[TimedStep, ...]
    loaded: tuple[TimedStep, ...]


@dataclass(frozen=True)
class Timed:
    """What one rank brings home: the judged run, and its turns."""

    result: RankResult
    turns: tuple[TimedTurn, ...]


class Baton:
    """Gives out the turns of one engine: a pipe per rank, on which a rank sleeps until a byte comes."""

    def __init__(self, folder: Path, ranks: int) -> None:
        """Make the pipes in `folder`, a new one."""
        self._fds: list[int] = []
        for rank in range(ranks):
            os.mkfifo(_pipe(folder, rank))
            self._fds.append(os.open(_pipe(folder, rank), os.O_RDWR))  # for writing; alone that would wait for a reader

    def give(self) -> None:
        """Let each rank take one turn."""
        for fd in self._fds:
            os.write(fd, _TURN)

    def close(self) -> None:
        """Let each rank go home once it has taken the turns it was given."""
        while self._fds:
            fd = self._fds.pop()
            os.write(fd, _END)
            os.close(fd)


def time_engine(context: RankContext, engine_name: str, job: JobConfig, timing: Timing, folder: Path) -> Timed | None:
    """Train `job` on `engine_name`, then time it whenever it is given a turn; None on a rank that takes no part.

    Raises:
        ConfigError, EngineError: see `common.harness.train.run_engine`.
    """
    turns: list[TimedTurn] = []
    with as_rank_of(context, job) as context:
        training = _train(context, engine_name, job, timing)
        if training is None:
            return None
        with open(_pipe(folder, context.rank), "rb", buffering=0) as pipe:
            context.progress(READY)
            while pipe.read(1) == _TURN:
                turns.append(_take_turn(training, timing))
                context.progress(TURN, len(turns))
    return Timed(training.result, tuple(turns))


def time_engines(
    context: RankContext,
    engine_names: Sequence[str],
    job: JobConfig,
    timing: Timing,
    turns: int,
    listen: Callable[[str], OnProgress],
) -> list[Timed | None]:
    """Train `job` on each engine, then time them in turns; by engine, None on a rank that takes no part in it.

    Args:
        context: of this rank; hears what all engines report.
        engine_names: each once.
        job: what each of them trains.
        timing: of one turn.
        turns: how many each takes.
        listen: called when an engine begins, with its name; what it returns hears of that engine alone.

    Raises:
        ConfigError, EngineError: see `common.harness.train.run_engine`.
    """
    seats: list[tuple[RankContext, Training | None, list[TimedTurn]]] = []
    for name in engine_names:
        set_initial_state()  # as if it were the only one
        own = _heard_by(context, listen(name))
        seats.append((own, _train(own, name, job, timing), []))
        dist.barrier()
        own.progress(READY)
    for own, training, taken in in_turns(seats, turns):
        if training is not None:
            taken.append(_take_turn(training, timing))
        dist.barrier()
        own.progress(TURN, len(taken))
    return [None if training is None else Timed(training.result, tuple(taken)) for _, training, taken in seats]


def in_turns(players: Sequence[T], turns: int) -> Iterator[T]:
    """Each of `players` once per turn, back and forth, so that none always works in the wake of the same other one."""
    for turn in range(turns):
        yield from players if turn % 2 == 0 else reversed(players)


def _heard_by(context: RankContext, hear: OnProgress) -> RankContext:
    """`context`, with `hear` told as well."""

    def report(progress: Progress) -> None:
        context.report(progress)
        hear(context.rank, progress)

    return replace(context, report=report)


def _train(context: RankContext, engine_name: str, job: JobConfig, timing: Timing) -> Training | None:
    """The whole judged run, ready to be timed; None on a rank that takes no part."""
    training = train(context, load_engine(engine_name), job, timeout_s=timing.timeout_s)
    if training is not None and timing.profile:
        with emulate(timing.link, timeout_s=timing.timeout_s) as meter:
            training.plain_step(0)
            training.traced_step(meter)
    return training


def _take_turn(training: Training, timing: Timing) -> TimedTurn:
    free = _time_steps(training, timing, PRESETS["none"]) if timing.link.across else ()
    return TimedTurn(free, _time_steps(training, timing, timing.link))


def _time_steps(training: Training, timing: Timing, link: LinkChoice) -> tuple[TimedStep, ...]:
    with emulate(link, timeout_s=timing.timeout_s) as meter:
        training.plain_step(0)
        return tuple(_time_step(training, meter) for _ in range(timing.steps))


def _time_step(training: Training, meter: Meter) -> TimedStep:
    meter.clear()
    stop_timer = training.device.start_timer()
    training.plain_step(0)
    step_s = stop_timer()
    return TimedStep(step_s, meter.exposed_s, meter.stalled_s, meter.moving_s, busy_s(meter.log), edges_s(meter.log))


def busy_s(log: Sequence[LogEntry]) -> float:
    """How long the busiest link was occupied by the operations in `log`; links of different groups run side by side."""
    by_group: dict[str, float] = defaultdict(float)
    for entry in log:
        by_group[entry.group] += entry.end_s - entry.start_s
    return max(by_group.values(), default=0.0)


def edges_s(log: Sequence[LogEntry]) -> float:
    """What the first gather and the last reduction in `log` take; see [Note: what no schedule hides]."""
    gathers = [entry for entry in log if way_of(entry.kind) == GATHER]
    reductions = [entry for entry in log if way_of(entry.kind) == REDUCE]
    return sum(entry.end_s - entry.start_s for entry in (*gathers[:1], *reductions[-1:]))


def _pipe(folder: Path, rank: int) -> Path:
    return folder / f"turns-{rank}"
