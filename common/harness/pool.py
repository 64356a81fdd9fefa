"""A pool of long-lived rank processes, so that a run on W ranks costs a fraction of a second.

One run, in phases (the workers' side is `worker.py`):

1. start the workers that are missing, in parallel;
2. send each rank the task;
3. gather results and pass on progress; the first failure or the deadline ends the run and every worker;
4. when all ranks have finished, release them, and wait until they are clean again.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, Self, TypeVar, TypeVarTuple

from common.errors import ConfigError, RankError, RankTimeout
from common.harness.diagnosis import Failure, Unfinished, blame_failure, blame_hang
from common.harness.messages import Died, Failed, Finished, Idle, Release, Started, Task
from common.harness.rank import OnProgress, Progress, RankContext, check_timeout
from common.harness.rank_process import RankProcess, import_path, worker_environment

START_TIMEOUT_S = 120.0
"""For importing torch; a machine that needs longer has other troubles."""
RELEASE_TIMEOUT_S = 30.0
"""For leaving the group and collecting garbage, which a task's own timeout need not cover."""
CLOSE_TIMEOUT_S = 5.0
GRACE_S = 0.2
"""After a first failure, how long to listen for others that happened at the same time."""
SECONDARY_GRACE_S = 3.0
"""The same while all that was heard is of broken connections, which some other failure has to explain."""
TICK_S = 0.2
"""How often to look for a process that died while a child of its own holds its socket open."""
STACK_TIMEOUT_S = 3.0
"""For a rank to write its stack; a healthy one takes milliseconds, unless the machine is overloaded."""
END_TIMEOUT_S = 1.0
"""For a process to be gone after its socket closed."""

R = TypeVar("R")
Ts = TypeVarTuple("Ts")
M = TypeVar("M")


class _Deadline:
    """When a wait is over; another thread than the one that waits may move it."""

    def __init__(self, timeout_s: float) -> None:
        self.allow(timeout_s)

    def allow(self, timeout_s: float) -> None:
        """Begin again, with this much time."""
        self.timeout_s, self._end_s = timeout_s, time.monotonic() + timeout_s

    @property
    def remaining_s(self) -> float:
        """What is left of it."""
        return self._end_s - time.monotonic()


