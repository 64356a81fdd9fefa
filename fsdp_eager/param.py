"""The life of one parameter: cut along dim 0, held as a shard, whole only while it is used.

Counterpart: fsdp_compiled/param.py, where reading a parameter is a traced computation that makes it whole.
Source: torch 2.13 `_fsdp_param.py`, class `FSDPParam`; the FSDP paper (arXiv 2304.11277), section 3.2.
Differs: a parameter owns no storage: shard and whole parameter are views into the buffers of its group.
Left out: sharding along another dimension, tensor-parallel parameters, tensor subclasses, CPU offload.

Shapes: W ranks, d0 rows of a parameter, c = ceil(d0 / W) rows of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from common.errors import EngineError
from fsdp_eager.torch_private import local_shard, run_post_accumulate_hooks, shard_like, swap_parameter


class ShardedState(Enum):
    """What the modules of a group hold. All parameters of a group are in the same state."""

    SHARDED = auto()
    """Shards; nothing is gathered."""
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
    """

    name: str
    param: nn.Parameter
    owners: tuple[tuple[nn.Module, str], ...]


class Cut:
    """How dim 0 is cut over W ranks, as `torch.chunk` does: c rows for each, the last ranks fewer or none.

    In buffers each chunk is padded to c rows, so that every rank sends and receives the same number of elements.
    """

    def __init__(self, shape: torch.Size, world_size: int) -> None:
        self.rows = shape[0]
        self.row_numel = math.prod(shape[1:])
        self.chunk_rows = -(-self.rows // world_size)
        self.chunk_numel = self.chunk_rows * self.row_numel

    def rows_of(self, rank: int) -> range:
        """The rows that `rank` holds; may be empty."""
        first = min(rank * self.chunk_rows, self.rows)
        return range(first, min(first + self.chunk_rows, self.rows))


class FSDPParam:
    """One parameter in both of its forms, and the modules that hold the one that is valid now.

    Attributes:
        name: what messages call it.
        cut: how its rows are spread over ranks.
        sharded_param: ND, a `Shard(0)` DTensor; its local tensor is a view into the group's shard.
        unsharded_param: ND, plain; a view into the group's whole buffer. Made once, since autograd keeps it.
    """

    def __init__(self, managed: Managed, cut: Cut, mesh: DeviceMesh, shard: torch.Tensor, whole: torch.Tensor) -> None:
        """Copy this rank's rows into `shard` and make both forms; modules are switched by `to_sharded`.

        Args:
            managed: the parameter.
            cut: how its rows are spread over ranks.
            mesh: 1-D mesh.
            shard: [c * rest], this parameter's part of the group's shard.
            whole: [W * c * rest], this parameter's part of the group's whole buffer.
        """
        param = managed.param
        self.name = managed.name
        self.cut = cut
        self._owners = managed.owners
        rows = cut.rows_of(mesh.get_local_rank())
        local = shard[: len(rows) * cut.row_numel].view(len(rows), *param.shape[1:])
        local.copy_(param.detach()[rows.start : rows.stop])
        placed = DTensor.from_local(local, mesh, (Shard(0),), run_check=False, shape=param.shape, stride=param.stride())
        self.sharded_param = nn.Parameter(placed, requires_grad=param.requires_grad)
        vars(self.sharded_param).update(vars(param))  # marks that users put on parameters, for their optimizer
        self.unsharded_param = nn.Parameter(whole[: param.numel()].view(param.shape), requires_grad=param.requires_grad)
        self._local = local
        self._whole = whole
        self._register(param, self.sharded_param)

    def to_unsharded(self) -> None:
        """Put the whole parameter, freshly gathered, where the shard is; frozen if the shard is.

        Raises:
            EngineError: one of the two was replaced, converted, moved or given other data.
        """
        self._check_memory(local_shard(self.sharded_param), self._local)
        self._check_memory(self.unsharded_param, self._whole)
        if self.unsharded_param.requires_grad != self.sharded_param.requires_grad:
            self.unsharded_param.requires_grad_(self.sharded_param.requires_grad)
        self._register(self.sharded_param, self.unsharded_param)

    def to_sharded(self) -> None:
        """Put the shard where the whole parameter is.

        Raises:
            EngineError: the whole parameter was replaced.
        """
        self._register(self.unsharded_param, self.sharded_param)

    def take_gradient(self) -> torch.Tensor | None:
        """Hand out the gradient of the whole parameter and forget it; None if it has none.

        Raises:
            EngineError: a sparse gradient.
        """
        grad = self.unsharded_param.grad
        self.unsharded_param.grad = None
        if grad is not None and grad.layout is not torch.strided:
            raise EngineError(
                f"parameter {self.name}: expected a dense gradient, found layout {grad.layout}; "
                "an embedding with sparse=True cannot be sharded, use sparse=False"
            )
        return grad

    def accept_gradient(self, shard: torch.Tensor) -> None:
        """Set, or add to, the gradient of the sharded parameter.

        Args:
            shard: [>= this rank's elements], 1D, the mean over ranks of this rank's rows, padding behind them.
        """
        local = shard[: self._local.numel()].view(self._local.shape)
        if self.sharded_param.grad is None:
            self.sharded_param.grad = shard_like(local, self.sharded_param)
        else:
            local_shard(self.sharded_param.grad).add_(local)
        run_post_accumulate_hooks(self.sharded_param)

    def _register(self, old: nn.Parameter, new: nn.Parameter) -> None:
        for module, attribute in self._owners:
            if not swap_parameter(module, attribute, old, new):
                raise EngineError(
                    f"parameter {self.name}: {type(module).__name__}.{attribute} was replaced after sharding, so it "
                    "would be neither gathered nor reduced; change values in place "
                    "(load_state_dict without assign=True), or replace it before sharding"
                )

    def _check_memory(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        # by dtype as well, so that a rank with an empty shard does not go on alone
        if found.dtype is not expected.dtype or (found.numel() and found.data_ptr() != expected.data_ptr()):
            raise EngineError(
                f"parameter {self.name}: expected {expected.dtype} in the buffer of its group, found {found.dtype} on "
                f"{found.device} elsewhere; convert or move a model (.to, .half, .data =) before sharding it, not after"
            )


def check_one_dtype(managed: Iterable[Managed]) -> None:
    """Refuse parameters that cannot travel in one message.

    Raises:
        EngineError: two dtypes.
    """
    first, *others = managed
    for name, param, _ in others:
        if param.dtype != first.param.dtype:
            raise EngineError(
                f"parameter {name!r}: {param.dtype}, but {first.name!r} in the same group is {first.param.dtype}; one "
                "group travels in one dtype, so put parameters of different dtypes into different groups"
            )
