"""Faults inside an engine: which messages are sent, in which dtype and order, when, and what is kept of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.gradient import Reduction
from common.harness.selftest.plant import Plant, Scene, named
from common.harness.selftest.shards import PAIR
from common.policy import MixedPrecisionPolicy

_MIDDLE = ".1"
"""How the name of the second block ends, in every model."""
_COLLECTIVES = "fsdp_compiled.collectives:"


def _call(at: str, change: Callable[..., Any]) -> tuple[Plant, ...]:
    """`change(scene, original, *args, **options)` in the place of the function at `at`; every call is a hit."""

    def act(scene: Scene, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            scene.hit()
            return change(scene, original, *args, **options)

        return call

    return (Plant(at, act),)


# The gradient contract


def in_contract(change: Callable[[Reduction, int], Reduction]) -> dict[str, tuple[Plant, ...]]:
    """`change` how gradients are averaged, given the contract and the world size, where each engine asks for it."""

    def decide(scene: Scene, original: Callable[..., Reduction], **options: Any) -> Reduction:
        return change(original(**options), options["world_size"])

    places = {"eager": "fsdp_eager.reduction:plan_reduction", "compiled": "fsdp_compiled.graph:plan_reduction"}
    return {engine: _call(place, decide) for engine, place in places.items()}


def undivided(reduction: Reduction, ranks: int) -> Reduction:
    """A sum where the mean belongs."""
    return replace(reduction, postdivide=None)


def divided_twice(reduction: Reduction, ranks: int) -> Reduction:
    """Before the sum and after it."""
    return replace(reduction, predivide=float(ranks))


def divided_first(reduction: Reduction, ranks: int) -> Reduction:
    """Before the sum instead of after it: the same mean, rounded otherwise where ranks are no power of two."""
    return replace(reduction, predivide=reduction.postdivide, postdivide=None)


def in_policy(change: Callable[[MixedPrecisionPolicy], MixedPrecisionPolicy]) -> dict[str, tuple[Plant, ...]]:
    """`change` the mixed-precision policy on its way into each engine."""

    def build(scene: Scene, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return original(*args, **options | {"mp_policy": change(options["mp_policy"])})

    places = {"eager": "fsdp_eager.parallelize:GroupOptions", "compiled": "fsdp_compiled.parallelize:data_parallel"}
    return {engine: _call(place, build) for engine, place in places.items()}


def reduces_in_bf16(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Sums travel narrow."""
    return replace(policy, reduce_dtype=torch.bfloat16)


