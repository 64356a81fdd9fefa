"""The catalogue: every fault that the judge has to find, as data, and the jobs they are planted in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from common.harness.selftest import changes, messages, shards, steps
from common.harness.selftest.plant import Plant
from common.harness.selftest.shards import TARGET
from common.job import JobConfig

_MODELS = "common.harness.selftest.models:"
_SMALL = JobConfig(model=_MODELS + "small", steps=2, seq=8, backend="aot_eager", link="none", lr=0.5, optimizer="sgd")
_JOBS: Mapping[str, JobConfig] = {
    "small": _SMALL,
    "three ranks": _SMALL,
    "tied": replace(_SMALL, model=_MODELS + "tied"),
    "frozen": replace(_SMALL, model=_MODELS + "frozen"),
    "predicted": replace(_SMALL, model="llama-debug", lr=0.1),
}
"""On the link that costs nothing: data moves in rank order there, and peaks of memory are the same every time."""
RANKS = range(2, 5)
"""World sizes that leave rows of every faulty parameter on the last rank."""


def job_of(key: str, ranks: int) -> JobConfig:
    """What is trained under the name `key` on `ranks` ranks; two cannot show an order, so "three ranks" has more."""
    world = max(ranks, 3) if key == "three ranks" else ranks
    return replace(_JOBS[key], ranks=world, batch=2 * world)


Plants = Mapping[str, tuple[Plant, ...]]


class Check(StrEnum):
    """Which part of the judge finds a fault."""

    CONTRACT = "contract"
    """The harness refuses what the engine hands it."""
    SHAPE = "shape"
    """A gradient is missing, is one too many, or is not finite."""
    GRADE = "grade"
    """Losses and gradients against a single process and against another engine."""
    COLLECTIVES = "collectives"
    """Messages against the plan's."""
    MEMORY = "memory"
    """Bytes between steps and at the peak, against the healthy engine's."""
    OVERLAP = "overlap"
    """What each message travels beside, against the healthy engine's."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that may be wrong with an engine.

    Attributes:
        name: what tables and options call it.
        about: what it does, in one line.
        caught_by: the check that has to find it.
        cause: a part of the text that has to be named as its likely cause; LAST stands for the last rank.
        plants: by engine, how it is put in.
        job: what is trained, see `job_of`.
    """

    name: str
    about: str
    caught_by: Check
    cause: str
    plants: Plants
    job: str = "small"


def _everywhere(*plants: Plant) -> Plants:
    """The same plants for every engine that shards."""
    return {engine: plants for engine in ("eager", "compiled", "torch-fsdp2")}


def _on(model: steps.OnModel) -> Plants:
    return _everywhere(steps.in_model(model))


def _with(optimizer: steps.OnOptimizer) -> Plants:
    return _everywhere(steps.in_optimizer(optimizer))


def _grade(name: str, about: str, cause: str, plants: Plants, job: str = "small") -> Fault:
    return Fault(name=name, about=about, caught_by=Check.GRADE, cause=cause, plants=plants, job=job)


