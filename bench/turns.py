"""Engines that take turns at one machine: each has ranks of its own, all are alive, and one of them works at a time.

Paired this way, whatever slows the machine for a while slows all engines alike.
"""

from __future__ import annotations

import queue
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.progress import Watcher
from common.engine import load_engine
from common.errors import RankTimeout
from common.harness.launch import OnProgress, Progress, RankPool
from common.harness.stopwatch import READY, TURN, Timed, Timing, Turns, time_engine
from common.job import JobConfig


def take_turns(
    jobs: Mapping[str, tuple[str, JobConfig]],
    timing: Timing,
    *,
    turns: int,
    timeout_s: float,
    watcher: Watcher,
) -> dict[str, list[Timed]]:
    """Train each job on its engine, one after the other, then time them in turns; results by name, then by rank.

    Args:
        jobs: engine and job by name.
        timing: of one turn.
        turns: how many each takes.
        timeout_s: for one engine to be built and trained, and again for each turn.
        watcher: hears of each run when it begins, and then of its ranks.

    Raises:
        ConfigError, RankError: from a rank; the others are ended.
    """
    with tempfile.TemporaryDirectory(prefix="turns-") as folder, _all_ended() as players:
        for name, (engine, job) in jobs.items():
            place = Path(folder) / str(len(players))
            place.mkdir()
            hear = watcher.begin(name)
            players.append(_Player(name, engine, job, timing, place, hear, timeout_s * (1 + turns) * len(jobs)))
            players[-1].wait_for(READY, 0, timeout_s)
        for turn in range(turns):
            for player in _order(players, turn):
                player.turns.give()
                player.wait_for(TURN, turn + 1, timeout_s)
        return {player.name: player.go_home() for player in players}


def _order(players: Sequence[_Player], turn: int) -> Sequence[_Player]:
    """Back and forth, so that no engine always works in the wake of the same other one."""
    return players if turn % 2 == 0 else players[::-1]


class _Player:
    """One engine on its own ranks, run by a thread of its own; the kernel ends the ranks with that thread."""

    def __init__(
        self,
        name: str,
        engine: str,
        job: JobConfig,
        timing: Timing,
        folder: Path,
        hear: OnProgress,
        timeout_s: float,
    ) -> None:
        self.name = name
        self.turns = Turns(folder, job.ranks)
        self._hear = hear
        self._reports: queue.Queue[tuple[int, Progress] | None] = queue.Queue()
        self._results: list[Timed | None] = []
        self._error: BaseException | None = None
        self._active = job.ranks if load_engine(engine).data_parallel else 1
        self._pool = RankPool(job.ranks)
        self._thread = threading.Thread(
            target=self._run, args=(engine, job, timing, folder, timeout_s), name=f"turns of {name}"
        )
        self._thread.start()

    def wait_for(self, phase: str, done: int, timeout_s: float) -> None:
        """Return when each rank has reported `phase`; raise what ended a rank before that."""
        waiting = self._active
        while waiting:
            try:
                report = self._reports.get(timeout=timeout_s)
            except queue.Empty:
                raise RankTimeout(
                    f"{self.name}: no rank reported anything for {timeout_s:g} s; expected {phase} {done}", rank=0
                ) from None
            if report is None:
                self._thread.join()
                raise self._error or AssertionError(f"{self.name}: ranks went home before {phase} {done}")
            rank, progress = report
            waiting -= (progress.phase, progress.done) == (phase, done)
            self._hear(rank, progress)

    def go_home(self) -> list[Timed]:
        """No more turns: wait for the ranks' results."""
        self.turns.end()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return [result for result in self._results if result is not None]

    def end(self) -> None:
        """End the ranks, whatever they do."""
        self._pool.kill()
        self._thread.join()

    def _run(self, engine: str, job: JobConfig, timing: Timing, folder: Path, timeout_s: float) -> None:
        try:
            with self._pool as pool:
                self._results = pool.run(
                    time_engine,
                    engine,
                    job,
                    timing,
                    folder,
                    ranks=job.ranks,
                    timeout_s=timeout_s,
                    on_progress=lambda rank, progress: self._reports.put((rank, progress)),
                )
        except BaseException as error:  # told to the thread that waits for this one
            self._error = error
        finally:
            self._reports.put(None)


@contextmanager
def _all_ended() -> Iterator[list[_Player]]:
    """A list for players; whatever ends the body early ends their ranks too."""
    players: list[_Player] = []
    try:
        yield players
    except BaseException:
        for player in players:
            player.end()
        raise
