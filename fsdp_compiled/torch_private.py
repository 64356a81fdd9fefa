"""The private torch names this room stands on, in one place, so that a new torch breaks one file, loudly.

Seen in torch 2.11 to 2.14 unless a line says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd

# Which graph input or gradient a node of an AOT graph stands for; the only way to know a parameter by its identity.
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    PlainAOTInput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
)

# `joint_custom_pass` is the one hook between tracing and partitioning that the AOT and Inductor paths share.
from torch._functorch.config import patch as functorch_patch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.config import patch as inductor_patch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.graph import _BoxedCodeGen
from torch.utils.checkpoint import CheckpointPolicy

__all__ = [
    "CheckpointPolicy",
    "FakeTensorMode",
    "aot_autograd",
    "boxed",
    "compile_fx",
    "compile_fx_inner",
    "fake_mode_of",
    "functorch_patch",
    "gradient_of_input",
    "in_range",
    "index_of_input",
    "inductor_patch",
    "min_cut_rematerialization_partition",
    "stored_parameter",
]


def stored_parameter(module: torch.nn.Module, name: str) -> Any:
    """What a module holds under `name`, past the property that replicates it; Dynamo traces through this read."""
    return module._parameters[name]


def index_of_input(placeholder: torch.fx.Node) -> int | None:
    """Which input of the traced function a placeholder holds; for a DTensor, holds the local tensor of."""
    desc = placeholder.meta.get("desc")
    if isinstance(desc, SubclassGetAttrAOTInput):
        desc = desc.base if desc.attr == "_local_tensor" else None
    return desc.idx if isinstance(desc, PlainAOTInput) else None


def gradient_of_input(desc: object) -> int | None:
    """Which input of the traced function an output descriptor is the (local) gradient of."""
    if isinstance(desc, SubclassGetAttrAOTOutput):
        desc = desc.base if desc.attr == "_local_tensor" else None
    if not isinstance(desc, GradAOTOutput):
        return None
    return desc.grad_of.idx if isinstance(desc.grad_of, PlainAOTInput) else None


def fake_mode_of(graph: torch.fx.Graph) -> FakeTensorMode:
    """The fake mode a graph was traced under, for the shapes of nodes that a pass adds."""
    for node in graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if isinstance(mode, FakeTensorMode):
            return mode
    raise AssertionError("a traced graph holds at least one fake tensor")


def boxed(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """Run `gm` as it is, taking its arguments in a list that it empties, so that each is freed after its last use."""
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    forward = gm.forward

    def run(args: list[Any]) -> Any:
        return forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def in_range(
    open_range: Callable[[], AbstractContextManager[object]], compiled: Callable[[list[Any]], Any]
) -> Callable[[list[Any]], Any]:
    """`compiled`, which takes its arguments in a list, with each call inside a range of its own."""

    def run(args: list[Any]) -> Any:
        with open_range():
            return compiled(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
