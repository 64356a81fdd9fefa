"""What the pattern of a whole run suggests went wrong, in the order in which a run goes: hints, never the verdict.

    1  which gradients there are        frozen, trained, untied
    2  numbers that are not finite      whose rows
    3  the loss of step 0               one rank's buffer, the same share for all, other tokens, a cast, other weights
    4  the gradients of step 0          see `causes`
    5  the first later step             no update, another one, weights from before it, gradients late or not cleared
    6  nothing beyond rounding          another order of sums

The first of these that finds something speaks; what comes after it only follows from it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from common.harness.causes import CLOSE, count_names, likely_causes, of_small_error, tokens_seen
from common.harness.distance import relative_error
from common.harness.grades import ErrorBound, Grade, Z
from common.harness.records import Run, RunRecord
from common.job import JobConfig


def run_causes(reference: Run, candidate: Run, referee: Run, wrong: list[str]) -> tuple[str, ...]:
    """Why `candidate` differs, a line each, the most telling first.

    Args:
        reference: the run it was judged against; its ranks' losses are of use if it has as many ranks.
        referee: the float64 run of the same job.
        wrong: parameters whose step-0 gradients are beyond their bounds.
    """
    if not _are_comparable(reference, candidate, referee):
        return ()
    lines = [*_presence(reference[1], candidate[1], referee[1])] or [*_not_finite(candidate)]
    if lines:
        return tuple(lines)
    look = _Look(reference[0], candidate[0], referee[0])
    if look.is_loss_off(0):
        return (_wrong_loss(look, candidate, referee),)
    if wrong:
        return likely_causes(wrong, candidate[1], referee[1], candidate[0].world_size)
    for step in range(1, len(referee[0].losses)):
        if look.is_loss_off(step) or look.off_params(step):
            return (_wrong_step(look, step),)
    return (_exchanged(look) or "nothing beyond rounding: ranks or terms are added in another order",)


def _are_comparable(reference: Run, candidate: Run, referee: Run) -> bool:
    """Whether no run was cut short and each gradient has one shape; else what is left says nothing."""
    runs = (reference, candidate, referee)
    steps = {len(series) for record, _ in runs for series in (record.losses, record.param_norms, record.grad_digests)}
    shapes = ({run[1][name].shape for run in runs if name in run[1]} for name in candidate[1])
    return len(steps) == 1 and all(len(each) == 1 for each in shapes)


# Phase 1 and 2


def _presence(
    theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor], truths: dict[str, torch.Tensor]
) -> Iterator[str]:
    missing = [name for name in theirs if name not in ours]
    if missing:
        yield f"{count_names(missing)}: no gradient where the reference has one: frozen, or cut off from the loss"
    for name in ours:
        if name in theirs:
            continue
        for other in truths:
            if other in ours and ours[other].shape == ours[name].shape == truths[other].shape:
                together = ours[other].double() + ours[name].double()
                if relative_error(together, truths[other].double()) < CLOSE:
                    yield f"{name!r}: only together with {other!r} the gradient of {other!r}: a tied weight untied"
                    break
        else:
            yield f"{name!r}: a gradient where the reference has none: frozen there, trained here"


def _not_finite(candidate: Run) -> Iterator[str]:
    record, gradients = candidate
    for name, gradient in gradients.items():
        bad = ~torch.isfinite(gradient)
        if bad.any():
            rows = bad.flatten(1).any(1) if bad.dim() > 1 else bad.reshape(-1)
            size = -(-len(rows) // record.world_size)
            ranks = sorted({int(row) // size for row in rows.nonzero()})
            whose = "all ranks" if len(ranks) == record.world_size else f"rank {', '.join(map(str, ranks))}"
            yield (
                f"{name!r}: {int(bad.sum())} of {bad.numel()} elements are not finite, in rows of {whose}: "
                "an overflow, or memory that was never written"
            )
            return
    for step, (losses, norms) in enumerate(zip(record.losses, record.param_norms, strict=True)):
        if not all(map(math.isfinite, (*losses, *norms.values()))):
            yield f"finite until step {step}: updates that are too large, or memory that was never written"
            return


# What is off, step by step


@dataclass(frozen=True)
class _Look:
    """Two runs and the truth, step by step."""

    reference: RunRecord
    candidate: RunRecord
    referee: RunRecord

    @property
    def bound(self) -> ErrorBound:
        """The widest there is: what is beyond it is no rounding."""
        return ErrorBound.of(
            Grade.COMPILER,
            JobConfig.from_dict(self.candidate.job),
            reference_ranks=self.reference.world_size,
            candidate_ranks=self.candidate.world_size,
        )

    def differ(self, ours: float, theirs: float) -> bool:
        """Whether two losses differ by more than rounding."""
        return abs(ours - theirs) > Z * self.bound.compute_roundoff * abs(theirs)

    def is_loss_off(self, step: int) -> bool:
        """Whether the loss of the whole batch is beyond what the losses so far allow."""
        truths = self.referee.mean_losses[: step + 1]
        theirs, ours = self.reference.mean_losses[step], self.candidate.mean_losses[step]
        truth = truths[-1]
        if truth == 0:
            return ours != 0
        floor = self.bound.loss_floors(self.bound.floor, truths)[-1]
        (scale,) = self.bound.scales([floor], [abs(theirs - truth) / abs(truth) / floor], [0.0])
        return abs(ours - truth) > Z * scale * abs(truth) * math.sqrt(step + 1)

    def off_params(self, step: int) -> list[str]:
        """The parameters whose gradient's norm is beyond what it may be, at `step`."""
        found = []
        for name, truth in self.referee.param_norms[step].items():
            theirs = self.reference.param_norms[step].get(name, truth)
            ours = self.candidate.param_norms[step].get(name, 0.0)
            # the larger of two rounding-sized differences may be many times the smaller, so CLOSE and not a bound
            if abs(ours - truth) > CLOSE * max(truth, theirs):
                found.append(name)
        return found


