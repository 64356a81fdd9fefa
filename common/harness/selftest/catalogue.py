"""The catalogue: every fault that the judge has to find.

Left out, since no number shows them: parameters packed in another order on all ranks alike, where ranks are summed in
rank order, and one rounding more to the dtype that computes.
"""

from __future__ import annotations

from common.harness.selftest import changes, messages, shards, steps
from common.harness.selftest.faults import Check, Fault, Plants, everywhere
from common.harness.selftest.shards import TARGET
from common.harness.selftest.wrong_numbers import GRADIENTS, STEPS, WEIGHTS


def _shape(name: str, about: str, cause: str, plants: Plants, job: str = "small") -> Fault:
    return Fault(name=name, about=about, caught_by=Check.SHAPE, cause=cause, plants=plants, job=job)


_SHAPES = (
    _shape(
        "untied", "a tied weight becomes two", "a tied weight untied", everywhere(steps.in_model(steps.unties)), "tied"
    ),
    _shape(
        "frozen-trained",
        "a frozen parameter is trained",
        "frozen there, trained here",
        everywhere(steps.in_model(steps.trains_the_frozen)),
        "frozen",
    ),
    _shape(
        "trained-frozen",
        "a parameter is frozen",
        "no gradient where the reference has one",
        everywhere(steps.in_model(steps.freezes_one)),
    ),
    _shape(
        "unwritten-row",
        "a row of the last rank's gradient is not a number",
        "in rows of rank LAST",
        shards.in_gradients(changes.unwritten_on_last, TARGET),
    ),
)


def _contract(name: str, about: str, cause: str, plants: Plants) -> Fault:
    return Fault(name=name, about=about, caught_by=Check.CONTRACT, cause=cause, plants=plants)


_CONTRACTS = (
    _contract(
        "renamed",
        "a module has another name after sharding",
        "keep the names of the model",
        {
            "eager": (steps.renames("fsdp_eager.parallelize"),),
            "compiled": (steps.renames("fsdp_compiled.parallelize"),),
            "torch-fsdp2": (steps.renames("common.baselines.torch_fsdp2"),),
        },
    ),
    _contract(
        "missing-on-one-rank",
        "the last rank has no gradient of one parameter",
        "ranks must reduce the same parameters",
        everywhere(steps.on_gradients(steps.loses_one_on_last)),
    ),
    _contract(
        "placed-otherwise",
        "a gradient is whole where its parameter is sharded",
        "sharded as the parameter is",
        everywhere(steps.on_gradients(steps.replicates_one)),
    ),
)


def _messages(name: str, about: str, cause: str, plants: Plants) -> Fault:
    return Fault(name=name, about=about, caught_by=Check.COLLECTIVES, cause=cause, plants=plants, job="predicted")


_COLLECTIVES = (
    _messages("gathered-again", "one bucket is gathered twice", "gathered twice", messages.GATHERS_AGAIN),
    _messages(
        "recompute-skipped",
        "weights stay gathered until backward",
        "kept after forward",
        messages.in_plan(reshard_after_forward=False),
    ),
    _messages("another-plan", "every parameter travels alone", "not bucketed", messages.in_plan(spec="param")),
    _messages(
        "gathers-unbucketed", "the pass that buckets gathers does nothing", "not bucketed", messages.UNBUCKETED_GATHERS
    ),
    _messages(
        "reductions-unbucketed",
        "the pass that buckets reductions does nothing",
        "not bucketed",
        messages.UNBUCKETED_REDUCTIONS,
    ),
    _messages(
        "loss-averaged",
        "a loss is averaged over ranks for show",
        "in no plan",
        everywhere(steps.in_loss(messages.averages_the_loss)),
    ),
)


def _memory(name: str, about: str, cause: str, plants: Plants) -> Fault:
    return Fault(name=name, about=about, caught_by=Check.MEMORY, cause=cause, plants=plants)


_MEMORY = (
    _memory("weights-leaked", "gathered weights are never freed", "all gathered weights", messages.KEEPS_WEIGHTS),
    _memory("arguments-leaked", "what graphs were given is kept", "between steps", messages.KEEPS_ARGUMENTS),
    _memory(
        "gradients-leaked", "gradients are held on to", "as one rank's gradients", everywhere(steps.keeps_references())
    ),
    _memory(
        "logits-leaked",
        "the last logits are held on to",
        "between steps",
        everywhere(steps.in_loss(messages.keeps_logits)),
    ),
    _memory(
        "gathered-all-at-once",
        "all weights that backward needs are gathered when it begins",
        "longer within the step",
        messages.GATHERS_ALL,
    ),
)


def _overlap(name: str, about: str, cause: str, plants: Plants) -> Fault:
    return Fault(name=name, about=about, caught_by=Check.OVERLAP, cause=cause, plants=plants)


_OVERLAP = (
    _overlap(
        "prefetch-lost", "gathers are launched where they are needed", "launched later", messages.PREFETCHES_NOTHING
    ),
    _overlap(
        "waited-early",
        "gathers are waited for before the compute that hides them",
        "waited for earlier",
        messages.WAITS_EARLY,
    ),
    _overlap(
        "reductions-waited-at-once",
        "reductions are waited for where they are launched",
        "waited for earlier",
        messages.WAITS_FOR_REDUCTIONS,
    ),
)

CATALOGUE = (*GRADIENTS, *WEIGHTS, *STEPS, *_SHAPES, *_CONTRACTS, *_COLLECTIVES, *_MEMORY, *_OVERLAP)
FAULTS = {fault.name: fault for fault in CATALOGUE}
