"""The private torch names that tests use. Seen in torch 2.11 to 2.14."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

# The only way to learn how many graphs were traced, and to fail on one that is traced again.
import torch._dynamo.config
import torch.distributed as dist

# The collectives of traced graphs, called by hand.
import torch.distributed._functional_collectives as functional_collectives
from torch._dynamo.utils import counters

# Reads back the code Inductor generated, to see that the order of the collectives survived to what runs.
from torch._inductor.utils import run_and_get_code

# The GPU allocator's account of itself; a machine without a GPU can look at what arguments it takes.
from torch.cuda.memory import _record_memory_history as record_memory_history
from torch.cuda.memory import _snapshot as allocator_snapshot

# A reduction that only NCCL knows.
from torch.distributed import _make_nccl_premul_sum as premultiplied_sum

# A process group of any size in one process: compiled graphs can be looked at without ranks.
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = [
    "FakeStore",
    "allocator_snapshot",
    "counting_graphs",
    "detailed_checks",
    "functional_collectives",
    "gradient_hooks",
    "premultiplied_sum",
    "record_memory_history",
    "run_and_get_code",
]


def gradient_hooks(tensor: torch.Tensor) -> int:
    """How many hooks are on the gradient of `tensor`."""
    return len(tensor._backward_hooks or {})


@contextmanager
def counting_graphs() -> Iterator[Callable[[], int]]:
    """Forget what was traced, raise when anything is traced again, and tell how many graphs there are."""
    torch.compiler.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield lambda: counters["stats"]["unique_graphs"]


@contextmanager
def detailed_checks() -> Iterator[None]:
    """As if the process had been started with `TORCH_DISTRIBUTED_DEBUG=DETAIL`, for process groups that exist."""
    before = dist.get_debug_level()  # type: ignore[attr-defined]
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.set_debug_level(before)  # type: ignore[attr-defined]
