"""What a comparison says, as tidy tables: one row per fact, at full precision, sizes in bytes, times in seconds.

Cells are plain Python values (the columns have dtype object), since None, "there is none", is not the same as NaN,
"the number is not one", which pandas would make of it.

Left out: how a table looks; that is `views`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import pandas as pd

from bench.baseline import Change
from bench.judge import REFEREE, CollectiveRow, collective_rows, memory_rows
from common.harness.memory_record import CLASSES, PREDICTED, Timeline
from common.harness.records import RunRecord
from common.harness.report import ParamRow, ParityReport, TrendRow

GRADE = ("against", "asked", "reached", "margin")
"""In every table: the grade that was asked of an engine, the one it reached, and how far it stays under the limits.

Where a row belongs to an engine it is the grade against the reference; the margin is that of the whole comparison, but
of a row that is about one check, its own.
"""


def frame(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """A table of `rows` that keeps its columns if there are no rows."""
    return pd.DataFrame(list(rows), columns=list(columns), dtype=object)


def grade_of(report: ParityReport | None) -> dict[str, Any]:
    """The columns `GRADE`; empty for an engine that is not judged."""
    if report is None:
        return dict.fromkeys(GRADE)
    reached = report.reached and str(report.reached)
    return {"against": report.reference, "asked": str(report.asked), "reached": reached, "margin": report.margin}


def verdict_table(reports: Iterable[ParityReport]) -> pd.DataFrame:
    """One row per judged pair."""
    columns = ("engine", *GRADE, "passed", "first_difference", "reason")
    return frame(
        (
            {
                "engine": report.candidate,
                **grade_of(report),
                "passed": report.passed,
                "first_difference": _place(report),
                "reason": report.reasons[0] if report.reasons else None,
            }
            for report in reports
        ),
        columns,
    )


def loss_table(records: Mapping[str, RunRecord], graded: Mapping[str, ParityReport]) -> pd.DataFrame:
    """One row per step and engine: the loss of the whole batch, and the norm of the whole gradient.

    Args:
        graded: by engine, the report against the reference.
    """
    return frame(
        (
            {"step": step, "engine": engine, "loss": loss, "grad_norm": norm, **grade_of(graded.get(engine))}
            for engine, record in records.items()
            for step, (loss, norm) in enumerate(zip(record.mean_losses, record.grad_norms, strict=True))
        ),
        ("step", "engine", "loss", "grad_norm", *GRADE),
    )


def gradient_table(reports: Iterable[ParityReport]) -> pd.DataFrame:
    """One row per judged pair: the gradients of step 0, and the parameter that comes closest to its limit."""
    return frame(
        (_gradient_row(report) for report in reports),
        (
            *("engine", *GRADE, "params_bitwise", "params", "worst_param"),
            *("relative_distance", "error", "reference_error", "ratio", "limit", "row_error", "row_limit", "max_ulp"),
        ),
    )


def parameter_table(reports: Iterable[ParityReport]) -> pd.DataFrame:
    """One row per judged pair and parameter: the gradient of step 0."""
    return frame(
        (
            {"engine": each.candidate, **grade_of(each), "margin": _own_margin(row), **asdict(row)}
            for each in reports
            for row in each.params
        ),
        ("engine", *GRADE, *(field.name for field in fields(ParamRow))),
    )


def trend_table(reports: Iterable[ParityReport]) -> pd.DataFrame:
    """One row per judged pair and number that is followed over steps."""
    return frame(
        (
            {
                "engine": each.candidate,
                **grade_of(each),
                "margin": _margin(row.candidate_error, row.limit),
                **asdict(row),
            }
            for each in reports
            for row in each.trends
        ),
        ("engine", *GRADE, *(field.name for field in fields(TrendRow))),
    )


def memory_table(records: Mapping[str, RunRecord], graded: Mapping[str, ParityReport]) -> pd.DataFrame:
    """One row per engine: bytes of live tensors, the most of any rank; the referee's are of no interest."""
    return frame(
        (
            {
                "engine": engine,
                "ranks": record.world_size,
                "start_bytes": max((peak.start_bytes for peak in record.memory), default=None),
                "peak_bytes": max((peak.peak_bytes for peak in record.memory), default=None),
                "step_bytes": max((peak.peak_bytes - peak.start_bytes for peak in record.memory), default=None),
                "active_bytes": max((peak.active_bytes for peak in record.memory if peak.active_bytes), default=None),
                "reserved_bytes": max(
                    (peak.reserved_bytes for peak in record.memory if peak.reserved_bytes), default=None
                ),
                **grade_of(graded.get(engine)),
            }
            for engine, record in records.items()
            if engine != REFEREE
        ),
        ("engine", "ranks", "start_bytes", "peak_bytes", "step_bytes", "active_bytes", "reserved_bytes", *GRADE),
    )


