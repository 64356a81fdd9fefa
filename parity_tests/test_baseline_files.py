"""Files of baselines: written, read, refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.baseline import check_same_job
from bench.baseline_files import load_baseline, save_baseline
from bench.store import Comparison
from common.errors import ConfigError
from parity_tests.cli_calls import FROZEN, call
from parity_tests.test_baseline import TINY, R, memory, reached


def test_baseline_file_is_sorted_and_comes_back(frozen: Comparison, tmp_path: Path) -> None:
    """Every key in order, at every depth; nothing of a parameter or a step; what is read is what was written."""
    path = tmp_path / "ci" / "small.json"
    save_baseline(path, frozen.to_baseline())
    text = path.read_text()
    data = json.loads(text, object_pairs_hook=lambda pairs: _in_order(pairs))
    assert text.endswith("}\n") and len(text.splitlines()) < 150
    assert set(data) == {"schema", "environment", "job", "reference", "engines"}
    assert set(data["engines"]) == {"single", "eager", "compiled", "ddp"}
    assert "embed.weight" not in text and "losses" not in text
    assert load_baseline(path) == frozen.to_baseline()
    assert memory("ddp", start_bytes=-1, peak_bytes=-1)(frozen).to_baseline() == frozen.to_baseline()  # of any rank
    ddp = data["engines"]["ddp"]
    stored = json.loads((FROZEN / "ddp.json").read_text())
    assert ddp["peak_bytes"] == max(rank["peak_bytes"] for rank in stored["memory"])
    assert ddp["against"]["single"]["reached"] == "reduction-order"
    assert data["engines"]["compiled"]["against"]["eager"] == {"asked": "bitwise", "margin": None, "reached": "bitwise"}


def _in_order(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert [name for name, _ in pairs] == sorted(name for name, _ in pairs)
    return dict(pairs)


@pytest.mark.parametrize(
    ("job", "reference", "engines", "expected"),
    [
        ({"ranks": 4}, "single", None, "--ranks (2 there, 4 here)"),
        ({"disabled_passes": ("bucket_gathers",)}, "single", None, "--disabled-passes (none there, bucket_gathers"),
        ({"data": "a.txt"}, "single", None, "--data (none there, a.txt here)"),
        ({"lr": 0.5, "link": "none"}, "single", None, "--link (gloo there, none here), --lr (1.0 there, 0.5 here)"),
        ({}, "ddp", ("eager", "compiled", "single"), "--reference (single there, ddp here), --engines"),
        ({}, "single", ("eager", "ddp"), "--engines (compiled,ddp,eager there, ddp,eager here)"),
        ({}, "single", ("ddp", "eager", "compiled", "torch-fsdp2"), "compiled,ddp,eager,torch-fsdp2 here"),
    ],
)
def test_other_comparisons_are_refused_by_their_options(
    job: dict[str, Any], reference: str, engines: tuple[str, ...] | None, expected: str, frozen: Comparison
) -> None:
    """Another job, reference or set of engines is one line that names the options; their order does not matter."""
    baseline = frozen.to_baseline()
    check_same_job("b.json", baseline, frozen.job, "single", ("ddp", "compiled", "eager"))
    with pytest.raises(ConfigError) as refused:
        check_same_job(
            "b.json", baseline, replace(frozen.job, **job), reference, engines or ("eager", "compiled", "ddp")
        )
    assert expected in str(refused.value) and "\n" not in str(refused.value)


BREAKS: dict[str, Callable[[dict[str, Any]], object]] = {
    "another schema": lambda data: data.update(schema=99),
    "no job": lambda data: data.pop("job"),
    "a job of tomorrow's": lambda data: data["job"].update(colour="red"),
    "no environment": lambda data: data.update(environment={}),
    "an unknown grade": lambda data: data["engines"]["ddp"]["against"]["single"].update(reached="perfect"),
    "a peak that is none": lambda data: data["engines"]["ddp"].update(peak_bytes="much"),
    "a count that is none": lambda data: data["engines"]["eager"]["collectives"][0].update(count=None),
    "engines that are none": lambda data: data.update(engines=[]),
}


@pytest.mark.usefixtures("no_ranks")
def test_wrong_baselines_end_in_one_line(frozen: Comparison, tmp_path: Path) -> None:
    """A file that is missing or of another job, and one that cannot be written: before ranks start."""
    good = tmp_path / "good.json"
    save_baseline(good, frozen.to_baseline())
    words = ("compare", *TINY, "--engines", "eager", "--out", str(tmp_path / "runs"))
    for option, path, expected in (
        ("baseline", tmp_path / "missing.json", "cannot be read"),
        ("baseline", good, "--steps (14 there, 2 here)"),
        ("save-baseline", tmp_path, "found a folder"),
        ("save-baseline", good / "b.json", "is a file"),
    ):
        ran = call(*words, f"--{option}", str(path))
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1), ran
        assert ran.err.startswith(f"fsdp-parity: {option} ") and expected in ran.err and "save-baseline" in ran.err, ran


@pytest.mark.parametrize("name", [*BREAKS, "cut off"])
def test_broken_baselines_are_refused_by_their_name(name: str, frozen: Comparison, tmp_path: Path) -> None:
    """Whatever is wrong with a file: its name, on one line, and the way out."""
    path = tmp_path / "b.json"
    save_baseline(path, frozen.to_baseline())
    data = json.loads(path.read_text())
    BREAKS.get(name, lambda data: None)(data)
    path.write_text(json.dumps(data)[: 99 if name == "cut off" else None])
    with pytest.raises(ConfigError) as refused:
        load_baseline(path)
    assert str(path) in str(refused.value) and "--save-baseline" in str(refused.value)
    assert "\n" not in str(refused.value)


WRONG = (None, [], {}, "x", -1, [[]])
TAKES_TEXT = ("environment.", "job.model", "job.plan", "job.link", "job.data")
"""Where one more word is as good as another; what the job's words mean is told by whatever reads them."""
TAKES_NULL = ("job.data", "job.seq", ".margin", ".reached")


