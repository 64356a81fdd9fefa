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
from bench.judge import REFEREE, CollectiveRow, collective_rows
from common.harness.records import RunRecord
from common.harness.report import ParamRow, ParityReport


def frame(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """A table of `rows` that keeps its columns if there are no rows."""
    return pd.DataFrame(list(rows), columns=list(columns), dtype=object)


def verdict_table(reports: Iterable[ParityReport]) -> pd.DataFrame:
    """One row per judged pair."""
    columns = ("engine", "against", "asked", "reached", "margin", "passed", "first_difference", "reason")
    return frame(
        (
            {
                "engine": report.candidate,
                "against": report.reference,
                "asked": str(report.asked),
                "reached": report.reached and str(report.reached),
                "margin": report.margin,
                "passed": report.passed,
                "first_difference": _place(report),
                "reason": report.reasons[0] if report.reasons else None,
            }
            for report in reports
        ),
        columns,
    )


def loss_table(records: Mapping[str, RunRecord]) -> pd.DataFrame:
    """One row per step and engine: the loss of the whole batch, and the norm of the whole gradient."""
    return frame(
        (
            {"step": step, "engine": engine, "loss": loss, "grad_norm": norm}
            for engine, record in records.items()
            for step, (loss, norm) in enumerate(zip(record.mean_losses, record.grad_norms, strict=True))
        ),
        ("step", "engine", "loss", "grad_norm"),
    )


def gradient_table(reports: Iterable[ParityReport]) -> pd.DataFrame:
    """One row per judged pair: the gradients of step 0, and the parameter that comes closest to its limit."""
    return frame(
        (_gradient_row(report) for report in reports),
        (
            *("engine", "against", "asked", "reached", "params_bitwise", "params", "worst_param"),
            *("relative_distance", "error", "reference_error", "ratio", "limit", "row_error", "row_limit", "max_ulp"),
        ),
    )


def parameter_table(reports: Iterable[ParityReport]) -> pd.DataFrame:
    """One row per judged pair and parameter: the gradient of step 0."""
    return frame(
        (
            {"engine": each.candidate, "against": each.reference, **asdict(row)}
            for each in reports
            for row in each.params
        ),
        ("engine", "against", *(field.name for field in fields(ParamRow))),
    )


def memory_table(records: Mapping[str, RunRecord]) -> pd.DataFrame:
    """One row per engine: bytes of live tensors, the most of any rank; the referee's are of no interest."""
    return frame(
        (
            {
                "engine": engine,
                "ranks": record.world_size,
                "start_bytes": max((peak.start_bytes for peak in record.memory), default=None),
                "peak_bytes": max((peak.peak_bytes for peak in record.memory), default=None),
                "step_bytes": max((peak.peak_bytes - peak.start_bytes for peak in record.memory), default=None),
                "reserved_bytes": max(
                    (peak.reserved_bytes for peak in record.memory if peak.reserved_bytes), default=None
                ),
            }
            for engine, record in records.items()
            if engine != REFEREE
        ),
        ("engine", "ranks", "start_bytes", "peak_bytes", "step_bytes", "reserved_bytes"),
    )


def collective_table(records: Mapping[str, RunRecord]) -> pd.DataFrame:
    """One row per engine, phase and kind: one step on rank 0, counted and predicted."""
    return frame(
        (asdict(row) for engine, record in records.items() for row in collective_rows(engine, record)),
        [field.name for field in fields(CollectiveRow)],
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
        "against": report.reference,
        "asked": str(report.asked),
        "reached": report.reached and str(report.reached),
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


def _badness(row: ParamRow) -> tuple[bool, float]:
    """Orders parameters: by the share of its limit that an error uses, what is not a number last."""
    pairs = ((row.candidate_error, row.limit), (row.candidate_row_error, row.row_limit))
    shares = [error / limit for error, limit in pairs if error is not None and limit] or [row.relative_distance]
    return any(map(math.isnan, shares)), max(shares)
