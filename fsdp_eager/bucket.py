"""Parameters that travel together: one all-gather, one reduction, one flat buffer for the shards.

Counterpart: fsdp_compiled/bucket.py, where a bucket is a rewrite of the graph.
Source: torch 2.13 `_fsdp_param_group.py`, class `FSDPParamGroup`; the FSDP paper (arXiv 2304.11277), FlatParameter,
for the flat buffer. Differs: knows nothing of hooks and steps (state.py), of when to launch (schedule.py), nor of
gradients (reduction.py).
Left out: several meshes or dtypes in one group.

Shapes: W ranks, S elements of this rank's padded shard of all parameters, in registration order.

[Note: alignment]
A kernel may sum in another order if its operand begins at another address (on CPUs a product with a single row does).
Parameters of the plain model begin where the allocator put them, at multiples of 64 bytes; so do whole parameters here,
though they share a buffer. Messages stay dense.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from common.errors import EngineError
from common.gradient import Transport
from common.mesh import backend_of, neighbours
from common.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fsdp_eager.collectives import copy_out, launch_gather
from fsdp_eager.param import Cut, FSDPParam, Managed, ShardedState
from fsdp_eager.reduction import GradientReducer
from fsdp_eager.reshard import SharedBuffer, WholeBuffer
from fsdp_eager.torch_private import local_shard, writes_to

ALIGNED = 32
"""Elements, 64 bytes of the narrowest dtype; see [Note: alignment]."""


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """How a group is sharded.

    Attributes:
        mesh: 1-D; the ranks that hold a shard each. Or 2-D: replicas of that.
        mp_policy: dtypes of the gather and of the reduction.
        offload_policy: where shards live.
        reshard_after_forward: free whole parameters after forward, gather them again in backward; a number: keep one
            part of so many; None: as True, but False for the root.
        prefetch: let the gather be launched one group ahead of its use.
        transport: how reductions travel.
    """

    mesh: DeviceMesh
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload_policy: OffloadPolicy = field(default_factory=OffloadPolicy)
    reshard_after_forward: bool | int | None = True
    prefetch: bool = True
    transport: Transport = Transport.AUTO

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        kind = self.mesh.device_type
        if kind == "cpu":
            return torch.device(kind)
        return torch.device(kind, torch.get_device_module(kind).current_device())

    @property
    def shard_device(self) -> torch.device:
        """Where shards live."""
        return torch.device("cpu") if isinstance(self.offload_policy, CPUOffloadPolicy) else self.device


@dataclass
class GatherSwitches:
    """What users set on a group about its whole parameters, each by a method of `FSDPModule`.

    Attributes:
        reshard_after_forward: see `GroupOptions`; None until it is known what the root is.
        reshard_after_backward: free whole parameters after backward.
        unshard_in_backward: backward needs whole parameters.
    """

    reshard_after_forward: bool | int | None
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True


class FSDPParamGroup:
    """Parameters that are gathered, freed and reduced together.

    Attributes:
        name: what messages and logs call it; empty until the first forward, if the caller gave none.
        options: how it is sharded.
        switches: what users change.
        params: in registration order.
        state: what the modules hold now.
        whole: the buffer of whole parameters.
        generation: how often that was replaced; a graph of an earlier one has no backward any more.
        reducer: the way of their gradients.
        communicates: whether its gathers and reductions are collectives at all.
    """

    whole: WholeBuffer

    def __init__(self, managed: Sequence[Managed], options: GroupOptions, name: str) -> None:
        """Shard the parameters; from here on their modules hold the shards.

        Raises:
            EngineError: two dtypes.
        """
        check_one_dtype((item.name, item.param) for item in managed)
        self.name = name
        self.options = options
        self.switches = GatherSwitches(options.reshard_after_forward)
        self.state = ShardedState.SHARDED
        self.generation = 0
        mesh = options.mesh
        self._world_size = mesh.size(mesh.ndim - 1)
        self._group: dist.ProcessGroup = mesh.get_group(mesh.ndim - 1)
        reshard = options.reshard_after_forward
        self._neighbours = None if isinstance(reshard, bool | None) else neighbours(mesh, reshard)
        self._cuts = [Cut(item.param.shape, self._world_size, item.dim) for item in managed]
        first = managed[0].param
        parts = self._allocate(first, first.device if first.is_meta else options.shard_device)
        self.params = tuple(
            FSDPParam(item, cut, mesh, *part) for item, cut, part in zip(managed, self._cuts, parts, strict=True)
        )
        self.whole.free()
        self.communicates = mesh.size() > 1 and self._shard.numel() > 0
        self._pending: tuple[torch.Tensor, dist.Work] | None = None  # what is gathered into, and its handle
        self._kept: torch.Tensor | None = None  # see [Note: a piece for backward]
        self._gathered_writes = self._writes()
        self.reducer = GradientReducer(
            self.params,
            shard_group=self._group,
            replica_group=mesh.get_group(0) if mesh.ndim == 2 else None,
            reduce_dtype=options.mp_policy.reduction_dtype(self._shard),
            transport=options.transport,
            backend=backend_of(self._group, mesh.device_type),
        )

    @property
    def shard_ranks(self) -> list[int]:
        """The ranks that share the parameters."""
        return dist.get_process_group_ranks(self._group)

    @property
    def is_stale(self) -> bool:
        """Whether the shards were written to since the whole parameters were gathered."""
        return self._writes() != self._gathered_writes

    def _writes(self) -> int:
        """A count of writes to the shards, made through their DTensors, as all ranks make them.

        A write to `to_local()` of one rank is not counted: ranks that differ here would gather, or not, alone.
        """
        return writes_to([param.sharded_param for param in self.params])

    def settle(self) -> None:
        """Take over what users did to the shards since the last gather: converted, moved, made real, loaded.

        Raises:
            EngineError: there is nothing to gather yet, or two dtypes.
        """
        if not any([param.is_moved() for param in self.params]) and not self._shard.is_meta:
            return
        shards = [(param.name, local_shard(param.sharded_param)) for param in self.params]
        unreal = [name for name, shard in shards if shard.is_meta]
        if unreal:
            raise EngineError(
                f"parameters {', '.join(unreal[:5])}: expected real values, found the meta device; before the first "
                'forward call model.to_empty(device="cpu") and set values, or load a state dict with assign=True'
            )
        check_one_dtype(shards)
        if shards[0][1].dtype is self._shard.dtype and not self._shard.is_meta:
            for param in self.params:
                param.move_back()
            return
        with torch.inference_mode(False):  # buffers outlive the evaluation that may be running
            parts = self._allocate(shards[0][1], self.options.shard_device)
            for param, part in zip(self.params, parts, strict=True):
                param.move_into(*part)
        self.whole.free()
        self.generation += 1
        self.reducer.reduce_dtype = self.options.mp_policy.reduction_dtype(self._shard)

    def launch_gather(self) -> None:
        """Start to gather the whole parameters; the group must be sharded."""
        kept, self._kept = self._kept, None
        if kept is not None:
            assert self._neighbours is not None
            self.whole.alloc()
            self._pending = self.whole.writable, launch_gather(kept, self.whole.writable, self._neighbours)
        elif self._world_size > 1 and self._shard.numel():
            if self._is_ordered:
                self.whole.alloc()
                gathered = self.whole.writable
            else:
                gathered = self.whole.writable.new_empty(self._world_size * self._shard.numel())
            self._pending = gathered, launch_gather(self._shard, gathered, self._group)
        if kept is None:  # what was kept is as old as the gather before
            self._gathered_writes = self._writes()
        self.state = ShardedState.GATHERING

    def wait_gather(self) -> None:
        """Finish the gather, and let modules hold whole parameters."""
        assert self.state is ShardedState.GATHERING
        if self._pending is not None:
            gathered, work = self._pending
            work.wait()
            self.whole.alloc()
            if gathered is not self.whole.writable:
                copy_out(gathered, self._wholes, self._cuts)
            self._pending = None
        elif not isinstance(self.whole, SharedBuffer):  # one rank: the cast is all there is to do
            self.whole.alloc()
            self.whole.writable[: self._shard.numel()].copy_(self._shard)
        for param in self.params:
            param.to_unsharded()
        self.state = ShardedState.UNSHARDED

    def discard_gather(self) -> None:
        """Wait for a gather that nobody came to use, and drop it."""
        assert self.state is ShardedState.GATHERING
        if self._pending is not None:
            self._pending[1].wait()
            self._pending = None
        self.whole.free()
        self.state = ShardedState.SHARDED

    def reshard(self, *, after_forward: bool = False) -> None:
        """Let modules hold shards again and free the whole parameters, `after_forward` all but the piece to keep."""
        if self.state is ShardedState.UNSHARDED:
            for param in self.params:
                param.to_sharded()
            keep = self._neighbours if after_forward and self.switches.reshard_after_forward is not True else None
            self._kept = None if keep is None else self.whole.piece(keep.rank(), keep.size())
            self.whole.free()
            self.state = ShardedState.SHARDED if self._kept is None else ShardedState.SHARDED_POST_FORWARD
        elif self.state is ShardedState.SHARDED_POST_FORWARD and not after_forward:
            self._kept = None
            self.state = ShardedState.SHARDED

    def _allocate(self, like: torch.Tensor, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """New buffers for parameters of the dtype of `like`: of each, its parts of the shard and of the whole."""
        policy = self.options.mp_policy
        dtype, compute_dtype = like.dtype, policy.compute_dtype(like)
        chunks = [cut.chunk_numel for cut in self._cuts]
        places = _places([self._world_size * chunk for chunk in chunks])
        shard_places = places if self._world_size == 1 else chunks  # what one rank computes with is its shard
        offload = self.options.offload_policy
        pinned = isinstance(offload, CPUOffloadPolicy) and offload.pin_memory and device.type == "cpu"
        numel = sum(shard_places)
        self._shard = torch.zeros(numel, dtype=dtype, device=device, pin_memory=pinned)  # zeros: the padding
        compute_device = device if device.type == "meta" else self.options.device
        total = sum(places)
        if self._neighbours is not None:
            total = -(-total // self._neighbours.size()) * self._neighbours.size()
        shared = self._world_size == 1 and compute_dtype is dtype and compute_device == device
        self.whole = SharedBuffer(self._shard) if shared else WholeBuffer(total, compute_dtype, compute_device)
        wholes = self.whole.whole[: sum(places)].split(places)
        self._wholes = [
            part[: self._world_size * chunk].view(self._world_size, chunk)
            for part, chunk in zip(self.whole.writable[: sum(places)].split(places), chunks, strict=True)
        ]
        self._is_ordered = len(self._cuts) == 1 and self._cuts[0].dim == 0 and total == sum(places)
        return list(zip(self._shard.split(shard_places), wholes, strict=True))


def _places(sizes: Sequence[int]) -> list[int]:
    """How much of a buffer each of `sizes` takes if the one after it is to begin aligned; see [Note: alignment]."""
    return [*(-(-size // ALIGNED) * ALIGNED for size in sizes[:-1]), *sizes[-1:]]


def check_one_dtype(params: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse parameters that cannot travel in one message.

    Raises:
        EngineError: two dtypes.
    """
    (first_name, first), *others = params
    for name, param in others:
        if param.dtype != first.dtype:
            raise EngineError(
                f"parameter {name!r}: {param.dtype}, but {first_name!r} in the same group is {first.dtype}; one "
                "group travels in one dtype, so put parameters of different dtypes into different groups"
            )
