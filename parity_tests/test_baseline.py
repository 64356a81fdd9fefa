"""Baselines: what is worse, what is better, what cannot be told, and which comparisons may be held against which.

Figures are those of `frozen/` (see `test_render.py`), changed one at a time; two comparisons run on ranks at the end.
"""

from __future__ import annotations

import json
import platform
import shlex
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import bench.commands
from bench.baseline import Held, Status, changes, regressions
from bench.documents import comparison_document
from bench.render import render
from bench.store import Comparison, load_comparison, save_comparison
from common.harness.grades import Grade
from common.harness.launch import RankPool
from common.harness.records import CollectiveCount, Environment
from parity_tests.cli_calls import FROZEN, Ran, call

TINY = (
    *("--model", "parity_tests.engines.models:bigram", "--steps", "2", "--batch", "4", "--seq", "16"),
    *("--backend", "eager", "--link", "none", "--reference", "torch-fsdp2"),
)
REFRESH = "fsdp-parity compare --save-baseline ci/small.json"
Change = Callable[[Comparison], Comparison]


def on(engine: str, **fields: Any) -> Change:
    """Changes fields of one engine's record; a function is given the old value."""

    def change(comparison: Comparison) -> Comparison:
        record = comparison.records[engine]
        new = {name: value(getattr(record, name)) if callable(value) else value for name, value in fields.items()}
        return replace(comparison, records={**comparison.records, engine: replace(record, **new)})

    return change


def memory(engine: str, **bytes_more: int) -> Change:
    """Changes the memory of one rank of `engine` by these bytes."""

    def more(ranks: list[Any]) -> list[Any]:
        last = ranks[-1]
        return [*ranks[:-1], replace(last, **{name: getattr(last, name) + size for name, size in bytes_more.items()})]

    return on(engine, memory=more)


def both_ranks_peak(engine: str, more: int) -> Change:
    """Changes the peak of all ranks of `engine`."""
    return on(engine, memory=lambda ranks: [replace(each, peak_bytes=each.peak_bytes + more) for each in ranks])


def collective(engine: str, **new: Any) -> Change:
    """Changes the gather of `engine` in forward."""
    return on(
        engine,
        collectives=lambda all_: [replace(c, **new) if c.phase == "forward" else c for c in all_],
    )


def reached(candidate: str, grade: Grade | None, **fields: Any) -> Change:
    """Changes what `candidate` reached against the reference."""

    def change(comparison: Comparison) -> Comparison:
        reports = [
            replace(each, reached=grade, **fields)
            if (each.candidate, each.reference) == (candidate, comparison.reference)
            else each
            for each in comparison.reports
        ]
        return replace(comparison, reports=tuple(reports))

    return change


def elsewhere(*others: Change, **environment: str) -> Change:
    """The same on another machine, or another torch, besides other changes."""

    def change(comparison: Comparison) -> Comparison:
        for name in comparison.records:
            moved = on(name, environment=lambda here: replace(here, **environment))
            comparison = moved(comparison)
        for other in others:
            comparison = other(comparison)
        return comparison

    return change


def emulated(*others: Change) -> Change:
    """The same on the emulated link at no cost."""

    def change(comparison: Comparison) -> Comparison:
        for name in comparison.records:
            comparison = on(name, job=lambda job: {**job, "link": "none"})(comparison)
        for other in others:
            comparison = other(comparison)
        return comparison

    return change


def unjudged(comparison: Comparison) -> Comparison:
    return replace(comparison, reports=comparison.reports[1:])


def without_compiled(comparison: Comparison) -> Comparison:
    return replace(comparison, records={k: v for k, v in comparison.records.items() if k != "compiled"})


def barrier_more(old: list[CollectiveCount]) -> list[CollectiveCount]:
    return [*old, CollectiveCount("optimizer", "all_reduce", 1, 4)]


