"""Two runs against their float64 referee: every error that a grade bounds, beside its bound.

at step 0       the gradient of each parameter, relative L2 error
over steps      loss, whole gradient norm, gradient norm of each parameter: root mean square of the relative error
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from common.harness.distance import relative_error, worst_row_error
from common.harness.grades import ErrorBound, Grade, root_mean_square
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
    """

    kind: Kind
    what: str
    param: str | None
    reference_error: float
    candidate_error: float
    limit: float

    @property
    def margin(self) -> float:
        """How many times the limit exceeds the error."""
        return self.limit / self.candidate_error if self.candidate_error else math.inf

    @property
    def holds(self) -> bool:
        """Whether the error is within its bound."""
        return self.candidate_error <= self.limit


def check_errors(grade: Grade, reference: Run, candidate: Run, referee: Run) -> list[Check]:
    """Everything that `grade`, not `BITWISE`, bounds; the runs hold the same parameters and steps."""
    bound = ErrorBound.of(
        grade,
        JobConfig.from_dict(candidate[0].job),
        reference_ranks=reference[0].world_size,
        candidate_ranks=candidate[0].world_size,
    )
    return [
        *_at_step_0(bound, reference, candidate, referee),
        *_over_steps(bound, reference, candidate, referee),
    ]


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


def _over_steps(bound: ErrorBound, reference: Run, candidate: Run, referee: Run) -> list[Check]:
    truth = referee[0]
    errors = gradient_errors(reference, referee)
    norms = truth.param_norms[0]
    # of the whole gradient: the parameters' errors in quadrature, each by its share
    whole = math.hypot(*(errors[name] * norms[name] for name in errors)) / (truth.grad_norms[0] or 1.0)
    steps = len(truth.losses)

    def check(
        what: str,
        series: Callable[[RunRecord], list[float]],
        limit: Callable[[float], float],
        param: str | None = None,
    ) -> Check:
        theirs, ours = (_rms_error(series(run[0]), series(truth), truth.grad_norms) for run in (reference, candidate))
        return Check(Kind.TREND, f"{what} over steps", param, theirs, ours, limit(theirs))

    checks = [
        check("loss", lambda record: record.mean_losses, lambda rms: bound.loss_limit(rms, whole, truth.mean_losses)),
        check("gradient norm", lambda record: record.grad_norms, lambda rms: bound.norm_limit(rms, whole, steps)),
    ]
    for name, error in errors.items():
        checks.append(
            check(
                f"gradient norm of {name!r}",
                lambda record, name=name: [step[name] for step in record.param_norms],  # type: ignore[misc]
                lambda rms, error=error: bound.norm_limit(rms, error, steps),  # type: ignore[misc]
                name,
            )
        )
    return checks


def _rms_error(values: list[float], truths: list[float], norms: list[float]) -> float:
    """Root mean square over steps of the relative error of `values`; `norms` [step] say what is negligible."""
    errors = []
    for value, truth, norm in zip(values, truths, norms, strict=True):
        scale = max(abs(truth), NEGLIGIBLE * norm)
        errors.append(abs(value - truth) / scale if scale else float(value != truth))
    return root_mean_square(errors)
