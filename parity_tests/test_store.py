"""Folders of runs: named, found, and refused where what they hold is broken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from bench.store import Comparison, find_run, make_run_folder
from common.errors import ConfigError
from common.job import JobConfig
from parity_tests.cli_calls import FROZEN, call
from parity_tests.test_render import write


def test_run_folders_are_new_and_named_by_their_job(tmp_path: Path) -> None:
    """Two runs in one second do not share a folder; a model's name loses what a path must not hold."""
    now = datetime(2026, 2, 3, 4, 5, 6)
    job = JobConfig(model="my.models:build", ranks=3, param_dtype="bf16")
    names = [make_run_folder(tmp_path / "a" / "b", job, now).name for _ in range(3)]
    assert names == ["20260203-040506-my.models-build-3ranks-bf16" + suffix for suffix in ("", "-2", "-3")]
    sized = replace(job, model="llama-debug,tied=true,frozen=" + "+".join(f"layers.{i}" for i in range(99)))
    name = make_run_folder(tmp_path, sized, now).name
    assert name.startswith("20260203-040506-llama-debug-tied-true-frozen-layers.0-layers.1-") and len(name) < 128
    with pytest.raises(ConfigError, match="cannot make a folder"):
        make_run_folder(FROZEN / "report.json", job, now)


def test_latest_is_the_run_that_ended_last(frozen: Comparison, tmp_path: Path) -> None:
    """Unfinished runs, which have no report, do not count."""
    for name in ("b", "a", "c"):
        write(tmp_path / name, frozen)
    (tmp_path / "c" / "report.json").unlink()
    assert find_run("latest", tmp_path).name == "a"
    assert find_run("b", tmp_path) == tmp_path / "b"
    with pytest.raises(ConfigError, match=r"run c: expected a folder with a report\.json"):
        find_run("c", tmp_path)


BREAKS: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "report of another schema": ("report.json", lambda data: data.update(schema=99)),
    "report without a job": ("report.json", lambda data: data.pop("job")),
    "report with an unknown grade": ("report.json", lambda data: data["comparisons"][0].update(asked="perfect")),
    "report with an unknown field": ("report.json", lambda data: data["comparisons"][0].update(mood="good")),
    "report with a job of today's": ("report.json", lambda data: data["job"].update(ranks=0)),
    "report with a word for a number": ("report.json", lambda data: data["comparisons"][1].update(margin="much")),
    "report without engines": ("report.json", lambda data: data.pop("engines")),
    "report with engines that are none": ("report.json", lambda data: data.update(engines=[1])),
    "report naming no record": ("report.json", lambda data: data["engines"].append("gone")),
    "record of another schema": ("eager.json", lambda data: data.update(schema=99)),
    "record without losses": ("eager.json", lambda data: data.pop("losses")),
    "record with a null": ("eager.json", lambda data: data.update(memory=None)),
    "record without steps": ("eager.json", lambda data: data.update(losses=[], grad_norms=[])),
    "record without a step": ("eager.json", lambda data: data["grad_digests"].pop()),
    "record without a rank": ("eager.json", lambda data: data["losses"][0].pop()),
    "record without a rank's memory": ("eager.json", lambda data: data["memory"].pop()),
    "record with a number for a word": ("eager.json", lambda data: data["environment"].update(torch=2.13)),
    "record with a word for a number": ("eager.json", lambda data: data["collectives"][0].update(count="two")),
    "record of the last schema": ("eager.json", lambda data: data.update(schema=1)),
    "record with a word for bytes": ("eager.json", lambda data: data["memory"][0]["points"][0].update(other="much")),
    "record without a peak by class": ("eager.json", lambda data: data["memory"][0]["points"].pop()),
    "record with a timeline cut off": ("eager.json", lambda data: data["timeline"]["times_s"].pop()),
    "record with a fraction of a rank": ("eager.json", lambda data: data.update(world_size=1.5)),
}


@pytest.mark.parametrize("name", BREAKS)
def test_broken_records_end_in_one_line(name: str, tmp_path: Path) -> None:
    """Whatever is wrong with a file: its name on one line and exit code 2."""
    file, change = BREAKS[name]
    folder = tmp_path / "run"
    shutil.copytree(FROZEN, folder)
    data = json.loads((folder / file).read_text())
    change(data)
    (folder / file).write_text(json.dumps(data))
    ran = call("show", str(folder))
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1), ran
    assert str(folder) in ran.err


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
def test_files_that_are_no_records_end_in_one_line(content: bytes, tmp_path: Path) -> None:
    """Empty, cut off, of another kind, or not even text."""
    for file in ("report.json", "eager.json"):
        folder = tmp_path / file
        shutil.copytree(FROZEN, folder)
        (folder / file).write_bytes(content)
        ran = call("show", str(folder))
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1) and file in ran.err, ran
