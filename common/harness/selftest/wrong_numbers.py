"""Faults that make losses or gradients wrong, which the grades have to find."""

from __future__ import annotations

from common.harness.selftest import changes, messages, shards, steps
from common.harness.selftest.faults import Check, Fault, Plants, everywhere
from common.harness.selftest.shards import TARGET


def _on(model: steps.OnModel) -> Plants:
    return everywhere(steps.in_model(model))


def _with(optimizer: steps.OnOptimizer) -> Plants:
    return everywhere(steps.in_optimizer(optimizer))


def _grade(name: str, about: str, cause: str, plants: Plants, job: str = "small") -> Fault:
    return Fault(name=name, about=about, caught_by=Check.GRADE, cause=cause, plants=plants, job=job)


GRADIENTS = (
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
        everywhere(steps.in_loss(lambda scene, loss, logits: loss.detach() + 8 * (loss - loss.detach()))),
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
        everywhere(steps.of_another_micro_batch()),
    ),
    _grade(
        "use-lost",
        "a tied weight gets the gradient of one use",
        "a use of it is missing",
        _on(steps.loses_a_use),
        "tied",
    ),
)
WEIGHTS = (
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
        everywhere(steps.in_seed(lambda scene, given: {"seed": given["seed"] + scene.rank})),
    ),
    _grade(
        "other-seed",
        "all ranks start from other weights",
        "other weights",
        everywhere(steps.in_seed(lambda scene, given: {"seed": given["seed"] + 1})),
    ),
)
STEPS = (
    _grade(
        "same-share",
        "every rank reads the first rank's share",
        "the same share",
        everywhere(steps.in_share(lambda scene, given: {"rank": 0})),
    ),
    _grade(
        "shares-exchanged",
        "ranks read each other's share",
        "exchanged their shares",
        everywhere(steps.in_share(lambda scene, given: {"rank": scene.ranks - 1 - scene.rank})),
    ),
    _grade(
        "other-batch",
        "each step reads the tokens of the next",
        "other tokens",
        everywhere(steps.in_share(lambda scene, given: {"step": given["step"] + 1})),
    ),
    _grade(
        "loss-summed",
        "the loss is summed over ranks",
        "summed over ranks or tokens",
        everywhere(steps.in_loss(lambda scene, loss, logits: loss * scene.ranks)),
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