def memory_class_table(records: Mapping[str, RunRecord], graded: Mapping[str, ParityReport]) -> pd.DataFrame:
    """One row per engine, rank and moment: live bytes by class, measured and predicted; not the referee's."""
    return frame(
        (
            {
                "engine": engine,
                "rank": row.rank,
                **asdict(row.point),
                "total": row.point.total,
                **{f"predicted_{name}": row.predicted and getattr(row.predicted, name) for name in PREDICTED},
                "ok": row.ok,
                **grade_of(graded.get(engine)),
            }
            for engine, record in records.items()
            if engine != REFEREE
            for row in memory_rows(engine, record)
        ),
        ("engine", "rank", "at", *CLASSES, "total", *(f"predicted_{name}" for name in PREDICTED), "ok", *GRADE),
    )


def timeline_table(records: Mapping[str, RunRecord], graded: Mapping[str, ParityReport]) -> pd.DataFrame:
    """One row per engine and sample: live bytes by class over one step, on the rank with the highest peak."""
    return frame(
        (
            {"engine": engine, "rank": line.rank, "time_s": time_s}
            | dict(zip(CLASSES, live, strict=True))
            | grade_of(graded.get(engine))
            for engine, line in timelines(records).items()
            for time_s, *live in zip(line.times_s, *(line.live[name] for name in CLASSES), strict=True)
        ),
        ("engine", "rank", "time_s", *CLASSES, *GRADE),
    )


def timelines(records: Mapping[str, RunRecord]) -> dict[str, Timeline]:
    """The timelines that there are, by engine; the referee's is of no interest."""
    return {
        engine: record.timeline
        for engine, record in records.items()
        if engine != REFEREE and record.timeline is not None
    }


def collective_table(records: Mapping[str, RunRecord], graded: Mapping[str, ParityReport]) -> pd.DataFrame:
    """One row per engine, phase and kind: one step on rank 0, counted and predicted."""
    return frame(
        (
            asdict(row) | grade_of(graded.get(engine))
            for engine, record in records.items()
            for row in collective_rows(engine, record)
        ),
        (*(field.name for field in fields(CollectiveRow)), *GRADE),
    )


def baseline_table(changes: Iterable[Change]) -> pd.DataFrame:
    """One row per figure of the baseline."""
    return frame(
        (
            {
                "engine": change.engine,
                "what": change.what,
                "unit": change.unit,
                "baseline": change.before,
                "now": change.now,
                "status": str(change.status),
            }
            for change in changes
        ),
        ("engine", "what", "unit", "baseline", "now", "status"),
    )


def _place(report: ParityReport) -> str | None:
    first = report.first_divergence
    return None if first is None else f"step {first.step}: {first.what}"


def _gradient_row(report: ParityReport) -> dict[str, Any]:
    worst = max((row for row in report.params if not row.bitwise), key=_badness, default=None)
    distances = [row.max_ulp for row in report.params if row.max_ulp is not None]
    return {
        "engine": report.candidate,
        **grade_of(report),
        "params_bitwise": sum(row.bitwise for row in report.params),
        "params": len(report.params),
        "worst_param": worst and worst.name,
        "relative_distance": worst and worst.relative_distance,
        "error": worst and worst.candidate_error,
        "reference_error": worst and worst.reference_error,
        "ratio": worst and worst.ratio,
        "limit": worst and worst.limit,
        "row_error": worst and worst.candidate_row_error,
        "row_limit": worst and worst.row_limit,
        "max_ulp": max(distances, default=None),
    }


def _own_margin(row: ParamRow) -> float | None:
    """The smaller of the margins of a whole gradient and of its worst row."""
    margins = [_margin(row.candidate_error, row.limit), _margin(row.candidate_row_error, row.row_limit)]
    return min((margin for margin in margins if margin is not None), default=None)


def _margin(error: float | None, limit: float | None) -> float | None:
    """How many times `limit` exceeds `error`; None where there is no limit."""
    if error is None or limit is None:
        return None
    return limit / error if error else math.inf


def _badness(row: ParamRow) -> tuple[bool, float]:
    """Orders parameters: by the share of its limit that an error uses, what is not a number last."""
    pairs = ((row.candidate_error, row.limit), (row.candidate_row_error, row.row_limit))
    shares = [error / limit for error, limit in pairs if error is not None and limit] or [row.relative_distance]
    return any(map(math.isnan, shares)), max(shares)
