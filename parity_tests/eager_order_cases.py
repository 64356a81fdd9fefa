"""Ranks that call different modules of one model: what they are told by the eager engine."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from common.harness.launch import RankContext
from common.mesh import build_mesh
from fsdp_eager import fully_shard
from parity_tests.torch_private import detailed_checks

SHORT_S = 2


class Routed(nn.Module):
    """Blocks of one size, called in the order that a rank asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = self.blocks[index](x)
        return x


def routed(mesh: DeviceMesh) -> Any:
    """A sharded model."""
    model = Routed()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def same_order(model: Any, rank: int) -> None:
    """Nothing is wrong."""
    for _ in range(2):
        model(torch.ones(2, 4), [0, 1, 2]).sum().backward()


def other_order(model: Any, rank: int) -> None:
    """The messages have the same sizes: without checks they are mixed up in silence."""
    model(torch.ones(2, 4), [0, 2, 1] if rank == 1 else [0, 1, 2]).sum().backward()


def skipped_by_one(model: Any, rank: int) -> None:
    """One rank calls a module less."""
    model(torch.ones(2, 4), [0, 2] if rank == 1 else [0, 1, 2]).sum().backward()


def unused_by_one(model: Any, rank: int) -> None:
    """All ranks call a module, one does not use what comes out: its reduction is another's."""
    first = model(torch.ones(2, 4), [0])
    second = model(torch.ones(2, 4), [1])
    (first if rank == 1 else first + second).sum().backward()


ORDERS: dict[str, Callable[[Any, int], None]] = {
    order.__name__: order for order in (same_order, other_order, skipped_by_one, unused_by_one)
}


def checked(ctx: RankContext, name: str, replicas: int) -> str:
    """What a rank is told where checks are on."""
    model = routed(build_mesh(replicas=replicas))
    with detailed_checks():
        return _told(lambda: ORDERS[name](model, ctx.rank))


def unchecked(ctx: RankContext) -> str:
    """What a rank is told that waits for a launch which another rank never makes."""
    group = dist.new_group(timeout=timedelta(seconds=SHORT_S))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    found = "none" if ctx.rank == 1 else _told(lambda: model(torch.ones(2, 4)))
    dist.barrier()
    return found


def _told(run: Callable[[], object]) -> str:
    try:
        run()
    except Exception as error:
        return "\n".join((f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())))
    return "none"
