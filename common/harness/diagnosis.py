"""Name the rank that is to blame: the first cause among several failures, the one that hangs among those that wait.

[Note: first cause]
When a rank dies, its peers' collectives break, and their errors may be read first. A death within the grace period
therefore comes before any exception, and an exception before one that only tells of a broken connection; among
equals, the earliest.

[Note: who hangs]
When ranks do not finish in time, most of them wait in a collective for the one that is late. A rank waits if its
main thread sleeps and the innermost code is torch's, or a line that calls `.wait()` of a work handle; the emulated link
is looked through. Code of torch that computes does not sleep. One that neither waits nor has returned hangs; if there
is none, the ranks called collectives that do not belong together.

Left out: a main thread that waits for another Python thread which in turn waits in a collective (backward on CUDA).
"""

from __future__ import annotations

import linecache
import os
import pickle
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path

import torch

from common.errors import ConfigError, RankError, RankTimeout
from common.harness.messages import Died, Failed
from common.harness.rank import Progress

TORCH = os.path.dirname(torch.__file__) + os.sep
STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
LINK = os.path.join(os.path.dirname(__file__), "link", "")
COLLECTIVE_FILES = ("distributed/distributed_c10d.py", "distributed/_functional_collectives.py")
"""Where the functions live that a user knows a collective by, below torch's folder."""

MISMATCH = "ranks may have issued different collectives; within common.harness.link.emulate an error names them"
"""For what plain gloo does not explain: it hangs, or aborts when a message has another size than it expects."""
GLOO_ABORT = "gloo::EnforceNotMet"

STATES = {"T": "stopped by a signal", "D": "in uninterruptible I/O", "Z": "dead"}

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        path = Path(self.file)
        shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        return f"{self.function} ({shown}:{self.line})"

    @property
    def in_torch(self) -> bool:
        return self.file.startswith(TORCH)

    @property
    def in_link(self) -> bool:
        return self.file.startswith(LINK)

    @property
    def in_stdlib(self) -> bool:
        """In the standard library or its backport, whose decorators wrap torch's functions."""
        is_stdlib = self.file.startswith(STDLIB) and "site-packages" not in self.file
        return is_stdlib or self.file.endswith("/typing_extensions.py")


@dataclass(frozen=True)
class Stack:
    """Where a rank's main thread was.

    Attributes:
        text: the dump of all threads.
        frames: the main thread's, innermost first; empty if the rank gave no answer.
        state: the main thread's state letter of /proc, such as S for sleeping.
    """

    text: str
    frames: tuple[Frame, ...]
    state: str

    @classmethod
    def parse(cls, text: str, main_thread: int, state: str) -> Stack:
        """Read a dump of `faulthandler`."""
        frames: list[Frame] = []
        in_main = False
        for line in text.splitlines():
            if thread := _THREAD.match(line):
                in_main = int(thread[1], 16) == main_thread
            elif in_main and (frame := _FRAME.match(line)):
                frames.append(Frame(frame[1], int(frame[2]), frame[3]))
        return cls(text, tuple(frames), state)

    @property
    def waits_in(self) -> str | None:
        """The collective in which the rank waits for others, or None; see [Note: who hangs]."""
        if not self.frames or (self.state != "S" and not self.frames[0].in_link):  # the link polls while it waits
            return None
        frames = list(dropwhile(lambda frame: frame.in_link, self.frames))
        if not frames:
            return None
        innermost = frames[0]
        if innermost.in_torch:
            leading = takewhile(lambda frame: frame.in_torch, frames)
            names = [f.function for f in leading if f.file.removeprefix(TORCH) in COLLECTIVE_FILES]
            return names[-1] if names else "a collective"
        if not innermost.in_stdlib and ".wait(" in linecache.getline(innermost.file, innermost.line):
            return "wait"
        return None

    @property
    def place(self) -> str:
        """The innermost line of code that is neither torch's nor Python's nor the emulated link's."""
        if not self.frames:
            return f"an unknown place (no stack: {STATES.get(self.state, 'stuck outside Python')})"
        ours = (f for f in self.frames if not (f.in_torch or f.in_stdlib or f.in_link or f.file[0] == "<"))
        return str(next(ours, self.frames[0]))


