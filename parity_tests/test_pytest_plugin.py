"""The pytest plugin in a user's suite: what passes, what a failure shows, what is refused, and what stays behind.

Each suite is a folder of its own, run by a pytest of its own, which finds the plugin as an installed one is found.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from parity_tests.cli_calls import ROOT, environment, marked

pytest_plugins = ["pytester"]

MODEL = """
import os
from pathlib import Path
from torch import nn

def my_model():
    with open(Path(__file__).with_name("built"), "a") as file:
        print(os.getpid(), file=file)
    return nn.Sequential(nn.Embedding(256, 6), nn.Linear(6, 256))

SMALL = dict(build=my_model, steps=2, batch=4, seq=8, backend="eager", engines=("torch-fsdp2", "eager"))
"""
SUITE = (
    MODEL
    + """
def test_agrees(fsdp_parity):
    (report,) = fsdp_parity(**SMALL, grade="bitwise")
    assert (report.candidate, str(report.reached)) == ("eager", "bitwise")

def test_sums(fsdp_parity):
    fsdp_parity(**SMALL | {"engines": ("eager", "sums")}, grade="bitwise")

def test_raises(fsdp_parity):
    fsdp_parity(**SMALL | {"engines": ("eager", "raises")})

def test_closure(fsdp_parity):
    def inner():
        return my_model()
    fsdp_parity(build=inner)

def test_lambda(fsdp_parity):
    fsdp_parity(build=lambda: my_model())

def test_unknown(fsdp_parity):
    fsdp_parity(**SMALL, step=3)

def test_model(fsdp_parity):
    fsdp_parity(**SMALL, model="llama-debug")

def test_grade(fsdp_parity):
    fsdp_parity(**SMALL, grade="equal")

def test_job(fsdp_parity):
    fsdp_parity(**SMALL | {"batch": 3})
"""
)
SUMS = """
import torch.distributed as dist

def parallelize(model, mesh, job):
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: dist.all_reduce(param.grad))
    return model
"""
RAISES = """
def parallelize(model, mesh, job):
    raise ValueError("no such shard")
"""
HANGS = """
import time

def parallelize(model, mesh, job):
    open("hanging", "w").close()
    time.sleep(600)
"""
PLUGIN_IS_LIGHT = """
import sys

assert "bench.pytest_plugin" in sys.modules
assert not {"torch", "numpy", "pandas", "rich"} & set(sys.modules)
"""


@pytest.fixture
def installed(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder for a suite, whose pytest finds this package with the entry points of our `pyproject.toml`."""
    names = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    package = pytester.mkdir("site") / "fsdp_side_by_side-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: fsdp-side-by-side\nVersion: 0\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in each.items()) for group, each in names.items()]
    (package / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(package.parent))))
    monkeypatch.setenv("PARITY_MARK", str(pytester.path))
    return pytester


def sections(output: str) -> dict[str, str]:
    """What pytest shows of each test that failed."""
    parts = re.split(r"^_+ (test_\w+) _+$", output.split("short test summary info")[0], flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_suite_of_a_user(installed: pytest.Pytester) -> None:
    """Engines that agree pass on shared ranks; a failure shows the first difference; a wrong call is one line."""
    tests = installed.mkdir("tests")
    for name, text in {"test_mine": SUITE, "sums": SUMS, "raises": RAISES, "conftest": PLUGIN_IS_LIGHT}.items():
        (tests / f"{name}.py").write_text(text)
    ran = installed.runpytest_subprocess("tests", "-p", "no:cacheprovider")
    ran.assert_outcomes(passed=1, failed=8)
    shown = sections(ran.stdout.str())
    assert "Traceback" not in shown["test_sums"] and ".py:" not in shown["test_sums"].split("more: ")[0]
    for expected in (
        "fsdp_parity: PARITY DOES NOT HOLD: 0 of 1 comparisons pass",
        "sums against eager: asked bitwise, reached none",
        "first bit that differs: step 0: gradient of '1.bias'",
        "2 times the mean: summed over ranks, not averaged",
        "more: fsdp-parity show ",
    ):
        assert expected in shown["test_sums"], shown["test_sums"]
    message, _, captured = shown["test_raises"].partition("Captured stderr call")
    assert re.fullmatch(r"\s*fsdp_parity: rank \d: ValueError: no such shard \(at build 0/1\)\s*-*\s*", message), (
        message
    )
    assert "Traceback" in captured and "raises.py" in captured
    for test, expected in {
        "test_closure": "found test_closure.<locals>.inner; define it there with def",
        "test_lambda": "found test_lambda.<locals>.<lambda>; define it there with def",
        "test_unknown": "found step; did you mean steps?",
        "test_model": "found model; give the model as build",
        "test_grade": "grade: expected one of bitwise, reduction-order, compiler, or None, found 'equal'",
        "test_job": "batch: 3 sequences do not divide over 2 ranks",
    }.items():
        assert expected in shown[test] and shown[test].strip("= \n").count("\n") == 0, shown[test]
    assert len(set((tests / "built").read_text().split())) == 3  # here and in two ranks, for all comparisons
    assert marked(str(installed.path)) == set()


def test_options_reach_the_job_in_any_import_mode(installed: pytest.Pytester) -> None:
    """A rank finds a model in a file that no import path leads to; ranks and backend are those of the options."""
    project = installed.mkdir("project")  # where pytest does not run, but takes names from
    (project / "pytest.ini").write_text("[pytest]\n")
    folder = project / "tests" / "deep"
    folder.mkdir(parents=True)
    (folder / "test_deep.py").write_text(
        MODEL + "\ndef test_agrees(fsdp_parity):\n    assert len(fsdp_parity(**SMALL | {'batch': 3})) == 1\n"
    )
    options = ("--import-mode=importlib", "--parity-ranks=1", "--parity-backend=aot_eager", "--basetemp=base")
    ran = installed.runpytest_subprocess("project", "-p", "no:cacheprovider", *options)
    ran.assert_outcomes(passed=1)
    (report,) = installed.path.glob("base/fsdp-parity0/*/report.json")
    job = json.loads(report.read_text())["job"]
    found = {name: job[name] for name in ("model", "ranks", "backend", "batch")}
    assert found == {"model": "tests.deep.test_deep:my_model", "ranks": 1, "backend": "aot_eager", "batch": 3}


def test_interrupted_suite_leaves_no_rank(installed: pytest.Pytester) -> None:
    """Ctrl-C while ranks work ends the suite as pytest does, and all ranks with it."""
    installed.makepyfile(hangs=HANGS, test_mine=MODEL + "\ndef test_hangs(fsdp_parity):\n    fsdp_parity(**HANGING)\n")
    path = installed.path / "test_mine.py"
    path.write_text(path.read_text().replace("HANGING", "SMALL | {'engines': ('single', 'hangs')}"))
    with subprocess.Popen(
        (sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(PARITY_MARK=str(installed.path)) | {"PYTHONPATH": os.environ["PYTHONPATH"]},
        cwd=installed.path,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        while process.poll() is None and not Path(installed.path, "hanging").exists():
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        try:
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == pytest.ExitCode.INTERRUPTED and "KeyboardInterrupt" in out, out
    assert marked(str(installed.path)) == set()
