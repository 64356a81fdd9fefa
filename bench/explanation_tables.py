"""What `explain` and `compare --bisect-passes` found, as a document, or as more of a comparison's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from bench.documents import Document, Section, comparison_document
from bench.explain import Explanation
from bench.stages import Bisection, StageRow
from bench.store import Comparison
from bench.tables import frame
from bench.views import view_stages, view_walk
from common.harness.divergence import PlaceRow

BEFORE, AFTER = 4, 8
"""How many places round the first divergence people are shown."""


def full_document(comparison: Comparison, lanes: Section | None = None) -> Document:
    """The document of a comparison, and below its own what was found out about it."""
    document = comparison_document(comparison, lanes)
    explanation, bisections = comparison.explanation, comparison.bisections
    lines = [line for bisection in bisections for line in bisection.lines]
    sections = []
    if explanation is not None:
        lines += [_title(explanation), *_lines(explanation)]
        sections += _walk_sections(explanation)
        bisections = (*bisections, *_bisections(explanation))
    return replace(
        document,
        lines=(*document.lines, *lines),
        sections=(*document.sections, *sections, *_stage_sections(bisections)),
    )


def explanation_document(explanation: Explanation) -> Document:
    """What was found, as a title, a few lines, and the tables behind them."""
    return Document(
        title=_title(explanation),
        holds=explanation.passed,
        lines=tuple(_lines(explanation)),
        sections=(*_walk_sections(explanation), *_stage_sections(_bisections(explanation))),
        machine={"explanation": _without_tables(explanation)},
    )


def _without_tables(explanation: Explanation) -> dict[str, Any]:
    """The rest is tables, which machine formats hold as such."""
    data = asdict(explanation)
    for table in ("rows", "bisection"):
        del data[table]
    return data


def _bisections(explanation: Explanation) -> tuple[Bisection, ...]:
    return () if explanation.bisection is None else (explanation.bisection,)


def _walk_sections(explanation: Explanation) -> list[Section]:
    """The walk, if there was one."""
    if not explanation.rows:
        return []
    walk = frame(({"place": row.place, **asdict(row)} for row in explanation.rows), _columns())
    at = next(
        (i for i, row in enumerate(explanation.rows) if explanation.finding and row == explanation.finding.row), 0
    )
    shown = slice(max(0, at - BEFORE), at + AFTER)
    title = f"Step {explanation.step}, {explanation.candidate} against {explanation.reference}, place by place"
    note = f"{len(walk.iloc[shown])} of {len(walk)} places; csv and json hold all; errors are relative to float64"
    view = view_walk(walk.iloc[shown]) if explanation.finding else None  # rows of zeros tell nobody anything
    return [Section("walk", title, walk, view, (note, *explanation.notes))]


def _stage_sections(bisections: Sequence[Bisection]) -> list[Section]:
    """Compiled engines, stage by stage, in one table."""
    rows = [
        {"engine": each.engine, "against": each.reference, **asdict(row)} for each in bisections for row in each.rows
    ]
    table = frame(rows, ("engine", "against", *(field.name for field in fields(StageRow))))
    return [Section("stages", "Stage by stage", table, view_stages(table))] if rows else []


def _columns() -> list[str]:
    return ["place", *(field.name for field in fields(PlaceRow))]


def _title(explanation: Explanation) -> str:
    finding, step = explanation.finding, explanation.step
    if not explanation.rows:
        return f"NOTHING TO EXPLAIN: {explanation.candidate} has the bits of {explanation.reference} at every step"
    if finding is not None and finding.breaks_promise:
        return f"FIRST DIVERGENCE: step {step}, {finding.row.place}"
    bisection = explanation.bisection
    if bisection is not None and bisection.guilty is not None:
        return f"FIRST DIVERGENCE: step {step}, brought in by the stage {bisection.guilty}"
    if not explanation.passed:
        return f"NOT FOUND: the pair fails, and step {step}, replayed, is within rounding at every place"
    if finding is not None:
        return f"NO DIVERGENCE BUT ROUNDING, which is first seen at: step {step}, {finding.row.place}"
    if bisection is not None and bisection.changing is not None:
        return (
            f"NO DIVERGENCE BUT ROUNDING, which the stage {bisection.changing} brings in; without it step {step} has "
            "equal bits"
        )
    return f"NOTHING FOUND: step {step}, replayed, has equal bits at every place"


def _lines(explanation: Explanation) -> list[str]:
    theirs, ours, finding = explanation.reference, explanation.candidate, explanation.finding
    lines = []
    if finding is not None:
        lines.append(f"differ: {finding.where}")
        if finding.index or finding.row.elements == 1:
            ulp = "" if finding.row.max_ulp is None else f"; {finding.row.max_ulp} ulp at most"
            lines.append(
                f"furthest at {list(finding.index)}: {theirs} {finding.reference_value!r}, {ours} "
                f"{finding.candidate_value!r}{ulp}"
            )
        lines += [f"likely: {cause}" for cause in finding.causes]
    else:
        lines += explanation.notes  # which else stand below the walk
    if explanation.bisection is not None:
        lines += explanation.bisection.lines
    return lines
