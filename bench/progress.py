"""What is shown on stderr while ranks work: a bar on a terminal, one line per engine elsewhere, nothing in CI.

stdout stays free for the result.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from common.harness.rank import OnProgress
from common.harness.rank import Progress as RankProgress
from common.harness.stopwatch import READY, TURN

REFRESH_PER_S = 4.0
"""Ranks want the cores; a bar need not be smooth."""

PHASES = {
    "build": "building",
    "step": "training",
    "instruments": "done",
    READY: "waiting for its turn",
    TURN: "waiting for its turn",
}
"""What ranks report, and how it is shown."""


class Watcher(Protocol):
    """Hears which run begins, and gives what listens to its ranks."""

    def begin(self, name: str) -> OnProgress: ...


@contextmanager
def watch(names: Sequence[str], steps: int, *, turns: int = 0, show: bool) -> Iterator[Watcher]:
    """A watcher for the runs called `names`, each of `steps` steps and `turns` turns; unless `show` it is silent."""
    if not show or os.environ.get("CI"):
        yield _Silent()
    elif sys.stderr.isatty():
        with _Bars(names, steps, turns) as bars:
            yield bars
    else:
        yield _Lines(names, steps, turns)


class _Silent:
    def begin(self, name: str) -> OnProgress:
        return _ignore


class _Lines:
    def __init__(self, names: Sequence[str], steps: int, turns: int) -> None:
        self._names = list(names)
        self._work = _count(steps, "step") + (f", then {_count(turns, 'turn')}" if turns else "")

    def begin(self, name: str) -> OnProgress:
        place = f"{self._names.index(name) + 1}/{len(self._names)}"
        print(f"[{place}] {name}: {self._work}", file=sys.stderr, flush=True)
        return _ignore


class _Bars:
    """One bar per run that has begun."""

    def __init__(self, names: Sequence[str], steps: int, turns: int) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[phase]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            refresh_per_second=REFRESH_PER_S,
            transient=True,
        )
        self._steps = steps
        self._bars: dict[str, TaskID] = {
            name: self._progress.add_task(
                f"{i}/{len(names)} {name}", total=steps + 1 + turns, start=False, visible=False, phase=""
            )
            for i, name in enumerate(names, 1)
        }

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def begin(self, name: str) -> OnProgress:
        bar = self._bars[name]
        self._progress.start_task(bar)
        self._progress.update(bar, visible=True, phase=PHASES["build"])

        def show(rank: int, event: RankProgress) -> None:
            if rank:
                return  # ranks keep step with each other; rank 0 takes part in every run
            trained = self._steps + 1
            done = {"step": event.done, "instruments": trained, READY: trained, TURN: trained + event.done}
            self._progress.update(bar, completed=done.get(event.phase, 0), phase=PHASES.get(event.phase, event.phase))

        return show


def _ignore(rank: int, event: RankProgress) -> None:
    """Show nothing."""


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
