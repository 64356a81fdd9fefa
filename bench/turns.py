"""Engines that take turns at one machine: all are alive, and one of them works at a time.

Paired this way, whatever slows the machine for a while slows all engines alike. Each has ranks of its own, so that a
failure is one engine's, and no engine shares a process with another; or, where torchrun started the ranks, all engines
live side by side in these.
"""

from __future__ import annotations

import queue
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from bench.progress import Watcher
from common.engine import load_engine
from common.errors import RankTimeout
from common.harness.launch import JoinedRanks, OnProgress, Progress, RankPool, Ranks
from common.harness.stopwatch import READY, TURN, Baton, Timed, Timing, in_turns, time_engine, time_engines
from common.job import JobConfig

IDLE_TIMEOUT_S = 7 * 24 * 3600.0
"""For the turns of all others."""
POLL_S = 0.2


def take_turns(
    ranks: Ranks,
    engines: Sequence[str],
    job: JobConfig,
    timing: Timing,
    *,
    turns: int,
    timeout_s: float,
    watcher: Watcher,
) -> dict[str, list[Timed]]:
    """Train `job` on each engine, one after the other, then time them in turns; results by engine, then by rank.

    Args:
        ranks: those of torchrun are the ones that work; instead of a pool, each engine gets one of its own.
        engines: by name, each once.
        job: what each of them trains.
        timing: of one turn.
        turns: how many each takes.
        timeout_s: for one engine to be built and trained, and again for each turn.
        watcher: hears of each run when it begins, and then of its ranks.

    Raises:
        ConfigError, RankError: from a rank; the others are ended.
    """
    if isinstance(ranks, JoinedRanks):
        return _take_turns_joined(ranks, engines, job, timing, turns, timeout_s, watcher)
    return _take_turns_apart(engines, job, timing, turns, timeout_s, watcher)


def _take_turns_joined(
    ranks: JoinedRanks,
    engines: Sequence[str],
    job: JobConfig,
    timing: Timing,
    turns: int,
    timeout_s: float,
    watcher: Watcher,
) -> dict[str, list[Timed]]:
    """Here and in the other ranks of torchrun, which all make this call."""

    def hear(_: int, progress: Progress) -> None:
        if progress.phase in (READY, TURN):
            ranks.allow(timeout_s)

    by_rank = ranks.run(
        time_engines,
        engines,
        job,
        timing,
        turns,
        watcher.begin,
        ranks=job.ranks,
        timeout_s=timeout_s,
        on_progress=hear,
    )
    by_engine = zip(*by_rank, strict=True)
    return {
        engine: [timed for timed in each if timed is not None] for engine, each in zip(engines, by_engine, strict=True)
    }


def _take_turns_apart(
    engines: Sequence[str], job: JobConfig, timing: Timing, turns: int, timeout_s: float, watcher: Watcher
) -> dict[str, list[Timed]]:
    """On ranks that are started here for each engine."""
    with tempfile.TemporaryDirectory(prefix="turns-") as folder, ExitStack() as table:
        players = []
        for number, engine in enumerate(engines):
            place = Path(folder) / str(number)
            place.mkdir()
            player = table.enter_context(_Player(engine, job, timing, place, timeout_s, watcher.begin(engine)))
            player.wait_for(READY, 0)
            players.append(player)
        for player in in_turns(players, turns):
            player.take_turn(timeout_s)
        return {player.engine: player.go_home() for player in players}


class _Player:
    """One engine on its own ranks, run by a thread of its own; the kernel ends the ranks with that thread.

    As a context it ends with its ranks gone, whatever ended the body.
    """

    def __init__(
        self, engine: str, job: JobConfig, timing: Timing, folder: Path, timeout_s: float, hear: OnProgress
    ) -> None:
        self.engine = engine
        self._baton = Baton(folder, job.processes)
        self._hear = hear
        self._reports: queue.Queue[tuple[int, Progress] | None] = queue.Queue()
        self._results: list[Timed | None] = []
        self._turns = 0
        self._error: BaseException | None = None
        self._pool = RankPool(job.processes)
        self._ranks = range(job.processes if load_engine(engine).data_parallel else 1)
        self._thread = threading.Thread(
            target=self._run, args=(job, timing, folder, timeout_s), name=engine, daemon=True
        )
        self._thread.start()

    def take_turn(self, timeout_s: float) -> None:
        """Have the ranks take one turn, and return when they have; the pool finds out who hangs, and where."""
        self._turns += 1
        self._pool.allow(timeout_s)
        self._baton.give()
        self.wait_for(TURN, self._turns)

    def wait_for(self, phase: str, done: int) -> None:
        """Return when each rank has reported `phase`; raise what ended a rank before that, or kept it too long."""
        missing = set(self._ranks)
        while missing:
            report = self._reports.get()
            if report is None:
                self._thread.join()
                if isinstance(self._error, RankTimeout):
                    text = f"engine {self.engine!r}, {phase} {done}: {self._error}"
                    raise RankTimeout(text, rank=self._error.rank, detail=self._error.detail)
                raise self._error or AssertionError(f"{self.engine}: ranks went home before {phase} {done}")
            rank, progress = report
            self._hear(rank, progress)
            if (progress.phase, progress.done) == (phase, done):
                missing.discard(rank)
        self._pool.allow(IDLE_TIMEOUT_S)

    def go_home(self) -> list[Timed]:
        """No more turns: wait for the ranks' results."""
        self._baton.close()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return [result for result in self._results if result is not None]

    def __enter__(self) -> _Player:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._baton.close()
        while self._thread.is_alive():
            if kind is not None:
                self._pool.interrupt()  # again and again, since ranks may be about to start
            self._thread.join(POLL_S)

    def _run(self, job: JobConfig, timing: Timing, folder: Path, timeout_s: float) -> None:
        try:
            with self._pool as pool:
                self._results = pool.run(
                    time_engine,
                    self.engine,
                    job,
                    timing,
                    folder,
                    ranks=job.processes,
                    timeout_s=timeout_s,
                    on_progress=lambda rank, progress: self._reports.put((rank, progress)),
                )
        except BaseException as error:  # told to the thread that waits for this one
            self._error = error
        finally:
            self._reports.put(None)