_GRADIENTS = (
    _grade(
        "sum-for-mean", "gradients are summed over ranks", "summed over ranks", messages.in_contract(messages.undivided)
    ),
    _grade(
        "divided-twice",
        "gradients are divided before and after the sum",
        "averaged twice",
        messages.in_contract(messages.divided_twice),
    ),
    _grade(
        "divide-missing",
        "one parameter's gradient is not divided",
        "times the mean: summed over ranks",
        shards.in_gradients(changes.times_ranks, TARGET),
        "three ranks",
    ),
    _grade(
        "reduced-twice",
        "one parameter's gradient is added twice",
        "added twice",
        shards.in_gradients(changes.times(2.0), TARGET),
        "three ranks",
    ),
    _grade(
        "local-norm",
        "gradients are scaled by the norm of one rank's shard",
        "the norm of one rank's shard",
        shards.in_gradients(changes.times_root_of_ranks),
    ),
    _grade("wrong-sign", "gradients point uphill", "the wrong sign", shards.in_gradients(changes.times(-1.0))),
    _grade(
        "loss-scale-kept",
        "a loss scale of 8 is never taken out again",
        "8 times the mean: a divisor or a loss scale",
        _everywhere(steps.in_loss(lambda scene, loss, logits: loss.detach() + 8 * (loss - loss.detach()))),
    ),
    _grade(
        "never-written",
        "one parameter's gradient stays zero",
        "zero: never reduced, or never written",
        shards.in_gradients(changes.zero, TARGET),
    ),
    _grade("shard-rolled", "a shard is off by one row", "rolled by", shards.in_gradients(changes.rolled, TARGET)),
    _grade(
        "last-rank-dropped",
        "the last rank's rows of one gradient are dropped",
        "all rows of rank LAST, the last, are wrong, the others right: zero",
        shards.in_gradients(changes.dropped_on_last, TARGET),
    ),
    _grade(
        "row-dropped",
        "the last rank loses one row of one gradient",
        "rows of rank LAST, the last, are wrong, the others right: zero",
        shards.in_gradients(changes.without_first_row_on_last, TARGET),
    ),
    _grade(
        "uneven-divisor",
        "the last rank, whose shard is smaller, divides by less",
        "all rows of rank LAST, the last, are wrong, the others right: 2 times",
        shards.in_gradients(changes.doubled_on_last),
    ),
    _grade(
        "unpacked-in-another-order",
        "two parameters of a bucket get each other's gradient",
        "a bucket unpacked in another order",
        messages.UNPACKS_IN_ANOTHER_ORDER | {"torch-fsdp2": (steps.on_gradients(steps.swaps_two),)},
    ),
    _grade("never-reduced", "each rank keeps its own gradient", "never reduced", messages.KEEPS_OWN),
    _grade(
        "rank-left-out",
        "the last rank gives nothing to the sum",
        "a rank is left out",
        shards.in_own_gradients(changes.zero_on_last),
    ),
    _grade(
        "reduced-in-bf16",
        "all gradients are reduced in bf16",
        "reduced or stored in bf16",
        messages.in_policy(messages.reduces_in_bf16),
    ),
    _grade(
        "stored-in-bf16",
        "one reduced gradient goes through bf16",
        "reduced or stored in bf16",
        shards.in_gradients(changes.rounded, TARGET),
    ),
    _grade(
        "rounded-before-sum",
        "each rank's gradient goes through bf16 before it is summed",
        "as by rounding to bf16",
        shards.in_own_gradients(changes.rounded, TARGET),
    ),
    _grade(
        "summed-backwards",
        "ranks are summed from the last to the first",
        "added in another order",
        messages.SUMS_BACKWARDS,
        "three ranks",
    ),
    _grade(
        "divided-first",
        "gradients are divided before the sum",
        "added in another order",
        messages.in_contract(messages.divided_first),
        "three ranks",
    ),
    _grade(
        "stale-gradient",
        "one gradient is handed out a step late",
        "a gradient handed out late",
        shards.in_gradients(changes.of_the_step_before, TARGET),
    ),
    _grade(
        "reduced-once",
        "one gradient is reduced at the first step only",
        "zero from step 1 on",
        shards.in_gradients(changes.only_once, TARGET),
    ),
    _grade(
        "another-micro-batch",
        "gradients are those of other tokens than the loss",
        "another micro-batch",
        _everywhere(steps.of_another_micro_batch()),
    ),
    _grade(
        "use-lost",
        "a tied weight gets the gradient of one use",
        "a use of it is missing",
        _on(steps.loses_a_use),
        "tied",
    ),
)
_WEIGHTS = (
    _grade(
        "gathered-rolled",
        "one gathered weight is off by one row",
        "other weights",
        shards.in_weights(changes.rolled, TARGET),
    ),
    _grade(
        "gathered-rounded",
        "gathered weights go through bf16",
        "as by rounding to bf16",
        shards.in_weights(changes.rounded),
    ),
    _grade(
        "stale-weights",
        "weights are gathered once, and updates never seen",
        "weights from before the update",
        shards.in_weights(changes.first_ever),
    ),
    _grade(
        "computed-in-bf16",
        "the engine computes in bf16",
        "as by rounding to bf16",
        messages.in_policy(messages.computes_in_bf16),
    ),
    _grade("input-cast", "one block's input goes through bf16", "as by rounding to bf16", _on(steps.casts_an_input)),
    _grade("buffer-rounded", "a buffer goes through bf16", "as by rounding to", _on(steps.rounds_a_buffer)),
    _grade(
        "buffer-of-one-rank",
        "the last rank has another buffer",
        "the loss of rank LAST alone",
        _on(steps.changes_a_buffer_on_last),
    ),
    _grade(
        "seed-by-rank",
        "each rank starts from weights of its own",
        "other weights",
        _everywhere(steps.in_arguments("build_model", lambda scene, given: {"seed": given["seed"] + scene.rank})),
    ),
    _grade(
        "other-seed",
        "all ranks start from other weights",
        "other weights",
        _everywhere(steps.in_arguments("build_model", lambda scene, given: {"seed": given["seed"] + 1})),
    ),
)
_STEPS = (
    _grade(
        "same-share",
        "every rank reads the first rank's share",
        "the same share",
        _everywhere(steps.in_arguments("batch", lambda scene, given: {"rank": 0})),
    ),
    _grade(
        "shares-exchanged",
        "ranks read each other's share",
        "exchanged their shares",
        _everywhere(steps.in_arguments("batch", lambda scene, given: {"rank": scene.ranks - 1 - scene.rank})),
    ),
    _grade(
        "other-batch",
        "each step reads the tokens of the next",
        "other tokens",
        _everywhere(steps.in_arguments("batch", lambda scene, given: {"step": given["step"] + 1})),
    ),
    _grade(
        "loss-summed",
        "the loss is summed over ranks",
        "summed over ranks or tokens",
        _everywhere(steps.in_loss(lambda scene, loss, logits: loss * scene.ranks)),
    ),
    _grade("rate-zero", "the learning rate is 0", "zero update", _with(steps.has_no_rate)),
    _grade(
        "rate-doubled",
        "the learning rate is twice what it should be",
        "updates are 2 times",
        _with(steps.has_twice_the_rate),
    ),
    _grade(
        "optimizer-of-copies",
        "the optimizer holds other parameters",
        "holds other parameters",
        _with(steps.holds_copies),
    ),
    _grade(
        "optimizer-misses-one",
        "the optimizer lacks one parameter",
        "the optimizer does not hold it",
        _with(steps.misses_one),
    ),
    _grade("decay-unasked", "weights decay", "weight decay", _with(steps.decays)),
    _grade("updates-late", "each update comes a step late", "zero update at step 0", _with(steps.steps_late)),
    _grade("not-cleared", "gradients are not cleared", "gradients are not cleared", _with(steps.keeps_gradients)),
)