B, R, C = Grade.BITWISE, Grade.REDUCTION_ORDER, Grade.COMPILER
OTHER_CPU, OTHER_TORCH = {"machine": "aarch64 DEFAULT"}, {"torch": "2.14.0"}
CASES: dict[str, tuple[Change, list[tuple[str, str, Status]]]] = {
    "nothing": (lambda same: same, []),
    "grade weaker": (reached("ddp", C), [("ddp", "grade against single", Status.WORSE)]),
    "grade none": (reached("ddp", None), [("ddp", "grade against single", Status.WORSE)]),
    "grade stricter": (reached("ddp", B), [("ddp", "grade against single", Status.BETTER)]),
    "pair judged no longer": (unjudged, [("compiled", "grade against eager", Status.WORSE)]),
    "margin": (reached("ddp", R, margin=1.01), []),
    "time": (on("ddp", first_step_s=1e6), []),
    "one gather more": (collective("eager", count=2), [("eager", "all_gather in forward", Status.WORSE)]),
    "one byte more": (collective("eager", bytes=12313), [("eager", "all_gather in forward", Status.WORSE)]),
    "one byte less": (collective("eager", bytes=12311), [("eager", "all_gather in forward", Status.BETTER)]),
    "a gather that moved": (
        collective("eager", phase="optimizer"),
        [
            ("eager", "all_gather in forward", Status.BETTER),
            ("eager", "all_gather in forward", Status.BETTER),
            ("eager", "all_gather in optimizer", Status.WORSE),
            ("eager", "all_gather in optimizer", Status.WORSE),
        ],
    ),
    "another collective": (
        on("single", collectives=barrier_more),
        [("single", "all_reduce in optimizer", Status.WORSE)] * 2,
    ),
    "start one byte more": (memory("eager", start_bytes=1), [("eager", "start", Status.WORSE)]),
    "start one byte less on one rank": (memory("eager", start_bytes=-1), []),
    "peak one byte more on one rank": (memory("compiled", peak_bytes=1), [("compiled", "peak", Status.WORSE)]),
    "peak less on gloo": (both_ranks_peak("compiled", -1), [("compiled", "peak", Status.UNSURE)]),
    "peak less without collectives": (both_ranks_peak("single", -1), [("single", "peak", Status.BETTER)]),
    "peak less on the emulated link": (
        emulated(both_ranks_peak("compiled", -1)),
        [("compiled", "peak", Status.BETTER)],
    ),
    "another machine": (elsewhere(**OTHER_CPU), []),
    "grade weaker there, as asked": (
        elsewhere(reached("ddp", C), **OTHER_CPU),
        [("ddp", "grade against single", Status.WORSE)],
    ),
    "grade stricter there": (
        elsewhere(reached("ddp", B), **OTHER_TORCH),
        [("ddp", "grade against single", Status.UNSURE)],
    ),
    "peak more there": (elsewhere(memory("ddp", peak_bytes=1), **OTHER_TORCH), [("ddp", "peak", Status.WORSE)]),
    "an engine missing": (without_compiled, [("compiled", "record", Status.WORSE)]),
}


@pytest.mark.parametrize("case", CASES)
def test_baseline_tells_worse_from_better(case: str, frozen: Comparison) -> None:
    """One figure changed: that one is told, as what it is; only what is worse fails, a line each."""
    change, expected = CASES[case]
    baseline, now = frozen.to_baseline(), change(frozen)
    found = [each for each in changes(baseline, now.records, now.reports) if each.status is not Status.SAME]
    assert [(each.engine, each.what, each.status) for each in found] == expected
    lines = regressions(baseline, now.records, now.reports)
    worse = [(engine, what) for engine, what, status in expected if status is Status.WORSE]
    assert [tuple(line.split(": ")[:2]) for line in lines] == worse
    assert replace(now, held=Held("b.json", REFRESH, baseline)).holds is not (bool(worse) or bool(now.disagreements))


def test_grade_on_another_machine_has_to_be_the_asked_one(frozen: Comparison) -> None:
    """A baseline that asked less than it reached: elsewhere the asked grade is enough, at home it is not."""
    taken = reached("ddp", B)(frozen).to_baseline()  # asked reduction-order
    moved = elsewhere(reached("ddp", R), **OTHER_CPU)(frozen)
    assert regressions(taken, moved.records, moved.reports) == []
    (line,) = regressions(taken, frozen.records, frozen.reports)
    assert line == "ddp: grade against single: reduction-order, worse than the baseline's bitwise"


def stored(folder: Path, comparison: Comparison) -> None:
    """`comparison` as it lies on disk."""
    shutil.copytree(FROZEN, folder)
    save_comparison(folder, comparison)
    for name, record in comparison.records.items():
        (folder / f"{name}.json").write_text(json.dumps(record.to_dict()))


