"""Tables and formats, from records that were frozen: no rank runs here.

`frozen/` is what `fsdp-parity compare --model parity_tests.engines.models:bigram --engines eager,compiled,ddp
--backend aot_eager --steps 14 --batch 4 --seq 8 --lr 1` wrote, but for the gradients, and with collectives `predicted`,
which of a user's own model they are not, by the formulas for models at home. A change that cannot read it needs a new
schema version, and new records.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from bench import tables, views
from bench.documents import comparison_document
from bench.judge import memory_rows
from bench.lanes import lanes_section
from bench.render import print_tables, render
from bench.store import Comparison, load_comparison, save_comparison
from common.harness.grades import Grade
from common.harness.instruments.trace import COMPUTE, LAUNCH, PHASE, Span
from common.harness.memory_record import CLASSES, PredictedPoint, Timeline
from common.harness.records import engine_file
from parity_tests.cli_calls import FROZEN, call

TEXT_FORMATS = ("table", "md", "html")
ENGINES = ["single", "eager", "compiled", "ddp", "float64"]


def stored(name: str) -> dict[str, Any]:
    """A frozen file as plain data: what tables are checked against."""
    data: dict[str, Any] = json.loads((FROZEN / f"{name}.json").read_text())
    return data


def covers(found: Any, expected: Any) -> bool:
    """Whether nested data hold all that is expected; fields that came later may stand beside it."""
    if isinstance(expected, dict):
        return isinstance(found, dict) and all(key in found and covers(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(covers, found, expected))
    return type(found) is type(expected) and bool(found == expected)


def plain(data: Any) -> Any:
    """What a reader of the JSON would see."""
    return json.loads(json.dumps(data))


def text(comparison: Comparison, form: str, width: int = 250) -> str:
    """What is printed of `comparison`; the table without colours."""
    document = comparison_document(comparison)
    if form != "table":
        return render(document, form)
    stream = io.StringIO()
    print_tables(document, Console(file=stream, width=width))
    return stream.getvalue()


def write(folder: Path, comparison: Comparison) -> None:
    """Store `comparison` in a folder that need not exist."""
    folder.mkdir(parents=True)
    save_comparison(folder, comparison)
    for name, record in comparison.records.items():
        engine_file(folder, name, ".json").write_text(json.dumps(record.to_dict()))


def broken_loss(comparison: Comparison) -> Comparison:
    """One in which the loss of eager is not a number at step 13, the gradient of one parameter infinitely far off."""
    record = comparison.records["eager"]
    losses = [*record.losses[:-1], [math.nan, math.nan]]
    report = next(each for each in comparison.reports if each.candidate == "eager")
    params = (replace(report.params[0], candidate_error=math.inf, ratio=math.inf), *report.params[1:])
    failed = replace(
        report, reached=None, margin=0.0, passed=False, reasons=("eager, step 13: loss is nan",), params=params
    )
    return replace(
        comparison,
        records={**comparison.records, "eager": replace(record, losses=losses)},
        reports=tuple(failed if each is report else each for each in comparison.reports),
    )


def unpredicted(comparison: Comparison) -> Comparison:
    """One in which eager gathers once more in forward than its plan says, and not at all in backward."""
    record = comparison.records["eager"]
    counted = [
        replace(each, count=each.count + 1) if each.phase == "forward" else each
        for each in record.collectives
        if (each.phase, each.kind) != ("backward", "all_gather")
    ]
    return replace(comparison, records={**comparison.records, "eager": replace(record, collectives=counted)})


def test_frozen_records_are_what_was_stored(frozen: Comparison) -> None:
    """Reading and writing loses nothing, not a digit."""
    report = stored("report")
    assert covers(plain(frozen.to_dict()), report)
    for name in report["engines"]:
        assert covers(plain(frozen.records[name].to_dict()), stored(name))
    assert frozen.reports[0].asked is Grade.BITWISE
    assert frozen.holds and list(frozen.records) == ENGINES


@pytest.mark.parametrize("change", [broken_loss, unpredicted])
def test_stored_comparison_comes_back_as_it_was(
    change: Callable[[Comparison], Comparison], frozen: Comparison, tmp_path: Path
) -> None:
    """Also with numbers that JSON has none for; what is printed is the same in every format."""
    comparison = change(frozen)
    write(tmp_path / "run", comparison)
    again = load_comparison(tmp_path / "run")
    assert again.to_dict() == comparison.to_dict()
    for form in (*TEXT_FORMATS, "csv", "json"):
        assert text(again, form) == text(comparison, form)


def test_json_holds_everything(frozen: Comparison) -> None:
    """The report, every record and every table, with a schema version; other programs can read it."""
    document = json.loads(text(frozen, "json"), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    report = stored("report")
    assert document["schema"] == 1
    assert covers(document, report)
    assert covers(document["records"], {name: stored(name) for name in ENGINES})
    memory = ("memory", "memory_timeline", "memory_classes")
    assert list(document["tables"]) == [
        *("verdict", "loss", "gradients", "parameters", "trends", *memory, "collectives")
    ]
    assert len(document["tables"]["parameters"]) == 3 * len(report["comparisons"])


def test_csv_gives_back_each_table(frozen: Comparison) -> None:
    """pandas reads it, picks a table by its name, and finds every loss bit for bit and whole numbers whole."""
    everything = pd.read_csv(io.StringIO(text(frozen, "csv")), dtype=str)
    assert everything.columns[0] == "table"
    loss = everything.query("table == 'loss'").dropna(axis=1, how="all")
    assert set(loss.columns) == {"table", "step", "engine", "loss", "grad_norm", *tables.GRADE}
    for name in ENGINES:
        record, rows = stored(name), loss[loss["engine"] == name]
        assert rows["step"].tolist() == [str(step) for step in range(14)]
        assert [float(cell) for cell in rows["loss"]] == [sum(step) / len(step) for step in record["losses"]]
        assert [float(cell) for cell in rows["grad_norm"]] == record["grad_norms"]
    plain = pd.read_csv(io.StringIO(text(frozen, "csv")), dtype=str, keep_default_na=False)
    assert set(plain[plain["table"] == "loss"]["peak_bytes"]) == {""}
    memory = plain[(plain["table"] == "memory") & (plain["engine"] == "eager")]
    assert memory["peak_bytes"].tolist() == [str(max(rank["peak_bytes"] for rank in stored("eager")["memory"]))]
    assert plain[plain["table"] == "collectives"]["ok"].tolist() == ["True"] * 6 + [""]


@pytest.mark.parametrize("form", TEXT_FORMATS)
def test_text_formats_begin_with_the_verdict(form: str, frozen: Comparison) -> None:
    """The verdict first, then one table each for parity, loss, gradients, memory, its classes and collectives."""
    shown = text(frozen, form)
    verdict = "PARITY HOLDS: compiled agrees with eager (asked bitwise, reached bitwise); 4 of 4 comparisons pass"
    before = {"table": "\n\n", "md": "## ", "html": "<h2>"}[form]
    names = ("Parity", "Loss", "Gradients of step 0", "Memory", "Memory by class", "Collectives of one step")
    titles = [before + name for name in names]
    places = [shown.index(wanted) for wanted in (verdict, *titles)]
    assert places == sorted(places)
    if form == "table":
        assert shown.startswith(verdict)
    for number in ("5.4622669", "4.1732234", "56.79 kB", "12.31 kB", "2.87e-06", "4.62x", "1 of 3"):
        assert number in shown
    assert "torch 2." in shown and "bigram" in shown


def test_every_table_tells_the_grade(frozen: Comparison) -> None:
    """Asked, reached and margin stand in each row of a judged engine: against the reference, or of the row's own pair.

    A row about one check has that check's margin, and the smallest of a pair's margins is the pair's.
    """
    reports = {(each["candidate"], each["reference"]): each for each in stored("report")["comparisons"]}
    document = comparison_document(frozen)
    for section in document.sections:
        judged = [row for row in section.data.to_dict(orient="records") if row["engine"] not in ("single", "float64")]
        assert judged
        for row in judged:
            report = reports[row["engine"], row["against"]]
            assert (row["asked"], row["reached"]) == (report["asked"], report["reached"])
            if section.name not in ("parameters", "trends"):
                assert row["against"] == "single" or section.name in ("verdict", "gradients")
                assert row["margin"] == report["margin"]
            elif report["asked"] != "bitwise":
                assert row["margin"] >= report["margin"]
        if section.view is not None:
            shown = section.view.to_string()
            assert "reduction-order" in shown and "4.62x" in shown, section.name
    checks = pd.concat([section.data for section in document.sections if section.name in ("parameters", "trends")])
    for (engine, against), report in reports.items():
        own = checks[(checks["engine"] == engine) & (checks["against"] == against)]["margin"]
        assert report["asked"] == "bitwise" or own.min() == pytest.approx(report["margin"])


def test_engines_that_are_not_judged_have_no_grade(frozen: Comparison) -> None:
    """The reference and the referee: nothing was asked of them."""
    loss = tables.loss_table(frozen.records, {report.candidate: report for report in frozen.reports[1:]})
    for engine in ("single", "float64"):
        rows = loss[loss["engine"] == engine]
        assert all(value is None for name in tables.GRADE for value in rows[name])
        assert views.view_loss(loss)[engine].tolist()[-3:] == [views.NONE] * 3


@pytest.mark.parametrize("form", TEXT_FORMATS)
def test_text_formats_show_what_failed(form: str, frozen: Comparison) -> None:
    """A failed pair and its reason, what is not a number, and the same loudly for collectives off the plan."""
    shown = text(broken_loss(frozen), form)
    assert "PARITY DOES NOT HOLD: 3 of 4 comparisons pass" in shown
    assert "eager against single: asked reduction-order, reached none: eager, step 13: loss is nan" in shown
    assert "FAIL" in shown and "nan" in shown and "inf" in shown
    shown = text(unpredicted(frozen), form)
    assert "PARITY DOES NOT HOLD: 4 of 4 comparisons pass" in shown
    assert "eager: all_gather in forward: the plan predicts 1 with 12312 bytes, counted 2 with 12312" in shown
    assert "eager: all_gather in backward: the plan predicts 1 with 12312 bytes, counted 0 with 0" in shown
    assert shown.count("MISMATCH") == 2


def mispredicted(comparison: Comparison) -> Comparison:
    """One in which formulas say of eager what was measured, but four bytes less of rank 1's gradients."""
    record = comparison.records["eager"]
    memory = []
    for rank, each in enumerate(record.memory):
        points = [point for point in each.points if point.at != "peak"]
        predicted = [PredictedPoint(p.at, p.parameters, p.optimizer_state, p.gradients, None) for p in points]
        predicted[2] = replace(predicted[2], gradients=points[2].gradients - 4 * rank)
        memory.append(replace(each, predicted=predicted))
    return replace(comparison, records={**comparison.records, "eager": replace(record, memory=memory)})


