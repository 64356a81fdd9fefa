"""The gradient contract as graph nodes: how the mean over ranks that a reduce-scatter stands for is taken.

Tracing leaves one mean reduce-scatter for each parameter, `bucket_reductions` one for each bucket. A native reduction
stays one; an ordered one becomes an all-to-all of what other ranks need, and a sum of what comes:

    sides [W, ...] of each parameter -> rows of the others -> cat -> ALL-TO-ALL -> WAIT -> sum in rank order
                                     -> this rank's row    -> cat -----------------------^

Counterpart: fsdp_eager/reduction.py, where gradients are taken from autograd and sent.
Source: see common/gradient.py.
Left out: accumulation, replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import GraphModule, Node

from common.gradient import Reduction, Transport
from fsdp_compiled.collectives import (
    ALL_TO_ALL,
    REDUCE_SCATTER,
    WAIT,
    Builder,
    Collective,
    aten,
    find_reductions,
    is_call,
    mark,
    value_of,
)


def lower_reductions(gm: GraphModule, *, decide: Callable[[torch.dtype], Reduction], rank: int) -> GraphModule:
    """Replace each mean reduce-scatter by the arithmetic of the gradient contract.

    Args:
        gm: a backward graph.
        decide: the `Reduction` of a buffer by its dtype, see `common.gradient.plan_reduction`.
        rank: this rank, in the group that reduces.
    """
    graph = gm.graph
    for reduction in find_reductions(graph):
        how = decide(value_of(reduction.start).dtype)
        lower = _lower_ordered if how.transport is Transport.ORDERED else _lower_native
        result = lower(Builder(graph), reduction, how, rank)
        with graph.inserting_before(reduction.wait):
            if how.postdivide is not None:
                result = Builder(graph).call(aten.div.Tensor, result, how.postdivide)
        reduction.wait.replace_all_uses_with(result)
        graph.erase_node(reduction.wait)
        packed = reduction.start.all_input_nodes
        graph.erase_node(reduction.start)
        while packed and not packed[0].users:  # the message of a bucket, which ordered reductions pack otherwise
            node, packed = packed[0], packed[0].all_input_nodes
            graph.erase_node(node)
    graph.lint()
    return gm


def _lower_native(builder: Builder, reduction: Collective, how: Reduction, rank: int) -> Node:
    source, _, world_size, group = reduction.start.args
    with builder.graph.inserting_before(reduction.start):
        if how.predivide is not None:
            source = builder.call(aten.div.Tensor, source, how.predivide)
        start = builder.call(REDUCE_SCATTER, source, how.op, world_size, group)
        mark(start, reduction.param)
    with builder.graph.inserting_before(reduction.wait):
        return builder.call(WAIT, start)


def _lower_ordered(builder: Builder, reduction: Collective, how: Reduction, rank: int) -> Node:
    """As `fsdp_eager.collectives.pack_gradients` and `launch_reduce_scatter`; graphs of different ranks differ here."""
    source, _, world_size, group = reduction.start.args
    assert isinstance(source, Node) and isinstance(world_size, int)
    shape = value_of(reduction.wait).shape
    with builder.graph.inserting_before(reduction.start):
        sides = _sides(source, world_size) or [builder.call(aten.view.default, source, [world_size, shape.numel()])]
        rows = [[builder.call(aten.select.int, side, 0, row) for side in sides] for row in range(world_size)]
        message = [_join(builder, rows.pop(rank)), _join(builder, [piece for row in rows for piece in row])]
        if how.predivide is not None:
            message = [builder.call(aten.div.Tensor, part, how.predivide) for part in message]
        own, sent = message
        splits = [0 if other == rank else shape.numel() for other in range(world_size)]
        start = builder.call(ALL_TO_ALL, sent, splits, splits, group)
        mark(start, reduction.param)
    with builder.graph.inserting_before(reduction.wait):
        # all of the shape is known: with no elements, -1 could be any size
        received = builder.call(aten.view.default, builder.call(WAIT, start), [world_size - 1, *shape])
        others = [builder.call(aten.select.int, received, 0, place) for place in range(world_size - 1)]
        return sum_in_rank_order(builder, builder.call(aten.view.default, own, list(shape)), others, rank)


def _sides(source: Node, world_size: int) -> list[Node]:
    """What was laid side by side to make `source`, each [W, ...], as `bucket_reductions` does; else nothing."""
    above = source.all_input_nodes
    if not (is_call(source, aten.reshape.default) and is_call(above[0], aten.cat.default)):
        return []
    sides, *dim = above[0].args
    is_by_rank = dim == [1] and len(value_of(above[0]).shape) == 2 and value_of(above[0]).shape[0] == world_size
    return list(sides) if is_by_rank else []  # type: ignore[arg-type]


def _join(builder: Builder, pieces: list[Node]) -> Node:
    """One after the other; what is one piece already stays where it is."""
    return pieces[0] if len(pieces) == 1 else builder.call(aten.cat.default, pieces)


def sum_in_rank_order(builder: Builder, own: Node, others: Sequence[Node], rank: int) -> Node:
    """`common.gradient.sum_in_rank_order`, as nodes."""
    addends = [*others[:rank], own, *others[rank:]]
    total = addends[0]
    for addend in addends[1:]:
        total = builder.call(aten.add.Tensor, total, addend)
    return total
