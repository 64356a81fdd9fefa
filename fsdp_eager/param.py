"""The life of one parameter: cut along one dimension, held as a shard, whole only while it is used.

Counterpart: fsdp_compiled/param.py, where reading a parameter is a traced computation that makes it whole.
Source: torch 2.13 `_fsdp_param.py`, class `FSDPParam`; the FSDP paper (arXiv 2304.11277), section 3.2.
Differs: a parameter owns no storage: shard and whole parameter are views into the buffers of its group. Any dimension
may be cut unevenly. What a user converts, moves, makes real or loads with `assign=True` is taken over.
Left out: tensor-parallel parameters, tensor subclasses.

Shapes: W ranks, d slices of a parameter along the dimension that is cut, c = ceil(d / W) of them in a chunk.
"""

from __future__ import annotations

import math
import weakref
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from common.errors import EngineError
from fsdp_eager.torch_private import (
    held_parameter,
    holds_shard,
    local_shard,
    run_post_accumulate_hooks,
    set_local_shard,
    shard_like,
    swap_parameter,
)


class ShardedState(Enum):
    """What the modules of a group hold. All parameters of a group are in the same state."""

    SHARDED = auto()
    """Shards; nothing is gathered."""
    SHARDED_POST_FORWARD = auto()
    """Shards; a larger piece of the whole parameters is kept for backward, see reshard.py."""
    GATHERING = auto()
    """Shards still; a gather is in flight."""
    UNSHARDED = auto()
    """Whole, plain parameters."""


class Managed(NamedTuple):
    """A parameter to shard.

    Attributes:
        name: what messages call it.
        param: the parameter as the user made it.
        owners: every (module, attribute) that holds it; more than one if it is tied.
        dim: the dimension to cut.
    """

    name: str
    param: nn.Parameter
    owners: tuple[tuple[nn.Module, str], ...]
    dim: int = 0


