"""The collectives as graph nodes: recognising them, naming their parameter, building new ones.

`mark_collectives` runs once, on the joint graph, where inputs and gradients can be told apart by identity: it writes
on each all-gather and reduce-scatter node which parameter it serves. The marks survive partitioning, so every later
pass groups by parameter name and never by position or by pattern.

    placeholder -> [cast] -> [pad] -> ALL-GATHER -> WAIT -> [slice] -> [view] -> compute
    compute -> [cast] -> [split, pad, cat] -> REDUCE-SCATTER -> WAIT -> [slice] -> [cast] -> output

Counterpart: fsdp_eager/collectives.py, which packs, launches and unpacks them.
Source: torchtitan `graph_trainer/fsdp_patterns.py` for the chains. Differs: recognised by the identity of the
parameter, not by having one placeholder above them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from common.errors import PassError
from fsdp_compiled.torch_private import fake_mode_of, gradient_of_input, index_of_input

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

ALL_GATHER = c10d.all_gather_into_tensor.default
REDUCE_SCATTER = c10d.reduce_scatter_tensor.default
ALL_TO_ALL = c10d.all_to_all_single.default
WAIT = c10d.wait_tensor.default

_MARK = "fsdp_param"
_CASTS = {aten._to_copy.default, torch.ops.prims.convert_element_type.default}
_VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.slice.Tensor,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.expand.default,
    aten.squeeze.dim,
    aten.unsqueeze.default,
    aten.alias.default,
    aten.detach.default,
}


@dataclass(frozen=True)
class Collective:
    """An all-gather or a reduction of sharded parameters.

    Attributes:
        param: the parameter it serves; of a bucket, the first one.
        start: the node that launches it.
        wait: the node that waits for it.
    """

    param: str
    start: Node
    wait: Node

    @property
    def key(self) -> tuple[Any, ...]:
        """Those with the same key may share a message: dtype, (operation,) world size, process group."""
        return (value_of(self.start).dtype, *self.start.args[1:])


class Builder:
    """Adds call nodes to a graph, each with the fake value that later passes and the compiler read."""

    def __init__(self, graph: Graph, like: Node | None = None) -> None:
        """`like` lends its provenance (which side of a joint graph a node is on) to the nodes that are added."""
        self.graph = graph
        self.mode = fake_mode_of(graph)
        self.provenance = {} if like is None else {k: v for k, v in like.meta.items() if k in _PROVENANCE}

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Insert `target(*args, **kwargs)` at the graph's insertion point."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update(self.provenance)
        values = torch.fx.node.map_arg((args, kwargs), value_of)
        with self.mode:
            node.meta["val"] = target(*values[0], **values[1])
        return node


_PROVENANCE = ("partitioner_tag", "seq_nr", "nn_module_stack", "fwd_nn_module_stack", "stack_trace")


def value_of(node: Node) -> Any:
    """The fake value of what `node` computes."""
    return node.meta["val"]


def is_call(node: Node, target: object) -> bool:
    """Whether `node` calls the operator `target`."""
    return node.op == "call_function" and node.target == target


def is_view(node: Node) -> bool:
    """Whether `node` only slices or reshapes its input."""
    return node.op == "call_function" and node.target in _VIEWS


def is_cast(node: Node) -> bool:
    """Whether `node` changes its input's dtype; Inductor's decompositions write it with an operator of their own."""
    return node.op == "call_function" and node.target in _CASTS


def mark_collectives(gm: GraphModule, *, params: Mapping[int, str]) -> GraphModule:
    """Write on each all-gather and reduce-scatter of sharded parameters which parameter it serves.

    Args:
        gm: a joint graph, or the forward graph of inference.
        params: parameter name by index among the traced function's inputs.

    Raises:
        PassError: a sharded parameter is computed with, yet nothing recognisable gathers it or reduces its gradient.
    """
    gathers = [node for node in gm.graph.nodes if is_call(node, ALL_GATHER)]
    owners = {node: _placeholder_above(node) for node in gathers}
    by_placeholder = {
        node: params[index]
        for node in gm.graph.find_nodes(op="placeholder")
        if (index := index_of_input(node)) is not None and index in params
    }
    for node, placeholder in owners.items():
        if placeholder in by_placeholder:
            node.meta[_MARK] = by_placeholder[placeholder]
    missed = [
        name for placeholder, name in by_placeholder.items() if placeholder.users and placeholder not in owners.values()
    ]
    if missed:
        raise PassError(f"trace: parameter {missed[0]!r} is computed with, but no all-gather of it was recognised")
    for name, value in gradients_of(gm.graph, params):
        starts = _reductions_above(value)
        if not starts:
            raise PassError(f"trace: the gradient of {name!r} reaches the output without a reduce-scatter")
        for start in starts:
            start.meta[_MARK] = name
    return gm


def gradients_of(graph: Graph, params: Mapping[int, str]) -> list[tuple[str, Node]]:
    """The parameters' gradients among the outputs of a joint graph; none of a forward graph."""
    output = graph.output_node()
    found = []
    for value, desc in zip(output.args[0], output.meta.get("desc", ()), strict=False):  # type: ignore[arg-type]
        index = gradient_of_input(desc)
        if index is not None and index in params and isinstance(value, Node):
            found.append((params[index], value))
    return found


