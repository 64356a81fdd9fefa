"""The collectives of one group: all-gather and copy-out, packing, reduction over shards and over replicas.

Counterpart: fsdp_compiled/collectives.py, where they are nodes of a graph.
Source: torch 2.13 `_fsdp_collectives.py` (`foreach_all_gather`, `foreach_all_gather_copy_out`, `foreach_reduce`).
Differs: no copy-in, since a group's shards already lie in one buffer; a second transport for reductions
(see [Note: rank order] in common/gradient.py); every collective is a work handle, on every device.
Left out: custom collectives, mixed dtypes in one message.

Shapes: W ranks, R replicas, n parameters, c_i elements of parameter i's padded chunk, S = c_1 + ... + c_n.

    shard [S]  --all-gather-->  gathered [W, S]  --copy-out-->  n whole parameters, each contiguous
    n gradients  --pack-->  message [W, S]  --reduce-scatter-->  [S]  --all-reduce-->  [S]: summed or averaged

A rank's own row stays here where rows are summed here: the message has W - 1, and as many come.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from common.gradient import Reduction, Transport, sum_in_rank_order
from fsdp_eager.param import Cut

# torch 2.13 renamed the two and warns of the old names; 2.11 and 2.12 have only those.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}


def launch_gather(shard: Tensor, gathered: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to fill `gathered` [W * S] with every rank's `shard` [S], in rank order.

    The cast to the dtype of `gathered`, if it is another, comes before the gather: what travels is narrow. So does the
    copy to its device, if shards live on the CPU.
    """
    if gathered.dtype is not shard.dtype or gathered.device != shard.device:
        place = gathered.view(group.size(), -1)[group.rank()]
        shard = place.copy_(shard.to(gathered.device, non_blocking=True))  # cast there: the copy is from pinned memory
    work: dist.Work = _all_gather(gathered, shard, group=group, async_op=True)
    return work


def copy_out(gathered: Tensor, wholes: list[Tensor], cuts: Sequence[Cut]) -> None:
    """Sort `gathered` [W * S], ordered by rank, into whole parameters.

    Args:
        gathered: what came.
        wholes: one for each parameter, [W, c_i].
        cuts: of each.
    """
    sizes = [cut.chunk_numel for cut in cuts]
    world_size = gathered.numel() // sum(sizes)
    rows = gathered.view(world_size, -1)
    if all(cut.dim == 0 for cut in cuts):  # chunks of rows follow each other in memory: one kernel for all
        torch.split_with_sizes_copy(rows, sizes, dim=1, out=wholes)
        return
    for chunks, whole, cut in zip(rows.split(sizes, dim=1), wholes, cuts, strict=True):
        target = whole.view(-1)[: cut.numel].view(cut.shape)
        for rank in range(world_size):
            shape = cut.shape_of(rank)
            cut.part(target, rank).copy_(chunks[rank, : math.prod(shape)].view(shape))


class Message(NamedTuple):
    """The gradients of a group, by the rank that needs them: the chunks of each parameter, one after the other.

    Attributes:
        sent: a row for each rank [W, S]; if this rank's own stays here, [W - 1, S], those of the others in rank order.
        own: [S], this rank's row if it stays here.
    """

    sent: Tensor
    own: Tensor | None

    def parts(self) -> list[Tensor]:
        """Both, or the one that there is."""
        return [self.sent] if self.own is None else [self.sent, self.own]


