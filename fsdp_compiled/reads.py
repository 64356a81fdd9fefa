"""A parameter that the model reads several times: gathered once, its gradient reduced once.

A weight that is tied, or used in two places, is traced as two reads, and their gradients are added where the reads
meet: at the shard. The eager engine has one whole weight, and autograd adds the whole gradients before they are cast
and reduced. Done in a graph the same way, in the same order, the two engines stay equal to the bit. On several ranks
`merge_repeated_reads` does so; on one, where nothing is gathered or reduced, what is left of a read are its casts, and
`add_before_casts` does.

Counterpart: none; under hooks all modules that read a parameter hold the same whole weight.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from common.errors import PassError
from common.policy import MixedPrecisionPolicy
from fsdp_compiled.collectives import (
    Builder,
    Collective,
    find_gathers,
    find_reductions,
    gradients_of,
    is_call,
    is_cast,
    is_view,
    stable_topological_sort,
)

aten = torch.ops.aten


def merge_repeated_reads(gm: GraphModule) -> GraphModule:
    """Gather a parameter once and reduce its gradient once, however often the model reads it."""
    graph = gm.graph
    first: dict[tuple[Any, ...], Collective] = {}
    for gather in find_gathers(graph):
        kept = first.setdefault((gather.param, gather.key), gather)
        if kept is not gather:
            gather.wait.replace_all_uses_with(kept.wait)
            graph.erase_node(gather.wait)
            graph.erase_node(gather.start)
    reductions: dict[str, list[Collective]] = {}
    for reduction in find_reductions(graph):
        reductions.setdefault(reduction.param, []).append(reduction)
    for several in reductions.values():
        if len(several) > 1:
            _reduce_once(graph, several)
    graph.eliminate_dead_code()
    for reduction in find_reductions(graph):
        if not reduction.wait.users:  # a wait counts as a side effect, so that it outlives its users
            graph.erase_node(reduction.wait)
            graph.erase_node(reduction.start)
    graph.eliminate_dead_code()
    graph.lint()
    return gm


def add_before_casts(gm: GraphModule, *, params: Mapping[int, str], policy: MixedPrecisionPolicy) -> GraphModule:
    """On one rank, where nothing is gathered or reduced: add the gradients of repeated reads before they are cast.

    Replaces add(cast(a), cast(b)) by cast(add(a, b)) where the casts are those that the policy gives each read.

    Args:
        gm: a joint graph.
        params: parameter name by index among the traced function's inputs.
        policy: dtypes of compute and reduction.
    """
    graph = gm.graph
    for name, gradient in gradients_of(graph, params):
        dtypes = _dtypes_of_read(gradient.meta["val"], policy)
        if len(dtypes) > 1 and is_call(gradient, aten.add.Tensor):
            value = _added(graph, name, gradient, dtypes)
            with graph.inserting_before(gradient):
                builder = Builder(graph, like=gradient)
                for dtype in dtypes[1:]:
                    value = builder.call(aten._to_copy.default, value, dtype=dtype)
            gradient.replace_all_uses_with(value)
    graph.eliminate_dead_code()
    graph.lint()
    return gm


def _reduce_once(graph: Graph, reductions: list[Collective]) -> None:
    """Replace add(reduce(a), reduce(b)) by reduce(add(a, b)), keeping the order of the additions."""
    whole = {_result(reduction.wait): _whole_gradient(reduction) for reduction in reductions}
    last = reductions[-1]
    results = list(whole)
    total, summed = results[0], whole[results[0]]
    head = whole[_result(last.wait)]
    consumers = list(head.users)  # the last chain's own first node, before anything is added
    builder = Builder(graph, like=head)
    pending = set(results[1:])
    while pending:
        (add,) = (user for user in total.users if is_call(user, aten.add.Tensor))
        (other,) = (node for node in add.all_input_nodes if node is not total)
        if other not in pending:
            raise PassError(
                f"trace: the gradient of {last.param!r} is summed from {len(results)} reads in an order that is not "
                "a chain of additions, so its reductions cannot be merged"
            )
        pending.remove(other)
        pair = [summed, whole[other]] if add.args[0] is total else [whole[other], summed]
        with graph.inserting_after(max(pair, key=_positions(graph).__getitem__)):
            summed = builder.call(aten.add.Tensor, *pair)
        total = add
    for consumer in consumers:
        if consumer is not summed and _leads_to(consumer, last.start):
            consumer.replace_input_with(head, summed)
    total.replace_all_uses_with(_result(last.wait))
    stable_topological_sort(graph)


def _result(wait: Node) -> Node:
    """The last node of a reduction's own chain: the shard's gradient in the parameter's dtype."""
    node = wait
    while len(node.users) == 1:
        (user,) = node.users
        if not (is_view(user) or is_cast(user)):
            break
        node = user
    return node


def _whole_gradient(reduction: Collective) -> Node:
    """The gradient of one read [d0, ...], in the dtype that computed it, before it is cast and padded."""
    node = reduction.start.all_input_nodes[0]
    if is_call(node, aten.cat.default):  # uneven rows: split, pad the last pieces, cat
        node = node.all_input_nodes[0]
        while node.target in (operator.getitem, aten.constant_pad_nd.default):
            (node,) = node.all_input_nodes
        (node,) = node.all_input_nodes  # what was split
    if is_cast(node):
        (node,) = node.all_input_nodes
    return node


def _leads_to(node: Node, target: Node) -> bool:
    pending, seen = [node], {node}
    while pending:
        node = pending.pop()
        if node is target:
            return True
        new = [user for user in node.users if user not in seen]
        seen.update(new)
        pending += new
    return False


def _positions(graph: Graph) -> dict[Node, int]:
    return {node: i for i, node in enumerate(graph.nodes)}


def _dtypes_of_read(gradient: torch.Tensor, policy: MixedPrecisionPolicy) -> list[torch.dtype]:
    """What a read's gradient is made in, and then cast to, each other than the one before it."""
    passed = [policy.compute_dtype(gradient), policy.reduction_dtype(gradient), gradient.dtype]
    return [dtype for i, dtype in enumerate(passed) if i == 0 or dtype is not passed[i - 1]]


def _added(graph: Graph, name: str, node: Node, dtypes: list[torch.dtype]) -> Node:
    """The value of `node`, a sum of reads' gradients or one of them, before its casts."""
    if is_call(node, aten.add.Tensor):
        first, second = (_added(graph, name, source, dtypes) for source in node.args)  # type: ignore[arg-type]
        with graph.inserting_before(node):
            return Builder(graph, like=node).call(aten.add.Tensor, first, second)
    for dtype in reversed(dtypes[1:]):
        if not is_cast(node) or node.meta["val"].dtype is not dtype:
            raise PassError(
                f"trace: expected the gradient of each read of {name!r} cast to {dtype}, found {node.format_node()}; "
                "is the parameter read in another way than through its module?"
            )
        (node,) = node.all_input_nodes
    return node
