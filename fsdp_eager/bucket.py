"""Parameters that travel together: one all-gather, one reduction, one flat buffer for the shards.

Counterpart: fsdp_compiled/bucket.py, where a bucket is a rewrite of the graph.
Source: torch 2.13 `_fsdp_param_group.py`, class `FSDPParamGroup`; the FSDP paper (arXiv 2304.11277), FlatParameter,
for the flat buffer. Differs: knows nothing of hooks and steps (state.py) nor of when to launch (schedule.py).
Left out: several meshes or dtypes in one group, resharding to a smaller mesh, accumulation without reduction.

Shapes: W ranks, S elements of this rank's padded shard of all parameters, in registration order.

[Note: alignment]
A kernel may sum in another order if its operand begins at another address (on CPUs a product with a single row does).
Parameters of the plain model begin where the allocator put them, at multiples of 64 bytes; so do whole parameters here,
though they share a buffer. Messages stay dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from common.gradient import Transport, plan_reduction
from common.mesh import backend_of
from common.policy import MixedPrecisionPolicy
from common.ranges import LAUNCH_GATHER, LAUNCH_REDUCE, WAIT_GATHER, WAIT_REDUCE, bucket_range
from common.shardable import check_shardable
from fsdp_eager.collectives import (
    PendingReduction,
    copy_out,
    finish_reduction,
    launch_gather,
    launch_reduction,
    pack_gradients,
    wait_reduction,
)
from fsdp_eager.param import Cut, FSDPParam, Managed, ShardedState, check_one_dtype
from fsdp_eager.reshard import SharedBuffer, WholeBuffer

ALIGNED = 32
"""Elements, 64 bytes of the narrowest dtype; see [Note: alignment]."""


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """How a group is sharded.

    Attributes:
        mesh: 1-D; the ranks that hold a shard each.
        mp_policy: dtypes of the gather and of the reduction.
        reshard_after_forward: free whole parameters after forward, gather them again in backward.
        prefetch: let the gather be launched one group ahead of its use.
        transport: how reductions travel.
    """

    mesh: DeviceMesh
    mp_policy: MixedPrecisionPolicy
    reshard_after_forward: bool = True
    prefetch: bool = True
    transport: Transport = Transport.AUTO


class FSDPParamGroup:
    """Parameters that are gathered, freed and reduced together.

    Attributes:
        name: what messages and logs call it; empty until the first forward, if the caller gave none.
        options: how it is sharded.
        params: in registration order.
        state: what the modules hold now.
        whole: the buffer of whole parameters.
        communicates: whether its gathers and reductions are collectives at all.
    """

    def __init__(self, managed: Sequence[Managed], options: GroupOptions, name: str) -> None:
        """Shard the parameters; from here on their modules hold the shards.

        Raises:
            EngineError: a parameter that cannot be sharded, see `common.shardable`; or two dtypes.
        """
        check_shardable(((item.name, item.param) for item in managed), options.mesh.device_type)
        check_one_dtype(managed)
        self.name = name
        self.options = options
        self.state = ShardedState.SHARDED
        first = managed[0].param
        self._world_size = options.mesh.size()
        self._process_group: dist.ProcessGroup = options.mesh.get_group()
        self._dtype = first.dtype
        self._compute_dtype = options.mp_policy.compute_dtype(first)
        self._reduce_dtype = options.mp_policy.reduction_dtype(first)
        self._reduction = plan_reduction(
            world_size=self._world_size,
            reduce_dtype=self._reduce_dtype,
            backend=backend_of(self._process_group, options.mesh.device_type),
            transport=options.transport,
        )
        cuts = [Cut(item.param.shape, self._world_size) for item in managed]
        chunks = [cut.chunk_numel for cut in cuts]
        whole_chunks = [self._world_size * chunk for chunk in chunks]
        places = _places(whole_chunks)
        shard_places = places if self._world_size == 1 else chunks  # what one rank computes with is its shard
        shard_numel = sum(shard_places)
        self._shard = torch.zeros(shard_numel, dtype=self._dtype, device=first.device)  # [S], zeros: the padding
        self.whole = (
            SharedBuffer(self._shard)
            if self._world_size == 1 and self._compute_dtype is self._dtype
            else WholeBuffer(sum(places), self._compute_dtype, first.device)
        )
        self.communicates = self._world_size > 1 and shard_numel > 0
        parts = zip(managed, cuts, self._shard.split(shard_places), self.whole.whole.split(places), strict=True)
        self.params = tuple(FSDPParam(item, cut, options.mesh, shard, whole) for item, cut, shard, whole in parts)
        self._regions = [  # [W, c_i] each, where copy-out writes
            region[: self._world_size * chunk].view(self._world_size, chunk)
            for region, chunk in zip(self.whole.writable.split(places), chunks, strict=True)
        ]
        self.whole.free()
        self._pending: tuple[torch.Tensor, dist.Work] | None = None  # what is gathered into, and its handle

    @torch.no_grad()
    def launch_gather(self) -> None:
        """Start to gather the whole parameters; the group must be sharded."""
        assert self.state is ShardedState.SHARDED
        if self.communicates:
            if len(self.params) == 1:  # ordered by rank is in order already: gather into place
                self.whole.alloc()
                gathered = self.whole.writable
            else:
                gathered = self.whole.writable.new_empty(self._world_size * self._shard.numel())
            with bucket_range(LAUNCH_GATHER, self.name):
                self._pending = gathered, launch_gather(self._shard, gathered, self._process_group)
        self.state = ShardedState.GATHERING

    @torch.no_grad()
    def wait_gather(self) -> None:
        """Finish the gather, and let modules hold whole parameters."""
        assert self.state is ShardedState.GATHERING
        if self._pending is not None:
            gathered, work = self._pending
            with bucket_range(WAIT_GATHER, self.name):
                work.wait()
            self.whole.alloc()
            if gathered is not self.whole.writable:
                copy_out(gathered, self._regions)
            self._pending = None
        elif not isinstance(self.whole, SharedBuffer):  # one rank: the cast is all there is to do
            self.whole.alloc()
            self.whole.writable.copy_(self._shard)
        for param in self.params:
            param.to_unsharded()
        self.state = ShardedState.UNSHARDED

    def discard_gather(self) -> None:
        """Wait for a gather that nobody came to use, and drop it."""
        assert self.state is ShardedState.GATHERING
        if self._pending is not None:
            with bucket_range(WAIT_GATHER, self.name):
                self._pending[1].wait()
            self._pending = None
        self.whole.free()
        self.state = ShardedState.SHARDED

    def reshard(self) -> None:
        """Let modules hold shards again and free the whole parameters."""
        if self.state is ShardedState.UNSHARDED:
            for param in self.params:
                param.to_sharded()
            self.whole.free()
            self.state = ShardedState.SHARDED

    def take_gradients(self) -> list[tuple[FSDPParam, torch.Tensor]]:
        """Hand out the gradients that autograd left in whole parameters; unused and frozen parameters have none."""
        taken = [(param, param.take_gradient()) for param in self.params]
        return [(param, gradient) for param, gradient in taken if gradient is not None]

    @torch.no_grad()
    def pack(self, gradients: list[tuple[FSDPParam, torch.Tensor]]) -> torch.Tensor:
        """Copy gradients, as `take_gradients` gave them, into the message [W, S of these parameters] of a reduction.

        Empties the list, so that their memory is free before more is asked for.
        """
        chunks = [param.cut.chunk_numel for param, _ in gradients]
        packed = pack_gradients([grad for _, grad in gradients], chunks, self._world_size, self._reduce_dtype)
        gradients.clear()
        return packed

    @torch.no_grad()
    def launch_reduction(self, packed: torch.Tensor) -> PendingReduction:
        """Start to reduce what `pack` returned."""
        with self._range(LAUNCH_REDUCE):
            return launch_reduction(packed, self._process_group, self._reduction)

    def wait_reduction(self, pending: PendingReduction) -> None:
        """Wait until the reduction's data is here."""
        with self._range(WAIT_REDUCE):
            wait_reduction(pending)

    def _range(self, event: str) -> AbstractContextManager[object]:
        """A range in whatever profile is recorded; none if nothing travels."""
        return bucket_range(event, self.name) if self.communicates else nullcontext()

    @torch.no_grad()
    def finish_reduction(self, params: Sequence[FSDPParam], pending: PendingReduction) -> None:
        """Wait for the reduction and put its parts, views of one buffer, into `.grad` of the sharded `params`."""
        self.wait_reduction(pending)
        total = finish_reduction(pending).to(self._dtype)
        for param, part in zip(params, total.split([param.cut.chunk_numel for param in params]), strict=True):
            param.accept_gradient(part)


def _places(sizes: Sequence[int]) -> list[int]:
    """How much of a buffer each of `sizes` takes if the one after it is to begin aligned; see [Note: alignment]."""
    return [*(-(-size // ALIGNED) * ALIGNED for size in sizes[:-1]), *sizes[-1:]]
