"""Run on the ranks that torchrun started, of which this process is one, with the interface of a pool.

Differs from a pool: nobody outside watches the ranks. Each watches itself, and torchrun ends the others when one ends.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, Self, TypeVar, TypeVarTuple, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from common.errors import ConfigError, RankError, RankTimeout
from common.harness.diagnosis import Stack, Unfinished, thread_state
from common.harness.rank import (
    OnProgress,
    Progress,
    RankContext,
    check_timeout,
    disable_flight_recorder,
    forget_task,
    is_connection_error,
    one_line,
    process_group,
    set_initial_state,
    use_loopback,
)

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
JOIN_TIMEOUT_S = 120.0
"""For the peers to come to the rendezvous; ranks start up at their own pace."""
WAITER_DELAY_S = 2.0
"""A rank that waits stays a little after the timeout: its end would silence the one it waits for."""
BACKSTOP_S = 10.0
"""If even a thread cannot run, since the hanging code keeps the interpreter, end without our message after this."""

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


def launched_by_torchrun() -> bool:
    """Whether this process was started as one of several ranks."""
    return all(name in os.environ for name in VARIABLES)


class JoinedRanks:
    """This process and its peers. Every process makes the same calls of `run`, in the same order."""

    def __init__(self) -> None:
        if not launched_by_torchrun():
            raise ConfigError(f"torchrun: expected {', '.join(VARIABLES)} in the environment; start with torchrun")
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            use_loopback(os.environ)
        disable_flight_recorder(os.environ)
        self._watchdog = _Watchdog(self.rank)
        self._store: Store | None = None
        self._runs = 0

    @property
    def is_main(self) -> bool:
        """Whether this process is the one to write and print."""
        return self.rank == 0

    def run(
        self,
        fn: Callable[[RankContext, *Ts], R],
        *args: *Ts,
        ranks: int,
        timeout_s: float = 60.0,
        on_progress: OnProgress | None = None,
    ) -> list[R]:
        """Call `fn(context, *args)` here, in a fresh gloo group of all ranks that torchrun started.

        After an error the group stays open and there is no further run: let the process end.

        Args:
            fn: the function; every rank passes the same.
            args: as every rank has them; nothing is sent.
            ranks: must be the world size.
            timeout_s: after this the process prints where it is and ends with exit code 3; meeting the
                other ranks does not count.
            on_progress: hears of this rank only.

        Returns:
            Each rank's result, by rank; all of them on every rank, so that all go on alike.

        Raises:
            ConfigError: `fn` raised one, or `ranks` is not the world size.
            RankError: `fn` raised something else.
        """
        check_timeout(timeout_s)
        if ranks != self.world_size:
            raise ConfigError(
                f"ranks: the job wants {ranks}, torchrun started {self.world_size}; "
                f"ask for {self.world_size}, or start with --nproc-per-node {ranks}"
            )
        watchdog = self._watchdog
        watchdog.progress = None

        def report(progress: Progress) -> None:
            watchdog.progress = progress
            if on_progress is not None:
                on_progress(self.rank, progress)

        set_initial_state()
        context = RankContext(self.rank, ranks, report)
        try:
            watchdog.allow(JOIN_TIMEOUT_S)
            with process_group(self._new_store(), self.rank, ranks, max(timeout_s, JOIN_TIMEOUT_S)):
                watchdog.allow(timeout_s)
                results: list[R | None] = [None] * ranks
                dist.all_gather_object(results, fn(context, *args))
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # one that a user's code asks for
            raise self._failure(error) from error
        finally:
            watchdog.stop()
        forget_task()
        return cast(list[R], results)

    def allow(self, timeout_s: float) -> None:
        """For `on_progress`: what follows in this run may take `timeout_s`, however long it has taken so far."""
        self._watchdog.allow(timeout_s)

    def _new_store(self) -> Store:
        """A part of the rendezvous for one run: what an earlier group left there must not be read by the next."""
        if self._store is None:
            self._store, _, _ = next(rendezvous("env://"))
        self._runs += 1
        return PrefixStore(f"run{self._runs}", self._store)

    def _failure(self, error: BaseException) -> RankError:
        lost = " lost a peer, whose own message says why" if is_connection_error(error) else ""
        return RankError(
            f"rank {self.rank}{lost}: {one_line(error)}",
            rank=self.rank,
            detail="".join(traceback.format_exception(error)),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to close: each run leaves its own group."""


class _Watchdog:
    """Ends this process when something takes longer than allowed; `progress` is the last that it reported."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.progress: Progress | None = None
        self._timer: threading.Timer | None = None

    def allow(self, timeout_s: float) -> None:
        """Watch what follows; it may take `timeout_s`."""
        self.stop()
        self._timer = threading.Timer(timeout_s, self._end_process, (timeout_s,))
        self._timer.daemon = True
        self._timer.start()
        faulthandler.dump_traceback_later(timeout_s + BACKSTOP_S, exit=True)

    def stop(self) -> None:
        """Watch no longer."""
        if self._timer is not None:
            self._timer.cancel()
            faulthandler.cancel_dump_traceback_later()

    def _end_process(self, timeout_s: float) -> NoReturn:
        state = thread_state(os.getpid())
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            stack = Stack.parse(file.read(), threading.main_thread().ident or 0, state)
        where = Unfinished(self.rank, stack, self.progress)
        waits = stack.waits_in is not None
        what = "waited for other ranks longer than" if waits else "did not finish within"
        error = RankTimeout(f"{where} {what} {timeout_s:g} s", rank=self.rank, detail=stack.text)
        print(f"{error}\n{error.detail}", file=sys.stderr, flush=True)
        if waits:
            time.sleep(WAITER_DELAY_S)
        os._exit(error.exit_code)