def _placeholder_above(node: Node) -> Node | None:
    """The placeholder at the top of a chain of one-input nodes."""
    while node.op != "placeholder":
        if len(node.all_input_nodes) != 1:
            return None
        (node,) = node.all_input_nodes
    return node


def _reductions_above(node: Node) -> list[Node]:
    """The reduce-scatters whose results, cast and added, make up `node`."""
    found: list[Node] = []
    pending = [node]
    while pending:
        node = pending.pop()
        if is_call(node, REDUCE_SCATTER):
            found.append(node)
        elif is_view(node) or is_cast(node) or node.target in (WAIT, aten.add.Tensor, aten.clone.default):
            pending += node.all_input_nodes
    return found


def find_gathers(graph: Graph) -> list[Collective]:
    """The marked all-gathers, in graph order."""
    return [Collective(node.meta[_MARK], node, _wait(node)) for node in graph.nodes if _is_marked(node, ALL_GATHER)]


def find_reductions(graph: Graph) -> list[Collective]:
    """The marked reduce-scatters, in graph order."""
    return [Collective(node.meta[_MARK], node, _wait(node)) for node in graph.nodes if _is_marked(node, REDUCE_SCATTER)]


def _is_marked(node: Node, target: object) -> bool:
    return is_call(node, target) and _MARK in node.meta


def _wait(start: Node) -> Node:
    (wait,) = (user for user in start.users if is_call(user, WAIT))
    return wait


def mark(node: Node, param: str) -> None:
    """Write on a collective that a pass built which parameter it serves; of a bucket, the first one."""
    node.meta[_MARK] = param


def param_of(node: Node) -> str:
    """The parameter that `mark` wrote on a collective."""
    param: str = node.meta[_MARK]
    return param


def find_lowered(graph: Graph) -> list[Node]:
    """The nodes that start a reduction after lowering, in graph order."""
    return [node for node in graph.nodes if _MARK in node.meta and node.target in (REDUCE_SCATTER, ALL_TO_ALL)]


def stable_topological_sort(graph: Graph) -> None:
    """Move the nodes that stand before one of their inputs behind it; leave all others in their order."""
    placed: set[Node] = set()
    waiting: dict[Node, int] = {}
    order: list[Node] = []

    def place(node: Node) -> None:
        stack = [node]
        while stack:
            current = stack.pop()
            placed.add(current)
            order.append(current)
            ready = []
            for user in current.users:
                if user in waiting:
                    waiting[user] -= 1
                    if waiting[user] == 0:
                        del waiting[user]
                        ready.append(user)
            stack += reversed(ready)

    for node in list(graph.nodes):
        missing = sum(source not in placed for source in node.all_input_nodes)
        if missing:
            waiting[node] = missing
        else:
            place(node)
    if waiting:
        raise PassError(f"reorder: the graph has a cycle through {next(iter(waiting)).name}")
    output = order[-1]
    assert output.op == "output"
    for node in order[:-1]:
        output.prepend(node)