@pytest.mark.parametrize("form", TEXT_FORMATS)
def test_bytes_that_are_not_the_formulas_fail_the_verdict(form: str, frozen: Comparison) -> None:
    """The class, the moment, the rank and both numbers; what is not predicted is not judged."""
    changed = mispredicted(frozen)
    assert len(changed.failures) == 1 and not changed.holds
    shown = text(changed, form)
    assert "4 of 4 comparisons pass, but collectives or bytes are not those of the plan" in shown
    assert "eager: memory, gradients after backward on rank 1: the formula predicts 6152 bytes, measured 6156" in shown
    assert [row.ok for row in memory_rows("eager", changed.records["eager"])] == [
        *(True, True, True, True, None),
        *(True, True, False, True, None),
    ]
    assert all(row.ok is None for row in memory_rows("ddp", changed.records["ddp"]))


def test_memory_by_class_is_that_of_the_highest_peak(frozen: Comparison) -> None:
    """People see the rank with the highest peak, machines all; classes of a row add up to what is live."""
    record = frozen.records["eager"]
    higher = replace(record.memory[1].points[-1], other=10**9)
    memory = [record.memory[0], replace(record.memory[1], points=[*record.memory[1].points[:-1], higher])]
    table = tables.memory_class_table({**frozen.records, "eager": replace(record, memory=memory)}, {})
    assert len(table) == 5 * (1 + 2 + 2 + 2) and set(table["engine"]) == set(ENGINES[:-1])
    for row in table.to_dict(orient="records"):
        assert row["total"] == sum(row[name] for name in CLASSES)
    view = views.view_memory_classes(table)
    assert view["engine"].tolist() == [name for engine in ENGINES[:-1] for name in (engine, *[""] * 4)]
    assert view["all"].tolist()[9] == "1.00 GB" and view["formula"].tolist()[9] == ""


