"""A document in one of five formats.

    table  for a terminal
    md     for a pull request
    html   one file that needs no other
    csv    one table of all: the first column names the table, cells that a table lacks are empty
    json   everything, with a schema version

What is not a number is the text "nan", "inf" or "-inf" in csv and json.
"""

from __future__ import annotations

import html
import io
import json
import math
import os
import sys
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench import svg
from bench.baseline import Status
from bench.documents import Document, Section
from bench.views import FAIL, MISMATCH, NONE, PASS

WIDE = 200
"""Columns where there is no terminal: nothing wraps there, and files have no edge."""

_GOOD, _BAD = "bold green", "bold red"
_STYLES = {PASS: "green", "ok": "green", FAIL: _BAD, MISMATCH: _BAD, Status.WORSE: _BAD, Status.BETTER: "green"}
_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; }
body { color: var(--text); background: var(--paper); color-scheme: light dark; }
:root { --good: #17692f; --bad: #b00020; }
@media (prefers-color-scheme: dark) { :root { --good: #6fce8b; --bad: #ff8a8a; } }
h1 { font-size: 1.4em; } h1.holds { color: var(--good); } h1.fails { color: var(--bad); }
h2 { font-size: 1.1em; margin: 1.6em 0 0.4em; }
table { border-collapse: collapse; } td, th { padding: 0.2em 0.8em; text-align: left; }
td, th { border-bottom: 1px solid var(--line); } th { border-bottom: 2px solid var(--faint); }
td { font-variant-numeric: tabular-nums; white-space: nowrap; } td.number, th.number { text-align: right; }
td.good { color: var(--good); } td.bad { color: var(--bad); font-weight: bold; }
p.note { color: var(--faint); font-size: 0.9em; } div { overflow-x: auto; }
"""


class _Console(Console):
    """Leaves a broken pipe to `emit`; rich would end the process with exit code 1, which here is a verdict."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def emit(document: Document, form: str) -> None:
    """Print `document` on stdout in the format `form`; a reader who has left early is no error."""
    try:
        if form == "table":
            print_tables(document, _Console(width=None if sys.stdout.isatty() else _width_without_terminal()))
        else:
            sys.stdout.write(render(document, form))
        sys.stdout.flush()
    except BrokenPipeError:
        # nothing that is printed later, by Python at its exit for one, may fail on it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def render(document: Document, form: str) -> str:
    """`document` as text: "json", "csv", "md" or "html"."""
    writers = {"json": to_json, "csv": to_csv, "md": to_markdown, "html": to_html}
    return writers[form](document)


def print_tables(document: Document, console: Console) -> None:
    """Print the title, then one table for each section, on `console`."""
    console.print(Text(document.title, style={True: _GOOD, False: _BAD, None: "bold"}[document.holds]), soft_wrap=True)
    for line in document.lines:
        console.print(Text(line), soft_wrap=True)
    for section, view in _shown(document):
        table = Table()
        for name in view.columns:
            table.add_column(Text(str(name)), justify="right" if _is_numeric(view[name]) else "left", overflow="fold")
        for row in view.itertuples(index=False):
            table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
        console.print()
        console.print(Text(section.title, style="bold"))
        console.print(table)
        for note in section.notes:
            console.print(Text(note, style="dim"), soft_wrap=True)


def to_json(document: Document) -> str:
    """All that is known, one object."""
    return json.dumps(document.to_dict(), indent=1, allow_nan=False) + "\n"


def to_csv(document: Document) -> str:
    """All tables in one, at full precision; `pandas.read_csv(...).query("table == 'loss'")` takes one out."""
    held = [(section.name, section.data) for section in document.sections if section.data is not None]
    parts = [data.map(_cell).assign(table=name) for name, data in held]
    columns = list(dict.fromkeys(name for part in parts for name in part.columns if name != "table"))
    rows = pd.concat([part.reindex(columns=["table", *columns]).astype(object) for part in parts])
    stream = io.StringIO()
    rows.to_csv(stream, index=False, lineterminator="\n")
    return stream.getvalue()


def to_markdown(document: Document) -> str:
    """Headings and pipe tables."""
    parts = [f"# {document.title}", *document.lines]
    for section, view in _shown(document):
        parts.append(f"## {section.title}")
        head = [str(name) for name in view.columns]
        rule = ["---:" if _is_numeric(view[name]) else "---" for name in view.columns]
        rows = [head, rule, *([_escaped(cell) for cell in row] for row in view.itertuples(index=False))]
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
        parts += section.notes
    return "\n\n".join(parts) + "\n"


def to_html(document: Document) -> str:
    """A page with its style and its pictures inside."""
    state = {True: ' class="holds"', False: ' class="fails"', None: ""}[document.holds]
    parts = [f"<h1{state}>{html.escape(document.title)}</h1>", *(f"<p>{html.escape(x)}</p>" for x in document.lines)]
    for section in document.sections:
        if section.picture:
            parts += [f"<h2>{html.escape(section.title)}</h2>", section.picture]
        elif section.view is not None:
            parts += [f"<h2>{html.escape(section.title)}</h2>", _html_table(section.view)]
            parts += [f'<p class="note">{html.escape(note)}</p>' for note in section.notes]
    title = html.escape(document.title)
    head = f'<meta charset="utf-8">\n<title>{title}</title>\n<style>{_CSS}{svg.CSS}</style>'
    body = "\n".join(parts)
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


def _shown(document: Document) -> list[tuple[Section, pd.DataFrame]]:
    """The sections that people see."""
    return [(section, section.view) for section in document.sections if section.view is not None]


def _width_without_terminal() -> int:
    return int(os.environ.get("COLUMNS") or WIDE)


def _is_numeric(column: pd.Series[Any]) -> bool:
    """Whether a column of text holds numbers, perhaps with a unit, and nothing else but gaps."""
    cells = [cell for cell in column if cell not in (NONE, "")]
    return bool(cells) and all(cell[0].isdigit() or cell[0] in "-+" or cell in ("nan", "inf") for cell in cells)


def _cell(value: Any) -> Any:
    """A csv cell: a number in full, NaN as a word; None stays, and is empty, as are the cells that a table lacks."""
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    return value


def _escaped(cell: str) -> str:
    return cell.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def _html_table(view: pd.DataFrame) -> str:
    """Columns of numbers stand at the right."""
    numeric = [_is_numeric(view[name]) for name in view.columns]
    head = "".join(_html_cell(str(name), "th", is_number) for name, is_number in zip(view, numeric, strict=True))
    rows = "".join(
        f"<tr>{''.join(_html_cell(cell, 'td', is_number) for cell, is_number in zip(row, numeric, strict=True))}</tr>\n"
        for row in view.itertuples(index=False)
    )
    return f"<div><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table></div>"


def _html_cell(cell: str, tag: str, is_number: bool) -> str:
    style = {_STYLES["ok"]: "good", _BAD: "bad"}.get(_STYLES.get(cell, ""), "number" if is_number else "")
    return f"<{tag}{f' class={chr(34)}{style}{chr(34)}' if style else ''}>{html.escape(cell)}</{tag}>"
