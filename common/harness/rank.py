"""What one rank sees: its context, its process group, and a process that remembers nothing of earlier tasks.

Both ways to run ranks (`pool`, `torchrun`) call these functions, so a task finds the same surroundings in each.

Left out: CUDA and nccl; a rank computes on CPU with one thread and talks over gloo.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from common.errors import ConfigError, RankError
from common.torch_private import one_thread_per_gloo_group, release_groups

SEED = 0
"""Every task starts from this random state, on every rank; a task that wants other numbers seeds itself."""

GROUP_TIMEOUT_MARGIN_S = 60.0
"""How much longer gloo waits than we do: the timeout that names the hanging rank has to come first."""


@dataclass(frozen=True)
class Progress:
    """How far a rank is: `done` of `total` units of `phase`; a total of None is not known."""

    phase: str
    done: int = 0
    total: int | None = None

    def __str__(self) -> str:
        return f"{self.phase} {self.done}" + ("" if self.total is None else f"/{self.total}")


OnProgress = Callable[[int, Progress], None]
"""Called in the parent as `on_progress(rank, progress)`."""


@dataclass(frozen=True)
class RankContext:
    """First argument of every function that runs on ranks.

    Attributes:
        rank: this rank, from 0.
        ranks: how many there are; the default process group has exactly these.
        report: where `progress` sends its events.
    """

    rank: int
    ranks: int
    report: Callable[[Progress], None]

    def progress(self, phase: str, done: int = 0, total: int | None = None) -> None:
        """Tell whoever watches how far this rank is."""
        self.report(Progress(phase, done, total))


def check_timeout(timeout_s: float) -> None:
    """Reject a timeout that is none.

    Raises:
        ConfigError: it is not a positive number.
    """
    if not timeout_s > 0:
        raise ConfigError(f"timeout: expected a positive number of seconds, found {timeout_s!r}")


def use_loopback(environ: MutableMapping[str, str]) -> None:
    """Let gloo talk over loopback, for ranks that are all on this machine, unless `environ` says otherwise.

    Without this gloo looks up the host's name, which need not resolve.
    """
    environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def disable_flight_recorder(environ: MutableMapping[str, str]) -> None:
    """Do without torch's record of collectives, unless `environ` says otherwise.

    It holds the call stacks of the last 2,000, and by them compiled graphs with all they were traced from.
    """
    environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")


def set_initial_state() -> None:
    """Give a task the process-wide settings of a new process, with one thread and a fixed seed.

    Left out: `torch._dynamo.config` and its like; change those inside their own `patch`.
    """
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(SEED)
    random.seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)


def forget_task() -> None:
    """Drop what a finished task leaves behind: compiled code, process groups, and garbage that holds tensors."""
    if "torch._dynamo" in sys.modules:  # compiled code holds the names of a group that is gone
        torch.compiler.reset()
    gc.collect()
    release_groups()


@contextmanager
def process_group(store: Store, rank: int, ranks: int, timeout_s: float) -> Iterator[None]:
    """A default gloo group of exactly `ranks` ranks; destroyed after a body that succeeds.

    After a body that fails the group stays: closing its sockets would make the waiting peers raise errors of
    their own, and the one that matters is this rank's.
    """
    timeout = timedelta(seconds=timeout_s + GROUP_TIMEOUT_MARGIN_S)
    store.set_timeout(timeout)
    with one_thread_per_gloo_group():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
        yield
    if dist.is_initialized():  # a task may have destroyed it itself
        dist.destroy_process_group()


def is_connection_error(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, only says that a peer went away, or that one is late."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, dist.DistNetworkError | dist.DistBackendError | dist.DistStoreError | RankError):
            return True
        if isinstance(link, RuntimeError) and ("gloo/transport" in str(link) or "by peer" in str(link)):
            return True
        link = link.__cause__ or link.__context__
    return False


def one_line(error: BaseException, limit: int = 500) -> str:
    """Type and message of `error` on one line."""
    text = " ".join(str(error).split())
    if len(text) > limit:
        text = text[:limit] + " ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