class RankPool:
    """Up to `max_ranks` rank processes, started when first needed and used again until the pool is closed.

    After a failure all of them are killed; the next run starts new ones. One run at a time. The kernel ends the
    workers with the *thread* that started them, so run from one that outlives the pool.
    """

    is_main = True

    def __init__(self, max_ranks: int) -> None:
        if max_ranks < 1:
            raise ConfigError(f"ranks: expected at least 1, found {max_ranks}")
        self.max_ranks = max_ranks
        self._processes: dict[int, RankProcess] = {}
        self._deadline = _Deadline(0.0)  # of the present run

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers that are up, by rank."""
        return tuple(self._processes[rank].pid for rank in sorted(self._processes))

    def run(
        self,
        fn: Callable[[RankContext, *Ts], R],
        *args: *Ts,
        ranks: int,
        timeout_s: float = 60.0,
        on_progress: OnProgress | None = None,
    ) -> list[R]:
        """Call `fn(context, *args)` on ranks 0 to `ranks - 1`, in a gloo group of exactly these.

        Args:
            fn: a function that can be imported by its name; so are the classes of `args` and of the results.
            args: sent to every rank, pickled.
            ranks: world size.
            timeout_s: for the call itself; starting workers does not count.
            on_progress: called here, between messages, with what ranks report.

        Returns:
            Each rank's result, by rank. Tensors in it are copies.

        Raises:
            ConfigError: `fn` raised one (the same type), or `ranks` does not fit the pool.
            RankError: a rank raised or died; it names the first cause.
            RankTimeout: a rank did not return in time; it names the one that hangs.
        """
        check_timeout(timeout_s)
        if fn.__module__ == "__main__":
            raise ConfigError(
                f"{fn.__qualname__} is defined in the script that was started, which ranks cannot import; "
                "move it into a module"
            )
        if not 1 <= ranks <= self.max_ranks:
            raise ConfigError(f"ranks: expected 1 to {self.max_ranks}, the size of the pool, found {ranks}")
        call = pickle.dumps((fn, args))
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder, self._killing_all_on_error():
            processes = self._start(ranks)
            task = Task(
                call=call,
                ranks=ranks,
                store=os.path.join(folder, "store"),
                timeout_s=timeout_s,
                sys_path=tuple(import_path()),
                environ=worker_environment(),
                cwd=os.getcwd(),
            )
            for process in processes:
                process.progress = None
                process.send(task)
            self._deadline = _Deadline(timeout_s)
            finished = _gather(processes, Finished, self._deadline, on_progress)
            for process in processes:
                process.send(Release())
            _gather(processes, Idle, _Deadline(RELEASE_TIMEOUT_S))
            for process in processes:
                _forward_output(process)
        return [pickle.loads(message.result) for message in finished]

    def allow(self, timeout_s: float) -> None:
        """From `on_progress` or another thread: the present run has this much time from now on, as if it began."""
        self._deadline.allow(timeout_s)

    def interrupt(self) -> None:
        """End the workers from another thread than the one that runs: its run then raises RankError."""
        for process in list(self._processes.values()):
            process.end()

    def kill(self) -> None:
        """End all workers now."""
        while self._processes:
            self._processes.popitem()[1].kill()

    def close(self) -> None:
        """Let the workers, which are idle, end by themselves; kill those that take too long."""
        for process in self._processes.values():
            process.connection.close()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for process in self._processes.values():
            process.death(wait_s=deadline - time.monotonic())
        self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    def _start(self, ranks: int) -> list[RankProcess]:
        """Workers 0 to `ranks - 1`, ready for a task; one that died since the last run is replaced."""
        for rank, process in list(self._processes.items()):
            if process.death():
                self._processes.pop(rank).kill()
        missing = [rank for rank in range(ranks) if rank not in self._processes]
        for rank in missing:
            self._processes[rank] = RankProcess(rank)
        new = [self._processes[rank] for rank in missing]
        for process, started in zip(new, _gather(new, Started, _Deadline(START_TIMEOUT_S)), strict=True):
            process.main_thread = started.main_thread
        return [self._processes[rank] for rank in range(ranks)]

    @contextmanager
    def _killing_all_on_error(self) -> Iterator[None]:
        """Leave no worker in an unknown state: whatever ends the body early ends all of them."""
        try:
            yield
        except BaseException:  # Ctrl-C and an error of `on_progress` too
            self.kill()
            raise


def _gather(
    processes: Sequence[RankProcess], expected: type[M], deadline: _Deadline, on_progress: OnProgress | None = None
) -> list[M]:
    """One message of type `expected` from each process, by rank.

    Raises:
        RankError, ConfigError: a rank failed.
        RankTimeout: one sent nothing of the kind in time.
    """
    answers: dict[int, M] = {}
    while len(answers) < len(processes):
        remaining_s = deadline.remaining_s
        if remaining_s <= 0:
            raise _hang(processes, answers, deadline.timeout_s)
        for process, message in _listen(processes, min(remaining_s, TICK_S)):
            if isinstance(message, expected):
                answers[process.rank] = message
            elif isinstance(message, Progress):
                process.progress = message
                if on_progress is not None:
                    on_progress(process.rank, message)
            else:
                raise _failure(processes, process, message)
    return [answers[process.rank] for process in processes]


def _listen(processes: Iterable[RankProcess], timeout_s: float) -> Iterator[tuple[RankProcess, Any]]:
    """What processes say within `timeout_s`, at most one message each; `Died` for one that is gone."""
    by_connection = {process.connection: process for process in processes}
    ready = wait(list(by_connection), timeout_s)
    for connection, process in by_connection.items():
        if connection in ready:
            yield process, _read(process)
        elif how := process.death():
            yield process, Died(how)


def _read(process: RankProcess) -> Any:
    try:
        return process.receive()
    except (EOFError, ConnectionError):
        return Died(process.death(wait_s=END_TIMEOUT_S) or "closed its connection to the pool")


def _failure(processes: Sequence[RankProcess], process: RankProcess, what: Failed | Died) -> RankError | ConfigError:
    """The error for a run in which `process` was the first seen to fail; listens a little for the first cause."""
    found = {process.rank: (process, what)}
    start = time.monotonic()
    while others := [one for one in processes if one.rank not in found]:
        is_explained = any(isinstance(end, Died) or not end.is_secondary for _, end in found.values())
        remaining_s = start + (GRACE_S if is_explained else SECONDARY_GRACE_S) - time.monotonic()
        if remaining_s <= 0:
            break
        for other, message in _listen(others, remaining_s):
            if isinstance(message, Failed | Died):
                found[other.rank] = (other, message)
    return blame_failure(
        [Failure(one.rank, end, one.progress, one.take_output() + one.crash_stack()) for one, end in found.values()]
    )


def _hang(processes: Sequence[RankProcess], answers: Container[int], timeout_s: float) -> RankError:
    """The error for a run in which only the ranks in `answers` were done in time."""
    silent = [process for process in processes if process.rank not in answers]
    for process in silent:
        if not process.main_thread:
            detail = process.take_output()
            return RankTimeout(
                f"rank {process.rank} did not start within {timeout_s:g} s", rank=process.rank, detail=detail
            )
    unfinished = [Unfinished(p.rank, p.stack(STACK_TIMEOUT_S), p.progress) for p in silent]
    returned = [process.rank for process in processes if process.rank in answers]
    return blame_hang(unfinished, returned, timeout_s)


def _forward_output(process: RankProcess) -> None:
    """Show what a rank printed, each line with its rank; on stderr, since stdout is for results."""
    for line in process.take_output().splitlines():
        print(f"[rank {process.rank}] {line}", file=sys.stderr)
