"""One step as a walk: what every module was given and made, forward and backward, in the order in which it happened.

    weights    each parameter as a step finds it, whole; each buffer
    input      the batch
    forward    each parameter as a module reads it, and each module's output
    loss
    backward   the gradient of each module's output; of each parameter, this rank's own, before ranks are averaged
    gradient   of each parameter, whole, averaged over ranks
    update     each parameter as the step leaves it, whole

Hooks on modules see this in any engine that calls them; a compiled graph calls none, so an engine is walked uncompiled.
They read parameters as modules do, by attribute, which is all that they need to know of an engine.

Left out: what happens inside a module that has no modules; weights that are gathered again in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from common.torch_private import tree_leaves

ROOT = "(model)"
"""The name of the model itself, which has none."""


class Phase(StrEnum):
    """Part of a step."""

    WEIGHTS = "weights"
    INPUT = "input"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    GRADIENT = "gradient"
    UPDATE = "update"


class What(StrEnum):
    """Which tensor of a module or parameter it is."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    BATCH = "tensor"
    READ = "parameter as read"
    OUTPUT = "output"
    LOSS = "loss"
    OUTPUT_GRADIENT = "gradient of output"
    LOCAL_GRADIENT = "gradient before reduction"
    GRADIENT = "gradient"


WHOLE = (What.PARAMETER, What.GRADIENT)
"""What is the same on each rank and kept by rank 0 alone; of the rest each rank has its own."""


@dataclass(frozen=True)
class Place:
    """Where a tensor was seen.

    Attributes:
        name: of module or parameter; a second call and an output of several have a number behind it.
    """

    phase: Phase
    what: What
    name: str

    def __str__(self) -> str:
        return f"{self.phase}: {self.what}" + (f" of {self.name!r}" if self.name else "")


Walk = dict[Place, torch.Tensor]
"""What was seen on one rank, in order."""


@contextmanager
def record_forward_and_backward(model: nn.Module, walk: Walk) -> Iterator[None]:
    """Add to `walk` what the modules of `model` make of one step, within the block."""
    recorder = _Recorder(walk, _first_names(model))
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(recorder.before(name)))
        handles.append(module.register_forward_hook(recorder.after(name)))
    try:
        yield
    finally:
        for handle in (*handles, *recorder.handles):
            handle.remove()


def record_parameters(model: nn.Module, walk: Walk, phase: Phase, *, keep: bool) -> None:
    """Add each parameter, whole, to `walk`; all ranks take part, and those that `keep` have it."""
    _record_whole(walk, phase, What.PARAMETER, dict(model.named_parameters()), keep)


def record_gradients(model: nn.Module, walk: Walk, *, keep: bool) -> None:
    """Add the gradient of each parameter, whole, the last one's first, since backward starts there; as above."""
    found = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    _record_whole(walk, Phase.GRADIENT, What.GRADIENT, dict(reversed(found.items())), keep)


def record_batch(batch: Any, walk: Walk) -> None:
    """Add each tensor of this rank's batch, by its number, to `walk`."""
    for i, leaf in enumerate(tree_leaves(batch)):
        if isinstance(leaf, torch.Tensor):
            walk[Place(Phase.INPUT, What.BATCH, str(i))] = _copy(leaf)


def record_buffers(model: nn.Module, walk: Walk) -> None:
    """Add each buffer, as this rank has it, to `walk`."""
    for name, buffer in model.named_buffers():
        walk[Place(Phase.WEIGHTS, What.BUFFER, name)] = _copy(buffer)


def in_order(walk: Walk) -> Walk:
    """The places by phase, and inside a phase as they came."""
    phases = list(Phase)
    return dict(sorted(walk.items(), key=lambda item: phases.index(item[0].phase)))


def _record_whole(walk: Walk, phase: Phase, what: What, tensors: dict[str, torch.Tensor], keep: bool) -> None:
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            walk[Place(phase, what, name)] = _copy(whole)


def _first_names(model: nn.Module) -> dict[str, str]:
    """Of each name of a parameter, the first; more than itself if it is tied."""
    first: dict[nn.Parameter, str] = {}
    return {name: first.setdefault(param, name) for name, param in model.named_parameters(remove_duplicate=False)}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().clone()


@dataclass
class _Recorder:
    """The hooks of one step.

    Attributes:
        names: of each parameter's names, the first.
        handles: hooks on tensors.
    """

    walk: Walk
    names: dict[str, str]
    handles: list[Any] = field(default_factory=list)
    _calls: dict[str, int] = field(default_factory=dict)
    _read: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def before(self, module_name: str) -> Any:
        """A hook before forward: parameters as the module is about to read them."""
        prefix = module_name + "." if module_name else ""

        def hook(module: nn.Module, args: Any) -> None:
            for attribute, _ in module.named_parameters(recurse=False, remove_duplicate=False):
                self._note_read(self.names[prefix + attribute], getattr(module, attribute))

        return hook

    def after(self, module_name: str) -> Any:
        """A hook behind forward: outputs, and hooks on them for their gradients."""

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            call = self._calls[module_name] = self._calls.get(module_name, 0) + 1
            name = (module_name or ROOT) + (f" (call {call})" if call > 1 else "")
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            for i, tensor in enumerate(tensors):
                label = f"{name}[{i}]" if len(tensors) > 1 else name
                self.walk[Place(Phase.FORWARD, What.OUTPUT, label)] = _copy(tensor)
                self._watch(tensor, Place(Phase.BACKWARD, What.OUTPUT_GRADIENT, label))

        return hook

    def _note_read(self, name: str, param: torch.Tensor) -> None:
        """Tied parameters are read in several places, casts of them may be several tensors: gradients add up."""
        seen = self._read.setdefault(name, [])
        if any(param is tensor for tensor in seen):
            return
        seen.append(param)
        if len(seen) == 1:
            self.walk[Place(Phase.FORWARD, What.READ, name)] = _copy(param)
        self._watch(param, Place(Phase.BACKWARD, What.LOCAL_GRADIENT, name))

    def _watch(self, tensor: torch.Tensor, place: Place) -> None:
        """Note the gradient of `tensor` when backward comes by."""

        def hook(gradient: torch.Tensor) -> None:
            before = self.walk.get(place)
            self.walk[place] = _copy(gradient) if before is None else before + gradient.cpu()

        if tensor.requires_grad:
            self.handles.append(tensor.register_hook(hook))
