"""Parameters that travel together: a bucket is a graph rewrite that turns many small messages into one.

    gather   [s1], [s2], ...            -> cat -> ONE ALL-GATHER -> wait -> [world, s1 + s2 + ...] -> columns -> weights
    reduce   [world * s1], [world * s2] -> side by side in [world, ...] -> ONE REDUCE-SCATTER -> wait -> pieces

Inside a message parameters lie in registration order, each padded to the same number of rows on every rank: the
layout of the eager engine and of torch's `fully_shard`, so that even a backend whose sums depend on the offset of an
element gives all three the same bits. A gather bucket stands where its first member stood, a reduction bucket where
its last one did.

Counterpart: fsdp_eager/bucket.py, where a bucket is an object with state.
Paper: arXiv 2411.00284, section 4 (bucketing).
Source: torch 2.13 `_inductor/fx_passes/bucketing.py` for the idea. Differs: groups by the plan's names.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from common.errors import PassError
from common.plan import BucketPlan
from fsdp_compiled.collectives import (
    ALL_GATHER,
    REDUCE_SCATTER,
    WAIT,
    Builder,
    Collective,
    aten,
    find_gathers,
    find_reductions,
    mark,
    stable_topological_sort,
)


def bucket_gathers(gm: GraphModule, *, plan: BucketPlan) -> GraphModule:
    """One all-gather per bucket of the plan (and dtype), with the parameters this graph gathers.

    Raises:
        PassError: a bucket was left with more than one message.
    """
    for members in _by_bucket(find_gathers(gm.graph), plan):
        if len(members) > 1:
            _merge_gathers(gm.graph, members)
    stable_topological_sort(gm.graph)
    _check(find_gathers(gm.graph), plan, "all-gather")
    gm.graph.lint()
    return gm


def bucket_reductions(gm: GraphModule, *, plan: BucketPlan) -> GraphModule:
    """One reduce-scatter per bucket of the plan (and dtype).

    Raises:
        PassError: a bucket was left with more than one message.
    """
    for members in _by_bucket(find_reductions(gm.graph), plan):
        if len(members) > 1:
            _merge_reductions(gm.graph, members)
    stable_topological_sort(gm.graph)
    _check(find_reductions(gm.graph), plan, "reduce-scatter")
    gm.graph.lint()
    return gm


def _by_bucket(collectives: Sequence[Collective], plan: BucketPlan) -> list[list[Collective]]:
    """Collectives that may share a message, each list in registration order."""
    bucket_of = plan.bucket_of()
    place = {param: i for i, param in enumerate(param for bucket in plan.buckets for param in bucket.params)}
    groups: dict[tuple[object, ...], list[Collective]] = {}
    for collective in sorted(collectives, key=lambda c: place[c.param]):
        groups.setdefault((bucket_of[collective.param], *collective.key), []).append(collective)
    return list(groups.values())


def _merge_gathers(graph: Graph, gathers: list[Collective]) -> None:
    position = {node: i for i, node in enumerate(graph.nodes)}
    first = min((gather.start for gather in gathers), key=position.__getitem__)
    first_wait = min((gather.wait for gather in gathers), key=position.__getitem__)
    _, world_size, group = first.args
    builder = Builder(graph)
    with graph.inserting_before(first):
        for gather in gathers:
            _bring_forward(gather.start, first)
        flat = [builder.call(aten.reshape.default, gather.start.args[0], [-1]) for gather in gathers]
        start = builder.call(ALL_GATHER, builder.call(aten.cat.default, flat), world_size, group)
        mark(start, gathers[0].param)
    with graph.inserting_before(first_wait):
        by_rank = builder.call(aten.view.default, builder.call(WAIT, start), [world_size, -1])
        wholes, offset = [], 0
        for gather, shard in zip(gathers, flat, strict=True):
            size = shard.meta["val"].numel()
            columns = builder.call(aten.slice.Tensor, by_rank, 1, offset, offset + size)
            # a copy even where a view would do: kernels may sum in another order at an address that is not aligned
            dense = builder.call(aten.clone.default, columns, memory_format=torch.contiguous_format)
            wholes.append(builder.call(aten.view.default, dense, list(gather.wait.meta["val"].shape)))
            offset += size
    _replace(graph, gathers, wholes)


def _bring_forward(node: Node, before: Node) -> None:
    """Move the casts and padding between a shard and its gather to `before`; they read placeholders only."""
    chain = []
    (node,) = node.all_input_nodes
    while node.op != "placeholder":
        chain.append(node)
        (node,) = node.all_input_nodes
    for link in reversed(chain):
        before.prepend(link)


def _merge_reductions(graph: Graph, reductions: list[Collective]) -> None:
    position = {node: i for i, node in enumerate(graph.nodes)}
    last = max((reduction.start for reduction in reductions), key=position.__getitem__)
    _, op, world_size, group = last.args
    builder = Builder(graph)
    with graph.inserting_before(last):
        sides = [builder.call(aten.reshape.default, r.start.args[0], [world_size, -1]) for r in reductions]
        packed = builder.call(aten.reshape.default, builder.call(aten.cat.default, sides, 1), [-1])
        start = builder.call(REDUCE_SCATTER, packed, op, world_size, group)
        mark(start, reductions[0].param)
        wait = builder.call(WAIT, start)
        shards, offset = [], 0
        for reduction, side in zip(reductions, sides, strict=True):
            size = side.meta["val"].shape[1]
            piece = builder.call(aten.slice.Tensor, wait, 0, offset, offset + size)
            shards.append(builder.call(aten.reshape.default, piece, list(reduction.wait.meta["val"].shape)))
            offset += size
    _replace(graph, reductions, shards)


def _replace(graph: Graph, old: Sequence[Collective], new: list[Node]) -> None:
    for collective, result in zip(old, new, strict=True):
        collective.wait.replace_all_uses_with(result)
        graph.erase_node(collective.wait)
        graph.erase_node(collective.start)


def _check(collectives: Sequence[Collective], plan: BucketPlan, kind: str) -> None:
    bucket_of = plan.bucket_of()
    seen: dict[tuple[object, ...], str] = {}
    for collective in collectives:
        key = (bucket_of[collective.param], *collective.key)
        if key in seen:
            raise PassError(
                f"bucket {plan.buckets[bucket_of[collective.param]].name!r}: expected one {kind}, found one each for "
                f"{seen[key]!r} and {collective.param!r}"
            )
        seen[key] = collective.param