class Cut:
    """How a dimension is cut over W ranks, as `torch.chunk` does: c slices for each, the last ranks fewer or none.

    In buffers each chunk is padded to c slices, so that every rank sends and receives the same number of elements.

    Attributes:
        shape: of the whole.
        numel: of the whole.
        dim: the dimension.
        chunk_numel: elements of a chunk with its padding.
    """

    def __init__(self, shape: torch.Size, world_size: int, dim: int = 0) -> None:
        self.shape = shape
        self.numel = shape.numel()
        self.dim = dim
        self._chunk = -(-shape[dim] // world_size)
        self.chunk_numel = self._chunk * math.prod((*shape[:dim], *shape[dim + 1 :]))

    def slices_of(self, rank: int) -> range:
        """The slices that `rank` holds; may be empty."""
        first = min(rank * self._chunk, self.shape[self.dim])
        return range(first, min(first + self._chunk, self.shape[self.dim]))

    def shape_of(self, rank: int) -> tuple[int, ...]:
        """The shape of what `rank` holds."""
        return (*self.shape[: self.dim], len(self.slices_of(rank)), *self.shape[self.dim + 1 :])

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """What `rank` holds of `whole`; a view."""
        slices = self.slices_of(rank)
        return whole.narrow(self.dim, slices.start, len(slices))


class FSDPParam:
    """One parameter in both of its forms, and the modules that hold the one that is valid now.

    Attributes:
        name: what messages call it.
        cut: how it is spread over ranks.
        sharded_param: ND, a DTensor, `Shard` along the last dimension of the mesh; its local tensor is a view into the
            group's shard.
        replaced: parameters in whose place it came; an optimizer that holds one would never train.
        unsharded_param: ND, plain; a view into the group's whole buffer. Made once for each buffer: autograd keeps it.
    """

    sharded_param: nn.Parameter
    unsharded_param: nn.Parameter

    def __init__(self, managed: Managed, cut: Cut, mesh: DeviceMesh, shard: Tensor, whole: Tensor) -> None:
        """Copy this rank's part into `shard` and make both forms; modules hold the shard from here on.

        Args:
            managed: the parameter.
            cut: how it is spread over ranks.
            mesh: 1-D, or 2-D with replicas first.
            shard: [c * rest], this parameter's part of the group's shard.
            whole: [W * c * rest], this parameter's part of the group's whole buffer.
        """
        param = managed.param
        self.name = managed.name
        self.cut = cut
        self.replaced = [weakref.ref(param)]
        self._owners = managed.owners
        rank = mesh.get_local_rank(mesh.ndim - 1)
        self._local_shape = cut.shape_of(rank)
        self._local_stride = torch.empty(self._local_shape, device="meta").stride()
        local = self._local_in(shard)
        local.copy_(cut.part(param.detach(), rank))
        placements = (*(Replicate() for _ in range(mesh.ndim - 1)), Shard(cut.dim))
        like = torch.empty_like(local)  # not `local`, which has an offset, see `standalone`
        placed = DTensor.from_local(like, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())
        self.sharded_param = nn.Parameter(placed, requires_grad=param.requires_grad)
        set_local_shard(self.sharded_param, local)
        vars(self.sharded_param).update(vars(param))  # marks that users put on parameters, for their optimizer
        self._hold(local, whole)
        self._register(param, self.sharded_param)

    def move_into(self, shard: Tensor, whole: Tensor) -> None:
        """Go on in other buffers, with the shard that a user converted or made real."""
        vars(self.sharded_param).update(vars(self.unsharded_param))  # a conversion loses marks
        self._hold(self._local_in(shard), whole)
        self.move_back()

    def move_back(self) -> None:
        """Copy the shard, wherever it lies, to its place in the buffer."""
        found = local_shard(self.sharded_param)
        if found is not self._local:
            self._local.copy_(found)
            set_local_shard(self.sharded_param, self._local)

    def is_moved(self) -> bool:
        """Whether the shard lies elsewhere than in its group's buffer, since a user moved, converted or replaced it.

        Raises:
            EngineError: it was replaced by something that is no such shard.
        """
        if holds_shard(self._owners[0], self.sharded_param, self._local):
            return False
        if held_parameter(*self._owners[0]) is not self.sharded_param and not self.take_over():
            raise self._replaced(*self._owners[0])
        return True

    def take_over(self) -> bool:
        """Go on with shards that were registered in the place of ours, as `load_state_dict(assign=True)` does.

        A tied parameter is given one for each of its names; the last stays, as it would if values were copied.

        Returns:
            Whether there are any.
        """
        ours = self.sharded_param
        held = [held_parameter(*owner) for owner in self._owners]
        last = held[-1]
        if last is None or not all(item is not ours and _is_like(item, ours) for item in held):
            return False
        self.replaced += [weakref.ref(item) for item in (ours, *held) if item is not None and item is not last]
        vars(last).update(vars(ours))
        last.requires_grad_(ours.requires_grad)
        self.sharded_param = last
        for owner, item in zip(self._owners, held, strict=True):
            if item is not None:
                swap_parameter([owner], item, last)
        return True

    def to_unsharded(self) -> None:
        """Put the whole parameter, freshly gathered, where the shard is; frozen if the shard is.

        Raises:
            EngineError: it was replaced, converted or given other data.
        """
        whole, found = self._whole, self.unsharded_param
        if found.data_ptr() != whole.data_ptr() and found.numel():
            raise EngineError(
                f"parameter {self.name}: expected {whole.dtype} in the buffer of its group, found {found.dtype} on "
                f"{found.device} elsewhere; while a parameter is whole, change its values in place and not by .data ="
            )
        if found.requires_grad != self.sharded_param.requires_grad:
            found.requires_grad_(self.sharded_param.requires_grad)
        self._register(self.sharded_param, found)

    def to_sharded(self) -> None:
        """Put the shard where the whole parameter is.

        Raises:
            EngineError: the whole parameter was replaced.
        """
        self._register(self.unsharded_param, self.sharded_param)

    def take_gradient(self) -> Tensor | None:
        """Hand out the gradient of the whole parameter and forget it; None if it has none.

        Raises:
            EngineError: a sparse gradient.
        """
        grad = self.unsharded_param.grad
        if grad is None:
            return None
        self.unsharded_param.grad = None
        if grad.layout is not torch.strided:
            raise EngineError(
                f"parameter {self.name}: expected a dense gradient, found layout {grad.layout}; "
                "an embedding with sparse=True cannot be sharded, use sparse=False"
            )
        return grad

    def accept_gradient(self, shard: Tensor) -> None:
        """Set, or add to, the gradient of the sharded parameter.

        Args:
            shard: [>= this rank's elements], 1D, the mean over ranks of this rank's part, padding behind it.
        """
        local = self._local_in(shard)
        if self.sharded_param.grad is None:
            self.sharded_param.grad = shard_like(local, self.sharded_param)
        else:
            local_shard(self.sharded_param.grad).add_(local)
        run_post_accumulate_hooks(self.sharded_param)

    def _local_in(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self._local_shape, self._local_stride)

    def _hold(self, local: Tensor, whole: Tensor) -> None:
        self._local, self._whole = local, whole
        view = whole[: self.cut.numel].view(self.cut.shape)
        self.unsharded_param = nn.Parameter(view, requires_grad=self.sharded_param.requires_grad)
        vars(self.unsharded_param).update(vars(self.sharded_param))

    def _register(self, old: nn.Parameter, new: nn.Parameter) -> None:
        if (owner := swap_parameter(self._owners, old, new)) is not None:
            raise self._replaced(*owner)

    def _replaced(self, module: nn.Module, attribute: str) -> EngineError:
        return EngineError(
            f"parameter {self.name}: {type(module).__name__}.{attribute} was replaced after sharding, so it "
            "would be neither gathered nor reduced; change values in place "
            "(load_state_dict without assign=True), or replace it before sharding"
        )


def _is_like(found: nn.Parameter | None, expected: nn.Parameter) -> bool:
    """Whether `found` is a shard as `expected`; its dtype may be another."""
    return (
        isinstance(found, DTensor)
        and isinstance(expected, DTensor)
        and found.shape == expected.shape
        and found.placements == expected.placements
        and found.device_mesh == expected.device_mesh
    )
