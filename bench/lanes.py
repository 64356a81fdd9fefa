"""One step drawn as lanes of text, engines under each other on one time scale: what computes while what travels.

    eager      phase    fffffffffffffffffffffbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbo
               compute  .aaabbbbbbbccccccc.ddddddddccccccccc..bbbbbbbbbaaaa.......
               gather   aabbcc·dd··cc··bb··
               reduce   ······dd···ccc

Every bucket has a letter; `.` is waiting, `·` an idle link. A cell shows what took most of its time; a launch, which
is short, counts as compute of nobody in particular.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from string import ascii_lowercase, ascii_uppercase

import pandas as pd

from bench.documents import Document, Section
from bench.lanes_picture import lanes_of, lanes_picture, step_length
from bench.tables import frame
from bench.views import as_text
from common.harness.instruments.trace import LAUNCH, PHASE, WAIT, Span

WIDTH = 100
"""Characters of the longest step, unless it is said."""
LETTERS = ascii_lowercase + ascii_uppercase
_WAITING, _IDLE, _NOBODY = ".", "·", "-"
_COLUMNS = ("engine", "lane", "kind", "name", "start_s", "end_s", "bytes")


def lanes_document(steps: Mapping[str, Sequence[Span]], *, rank: int, width: int) -> Document:
    """The steps of several engines, by name, of one rank; the longest takes `width` cells."""
    summary = ", ".join(f"{engine} {step_length(spans) * 1e3:.1f} ms" for engine, spans in steps.items())
    return Document(f"LANES: {summary}", None, (), (lanes_section(steps, rank=rank, width=width),), {"rank": rank})


def lanes_section(steps: Mapping[str, Sequence[Span]], *, rank: int, width: int = WIDTH) -> Section:
    """The same as one part of a document."""
    longest_s = max(step_length(spans) for spans in steps.values())
    letters = _letters(steps.values())
    view = _view(steps, letters, longest_s / width, width)
    buckets = ", ".join(f"{letter} {name}" for name, letter in letters.items())
    notes = (
        f"one cell is {longest_s / width * 1e3:.3g} ms; a cell shows what took most of it; recording slows a step down",
        f"buckets: {buckets}" if buckets else "no collective names a bucket",
        f"phase: forward, backward, optimizer; compute: a bucket's letter, {_WAITING} waits, {_NOBODY} launches, or "
        f"computes for no bucket; {_IDLE} nothing",
    )
    rows = [
        {"engine": engine} | {name: getattr(span, name) for name in _COLUMNS[1:]}
        for engine, spans in steps.items()
        for span in spans
    ]
    title = f"One step of rank {rank}"
    return Section("lanes", title, frame(rows, _COLUMNS), view, notes, lanes_picture(steps, letters))


def _view(steps: Mapping[str, Sequence[Span]], letters: Mapping[str, str], cell_s: float, width: int) -> pd.DataFrame:
    columns: dict[str, list[str]] = {"engine": [], "lane": [], "": []}
    for engine, spans in steps.items():
        for lane, text in _drawings(spans, letters, cell_s, width):
            columns["engine"].append("" if columns["engine"] and lane != PHASE else engine)
            columns["lane"].append(lane)
            columns[""].append(text)
    return as_text(columns)


def _drawings(
    spans: Sequence[Span], letters: Mapping[str, str], cell_s: float, width: int
) -> Iterable[tuple[str, str]]:
    """The lanes of one step, each with what is drawn on it."""
    cells = min(width, math.ceil(step_length(spans) / cell_s))
    for title, lane in lanes_of(spans):
        yield title, draw([(span, _mark(span, letters)) for span in lane], cell_s, cells, _IDLE)


def draw(spans: Iterable[tuple[Span, str]], cell_s: float, width: int, idle: str) -> str:
    """One lane of `width` cells, each as the mark that fills most of it, or `idle` if that is most."""
    filled: list[dict[str, float]] = [defaultdict(float) for _ in range(width)]
    for span, mark in spans:
        for cell in range(max(0, int(span.start_s / cell_s)), min(width - 1, int(span.end_s / cell_s)) + 1):
            overlap_s = min(span.end_s, (cell + 1) * cell_s) - max(span.start_s, cell * cell_s)
            filled[cell][mark] += max(0.0, overlap_s)
    text = ""
    for marks in filled:
        empty_s = cell_s - sum(marks.values())
        mark, most_s = max(marks.items(), key=lambda item: item[1], default=(idle, 0.0))
        text += mark if most_s > empty_s else idle
    return text


def _mark(span: Span, letters: Mapping[str, str]) -> str:
    if span.lane == PHASE:
        return span.name[:1]
    fixed = {WAIT: _WAITING, LAUNCH: _NOBODY}
    return fixed.get(span.kind) or letters.get(span.name, _NOBODY)


def _letters(steps: Iterable[Sequence[Span]]) -> dict[str, str]:
    """A letter for each bucket, in the order of their first launch; they repeat after 52."""
    names = dict.fromkeys(
        span.name
        for spans in steps
        for span in sorted(spans, key=lambda span: span.start_s)
        if span.kind == LAUNCH and span.name
    )
    return {name: LETTERS[number % len(LETTERS)] for number, name in enumerate(names)}
