"""The gradient contract: `.grad` is the mean over data-parallel ranks, and one function says how it is made.

Both engines ask `plan_reduction` and then do the same arithmetic at every world size: which operation travels,
what is divided before and after, and whether the sum is the backend's or taken here in rank order.

[Note: rank order]
A floating-point sum depends on its order. A backend's reduce-scatter adds in an order of its own, which may
depend on where in a message an element lies, so packing parameters differently changes bits. The `ordered`
transport sends each other rank its pieces (all-to-all) and adds what comes, and a rank's own piece in its place, as
((r0 + r1) + r2) + ...: an element's sum then depends on nothing but its addends, and how parameters are packed changes
no bit at any world size.

Source: torch 2.13 `_fsdp_collectives.py`, `_get_gradient_divide_factors`, for the native transport.
Differs: the ordered transport, and divide factors on every backend (torch uses PREMUL_SUM, which gloo lacks).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch


class Transport(StrEnum):
    """How a reduction travels."""

    AUTO = "auto"
    """`ordered` on gloo, whose own reduce-scatter is slow and of unspecified order; else `native`."""
    NATIVE = "native"
    """The backend's reduce-scatter."""
    ORDERED = "ordered"
    """An all-to-all, and a sum in rank order; see [Note: rank order]."""


@dataclass(frozen=True)
class Reduction:
    """How one gradient buffer becomes the mean over ranks.

    Attributes:
        transport: `NATIVE` or `ORDERED`, never `AUTO`.
        op: the operation of native reductions, "sum" or "avg"; ordered reductions always sum.
        predivide: divisor applied before the first sum, or None.
        postdivide: divisor applied after the last sum, or None.
    """

    transport: Transport
    op: str
    predivide: float | None = None
    postdivide: float | None = None


@functools.cache
def plan_reduction(
    *,
    world_size: int,
    reduce_dtype: torch.dtype,
    backend: str,
    transport: Transport = Transport.AUTO,
    replicas: int = 1,
    divide_factor: float | None = None,
    force_sum: bool = False,
) -> Reduction:
    """Decide how gradients of `reduce_dtype` are averaged over `world_size` x `replicas` ranks.

    fp16 is divided on both sides of the sum, so that neither the addends underflow nor the sum overflows. fp64 needs it
    not; it is treated alike since torch does so with all but fp32 and bf16.

    Args:
        world_size: ranks that hold a gradient each, of one group of shards.
        reduce_dtype: dtype of the buffer that travels.
        backend: name of the process group's backend, such as "gloo" or "nccl".
        transport: `AUTO` picks by backend.
        replicas: groups of shards; more than one with hybrid sharding.
        divide_factor: what the sum over all ranks is divided by, in the place of their number.
        force_sum: let native collectives sum and never average.
    """
    if transport is Transport.AUTO:
        transport = Transport.ORDERED if backend == "gloo" else Transport.NATIVE
    factor = float(world_size * replicas) if divide_factor is None else float(divide_factor)
    if reduce_dtype not in (torch.float32, torch.bfloat16):
        # a power of two, so exact, that halves the exponent range each side needs: about sqrt(factor), as far as
        # powers of two divide that
        predivide = 1
        while factor % predivide == 0 and factor > predivide**2:
            predivide *= 2
        return Reduction(transport, "sum", float(predivide), factor / predivide)
    if transport is Transport.NATIVE and divide_factor is None and not force_sum:
        return Reduction(transport, "avg")
    return Reduction(transport, "sum", None, factor)


def sum_in_rank_order(own: torch.Tensor, others: Sequence[torch.Tensor], rank: int) -> None:
    """Make `own` the sum over ranks, from rank 0 upwards, in its dtype; see [Note: rank order].

    Args:
        own: [n], what this rank adds.
        others: what the other ranks add, each [n], in rank order; overwritten.
        rank: this rank.
    """
    if rank:
        before, *more = others[:rank]
        for piece in more:
            before += piece
        own += before  # a + b has the bits of b + a
    for piece in others[rank:]:
        own += piece
