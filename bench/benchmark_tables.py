"""What a benchmark says, as one tidy table for machines, two for people, and a document around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from bench.benchmark import BenchRow, Spread
from bench.benchmark_files import Benchmark, Cell
from bench.documents import Document, Section, describe_job
from bench.tables import frame
from bench.views import GRADE, as_text, format_grade, format_number, format_size

_GRADE = ("asked", "reached", "margin")
_FIGURES = (
    "compute_s",
    "busy_s",
    "exposed_s",
    "stalled_s",
    "moving_s",
    "hidden",
    "edges_s",
    "bound_s",
    "efficiency",
    "tokens_per_s",
    "peak_bytes",
    "collectives",
    "first_step_s",
    "verdict",
    "failures",
)


_LINK_NOTES = (
    "busy: time on the link; exposed: slept in it; hidden: the share of busy that compute covered",
    "efficiency: bound / step, the bound being busy, or compute with what no schedule hides, the first gather and "
    "the last reduction, if that is more; over 100% where the compute-only steps were disturbed",
)


def benchmark_document(benchmark: Benchmark) -> Document:
    """The rows of all cells, and how to read them."""
    table = benchmark_table(benchmark)
    failures = benchmark.failures
    title = "engines without figures do not agree" if failures else _agreement(benchmark)
    links = dict.fromkeys((cell.link, cell.about, cell.job.link, cell.job.is_judged) for cell in benchmark.cells)
    first = benchmark.cells[0].job
    swept = ", ".join(name.replace("_", " ") for name in benchmark.swept if name != "link")
    varied = f"; this is the first cell, others differ in {swept}" if len(benchmark.cells) > 1 and swept else ""
    lines = (
        *failures,
        f"{describe_job(first)}; torch {benchmark.torch}{varied}",
        *(
            f"link {link}: {about}; "
            + (f"judged against {benchmark.reference} on link {carrier}" if is_judged else "nothing is judged")
            for link, about, carrier, is_judged in links
        ),
    )
    is_emulated = any(row.busy_s is not None for cell in benchmark.cells for row in cell.rows)
    notes = (
        "medians over turns, in brackets the middle half; compute: the same step on a link that costs nothing",
        *(_LINK_NOTES if is_emulated else ()),
        "speed: step of the first engine over this one's, turn by turn; no verdict where 1 is in the middle half, or "
        "where chance would give as lopsided a count of turns in 1 case of 20",
    )
    cost_note = "collectives of the engines at home are held against the plan's, and fail the row where they differ"
    sections = (
        Section("benchmark", "Throughput", table, throughput_view(benchmark), notes),
        Section("cost", "Parity, memory, collectives", None, cost_view(benchmark), (cost_note,)),
    )
    is_judged = any(cell.job.is_judged for cell in benchmark.cells)
    holds = not failures if is_judged or failures else None
    return Document(f"BENCH: {title}", holds, lines, sections, benchmark.to_dict())


def _agreement(benchmark: Benchmark) -> str:
    """What stands behind the figures, if none is missing."""
    judged = [cell.job.is_judged for cell in benchmark.cells]
    if all(judged):
        return "every engine agrees with the reference"
    return "one rank alone; nothing is judged on link fake" if not any(judged) else "nothing is judged on link fake"


def benchmark_table(benchmark: Benchmark) -> pd.DataFrame:
    """One row per cell and engine, at full precision."""
    cell_columns = ("link", "plan", "ranks", "reshard_after_forward", "block_backend", "disabled_passes")
    spreads = [f"{name}_{part}" for name in ("step_s", "speed") for part in ("median", "low", "high")]
    rows = [
        _cell_columns(cell) | _figures(row) | {"against": benchmark.reference if row.asked else None}
        for cell in benchmark.cells
        for row in cell.rows
    ]
    return frame(rows, (*cell_columns, "engine", "backend", "against", *_GRADE, *spreads, *_FIGURES))


def throughput_view(benchmark: Benchmark) -> pd.DataFrame:
    """Times for people: what was swept first, then the figures."""
    rows = [row for cell in benchmark.cells for row in cell.rows]
    return as_text(
        _named(benchmark)
        | {
            "step ms": [_spread(row.step_s, "{:.1f}", 1e3) for row in rows],
            "tokens/s": _column(rows, lambda row: row.tokens_per_s, "{:,.0f}"),
            "compute ms": _column(rows, lambda row: row.compute_s, "{:.1f}", 1e3),
            "busy ms": _column(rows, lambda row: row.busy_s, "{:.1f}", 1e3),
            "exposed ms": _column(rows, lambda row: row.exposed_s, "{:.1f}", 1e3),
            "hidden": _column(rows, lambda row: row.hidden, "{:.0%}"),
            "efficiency": _column(rows, lambda row: row.efficiency, "{:.0%}"),
            "speed": [_spread(row.speed, "{:.2f}x") for row in rows],
            "verdict": [row.verdict for row in rows],
        }
    )


def cost_view(benchmark: Benchmark) -> pd.DataFrame:
    """What the times stand on, and what else a step takes, for people."""
    rows = [row for cell in benchmark.cells for row in cell.rows]
    return as_text(
        _named(benchmark)
        | {
            GRADE: [format_grade(row.asked, row.reached, row.margin) for row in rows],
            "peak": [format_size(row.peak_bytes) for row in rows],
            "collectives": [row.collectives for row in rows],
            "first step s": _column(rows, lambda row: row.first_step_s, "{:.1f}"),
        }
    )


def _named(benchmark: Benchmark) -> dict[str, list[Any]]:
    """What tells rows apart: what was swept, engine and backend."""
    pairs = [(cell, row) for cell in benchmark.cells for row in cell.rows]
    names = [name for name in benchmark.swept if name != "backend"]  # that is a column of its own
    swept = {name.replace("_", " "): [_cell_columns(cell)[name] for cell, _ in pairs] for name in names}
    return swept | {"engine": [row.engine for _, row in pairs], "backend": [row.backend for _, row in pairs]}


def _column(
    rows: Sequence[BenchRow], figure: Callable[[BenchRow], float | None], form: str, scale: float = 1.0
) -> list[str | None]:
    values = [figure(row) for row in rows]
    return [format_number(value if value is None else value * scale, form) for value in values]


def _cell_columns(cell: Cell) -> dict[str, Any]:
    job = cell.job
    return {
        "link": cell.link,
        "plan": job.plan,
        "ranks": job.ranks,
        "reshard_after_forward": job.reshard_after_forward,
        "block_backend": job.block_backend,
        "disabled_passes": ",".join(job.disabled_passes) or "none",
    }


def _figures(row: BenchRow) -> dict[str, Any]:
    figures: dict[str, Any] = {"engine": row.engine, "backend": row.backend}
    for name in ("step_s", "speed"):
        spread: Spread | None = getattr(row, name)
        for part in ("median", "low", "high"):
            figures[f"{name}_{part}"] = None if spread is None else getattr(spread, part)
    return (
        figures
        | {name: getattr(row, name) for name in (*_GRADE, *_FIGURES)}
        | {"failures": "; ".join(row.failures) or None}
    )


def _spread(spread: Spread | None, form: str, scale: float = 1.0) -> str | None:
    if spread is None:
        return None
    median, low, high = (form.format(value * scale) for value in (spread.median, spread.low, spread.high))
    return f"{median} [{low}, {high}]"