def _shape(name: str, about: str, cause: str, plants: Plants, job: str = "small") -> Fault:
    return Fault(name=name, about=about, caught_by=Check.SHAPE, cause=cause, plants=plants, job=job)


_SHAPES = (
    _shape("untied", "a tied weight becomes two", "a tied weight untied", _on(steps.unties), "tied"),
    _shape(
        "frozen-trained",
        "a frozen parameter is trained",
        "frozen there, trained here",
        _on(steps.trains_the_frozen),
        "frozen",
    ),
    _shape(
        "trained-frozen", "a parameter is frozen", "no gradient where the reference has one", _on(steps.freezes_one)
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
        _everywhere(steps.on_gradients(steps.loses_one_on_last)),
    ),
    _contract(
        "placed-otherwise",
        "a gradient is whole where its parameter is sharded",
        "sharded as the parameter is",
        _everywhere(steps.on_gradients(steps.replicates_one)),
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
        _everywhere(steps.in_loss(messages.averages_the_loss)),
    ),
)


def _memory(name: str, about: str, cause: str, plants: Plants) -> Fault:
    return Fault(name=name, about=about, caught_by=Check.MEMORY, cause=cause, plants=plants)


_MEMORY = (
    _memory("weights-leaked", "gathered weights are never freed", "all gathered weights", messages.KEEPS_WEIGHTS),
    _memory("arguments-leaked", "what graphs were given is kept", "between steps", messages.KEEPS_ARGUMENTS),
    _memory(
        "gradients-leaked", "gradients are held on to", "as one rank's gradients", _everywhere(steps.keeps_references())
    ),
    _memory(
        "logits-leaked",
        "the last logits are held on to",
        "between steps",
        _everywhere(steps.in_loss(messages.keeps_logits)),
    ),
    _memory(
        "gathered-all-at-once",
        "all weights are gathered before the first layer",
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

CATALOGUE = (*_GRADIENTS, *_WEIGHTS, *_STEPS, *_SHAPES, *_CONTRACTS, *_COLLECTIVES, *_MEMORY, *_OVERLAP)
FAULTS = {fault.name: fault for fault in CATALOGUE}
