"""Two runs against their float64 referee: every error that a grade bounds, beside its bound.

at step 0       the gradient of each parameter, relative L2 error
over steps      loss, whole gradient norm, gradient norm of each parameter: the relative error of each step in units of
                what rounding may come to by then, see [Note: error over steps] in `grades`; root mean square
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from common.harness.distance import relative_error, worst_row_error
from common.harness.grades import ErrorBound, Grade, Z, root_mean_square
from common.harness.records import Run, RunRecord
from common.job import JobConfig

NEGLIGIBLE = 2.0**-52
"""A gradient smaller than this share of all gradients is zero to float64, and what remains of it is noise."""


class Kind(Enum):
    """What an error is of."""

    GRADIENT = "gradient"
    ROW = "row"
    TREND = "trend"


@dataclass(frozen=True)
class Check:
    """One error, its like on the reference, and its bound.

    Attributes:
        kind: a step-0 gradient, its worst row, or a number over steps.
        what: for a message.
        param: the parameter it is of; None for loss and whole norm.
        judged_steps: how many steps say something; None for a check of step 0.
    """

    kind: Kind
    what: str
    param: str | None
    reference_error: float
    candidate_error: float
    limit: float
    judged_steps: int | None = None

    @property
    def margin(self) -> float:
        """How many times the limit exceeds the error."""
        return self.limit / self.candidate_error if self.candidate_error else math.inf

    @property
    def holds(self) -> bool:
        """Whether the error is within its bound."""
        return self.candidate_error <= self.limit


def check_errors(grade: Grade, reference: Run, candidate: Run, referee: Run, peers: Sequence[Run] = ()) -> list[Check]:
    """Everything that `grade`, not `BITWISE`, bounds; the runs hold the same parameters and steps.

    Args:
        peers: draws of what rounding does over steps, besides the reference.
    """
    bound = _bound(grade, reference, candidate)
    return [
        *check_gradients(grade, reference, candidate, referee),
        *_over_steps(bound, reference, candidate, referee, peers),
    ]


def check_gradients(grade: Grade, reference: Run, candidate: Run, referee: Run) -> list[Check]:
    """Of `check_errors` those of step 0."""
    return list(_at_step_0(_bound(grade, reference, candidate), reference, candidate, referee))


def _bound(grade: Grade, reference: Run, candidate: Run) -> ErrorBound:
    return ErrorBound.of(
        grade,
        JobConfig.from_dict(candidate[0].job),
        reference_ranks=reference[0].world_size,
        candidate_ranks=candidate[0].world_size,
    )


def gradient_errors(run: Run, referee: Run) -> dict[str, float]:
    """By parameter, the relative L2 error of the step-0 gradient."""
    least = NEGLIGIBLE * referee[0].grad_norms[0]
    return {name: relative_error(run[1][name], truth, least) for name, truth in referee[1].items()}


def _at_step_0(bound: ErrorBound, reference: Run, candidate: Run, referee: Run) -> Iterator[Check]:
    ours, theirs = gradient_errors(candidate, referee), gradient_errors(reference, referee)
    least = NEGLIGIBLE * referee[0].grad_norms[0]
    for name, truth in referee[1].items():
        limit = bound.gradient_limit(theirs[name], truth.numel())
        yield Check(Kind.GRADIENT, f"gradient of {name!r}", name, theirs[name], ours[name], limit)
        their_error, _ = worst_row_error(reference[1][name], truth, least)
        our_error, row = worst_row_error(candidate[1][name], truth, least)
        limit = bound.gradient_limit(their_error, truth.numel())
        what = f"row {row} of {len(truth) if truth.dim() else 1} in the gradient of {name!r}"
        yield Check(Kind.ROW, what, name, their_error, our_error, limit)


@dataclass(frozen=True)
class _Series:
    """One number over steps.

    Attributes:
        read: takes it from a record, [step].
        floors: [step], see [Note: error over steps].
        is_norm: of a gradient; the loss has little in common with those.
    """

    what: str
    param: str | None
    read: Callable[[RunRecord], list[float]]
    floors: list[float]
    is_norm: bool = True

    def errors(self, run: Run, truth: RunRecord) -> list[float]:
        """[step], relative errors of `run` in units of the floors; what is not a number is infinitely far off."""
        errors = []
        rows = zip(self.read(run[0]), self.read(truth), truth.grad_norms, self.floors, strict=True)
        for value, true, norm, floor in rows:
            scale = max(abs(true), NEGLIGIBLE * norm) * floor
            error = abs(value - true) / scale if scale else float(value != true)
            errors.append(error if math.isfinite(error) else math.inf)
        return errors


def _over_steps(
    bound: ErrorBound, reference: Run, candidate: Run, referee: Run, peers: Sequence[Run]
) -> Iterator[Check]:
    truth = referee[0]
    series = list(_followed(bound, reference, referee))
    draws = [[each.errors(run, truth) for run in (reference, *peers)] for each in series]
    of_params = [
        errors for each, drawn in zip(series, draws, strict=True) if each.param is not None for errors in drawn
    ]
    common = _most_so_far(of_params)
    for each, drawn in zip(series, draws, strict=True):
        scales = bound.scales(each.floors, _most_so_far(drawn), common if each.is_norm else [0.0] * len(common))
        judged = [step for step, scale in enumerate(scales) if scale * Z < 1]
        theirs, ours = (
            root_mean_square([errors[step] * each.floors[step] / scales[step] for step in judged])
            for errors in (drawn[0], each.errors(candidate, truth))
        )
        yield Check(Kind.TREND, f"{each.what} over steps", each.param, theirs, ours, Z, len(judged))


def _followed(bound: ErrorBound, reference: Run, referee: Run) -> Iterator[_Series]:
    """Loss, whole gradient norm, norm of each parameter's gradient."""
    truth = referee[0]
    errors = gradient_errors(reference, referee)
    norms = truth.param_norms[0]
    # of the whole gradient: the parameters' errors in quadrature, each by its share
    whole = math.hypot(*(errors[name] * norms[name] for name in errors)) / (truth.grad_norms[0] or 1.0)
    steps = len(truth.losses)
    loss_floors = bound.loss_floors(whole, truth.mean_losses)
    yield _Series("loss", None, lambda record: record.mean_losses, loss_floors, is_norm=False)
    yield _Series("gradient norm", None, lambda record: record.grad_norms, bound.norm_floors(whole, steps))
    for name, error in errors.items():
        yield _Series(f"gradient norm of {name!r}", name, _norms_of(name), bound.norm_floors(error, steps))


def _norms_of(name: str) -> Callable[[RunRecord], list[float]]:
    return lambda record: [step[name] for step in record.param_norms]


def _most_so_far(draws: Sequence[Sequence[float]]) -> list[float]:
    """[step], the largest root mean square over `draws` [draw][step] up to that step."""
    return list(accumulate((root_mean_square(list(step)) for step in zip(*draws, strict=True)), max))
