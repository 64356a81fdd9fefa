"""Giving the memory back: a recompute tag on the gather, so that backward gathers again instead of keeping weights.

Autograd saves what backward reads. Traced into a joint graph, a gathered weight is such a value, and the partitioner
would keep it: ZeRO-2 memory, silently. The tag `MUST_RECOMPUTE` on the whole chain from shard to weight makes it save
the shard, which is alive anyway, and copy the chain, all-gather included, into the backward graph. That it did is
checked, not assumed: `check_resharded` looks at what backward is given.

The tags know nothing of activation checkpointing and do not disturb it: whether weights are kept and whether
activations are kept are two questions.

Counterpart: fsdp_eager/reshard.py, which frees and refills the storage of the gathered weights.
Paper: arXiv 2411.00284, section 3, uses a selective-checkpoint context round the gather; tags on the graph do the same
after tracing, when buckets are known.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from common.errors import PassError
from common.plan import BucketPlan
from fsdp_compiled.collectives import Collective, find_gathers, is_view
from fsdp_compiled.torch_private import CheckpointPolicy

# Recompute regions are told apart by this number; users' own checkpoint regions count up from 0.
_REGION = 1_000_000
_RESHARDED = "fsdp_resharded_param"


def tag_gathers(gm: GraphModule, *, plan: BucketPlan) -> GraphModule:
    """Tag each gather of the joint graph whose bucket reshards, so that backward repeats it.

    Untagged gathers are kept, since the partitioner never repeats a collective of its own accord.
    """
    bucket_of = plan.bucket_of()
    for gather in find_gathers(gm.graph):
        if plan.buckets[bucket_of[gather.param]].reshard_after_forward:
            for node in _chain(gather):
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                node.meta["ac_graph_id"] = _REGION
                node.meta[_RESHARDED] = gather.param
    return gm


def _chain(gather: Collective) -> list[Node]:
    """All nodes between the shard and the places that compute with the weight: casts, padding, gather, views."""
    chain: list[Node] = []
    node = gather.start
    while node.op != "placeholder":
        chain.append(node)
        (node,) = node.all_input_nodes
    pending = [gather.wait]
    while pending:
        node = pending.pop()
        if node not in chain:
            chain.append(node)
            pending += [user for user in node.users if is_view(user)]
    return chain


def check_resharded(gm: GraphModule) -> GraphModule:
    """See that the backward graph takes no weight from forward that it should gather again.

    Raises:
        PassError: it does.
    """
    for node in gm.graph.find_nodes(op="placeholder"):
        if _RESHARDED in node.meta:
            raise PassError(
                f"reshard: forward keeps the gathered weight {node.meta[_RESHARDED]!r} for backward (as {node.name}), "
                "although its bucket reshards after forward: the partitioner did not honour the recompute tag"
            )
    return gm
