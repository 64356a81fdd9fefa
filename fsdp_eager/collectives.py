"""The collectives of one group: all-gather and copy-out, packing and reduction.

Counterpart: fsdp_compiled/collectives.py, where they are nodes of a graph.
Source: torch 2.13 `_fsdp_collectives.py` (`foreach_all_gather`, `foreach_all_gather_copy_out`, `foreach_reduce`).
Differs: no copy-in, since a group's shards already lie in one buffer; a second transport for reductions
(see [Note: rank order] in common/gradient.py); every collective is a work handle, on every device.
Left out: custom collectives, mixed dtypes in one message, reduction over replicas.

Shapes: W ranks, n parameters, c_i elements of parameter i's padded chunk, S = c_1 + ... + c_n.

    shard [S]  --all-gather-->  gathered [W, S]  --copy-out-->  n regions [W, c_i]: each parameter contiguous
    n gradients  --pack-->  packed [W, S]  --reduce-->  shard [S]: the mean of this rank's rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from common.gradient import Reduction, Transport, sum_in_rank_order

# torch 2.13 renamed the two and warns of the old names; 2.11 and 2.12 have only those.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}


def launch_gather(shard: Tensor, gathered: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to fill `gathered` [W * S] with every rank's `shard` [S], in rank order.

    The cast to the dtype of `gathered`, if it is another, comes before the gather: what travels is narrow.
    """
    if gathered.dtype is not shard.dtype:
        place = gathered.view(group.size(), -1)[group.rank()]
        shard = place.copy_(shard)
    work: dist.Work = _all_gather(gathered, shard, group=group, async_op=True)
    return work


def copy_out(gathered: Tensor, regions: Sequence[Tensor]) -> None:
    """Sort `gathered` [W * S], ordered by rank, into `regions` [W, c_i], one per parameter."""
    sizes = [region.shape[1] for region in regions]
    torch.split_with_sizes_copy(gathered.view(-1, sum(sizes)), sizes, dim=1, out=list(regions))


def pack_gradients(gradients: Sequence[Tensor], chunks: Sequence[int], world_size: int, dtype: torch.dtype) -> Tensor:
    """Lay gradients out by the rank that needs their rows, cast to `dtype`.

    Args:
        gradients: one of shape [d0, ...] for each parameter.
        chunks: c_i of each.
        world_size: W.
        dtype: what travels.

    Returns:
        packed [W, S]; row r holds the chunks of rank r, one parameter after the other, padded with zeros.
    """
    columns = []
    for gradient, chunk in zip(gradients, chunks, strict=True):
        flat = gradient.reshape(-1)
        missing = world_size * chunk - flat.numel()
        columns.append((F.pad(flat, (0, missing)) if missing else flat).view(world_size, chunk))
    packed = gradients[0].new_empty(world_size, sum(chunks), dtype=dtype)
    return torch.cat(columns, dim=1, out=packed)


@dataclass
class PendingReduction:
    """A reduction in flight.

    Attributes:
        packed: [W, S], what this rank sends; held until the transfer is over, and no longer.
        received: native: 1D [S], reduced; ordered: [W, S], row r from rank r, not yet summed.
        work: the handle to wait on; None if there is nobody to send to, or nothing to send.
        reduction: the arithmetic that was asked for.
    """

    packed: Tensor | None
    received: Tensor
    work: dist.Work | None
    reduction: Reduction


def launch_reduction(packed: Tensor, group: dist.ProcessGroup, reduction: Reduction) -> PendingReduction:
    """Start to reduce `packed` [W, S] so that each rank gets its row."""
    if reduction.predivide is not None:
        packed.div_(reduction.predivide)
    if packed.shape[0] == 1 or not packed.numel():
        return PendingReduction(packed, packed[0], None, reduction)
    if reduction.transport is Transport.ORDERED:
        received = torch.empty_like(packed)
        work = dist.all_to_all_single(received, packed, group=group, async_op=True)
    else:
        received = packed.new_empty(packed.shape[1])
        work = _reduce_scatter(received, packed.view(-1), op=_OPS[reduction.op], group=group, async_op=True)
    return PendingReduction(packed, received, work, reduction)


def wait_reduction(pending: PendingReduction) -> None:
    """Wait until a reduction's data is here, and let go of the message."""
    if pending.work is not None:
        pending.work.wait()
    pending.packed = pending.work = None  # the handle holds the message too


def finish_reduction(pending: PendingReduction) -> Tensor:
    """What came of a reduction that was waited for.

    Returns:
        1D [S], the mean over ranks of this rank's chunks, in the dtype that travelled.
    """
    total = pending.received
    if total.ndim == 2:
        total = sum_in_rank_order(total)
    if pending.reduction.postdivide is not None:
        total.div_(pending.reduction.postdivide)
    return total
