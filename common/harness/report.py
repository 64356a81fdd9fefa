"""What the judge says of one pair of runs, as plain data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from common.harness.grades import Grade
from common.harness.records import json_ready


@dataclass(frozen=True)
class ParamRow:
    """One parameter's gradient at step 0.

    Attributes:
        name: of the parameter.
        bitwise: equal bits.
        max_abs_diff: largest difference between the two sides.
        relative_distance: L2 norm of the difference over that of the reference.
        max_ulp: largest distance in units in the last place; None for different dtypes.
        reference_error, candidate_error: relative L2 error against float64; None without a referee.
        ratio: the candidate's error over the reference's; None without a referee.
        limit: the largest `candidate_error` that the grade allows; None for bitwise, or without a referee.
        reference_row_error, candidate_row_error, row_limit: the same for the worst row of the gradient.
    """

    name: str
    bitwise: bool
    max_abs_diff: float
    relative_distance: float
    max_ulp: int | None
    reference_error: float | None = None
    candidate_error: float | None = None
    ratio: float | None = None
    limit: float | None = None
    reference_row_error: float | None = None
    candidate_row_error: float | None = None
    row_limit: float | None = None


@dataclass(frozen=True)
class StepRow:
    """One step on both sides; losses are means over ranks, norms those of the whole gradient."""

    step: int
    reference_loss: float
    candidate_loss: float
    loss_diff: float
    reference_norm: float
    candidate_norm: float
    params_differ: int


@dataclass(frozen=True)
class TrendRow:
    """One number over all steps: its error against float64, in units of what rounding may come to by each step.

    Attributes:
        what: "loss over steps", "gradient norm over steps", or "gradient norm of NAME over steps".
        reference_error, candidate_error: root mean square over the steps that are judged.
        limit: the largest `candidate_error` that the grade allows; None for bitwise.
        judged_steps: how many steps say something, see [Note: error over steps] in `grades`; None if not recorded.
    """

    what: str
    reference_error: float
    candidate_error: float
    limit: float | None
    judged_steps: int | None = None


@dataclass(frozen=True)
class Divergence:
    """The first place where bits differ, in the order in which a step computes."""

    step: int
    what: str


@dataclass(frozen=True)
class ParityReport:
    """The verdict on one pair of runs.

    Attributes:
        reference, candidate: engine names.
        asked: the grade that was asked.
        reached: the strictest grade that holds; None if none does.
        margin: how many times the limit exceeds the error at the tightest check; None for bitwise.
        passed: whether `reached` is as strict as `asked`, with nothing missing and all finite.
        reasons: why it did not pass, the most telling first.
        causes: what the pattern of errors suggests; a hint, no finding.
        first_divergence: where bits first differ; None if they never do.
        params: step 0, in the model's order.
        steps, trends: over steps; no trends without a referee.
    """

    reference: str
    candidate: str
    asked: Grade
    reached: Grade | None
    margin: float | None
    passed: bool
    reasons: tuple[str, ...]
    causes: tuple[str, ...]
    first_divergence: Divergence | None
    params: tuple[ParamRow, ...]
    steps: tuple[StepRow, ...]
    trends: tuple[TrendRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready data."""
        data: dict[str, Any] = json_ready(dataclasses.asdict(self))
        return data
