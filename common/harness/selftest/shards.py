"""Faults in what a shard holds: one change of rows, planted in each engine at the place where such a fault would be.

    gradients   eager: when a group hands a parameter its reduced rows; compiled: behind the wait of its reduction in
                the graph; others: `.grad`, before anyone reads it
    own         before the reduction: when a group takes a whole gradient; before its reduction in the graph
    weights     eager: when modules get the gathered parameter; compiled: behind the wait of its gather

A change gets the rows and returns others; in a graph it is a node of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from common.harness.selftest.plant import Act, Plant, Scene, named

TARGET = "blocks.1.up.weight"
"""The parameter that faults of one parameter are planted in."""
PAIR = ("blocks.1.up.weight", "blocks.1.gate.weight")
"""Two parameters of one shape and bucket, next to each other."""

Change = Callable[[Scene, str, Tensor], Tensor]
"""Given the scene, a parameter's name and its rows [rows, ...], the rows to go on with."""


def in_gradients(change: Change, *names: str) -> Mapping[str, tuple[Plant, ...]]:
    """`change` of this rank's rows of the reduced gradients of `names`, or of all, for each engine."""
    return {
        "eager": (Plant("fsdp_eager.param:FSDPParam.accept_gradient", _on_accepted(change, names)),),
        "compiled": (Plant("fsdp_compiled.graph:bucket_reductions", _in_graph(change, names, "find_reductions")),),
        "torch-fsdp2": (in_grads(change, *names),),
    }


def in_own_gradients(change: Change, *names: str) -> Mapping[str, tuple[Plant, ...]]:
    """`change` of this rank's whole gradients before they are reduced."""
    return {
        "eager": (Plant("fsdp_eager.param:FSDPParam.take_gradient", _on_taken(change, names)),),
        "compiled": (Plant("fsdp_compiled.graph:bucket_reductions", _before_reductions(change, names)),),
    }


def in_weights(change: Change, *names: str) -> Mapping[str, tuple[Plant, ...]]:
    """`change` of the gathered weights of `names`, or of all."""
    return {
        "eager": (Plant("fsdp_eager.param:FSDPParam.to_unsharded", _on_gathered(change, names)),),
        "compiled": (Plant("fsdp_compiled.graph:bucket_gathers", _in_graph(change, names, "find_gathers")),),
    }


def in_grads(change: Change, *names: str) -> Plant:
    """`change` of this rank's part of `.grad` of `names`, or of all, after backward."""

    def act(scene: Scene, original: Callable[..., Any]) -> Callable[..., Any]:
        def collect(model: torch.nn.Module, **options: Any) -> Any:
            for name, param in model.named_parameters():
                if param.grad is not None and (not names or name in names):
                    local = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
                    local.copy_(_changed(change, scene, name, local.clone()))
            return original(model, **options)

        return collect

    return Plant("common.harness.train:collect_gradients", act)


def _changed(change: Change, scene: Scene, name: str, rows: Tensor) -> Tensor:
    """What `change` makes of `rows`; a hit if it is anything else."""
    result = change(scene, name, rows)
    if not torch.equal(result, rows):
        scene.hit()
    return result


def _on_accepted(change: Change, names: tuple[str, ...]) -> Act:
    def act(scene: Scene, original: Callable[..., Any]) -> Callable[..., Any]:
        def accept(param: Any, shard: Tensor) -> None:
            if not names or param.name in names:
                shape = param.cut.shape_of(scene.rank)
                part = shard[: math.prod(shape)].view(shape)
                shard = _changed(change, scene, param.name, part).reshape(-1)
            original(param, shard)

        return accept

    return act


def _on_taken(change: Change, names: tuple[str, ...]) -> Act:
    def act(scene: Scene, original: Callable[..., Any]) -> Callable[..., Any]:
        def take(param: Any) -> Tensor | None:
            gradient: Tensor | None = original(param)
            if gradient is None or (names and param.name not in names):
                return gradient
            return _changed(change, scene, param.name, gradient)

        return take

    return act


def _before_reductions(change: Change, names: tuple[str, ...]) -> Act:
    def act(scene: Scene, original: Callable[..., Any]) -> Callable[..., Any]:
        reductions = named("fsdp_compiled.collectives:find_reductions")

        def graph_pass(gm: torch.fx.GraphModule, **options: Any) -> Any:
            for reduction in reductions(gm.graph):
                if not names or reduction.param in names:
                    (source,) = reduction.start.all_input_nodes
                    function = functools.partial(_changed, change, scene, reduction.param)
                    add_after(source, function, users=[reduction.start])
            return original(gm, **options)

        return graph_pass

    return act


def _on_gathered(change: Change, names: tuple[str, ...]) -> Act:
    def act(scene: Scene, original: Callable[..., Any]) -> Callable[..., Any]:
        def to_unsharded(param: Any) -> None:
            if not names or param.name in names:
                whole = param.unsharded_param.data
                whole.copy_(_changed(change, scene, param.name, whole.clone()))
            original(param)

        return to_unsharded

    return act


def _in_graph(change: Change, names: tuple[str, ...], find: str) -> Act:
    """A node for each collective that `find` finds, behind its wait, before a pass packs it with others."""

    def act(scene: Scene, original: Callable[..., Any]) -> Callable[..., Any]:
        collectives = named(f"fsdp_compiled.collectives:{find}")

        def graph_pass(gm: torch.fx.GraphModule, **options: Any) -> Any:
            for collective in collectives(gm.graph):
                if not names or collective.param in names:
                    add_after(collective.wait, functools.partial(_changed, change, scene, collective.param))
            return original(gm, **options)

        return graph_pass

    return act


def add_after(
    node: torch.fx.Node, function: Callable[[Tensor], Tensor], *, users: list[torch.fx.Node] | None = None
) -> None:
    """Let `users` of `node`, all if none are given, read `function` of it instead."""

    def planted(value: Tensor) -> Tensor:
        return function(value)

    users = list(node.users) if users is None else users
    with node.graph.inserting_after(node):
        added = node.graph.call_function(planted, (node,))
    added.meta.update(node.meta)
    for user in users:
        user.replace_input_with(node, added)