@dataclass(frozen=True)
class Unfinished:
    """A rank that had not returned at the deadline."""

    rank: int
    stack: Stack
    progress: Progress | None

    def __str__(self) -> str:
        waits = f"in {self.stack.waits_in} " if self.stack.waits_in else ""
        after = f" (at {self.progress})" if self.progress else ""
        return f"rank {self.rank} {waits}at {self.stack.place}{after}"


def is_complete(text: str) -> bool:
    """Whether a dump of `python -m` ends where the main thread, which comes last, began, or where it was cut off."""
    return text.rstrip().endswith(("in _run_module_as_main", "..."))


def thread_state(pid: int) -> str:
    """The state letter of a process's main thread."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@dataclass(frozen=True)
class Failure:
    """A rank that raised or died.

    Attributes:
        rank: which.
        what: its exception or its end.
        progress: how far it had come.
        output: what it printed, and the stacks of a crash.
    """

    rank: int
    what: Failed | Died
    progress: Progress | None
    output: str

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Sorts the first cause first; see [Note: first cause]."""
        is_secondary = isinstance(self.what, Failed) and self.what.is_secondary
        return isinstance(self.what, Failed), is_secondary, self.what.at_s

    def __str__(self) -> str:
        after = f" (at {self.progress})" if self.progress else ""
        if isinstance(self.what, Died):
            why = f": {MISMATCH}" if GLOO_ABORT in self.output else ""
            return f"rank {self.rank} {self.what.how}{after}{why}"
        return f"rank {self.rank}: {self.what.summary}{after}"


def blame_failure(failures: Sequence[Failure]) -> RankError | ConfigError:
    """The error to raise for a run in which ranks failed, made from the first cause."""
    first, *others = sorted(failures, key=lambda failure: failure.order)
    parts = [first.what.detail if isinstance(first.what, Failed) else "", *(f"then {other}" for other in others)]
    if first.output.strip():
        parts.append(f"--- output of rank {first.rank}\n{first.output}")
    detail = "\n".join(part for part in parts if part)
    error = RankError(str(first), rank=first.rank, detail=detail)
    error.add_note(detail)  # an uncaught error shows it under its own traceback
    if isinstance(first.what, Died) or first.what.config_error is None:
        return error
    config_error = pickle.loads(first.what.config_error)
    assert isinstance(config_error, ConfigError), config_error
    config_error.__cause__ = error
    return config_error


def blame_hang(unfinished: Sequence[Unfinished], returned: Sequence[int], timeout_s: float) -> RankTimeout:
    """The error that names the rank which keeps the others waiting; see [Note: who hangs].

    Args:
        unfinished: the ranks that have not returned; at least one.
        returned: the ranks that have.
        timeout_s: how long they had.
    """
    waiting = [one for one in unfinished if one.stack.waits_in]
    hung = [one for one in unfinished if not one.stack.waits_in]
    within = f"within {timeout_s:g} s"
    if hung and waiting:
        text = f"{hung[0]} did not finish {within}; waiting for it: {_listed(waiting)}"
        if hung[1:]:
            text += f"; also late: {_listed(hung[1:])}"
    elif hung:
        text = f"{_listed(hung)} did not finish {within}; raise the timeout if this is only slow"
    elif returned:
        names = ", ".join(map(str, returned))
        text = (
            f"{_listed(waiting)} waited more than {timeout_s:g} s for rank {names}, which has returned "
            "and called fewer collectives"
        )
    else:
        text = (
            f"{_listed(waiting)} did not finish {within}: each waits for the others, "
            f"since they called collectives that do not match; {MISMATCH}"
        )
    blamed = (hung or waiting)[0]
    detail = "\n".join(f"--- {one}\n{one.stack.text}" for one in unfinished)
    error = RankTimeout(text, rank=blamed.rank, detail=detail)
    error.add_note(detail)
    return error


def _listed(ranks: Sequence[Unfinished]) -> str:
    return ", ".join(map(str, ranks))