def computes_in_bf16(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Weights travel narrow, and compute is narrow."""
    return replace(policy, param_dtype=torch.bfloat16)


def in_plan(**changed: Any) -> dict[str, tuple[Plant, ...]]:
    """Another bucket plan than the job's."""

    def build(scene: Scene, original: Callable[..., Any], model: Any, spec: str, **options: Any) -> Any:
        return original(model, changed.get("spec", spec), **options | {k: v for k, v in changed.items() if k != "spec"})

    places = {"eager": "fsdp_eager.parallelize:build_plan", "compiled": "fsdp_compiled.parallelize:build_plan"}
    return {engine: _call(place, build) for engine, place in places.items()}


# What arrives


def _in_sums(change: Callable[..., Any]) -> dict[str, tuple[Plant, ...]]:
    """`change` the sums in rank order, which take a rank's own addend, the others and its rank."""
    return {
        "eager": _call("fsdp_eager.collectives:sum_in_rank_order", change),
        "compiled": _call("fsdp_compiled.collectives:sum_in_rank_order", change),
    }


def _keeps_own(scene: Scene, original: Callable[..., Any], *args: Any) -> Any:
    *builder, own, others, rank = args
    copies = [own.clone() if isinstance(own, Tensor) else own for _ in others]  # eager adds to `own` in place
    return original(*builder, own, copies, rank)


def _sums_backwards(scene: Scene, original: Callable[..., Any], *args: Any) -> Any:
    *builder, own, others, rank = args
    return original(*builder, own, others[::-1], len(others) - rank)


KEEPS_OWN = _in_sums(_keeps_own)
SUMS_BACKWARDS = _in_sums(_sums_backwards)


def _unpacks_in_another_order_eager(scene: Scene, original: Callable[..., Any], reducer: Any, flight: Any) -> Any:
    order = {PAIR[0]: PAIR[1], PAIR[1]: PAIR[0]}
    by_name = {param.name: param for param in flight.params}
    flight.params = [by_name[order.get(param.name, param.name)] for param in flight.params]
    original(reducer, flight)


def _unpacks_in_another_order_compiled(scene: Scene, original: Callable[..., Any], gm: Any, **options: Any) -> Any:
    by_param = {each.param: each for each in named(_COLLECTIVES + "find_reductions")(gm.graph)}
    first, second = (by_param[name].wait for name in PAIR)
    other = {first: second, second: first}
    users = {**first.users, **second.users}
    gm.graph.output_node().prepend(first)
    gm.graph.output_node().prepend(second)
    for user in users:
        user.args = torch.fx.node.map_arg(user.args, lambda node: other.get(node, node))
    named(_COLLECTIVES + "stable_topological_sort")(gm.graph)
    return original(gm, **options)


UNPACKS_IN_ANOTHER_ORDER = {
    "eager": _call("fsdp_eager.reduction:GradientReducer.accept", _unpacks_in_another_order_eager),
    "compiled": _call("fsdp_compiled.graph:bucket_reductions", _unpacks_in_another_order_compiled),
}


# How many messages


def _gathers_again_eager(scene: Scene, original: Callable[..., Any], group: Any) -> None:
    original(group)
    if group.name.endswith(_MIDDLE):
        group.wait_gather()
        group.reshard()
        original(group)


def _gathers_again_compiled(scene: Scene, original: Callable[..., Any], gm: Any, **options: Any) -> Any:
    gm = original(gm, **options)
    gather = named(_COLLECTIVES + "find_gathers")(gm.graph)[-1]
    with gm.graph.inserting_after(gather.wait):
        again = gm.graph.call_function(gather.start.target, gather.start.args)
    with gm.graph.inserting_after(again):
        waited = gm.graph.call_function(gather.wait.target, (again,))
    again.meta["val"], waited.meta["val"] = gather.start.meta["val"], gather.wait.meta["val"]
    return gm


GATHERS_AGAIN = {
    "eager": _call("fsdp_eager.bucket:FSDPParamGroup.launch_gather", _gathers_again_eager),
    "compiled": _call("fsdp_compiled.graph:bucket_gathers", _gathers_again_compiled),
}


def _left_out(scene: Scene, original: Callable[..., Any], gm: Any, **options: Any) -> Any:
    return gm


UNBUCKETED_GATHERS = {"compiled": _call("fsdp_compiled.graph:bucket_gathers", _left_out)}
UNBUCKETED_REDUCTIONS = {"compiled": _call("fsdp_compiled.graph:bucket_reductions", _left_out)}


def averages_the_loss(scene: Scene, loss: Tensor, logits: Tensor) -> Tensor:
    """A message in forward that only shows a number."""
    dist.all_reduce(loss.detach().clone())
    return loss


# What is kept


def _frees_nothing(scene: Scene, original: Callable[..., Any], buffer: Any) -> None:
    """Parameters are swapped and gathered as ever; their storage stays."""


def _keeps_arguments(scene: Scene, original: Callable[..., Any], gm: Any, inputs: Any) -> Any:
    run = original(gm, inputs)

    def keeping(args: list[Any]) -> Any:
        scene.kept[id(gm)] = list(args)
        return run(args)

    vars(keeping).update(vars(run))  # the mark by which the compiler knows that it may hand over a list
    return keeping


KEEPS_WEIGHTS = {"eager": _call("fsdp_eager.reshard:WholeBuffer.free", _frees_nothing)}
KEEPS_ARGUMENTS = {"compiled": _call("fsdp_compiled.torch_private:boxed", _keeps_arguments)}


def keeps_logits(scene: Scene, loss: Tensor, logits: Tensor) -> Tensor:
    """Somebody holds on to the logits of the last step."""
    scene.kept["logits"] = logits
    return loss


def _gathers_all_eager(scene: Scene, original: Callable[..., Any], schedule: Any, group: Any) -> Any:
    following = original(schedule, group)
    for other in sorted(schedule.awaiting_backward(), key=lambda each: each.name):  # a set, in no order of its own
        schedule.unshard(other)
    return following


def _gathers_all_compiled(scene: Scene, original: Callable[..., Any], gm: Any, **options: Any) -> Any:
    """All gathers, and all waits for them, stand before the first operator that computes."""
    gm = original(gm, **options)
    gathers = named(_COLLECTIVES + "find_gathers")(gm.graph)
    above = named("fsdp_compiled.schedule:_above")
    first = next(node for node in gm.graph.nodes if node.op == "call_function")
    for gather in gathers:
        for node in above(gather.wait):
            if node is not first:
                first.prepend(node)
    named(_COLLECTIVES + "stable_topological_sort")(gm.graph)
    return gm


GATHERS_ALL = {
    "eager": _call("fsdp_eager.schedule:Schedule.enter_backward", _gathers_all_eager),
    "compiled": _call("fsdp_compiled.graph:prefetch_gathers", _gathers_all_compiled),
}


# When


def _never(scene: Scene, original: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Do nothing."""


PREFETCHES_NOTHING = {
    "eager": _call("fsdp_eager.schedule:Schedule.prefetch", _never),
    "compiled": _call("fsdp_compiled.graph:prefetch_gathers", _left_out),
}


def _waits_early_eager(scene: Scene, original: Callable[..., Any], schedule: Any, groups: Any) -> None:
    original(schedule, groups)
    for group in groups:
        schedule.unshard(group)


def _waits_early_compiled(scene: Scene, original: Callable[..., Any], gm: Any, **options: Any) -> Any:
    gm = original(gm, **options)
    for gather in named(_COLLECTIVES + "find_gathers")(gm.graph):
        gather.start.append(gather.wait)
    return gm


WAITS_EARLY = {
    "eager": _call("fsdp_eager.schedule:Schedule.prefetch", _waits_early_eager),
    "compiled": _call("fsdp_compiled.graph:prefetch_gathers", _waits_early_compiled),
}


def _waits_at_once_eager(scene: Scene, original: Callable[..., Any], schedule: Any, group: Any) -> None:
    original(schedule, group)
    schedule.finish_reductions()


WAITS_FOR_REDUCTIONS = {
    "eager": _call("fsdp_eager.schedule:Schedule.reduce", _waits_at_once_eager),
    "compiled": _call("fsdp_compiled.graph:delay_reduction_waits", _left_out),
}
