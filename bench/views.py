"""How the tables look to people: cells as text, loss laid out by step, what everyone would skip left out.

Machine formats never come through here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pandas as pd

from bench.baseline import Status

MAX_STEPS = 12
"""A longer run shows this many of its steps, the first and the last among them."""
NONE = "-"
PASS, FAIL, MISMATCH, UNJUDGED, UNREACHED = "PASS", "FAIL", "MISMATCH", "no formula", "none"
GRADE = "asked / reached"
"""Title of the column that holds a grade in short."""


def view_verdict(table: pd.DataFrame) -> pd.DataFrame:
    """One row per judged pair."""
    return as_text(
        {
            "engine": table["engine"],
            "against": table["against"],
            "asked": table["asked"],
            "reached": table["reached"],
            "margin": [format_margin(value) for value in table["margin"]],
            "verdict": [PASS if passed else FAIL for passed in table["passed"]],
            "first difference": table["first_difference"],
        }
    )


def view_loss(table: pd.DataFrame) -> pd.DataFrame:
    """One row per step shown, one column per engine; below them the grade of each."""
    grades = {str(row["engine"]): row for row in table.to_dict(orient="records")}
    wide = table.pivot(index="step", columns="engine", values="loss")
    shown = shown_steps(len(wide))
    columns: dict[str, Iterable[Any]] = {"step": [*shown, "asked", "reached", "margin"]}
    for engine, row in grades.items():
        losses = (format_number(loss, "{:.7f}") for loss in wide[engine].iloc[shown])
        reached = row["asked"] and (row["reached"] or UNREACHED)
        columns[engine] = [*losses, row["asked"], reached, format_margin(row["margin"])]
    return as_text(columns)


def shown_steps(steps: int) -> list[int]:
    """The first and the last of `steps` steps, and some evenly between."""
    if steps <= MAX_STEPS:
        return list(range(steps))
    return [round(i * (steps - 1) / (MAX_STEPS - 1)) for i in range(MAX_STEPS)]


def view_gradients(table: pd.DataFrame) -> pd.DataFrame:
    """One row per judged pair."""
    equal = zip(table["params_bitwise"], table["params"], strict=True)
    return as_text(
        {
            "engine": table["engine"],
            "against": table["against"],
            "asked": table["asked"],
            "reached": table["reached"],
            "margin": [format_margin(value) for value in table["margin"]],
            "bitwise": [f"{same} of {total}" for same, total in equal],
            "worst parameter": table["worst_param"],
            "error": [format_number(value, "{:.2e}") for value in table["error"]],
            "its reference's": [format_number(value, "{:.2e}") for value in table["reference_error"]],
            "ratio": [format_number(value, "{:.3g}") for value in table["ratio"]],
            "limit": [format_number(value, "{:.2e}") for value in table["limit"]],
            "max ulp": [value if value is None or value < 10**6 else f"{value:.1e}" for value in table["max_ulp"]],
        }
    )


def view_memory(table: pd.DataFrame) -> pd.DataFrame:
    """One row per engine; what a GPU's allocator reserved only where there is one."""
    columns = {
        "engine": table["engine"],
        "ranks": table["ranks"],
        "at start": [format_size(value) for value in table["start_bytes"]],
        "peak": [format_size(value) for value in table["peak_bytes"]],
        "peak over start": [format_size(value) for value in table["step_bytes"]],
    }
    if any(value is not None for value in table["reserved_bytes"]):
        columns["reserved"] = [format_size(value) for value in table["reserved_bytes"]]
    return as_text(columns | {GRADE: format_grades(table)})


def view_collectives(table: pd.DataFrame) -> pd.DataFrame:
    """One row per engine, phase and kind."""
    marks = {True: "ok", False: MISMATCH, None: UNJUDGED}
    return as_text(
        {
            "engine": table["engine"],
            "phase": table["phase"],
            "kind": table["kind"],
            "count": table["count"],
            "size": [format_size(value) for value in table["bytes"]],
            "predicted": table["predicted_count"],
            "predicted size": [format_size(value) for value in table["predicted_bytes"]],
            "ok?": [marks[value] for value in table["ok"]],
            GRADE: format_grades(table),
        }
    )


def view_baseline(table: pd.DataFrame) -> pd.DataFrame:
    """One row per figure that is not the baseline's, sizes to the byte."""
    changed = table[table["status"] != Status.SAME]
    return as_text(
        {
            "engine": changed["engine"],
            "what": changed["what"],
            "unit": [value or None for value in changed["unit"]],
            "baseline": [_plain(value) for value in changed["baseline"]],
            "now": [_plain(value) for value in changed["now"]],
            "verdict": changed["status"],
        }
    )


def view_plain(table: pd.DataFrame) -> pd.DataFrame:
    """Every column as it is, whole numbers with separators."""
    return as_text({str(name): [_plain(value) for value in table[name]] for name in table.columns})


def as_text(columns: dict[str, Any]) -> pd.DataFrame:
    """Columns as cells of text; `NONE` where there is nothing."""
    cells = {name: [NONE if value is None else str(value) for value in values] for name, values in columns.items()}
    return pd.DataFrame(cells, dtype=object)


def _plain(value: Any) -> Any:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value


def format_number(value: float | None, form: str) -> str | None:
    """A number in `form`; what is not finite as it is."""
    if value is None:
        return None
    return form.format(value) if math.isfinite(value) else str(value)


def format_margin(margin: float | None) -> str | None:
    """How many times the limit exceeds the error."""
    return format_number(margin, "{:.3g}x")


def format_grades(table: pd.DataFrame) -> list[str | None]:
    """The columns asked, reached and margin in one, such as "compiler / reduction-order 5.2x"."""
    rows = zip(table["asked"], table["reached"], table["margin"], strict=True)
    return [format_grade(*row) for row in rows]


def format_grade(asked: str | None, reached: str | None, margin: float | None) -> str | None:
    """A grade in short; None where none was asked."""
    if asked is None:
        return None
    return " ".join(filter(None, (f"{asked} / {reached or UNREACHED}", format_margin(margin))))


def format_size(size: int | None) -> str | None:
    """Bytes in the unit that leaves one to three digits before the point."""
    if size is None:
        return None
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{size} B" if unit == "B" else f"{value:.2f} {unit}"


def view_walk(table: pd.DataFrame) -> pd.DataFrame:
    """One row per place of a step."""
    return as_text(
        {
            "place": table["place"],
            "elements": table["elements"],
            "differing": table["differing"],
            "max ulp": [value if value is None or value < 10**6 else f"{value:.1e}" for value in table["max_ulp"]],
            "reference's error": [format_number(value, "{:.2e}") for value in table["reference_error"]],
            "error": [format_number(value, "{:.2e}") for value in table["candidate_error"]],
            "limit": [format_number(value, "{:.2e}") for value in table["limit"]],
            "note": table["note"],
        }
    )


def view_stages(table: pd.DataFrame) -> pd.DataFrame:
    """One row per stage of a compiled engine."""
    return as_text(
        {
            "stage": table["stage"],
            "asked": table["asked"],
            "reached": table["reached"],
            "margin": [format_number(value, "{:.3g}x") for value in table["margin"]],
            "verdict": [PASS if passed else FAIL for passed in table["passed"]],
            "gradients that differ": table["params_differ"],
            "peak": [format_size(value) for value in table["peak_bytes"]],
            "collectives": table["collectives"],
        }
    )