def pack_gradients(
    gradients: Sequence[Tensor], cuts: Sequence[Cut], world_size: int, dtype: torch.dtype, *, keep: int | None
) -> Message:
    """Lay gradients out by the rank that needs their part, cast to `dtype`, padded with zeros.

    Args:
        gradients: one for each parameter, in its shape.
        cuts: of each.
        world_size: W.
        dtype: what travels.
        keep: the rank whose row is not sent, if there is one.
    """
    numel = sum(cut.chunk_numel for cut in cuts)
    sent = gradients[0].new_empty(world_size if keep is None else world_size - 1, numel, dtype=dtype)
    own = None if keep is None else sent.new_empty(numel)
    if own is None and all(cut.dim == 0 and cut.numel == world_size * cut.chunk_numel for cut in cuts):
        columns = [grad.reshape(world_size, cut.chunk_numel) for grad, cut in zip(gradients, cuts, strict=True)]
        torch.cat(columns, dim=1, out=sent)  # one kernel for all rows
        return Message(sent, own)
    targets = list(sent.unbind())
    if keep is not None and own is not None:
        targets.insert(keep, own)
    parts = [_by_rank(gradient, cut, world_size) for gradient, cut in zip(gradients, cuts, strict=True)]
    for target, chunks in zip(targets, zip(*parts, strict=True), strict=True):
        torch.cat(chunks, out=target)
    return Message(sent, own)


def _by_rank(gradient: Tensor, cut: Cut, world_size: int) -> Iterable[Tensor]:
    """The W chunks [c_i] of one gradient; what is copied for one, as its padding asks for, does not outlive it."""
    if cut.dim == 0 and cut.numel == world_size * cut.chunk_numel:
        return gradient.reshape(world_size, cut.chunk_numel).unbind()
    return (_padded(cut.part(gradient, rank).reshape(-1), cut.chunk_numel) for rank in range(world_size))


def _padded(part: Tensor, numel: int) -> Tensor:
    missing = numel - part.numel()
    return F.pad(part, (0, missing)) if missing else part


@dataclass
class PendingReduction:
    """A reduction in flight.

    Attributes:
        result: 1D [S]; native: what the transfer writes to; ordered: this rank's own addend, to which others are added.
        sent: what this rank sends; held until the transfer is over, and no longer.
        others: ordered: what comes from the other ranks, in rank order, each [S].
        rank: this rank.
        work: the handle to wait on; None if there is nobody to send to, or nothing to send.
    """

    result: Tensor
    sent: Tensor | None = None
    others: Sequence[Tensor] = ()
    rank: int = 0
    work: dist.Work | None = None

    def wait(self) -> Tensor:
        """Wait until the data is here, and let go of what was sent.

        Returns:
            1D [S], this rank's chunks, reduced, in the dtype that travelled.
        """
        if self.work is not None:
            self.work.wait()
        self.sent = self.work = None  # the handle holds the message too
        sum_in_rank_order(self.result, self.others, self.rank)
        self.others = ()
        return self.result


def launch_reduce_scatter(message: Message, group: dist.ProcessGroup, reduction: Reduction) -> PendingReduction:
    """Start to reduce a message so that each rank gets the sum of its rows, summed here if its own stays here."""
    sent, own = message
    rank, world_size = group.rank(), group.size()
    if reduction.predivide is not None:
        for part in message.parts():
            part.div_(reduction.predivide)
    if own is None:
        total = sent.new_empty(sent.shape[1])
        if not sent.numel():
            return PendingReduction(total)
        work = _reduce_scatter(total, sent.view(-1), op=_OPS[reduction.op], group=group, async_op=True)
        return PendingReduction(total, sent, work=work)
    if not sent.numel():
        return PendingReduction(own)
    rows = [int(other != rank) for other in range(world_size)]
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received, sent, rows, rows, group=group, async_op=True)
    return PendingReduction(own, sent, received.unbind(), rank, work)


def launch_all_reduce(shard: Tensor, group: dist.ProcessGroup, reduction: Reduction) -> PendingReduction:
    """Start to reduce `shard` [S] over replicas, in place."""
    if group.size() == 1 or not shard.numel():
        return PendingReduction(shard)
    if reduction.transport is Transport.ORDERED:
        received = shard.new_empty(group.size(), shard.numel())
        work = _all_gather(received.view(-1), shard, group=group, async_op=True)
        others = list(received.unbind())
        del others[group.rank()]
        return PendingReduction(shard, None, others, group.rank(), work)
    work = dist.all_reduce(shard, op=_OPS[reduction.op], group=group, async_op=True)
    return PendingReduction(shard, work=work)