@pytest.mark.parametrize("form", ["table", "md", "html", "csv", "json"])
def test_show_tells_of_the_baseline_from_the_records(form: str, frozen: Comparison, tmp_path: Path) -> None:
    """What is worse, what is better and the command that takes it anew, in every format; exit code 1 if it is worse."""
    held = Held("ci/small.json", REFRESH, frozen.to_baseline())
    codes = {}
    for name, change in {
        "same": lambda same: same,
        "better": both_ranks_peak("single", -8),
        "worse": emulated(both_ranks_peak("single", -8), memory("eager", peak_bytes=16)),
    }.items():
        comparison = replace(change(frozen), held=held)
        stored(tmp_path / name, comparison)
        assert load_comparison(tmp_path / name) == comparison
        ran = call("show", str(tmp_path / name), "--format", form)
        codes[name] = ran.code
        if form != "table":
            assert ran.out == render(comparison_document(comparison), form)
        assert ("WORSE" in ran.out, "better" in ran.out) == (name == "worse", name != "same"), (name, ran.out)
        assert form == "csv" or (REFRESH in ran.out) == (name != "same" or form == "json")
        if form not in ("csv", "json"):
            assert ("WORSE THAN THE BASELINE in 1 figure. PARITY HOLDS" in ran.out) == (name == "worse")
            assert ("Against ci/small.json" in ran.out) == (name != "same")
            assert ("56,804" in ran.out) == (name == "worse")  # what eager now needs, to the byte
    assert codes == {"same": 0, "better": 0, "worse": 1}


def test_environments_that_differ_are_noted(frozen: Comparison) -> None:
    """Another machine or torch is named beside the figures; the same ones are not."""
    held = Held("b.json", REFRESH, frozen.to_baseline())
    for change, expected in (
        (elsewhere(memory("ddp", peak_bytes=1), **OTHER_TORCH), "torch 2.13.0+cpu there, 2.14.0 here; no time is"),
        (elsewhere(memory("ddp", peak_bytes=1), **OTHER_CPU), "machine x86_64 there, aarch64 DEFAULT here"),
        (memory("ddp", peak_bytes=1), None),
    ):
        text = render(comparison_document(replace(change(frozen), held=held)), "md")
        assert (expected or "taken elsewhere") in text if expected else "taken elsewhere" not in text


def test_baseline_end_to_end(pool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Taken, then changed: it fails by what is worse, tells what is better, prints the words that take it anew.

    A rank that is not the first comes to the same exit code, and prints and writes nothing.
    """
    monkeypatch.setattr(bench.commands, "open_ranks", lambda ranks: nullcontext(pool))
    path = tmp_path / "small.json"
    words = ("compare", *TINY, "--engines", "eager", "--out", str(tmp_path / "runs"), "--format", "json")
    taken = call(*words, "--save-baseline", str(path))
    assert taken.code == 0 and f"baseline: {path}\n" in taken.err
    data = json.loads(path.read_text())
    data["engines"]["eager"]["peak_bytes"] -= 1
    data["engines"]["torch-fsdp2"]["collectives"][0]["count"] += 1
    path.write_text(json.dumps(data))
    ran = call(*words, f"--baseline={path}")
    assert ran.code == 1, ran
    peak, refresh = data["engines"]["eager"]["peak_bytes"], ran.json["held"]["refresh"]
    assert ran.json["failures"] == [f"eager: peak: {peak + 1:,} bytes, worse than the baseline's {peak:,}"]
    assert [row["status"] for row in ran.json["tables"]["baseline"] if row["status"] != "same"] == ["WORSE", "better"]
    assert call("show", "latest", "--out", str(tmp_path / "runs"), "--format", "json") == replace(ran, err="")

    program, *again = shlex.split(refresh)
    assert program == "fsdp-parity" and again == [*words, "--save-baseline", str(path)]

    monkeypatch.setattr(bench.commands, "open_ranks", lambda ranks: nullcontext(OtherRank(pool)))
    before = sorted(tmp_path.rglob("*"))
    words = (*words, "--baseline", str(path), "--save-baseline", str(tmp_path / "new.json"))
    assert call(*words) == Ran(1, "", "")
    assert sorted(tmp_path.rglob("*")) == before


class OtherRank:
    """What a rank of torchrun's that is not the first has: results of all, and nothing to write."""

    is_main = False

    def __init__(self, pool: RankPool) -> None:
        self.run = pool.run


def test_engines_that_disagree_make_no_baseline(pool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Exit code 1 as ever, no file, and a line that says so."""
    monkeypatch.setattr(bench.commands, "open_ranks", lambda ranks: nullcontext(pool))
    path = tmp_path / "small.json"
    words = (*TINY, "--engines", "parity_tests.engines.summing", "--out", str(tmp_path / "runs"))
    ran = call("compare", *words, "--save-baseline", str(path))
    assert ran.code == 1 and not path.exists()
    assert f"baseline: {path} is not written, since parity does not hold" in ran.err


def test_environment_names_the_vector_instructions() -> None:
    """Two processors of one family with other kernels are two machines."""
    assert Environment.here().machine == f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