# Phase 3


def _wrong_loss(look: _Look, candidate: Run, referee: Run) -> str:
    """The loss of step 0 is off: forward, or what goes into it."""
    ours, truth = look.candidate.losses[0], look.referee.mean_losses[0]
    if len(set(ours)) == 1 and len(ours) > 1:
        return "every rank has the same loss: all read the same share of the batch"
    alone = _ranks_off(look)
    if alone:
        whose = ", ".join(map(str, alone))
        return f"the loss of rank {whose} alone is off: a buffer, an input or a weight that only it has"
    factor = sum(ours) / len(ours) / truth if truth else 1.0
    for value, how in (
        (float(len(ours)), "summed over ranks or tokens, not averaged"),
        (1 / len(ours), "averaged twice"),
    ):
        if len(ours) > 1 and abs(factor / value - 1) < CLOSE / 10:
            return f"the loss is {value:.3g} times what it should be: {how}"
    if any(tokens_seen(candidate[1][name], gradient) != "same" for name, gradient in referee[1].items()):
        return "other rows have gradients, as if forward reads other tokens: another batch, share or seed"
    errors = [relative_error(candidate[1][name], gradient) for name, gradient in referee[1].items()]
    level = statistics.median(errors) if errors else math.inf
    if level < CLOSE:
        small = of_small_error(level, "an input, a buffer or a weight")
        return "the loss is wrong, and most gradients are " + (
            small or "right: the loss has a term that they do not feel, or is not the one that they are of"
        )
    return (
        "computes something else from step 0 on: other weights (another seed, gathered wrongly), another input, or "
        "other arithmetic in a module; `explain` walks it"
    )


def _ranks_off(look: _Look) -> list[int]:
    """The ranks whose loss alone differs from the reference's by more than rounding; none if all do."""
    ours, theirs = look.candidate.losses[0], look.reference.losses[0]
    if len(ours) != len(theirs):
        return []
    off = [rank for rank, pair in enumerate(zip(ours, theirs, strict=True)) if look.differ(*pair)]
    return off if len(off) < len(ours) else []


def _exchanged(look: _Look) -> str | None:
    """Whether ranks have the losses of other ranks."""
    ours, theirs = look.candidate.losses[0], look.reference.losses[0]
    if len(ours) != len(theirs) or not any(map(look.differ, ours, theirs)):
        return None
    alike = not any(map(look.differ, sorted(ours), sorted(theirs)))
    return "ranks have each other's losses: they exchanged their shares of the batch" if alike else None


# Phase 5


def _wrong_step(look: _Look, step: int) -> str:
    """All is right before `step`, and something is wrong at it."""
    norms, digests = look.candidate.param_norms, look.candidate.grad_digests
    off = look.off_params(step)
    silent = [name for name in off if norms[step].get(name, 0.0) == 0]
    if silent:
        return f"{count_names(silent)}: zero from step {step} on: no longer reduced, or no longer written"
    late = [name for name in off if digests[step][name] == digests[step - 1][name]]
    if late:
        return f"{count_names(late)}: the bits of the step before: a gradient handed out late"
    if not look.is_loss_off(step):
        return (
            f"{count_names(off)}: norm wrong from step {step} on, though the loss before it is right: as if added to "
            "what was there, gradients are not cleared; or backward changes"
        )
    return _wrong_update(look, step - 1)


def _wrong_update(look: _Look, step: int) -> str:
    """What the norms of the updates that end `step` say of the wrong loss after them."""
    theirs, ours = (
        record.update_norms[step] if step < len(record.update_norms) else {}
        for record in (look.reference, look.candidate)
    )
    moved = [name for name in theirs if 0 < theirs[name] < math.inf and name in ours]
    still = [name for name in moved if ours[name] == 0]
    if moved and still == moved:
        return (
            f"zero update at step {step}: the learning rate is 0, the optimizer holds other parameters, or is not run"
        )
    if still:
        return f"{count_names(still)}: zero update at step {step}: the optimizer does not hold it"
    factors = [ours[name] / theirs[name] for name in moved]
    if not all(map(math.isfinite, factors)):
        return (
            f"the update of step {step} is not finite, though its gradients are: for example the state of the optimizer"
        )
    after = "and the next loss is not: weights from before the update (gathered once and kept)"
    if not factors:
        return f"the gradients of step {step} have the right norms, {after}, wrong updates, or other data"
    if all(abs(factor - 1) < CLOSE for factor in factors):
        return (
            f"the norms of the updates of step {step} are right, {after}, gradients or updates with the right norm and "
            "wrong elements, or other data"
        )
    middle = statistics.median(factors)
    if all(abs(factor - middle) < CLOSE * middle for factor in factors):
        return f"updates are {middle:.3g} times as large at step {step}: stepped twice, or another learning rate"
    return (
        f"the update of step {step} is none of its gradient alone: weight decay, momentum or another state of the "
        "optimizer"
    )
