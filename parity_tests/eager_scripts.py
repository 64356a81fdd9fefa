"""Training scripts as users of FSDP2 write them, each run with torch's `fully_shard` and with the engine's.

A script gets the names it would import and returns what it computed, by name; the two results must have equal bits.
Reductions travel natively, as torch's do. Where three ranks are summed, the order counts: see `bare`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from common.harness.launch import RankContext
from common.mesh import build_mesh
from parity_tests.eager_cases import loss_of, make_net

Found = dict[str, Tensor | None]
Script = Callable[[Any, RankContext], Found]

SCRIPTS: dict[str, Script] = {}


def script(fn: Script) -> Script:
    """Enter a script under its name."""
    SCRIPTS[fn.__name__] = fn
    return fn


def apply(api: Any, model: nn.Module, **options: Any) -> Any:
    """Shard each block, then the rest."""
    options.setdefault("mesh", build_mesh())
    for block in model.blocks:
        api.fully_shard(block, **options)
    api.fully_shard(model, **options)
    return model


def gradients(model: nn.Module, title: str = "") -> Found:
    """This rank's part of each gradient, in a copy."""
    return {f"{title} {name}": _local(param.grad) for name, param in model.named_parameters()}


def values(model: nn.Module) -> Found:
    """This rank's part of each parameter, in a copy."""
    return {name: _local(param.detach()) for name, param in model.named_parameters()}


def _local(tensor: Tensor | None) -> Tensor | None:
    if isinstance(tensor, DTensor):
        return tensor.to_local().clone()
    return None if tensor is None else tensor.clone()


def steps(model: nn.Module, ctx: RankContext, count: int = 2) -> Found:
    """Losses, gradients and parameters of a few AdamW steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found: Found = {}
    for step in range(count):
        loss = loss_of(model, step, ctx.rank)
        loss.backward()
        found |= {f"loss {step}": loss.detach(), **gradients(model, f"step {step}")}
        optimizer.step()
        optimizer.zero_grad()
    return found | values(model)


def zeroed_net(**options: bool) -> nn.Module:
    """The net with other values."""
    net = make_net(**options)
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()
    return net


def same_values(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))


def rows_of(ctx: RankContext, width: int) -> Tensor:
    return torch.randn(3, width, generator=torch.Generator().manual_seed(ctx.rank))