def leaves(data: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each place of JSON data that holds no place itself: what it is called, what holds it and by which key."""
    for key in data if isinstance(data, dict) else range(len(data)):
        name = f"{where}[{key}]" if isinstance(data, list) else f"{where}.{key}".lstrip(".")
        if isinstance(data[key], (dict, list)) and data[key]:
            yield from leaves(data[key], name)
        else:
            yield name, data, key


def is_valid(name: str, value: object) -> bool:
    """Whether a baseline may have this of `WRONG` at a leaf."""
    if value is None:
        return name.endswith(TAKES_NULL)
    if value == "x":
        return name.startswith(TAKES_TEXT) or name.endswith((".phase", ".kind"))
    if value == []:
        return name.endswith((".disabled_passes", ".collectives"))
    return value == {} and name == "engines.single.against"  # it is the reference


def test_every_wrong_value_is_refused_by_its_place(frozen: Comparison, tmp_path: Path) -> None:
    """Each leaf of a file in turn holds something else: it is refused by its name or is a value of its kind."""
    path = tmp_path / "b.json"
    save_baseline(path, frozen.to_baseline())
    data = json.loads(path.read_text())
    places = list(leaves(data))
    assert len(places) > 60
    for name, holder, key in places:
        right = holder[key]
        for value in WRONG:
            holder[key] = value
            path.write_text(json.dumps(data))
            said = ""
            try:
                load_baseline(path)
            except ConfigError as error:
                said = str(error)
            if not said:
                assert value == right or is_valid(name, value), (name, value)
                continue
            assert not is_valid(name, value), (name, value, said)
            assert str(path) in said and name.split(".")[-1].split("[")[0] in said and "\n" not in said, said
        holder[key] = right


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda data: data["engines"]["ddp"].update(against={}),
            "engines.ddp.against: expected the reference 'single'",
        ),
        (lambda data: data["engines"].pop("single"), "reference: expected one of the engines compiled, ddp, eager"),
        (lambda data: data["engines"].pop("eager"), "engines.compiled.against: expected engines of compiled, ddp"),
        (lambda data: data["engines"]["ddp"].update(collectives=[3]), "engines.ddp.collectives[0]: expected an object"),
        (lambda data: data["engines"]["ddp"].update(against=[]), "engines.ddp.against: expected an object, found []"),
        (lambda data: data["job"].update(steps=True), "job.steps: expected a whole number, found True"),
        (lambda data: data.update(environment="here"), "environment: expected an object, found 'here'"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    change: Callable[[dict[str, Any]], object], expected: str, frozen: Comparison, tmp_path: Path
) -> None:
    """An engine that is held to nothing, or to one that is not there; a branch that is something else."""
    path = tmp_path / "b.json"
    save_baseline(path, frozen.to_baseline())
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError) as refused:
        load_baseline(path)
    assert expected in str(refused.value) and str(path) in str(refused.value)


def test_infinite_margin_comes_back(frozen: Comparison, tmp_path: Path) -> None:
    """JSON has no number for it."""
    baseline = reached("ddp", R, margin=float("inf"))(frozen).to_baseline()
    save_baseline(tmp_path / "b.json", baseline)
    assert load_baseline(tmp_path / "b.json") == baseline