def line(*totals: int) -> Timeline:
    """A forward of the first six samples, a backward of the others, and an optimizer in which nothing happens."""
    times_s = [float(number) for number in range(len(totals))]
    live = {name: [0] * len(totals) for name in CLASSES} | {"other": list(totals)}
    return Timeline(0, {"forward": 5.0, "backward": 99.0, "optimizer": 100.0}, times_s, live)


def test_sparkline_shows_the_peak_and_the_phases() -> None:
    """The highest of each few samples, in eighths of the most of any engine; a still phase stays where it was."""
    drawn = views.sparkline(line(*[0] * 6, 8, 2, 4, 2, 2, 2, 2), 16)
    assert [len(phase) for phase in drawn.split("│")] == list(views.SPARKS)
    forward, backward, optimizer = drawn.split("│")
    assert (set(forward), set(optimizer), max(backward)) == ({"▁"}, {"▂"}, "▅")
    assert views.sparkline(line(16), 16).endswith("████")


def test_page_draws_memory_and_lanes(frozen: Comparison) -> None:
    """A picture for each, with what colours mean, the engines, their peaks and phases; other formats have none."""
    assert "<svg" not in text(frozen, "md") and "<svg" not in text(frozen, "json")
    spans = [Span(PHASE, PHASE, "forward", 0.0, 2.0), Span(COMPUTE, COMPUTE, "layer<0>", 0.5, 1.5)]
    launch = Span(COMPUTE, LAUNCH, "layer<0>", 0.0, 0.1)
    lanes = lanes_section({"eager": [*spans, launch], "ddp": spans[:1]}, rank=0)
    page = render(comparison_document(frozen, lanes), "html")
    Page(page)
    memory, steps = page.split("<svg")[1:]
    for word in (*views.CLASS_TITLES.values(), *ENGINES[:-1], "forward", "backward", "optimizer", "peak 56.79 kB"):
        assert f">{word}<" in memory, word
    for word in ("eager", "ddp", "forward", "compute", "layer&lt;0&gt;", "2000 ms"):
        assert f">{word}<" in steps, word


