"""Where the engine taps into autograd: before a module's backward, and after it.

Counterpart: none; a traced graph has its backward before it, and needs no tap.
Source: torch 2.13 `_fsdp_param_group.py` (`RegisterPostBackwardFunction`), `_fsdp_state.py`
(`_register_pre_backward_hook`). Differs: an output that is a view is tapped at its base, so that a change in place
does not lose the tap; an output in which no tensor can be found is an error.
Left out: a module that changes its input in place (torch raises: the tap on inputs is a function of them).

[Note: reverse order]
Autograd runs the nodes of a graph in the reverse of the order in which forward made them: a node that forward made
later feeds gradients only to earlier ones, so the latest node left is always ready, and it is taken first.
Accumulating a parameter's gradient comes before everything else that is ready. So the node that `tap_inputs` puts
before the first operation of a module runs when every gradient of the module's parameters is there, and the tap on
its outputs runs before any operation that reads a parameter.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsdp_eager.torch_private import base_of

Callback = Callable[[], None]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def tap_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], callback: Callback) -> tuple[tuple[Any, ...], Any]:
    """Let `callback` run in backward once the gradients of all inputs are computed; never, if none needs one.

    Returns:
        The inputs, to be used in place of the given ones.
    """
    tensors: dict[int, Tensor] = {}

    def collect(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensors[id(tensor)] = tensor
        return tensor

    map_tensors(collect, (args, kwargs))
    if not tensors:
        return args, kwargs
    tapped = dict(zip(tensors, _after_inputs(callback, *tensors.values()), strict=True))
    result: tuple[tuple[Any, ...], Any] = map_tensors(lambda tensor: tapped.get(id(tensor), tensor), (args, kwargs))
    return result


def tap_outputs(output: Any, inputs: Any, callback: Callback) -> tuple[bool, type | None]:
    """Let `callback` run in backward before the module that made `output` of `inputs`, once for each tensor of it.

    A view is tapped at its base, unless the base is older than the module: when the view is changed in place, the
    base's history is kept while the view gets a new one, without the tap.

    Returns:
        Whether any tensor of `output` needs a gradient; the type of an object in it that may hide tensors, if any.
    """
    older: set[int] = set()
    tapped = False
    opaque: type | None = None

    def note(tensor: Tensor) -> Tensor:
        older.update((id(tensor), id(base_of(tensor))))
        return tensor

    def tap(tensor: Tensor) -> Tensor:
        nonlocal tapped
        if tensor.requires_grad:
            tapped = True
            base = base_of(tensor)
            if base is not None and not older:
                map_tensors(note, inputs)
            # a leaf is a parameter, which stays, and so would the hook; it is not changed in place
            inside = base is not None and base.grad_fn is not None and id(base) not in older
            place = base if base is not None and inside else tensor
            place.register_hook(lambda _: callback())
        return tensor

    def look(leaf: object) -> None:
        nonlocal opaque
        opaque = opaque if isinstance(leaf, _PLAIN) else type(leaf)

    map_tensors(tap, output, look)
    return tapped, opaque


def map_tensors(fn: Callable[[Tensor], Tensor], tree: Any, other: Callable[[object], None] | None = None) -> Any:
    """Apply `fn` to each tensor in tuples, lists, dicts and dataclasses; what does not change is not copied.

    Args:
        fn: what to put in a tensor's place.
        tree: the nest.
        other: shown each object that is none of these.
    """
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, list | tuple):
        items = [map_tensors(fn, item, other) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    is_dict = isinstance(tree, dict)
    if is_dict or (dataclasses.is_dataclass(tree) and not isinstance(tree, type)):
        parts = tree.items() if is_dict else [(f.name, getattr(tree, f.name)) for f in dataclasses.fields(tree)]
        changed = {key: new for key, old in parts if (new := map_tensors(fn, old, other)) is not old}
        result = copy.copy(tree) if changed else tree
        for key, value in changed.items():
            if is_dict:
                result[key] = value
            else:
                object.__setattr__(result, key, value)  # frozen ones too: the copy is ours
        return result
    if other is not None:
        other(tree)
    return tree


class _AfterInputs(torch.autograd.Function):
    """The identity; its backward runs when the gradients of all its inputs are there, see [Note: reverse order]."""

    @staticmethod
    def forward(ctx: Any, callback: Callback, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.callback = callback
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.callback()
        return (None, *grads)


_after_inputs: Any = _AfterInputs.apply
