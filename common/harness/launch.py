"""Run a function on ranks: on those that torchrun started, else on processes of our own.

    with open_ranks(2) as ranks:
        results = ranks.run(train, job, ranks=2, timeout_s=600)

`rank.py` is what a rank sees; `pool.py`, `rank_process.py`, `messages.py` and `worker.py` are the pool from parent to
child; `torchrun.py` is the other way; `diagnosis.py` finds out which rank is to blame when a run fails.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self, TypeVar, TypeVarTuple

from common.harness.pool import RankPool
from common.harness.rank import OnProgress, Progress, RankContext
from common.harness.torchrun import JoinedRanks, launched_by_torchrun

__all__ = [
    "JoinedRanks",
    "OnProgress",
    "Progress",
    "RankContext",
    "RankPool",
    "Ranks",
    "launched_by_torchrun",
    "open_ranks",
]

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class Ranks(Protocol):
    """Something that runs functions on ranks; `RankPool.run` and `JoinedRanks.run` say how each does it.

    A context, which can be entered again: on the way out a pool ends its processes.
    """

    @property
    def is_main(self) -> bool:
        """Whether this process is the one to write and print; true unless torchrun started several."""
        ...

    def run(
        self,
        fn: Callable[[RankContext, *Ts], R],
        *args: *Ts,
        ranks: int,
        timeout_s: float = 60.0,
        on_progress: OnProgress | None = None,
    ) -> list[R]:
        """Call `fn(context, *args)` on each of `ranks` ranks in a gloo group of their own; results by rank.

        Raises:
            ConfigError: `fn` raised one, or there cannot be `ranks` ranks.
            RankError: a rank raised, died or hung. A rank of torchrun's that hangs ends its process instead.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_ranks(max_ranks: int) -> Ranks:
    """The ranks this process is one of, if torchrun started it; else a pool of up to `max_ranks`."""
    return JoinedRanks() if launched_by_torchrun() else RankPool(max_ranks)
