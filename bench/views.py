"""How the tables look to people: cells as text, loss laid out by step, what everyone would skip left out.

Machine formats never come through here.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import pandas as pd

from bench.baseline import Status
from common.harness.memory_record import (
    CLASSES,
    GATHERED,
    GRADIENTS,
    MESSAGES,
    OTHER,
    PARAMETERS,
    PEAK,
    START,
    STATE,
    Timeline,
)

MAX_STEPS = 12
"""A longer run shows this many of its steps, the first and the last among them."""
NONE = "-"
PASS, FAIL, MISMATCH, UNJUDGED, UNREACHED = "PASS", "FAIL", "MISMATCH", "no formula", "none"
GRADE = "asked / reached"
"""Title of the column that holds a grade in short."""
CLASS_TITLES = {
    PARAMETERS: "parameters",
    STATE: "optimizer state",
    GRADIENTS: "gradients",
    GATHERED: "gathered",
    MESSAGES: "messages",
    OTHER: "activations, other",
}
SPARKS = (10, 14, 4)
"""Characters for forward, backward and optimizer in a line of text."""
_SPARK = "▁▂▃▄▅▆▇█"
_MARKS: dict[bool | None, str] = {True: "ok", False: MISMATCH, None: UNJUDGED}


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
            "first bit that differs": table["first_difference"],
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


def view_memory(table: pd.DataFrame, lines: Mapping[str, Timeline] | None = None) -> pd.DataFrame:
    """One row per engine; columns of a GPU's allocator only where there is one, live bytes only where known."""
    columns = {
        "engine": table["engine"],
        "ranks": table["ranks"],
        "at start": [format_size(value) for value in table["start_bytes"]],
        "peak": [format_size(value) for value in table["peak_bytes"]],
    }
    for name in ("active", "reserved"):
        if any(value is not None for value in table[f"{name}_bytes"]):
            columns[name] = [format_size(value) for value in table[f"{name}_bytes"]]
    if lines:
        most = max(max(line.totals) for line in lines.values())
        drawn = {engine: sparkline(line, most) for engine, line in lines.items()}
        columns["forward │ backward │ optimizer"] = [drawn.get(engine) for engine in table["engine"]]
    return as_text(columns | {GRADE: format_grades(table)})


def sparkline(line: Timeline, most: int) -> str:
    """Live bytes over one step in about 30 characters, phases set apart; a full block is `most` bytes."""
    phases = []
    for samples, width in zip(by_phase(line), SPARKS, strict=False):
        totals = [sum(sample) for sample in samples]
        edges = [round(i * len(totals) / width) for i in range(width + 1)]
        highest = [max(totals[min(a, len(totals) - 1) : max(b, a + 1)]) for a, b in pairwise(edges)]
        phases.append("".join(_SPARK[min(7, total * 8 // most)] for total in highest))
    return "│".join(phases)


def by_phase(line: Timeline) -> list[list[tuple[int, ...]]]:
    """The samples in each phase, the bytes of each class; a phase in which nothing changed has that of its start."""
    samples = list(zip(*(line.live[name] for name in CLASSES), strict=True))
    phases, begin = [], 0
    for end_s in line.ends_s.values():
        end = bisect_right(line.times_s, end_s)
        phases.append(samples[begin:end] or samples[max(0, begin - 1) : begin])
        begin = end
    return phases


def view_memory_classes(table: pd.DataFrame) -> pd.DataFrame:
    """One row per engine and moment, of the rank with the highest peak."""
    rows = [row for engine, part in table.groupby("engine", sort=False) for row in _of_highest_peak(part)]
    columns: dict[str, list[Any]] = {
        "engine": [row["engine"] if row["at"] == START else "" for row in rows],
        "at": ["at the " + row["at"] if row["at"] in (START, PEAK) else "after " + row["at"] for row in rows],
    }
    for name in CLASSES:
        columns[CLASS_TITLES[name]] = [format_size(row[name]) if row[name] else NONE for row in rows]
    columns["all"] = [format_size(row["total"]) for row in rows]
    columns["formula"] = [_MARKS[row["ok"]] if row["at"] != PEAK else "" for row in rows]
    grades = format_grades(table.loc[[row["index"] for row in rows]])
    columns[GRADE] = [grade if row["at"] == START else "" for grade, row in zip(grades, rows, strict=True)]
    return as_text(columns)


def _of_highest_peak(part: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of one rank; of several with the same peak the first."""
    peaks = part[part["at"] == PEAK]
    rank = peaks["rank"].tolist()[max(range(len(peaks)), key=peaks["total"].tolist().__getitem__)]
    rows: list[dict[str, Any]] = part[part["rank"] == rank].reset_index().to_dict(orient="records")
    return rows


def view_collectives(table: pd.DataFrame) -> pd.DataFrame:
    """One row per engine, phase and kind."""
    return as_text(
        {
            "engine": table["engine"],
            "phase": table["phase"],
            "kind": table["kind"],
            "count": table["count"],
            "size": [format_size(value) for value in table["bytes"]],
            "predicted": table["predicted_count"],
            "predicted size": [format_size(value) for value in table["predicted_bytes"]],
            "ok?": [_MARKS[value] for value in table["ok"]],
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
            "engine": table["engine"],
            "against": table["against"],
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
