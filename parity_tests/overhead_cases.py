"""How much Python an engine runs: calls are counted, since they do not depend on how busy the machine is."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

import fsdp_eager
from common.harness.launch import RankContext
from common.mesh import build_mesh


class Scales(nn.Module):
    """Ten parameters of eight elements, and next to no compute."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(10):
            self.register_parameter(f"scale{i}", nn.Parameter(torch.ones(8)))

    def forward(self, x: Tensor) -> Tensor:
        for param in self.parameters():
            x = x * param
        return x


class Counter:
    """Calls of Python functions and of built-in ones, on this thread, while the context lasts."""

    def __init__(self) -> None:
        self.calls = 0

    def __enter__(self) -> Counter:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: object, event: str, argument: object) -> None:
        self.calls += event in ("call", "c_call")


def calls(ctx: RankContext, api: str, groups: int) -> dict[str, int]:
    """Calls in sharding a model of so many groups, and in a step beyond those of the plain model."""
    library: Any = {"torch": torch_fsdp, "ours": fsdp_eager}[api]
    model = nn.Sequential(*(Scales() for _ in range(groups)))
    x = torch.ones(8)
    plain = _step(model, x)
    mesh = build_mesh()
    with Counter() as setup:
        for module in (*model, model):
            library.fully_shard(module, mesh=mesh)
    for _ in range(2):
        model(x).sum().backward()
    return {"setup": setup.calls, "step": _step(model, x) - plain}


def _step(model: nn.Module, x: Tensor) -> int:
    with Counter() as counter:
        model(x).sum().backward()
    return counter.calls
