"""When to launch and when to wait: the order of a graph's collectives around its compute.

    gather   g0 w0 compute0 g1 w1 compute1 g2 ...   ->   g0 g1 w0 compute0 g2 w1 compute1 ...
    reduce   compute r0 w0 compute r1 w1 ...        ->   compute r0 compute r1 w0 compute ... w1

A bucket's gather is launched before the wait of the bucket before it, so it travels while that one computes; a
reduction is waited for after the next one was launched. One bucket ahead, never more: two gathered buckets are alive
at once, as with the eager engine's implicit prefetch.

Counterpart: fsdp_eager/schedule.py, the same order made at run time.
Paper: arXiv 2411.00284, section 4 (reordering). Differs: reductions wait for the next reduction, not for the next
gather, so that the two directions do not constrain each other.
Left out: choosing how far ahead by cost.
"""

from __future__ import annotations

from itertools import pairwise

from torch.fx import Graph, GraphModule, Node

from common.plan import BucketPlan
from fsdp_compiled.collectives import WAIT, find_gathers, find_lowered, is_call


def prefetch_gathers(gm: GraphModule, *, plan: BucketPlan) -> GraphModule:
    """Launch each bucket's gather before the wait of the gather ahead of it, where the bucket allows prefetch."""
    bucket_of = plan.bucket_of()
    gathers = find_gathers(gm.graph)
    for ahead, gather in reversed(list(pairwise(gathers))):
        if plan.buckets[bucket_of[gather.param]].prefetch:
            for node in _above(gather.start):
                ahead.wait.prepend(node)
    gm.graph.lint()
    return gm


def delay_reduction_waits(gm: GraphModule) -> GraphModule:
    """Wait for each reduction, and finish its shards' gradients, after the next reduction was launched."""
    graph = gm.graph
    starts = find_lowered(graph)
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        (wait,) = (user for user in start.users if is_call(user, WAIT))
        anchor = following.next if following is not None else graph.output_node()
        for node in _below(graph, wait):
            anchor.prepend(node)
    graph.lint()
    return gm


def _above(node: Node) -> list[Node]:
    """`node` and all it is computed from but placeholders, inputs first."""
    order: dict[Node, None] = {}

    def visit(current: Node) -> None:
        if current.op == "placeholder" or current in order:
            return
        for source in current.all_input_nodes:
            visit(source)
        order[current] = None

    visit(node)
    return list(order)


def _below(graph: Graph, node: Node) -> list[Node]:
    """`node` and all that is computed from it but the output, in graph order."""
    found = {node}
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if user.op != "output" and user not in found:
                found.add(user)
                pending.append(user)
    return [other for other in graph.nodes if other in found]