def test_failed_verdict_is_the_exit_code_of_show(frozen: Comparison, tmp_path: Path) -> None:
    """Collectives off the plan alone make exit code 1; with them as predicted it is 0."""
    write(tmp_path / "good", frozen)
    write(tmp_path / "bad", unpredicted(frozen))
    assert (call("show", str(tmp_path / "good")).code, call("show", str(tmp_path / "bad")).code) == (0, 1)


def test_csv_and_json_tell_nan_from_nothing(frozen: Comparison) -> None:
    """A number that is none is the word nan or inf; what is not there is empty, or null."""
    broken = broken_loss(frozen)
    rows = pd.read_csv(io.StringIO(text(broken, "csv")), dtype=str, keep_default_na=False)
    loss = rows[(rows["table"] == "loss") & (rows["engine"] == "eager")]
    assert loss["loss"].tolist()[-1] == "nan" and "" not in loss["loss"].tolist()
    gradients = rows[(rows["table"] == "gradients") & (rows["engine"] == "eager")]
    assert (gradients["error"].item(), gradients["reached"].item()) == ("inf", "")
    tables_ = json.loads(text(broken, "json"))["tables"]
    assert tables_["loss"][27]["loss"] == "nan"
    assert [row["reached"] for row in tables_["gradients"]] == ["bitwise", None, "reduction-order", "reduction-order"]


def test_markdown_tables_are_well_formed(frozen: Comparison) -> None:
    """Every row of a table has as many cells as its head, also with a pipe in a name."""
    report = replace(frozen.reports[0], candidate="a|b\\c")
    shown = text(replace(frozen, reports=(report, *frozen.reports[1:])), "md")
    blocks = [block.splitlines() for block in shown.split("\n\n") if block.startswith("|")]
    assert len(blocks) == 6
    for lines in blocks:
        cells = [line.replace("\\\\", "").replace("\\|", "").count("|") for line in lines]
        assert len(set(cells)) == 1 and set(lines[1]) <= set("|-: ")
    assert "a\\|b\\\\c" in shown


class Page(HTMLParser):
    """Reads a page: its cells by table, and every address it names."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        self.addresses += [str(value) for name, value in attrs if name in ("src", "href", "action", "style")]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data
        assert "url(" not in data and "@import" not in data


def test_html_is_one_page_that_needs_no_other(frozen: Comparison) -> None:
    """It is well nested, refers to nothing, escapes names, and its cells are those of the table."""
    report = replace(frozen.reports[0], candidate="<b>&")
    page = Page(text(replace(frozen, reports=(report, *frozen.reports[1:])), "html"))
    assert page.addresses == [] and len(page.tables) == 6
    assert page.tables[0][1][0] == "<b>&"
    loss = page.tables[1]
    assert loss[0] == ["step", *ENGINES] and loss[1][:2] == ["0", "5.4622669"] and loss[-4][0] == "13"
    assert [row[0] for row in loss[-3:]] == ["asked", "reached", "margin"]
    assert all(len(row) == len(table[0]) for table in page.tables for row in table)


@pytest.mark.parametrize("width", [40, 80, 250])
def test_table_fits_the_terminal(width: int, frozen: Comparison) -> None:
    """No line of a table is wider than the terminal, and no cell is cut off."""
    shown = text(frozen, "table", width)
    assert max(len(line) for line in shown.splitlines() if line and line[0] in "┏┃┡│└") <= width
    assert "…" not in shown
