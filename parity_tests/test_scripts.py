"""`scripts/`: what starts torchrun here and under Slurm, with stubs in Slurm's place, and the check against a wire.

Left out: the wire itself, which needs root; only the judgement of what was timed on it is here.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from bench.benchmark_files import Benchmark, Cell, save_benchmark, save_turns
from common.harness.stopwatch import TimedStep, TimedTurn
from common.job import JobConfig
from parity_tests.cli_calls import ROOT, environment, run_process

SCRIPTS = ROOT / "scripts"
TINY = ("--model", "parity_tests.engines.models:bigram", "--steps", "1", "--batch", "2", "--seq", "16")
TIMED = ("--engines", "eager", "--link", "none", "--turns", "1", "--turn-steps", "1", "--format", "json")

SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames node[1-2]" ] || exit 9
echo localhost
echo elsewhere
"""
SRUN = """#!/bin/bash
# two nodes on one machine
while [[ "$1" == --* ]]; do echo "$1" >>"$ASKED"; shift; done
"$@" & first=$!
"$@" & second=$!
wait "$first" && wait "$second"
"""


def free_port(lowest: int, highest: int) -> int:
    for port in range(lowest, highest):
        with socket.socket() as found:
            try:
                found.bind(("localhost", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no free port from {lowest} to {highest}")


@pytest.mark.parametrize("script", ["torchrun.sh", "slurm.sbatch", "netns_check.sh"])
def test_script_can_be_read(script: str) -> None:
    """bash finds no fault in its grammar, and what is started by its name may be executed."""
    path = SCRIPTS / script
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, check=False).returncode == 0
    assert path.suffix == ".sbatch" or os.access(path, os.X_OK)


def test_slurm_script_starts_torchrun_on_every_node(tmp_path: Path) -> None:
    """Started from the checkout, two nodes of one rank meet at the first, and one `bench` comes of it."""
    for name, text in {"scontrol": SCONTROL, "srun": SRUN}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    copied = tmp_path / "slurm_script"  # as Slurm does
    copied.write_text((SCRIPTS / "slurm.sbatch").read_text())
    slurm = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": str(free_port(20_000, 30_000) - 20_000 + 70_000),
    }
    more = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable, "ASKED": str(tmp_path / "asked")}
    here = {"RANKS_PER_NODE": "1", "IFNAME": "lo"}
    out = tmp_path / "runs"
    words = ("bench", *TINY, *TIMED, "--out", str(out))
    ran = run_process("bash", str(copied), *words, cwd=tmp_path, **slurm, **more, **here)
    assert ran.code == 0, ran.err
    assert (tmp_path / "asked").read_text().split() == ["--kill-on-bad-exit=1", "--ntasks=2", "--ntasks-per-node=1"]
    (row,) = ran.json["cells"][0]["rows"]
    assert ran.json["cells"][0]["job"]["ranks"] == 2 and row["step_s"]["median"] > 0
    assert len(list(out.iterdir())) == 1


def test_torchrun_script_wants_to_know_where_nodes_meet() -> None:
    """Several nodes without a place to meet: one line, before anything starts."""
    ran = run_process("bash", str(SCRIPTS / "torchrun.sh"), "list", NODES="2")
    assert ran.code != 0 and ran.out == "" and ran.err.count("\n") == 1
    assert "RENDEZVOUS: expected HOST:PORT" in ran.err


def test_netns_check_says_why_it_cannot_run(tmp_path: Path) -> None:
    """Not root, or without `tc`: exit code 2 and one line."""
    for name in ("bash", "dirname", "ip"):
        (tmp_path / name).write_text(f'#!/bin/sh\nPATH={os.environ["PATH"]} exec {name} "$@"\n')
    (tmp_path / "id").write_text('#!/bin/sh\necho "${USER_ID}"\n')
    for path in tmp_path.iterdir():
        path.chmod(0o755)
    for user, expected in (("1000", "needs root"), ("0", "needs tc")):
        done = subprocess.run(
            ["/bin/bash", str(SCRIPTS / "netns_check.sh")],
            capture_output=True,
            text=True,
            env=environment(PATH=str(tmp_path), USER_ID=user, PYTHON=sys.executable),
            check=False,
        )
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert f"netns_check: {expected}" in done.stderr


def rank_cells(folder: Path, *cells: dict[str, Sequence[float]]) -> int:
    """What `compare_rankings.py` makes of cells with these step times by engine; a second rank is always faster."""
    made = []
    for number, times in enumerate(cells, 1):
        (folder / f"cell-{number}").mkdir(parents=True)
        turns = {engine: [[turn(step_s), turn(step_s / 2)] for step_s in taken] for engine, taken in times.items()}
        save_turns(folder / f"cell-{number}", turns)
        made.append(Cell(JobConfig(), f"link {number}", "", ()))
    save_benchmark(folder, Benchmark("now", "single", ("link",), "2", tuple(made)))
    spec = importlib.util.spec_from_file_location("compare_rankings", SCRIPTS / "compare_rankings.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    code: int = script.main(folder)
    return code


def turn(step_s: float) -> TimedTurn:
    def step(step_s: float) -> TimedStep:
        return TimedStep(**dict.fromkeys(asdict(TimedStep(0, 0, 0, 0, 0, 0)), 0.0) | {"step_s": step_s})

    return TimedTurn((step(9.0),), (step(step_s),))


UP, DOWN, MIXED = [1.0] * 7, [2.0] * 7, [1.1, 0.9, 1.1, 0.9, 1.1, 0.9, 1.1]


@pytest.mark.parametrize(
    ("first", "second", "code", "said"),
    [
        (
            {"a": UP, "b": DOWN, "c": MIXED},
            {"a": UP, "b": DOWN, "c": DOWN},
            0,
            ("same     a to b: < (0.50) | < (0.50)", "tie      a to c: ~ (0.91) | < (0.50)"),
        ),
        ({"a": UP, "b": DOWN}, {"a": DOWN, "b": UP}, 1, ("REVERSED a to b: < (0.50) | > (2.00)",)),
        ({"a": UP, "b": MIXED}, {"a": UP, "b": DOWN}, 2, ("0 pairs told apart on both links",)),
    ],
    ids=["same", "reversed", "tied"],
)
def test_rankings_agree_unless_a_pair_is_reversed(
    first: dict[str, Sequence[float]],
    second: dict[str, Sequence[float]],
    code: int,
    said: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Pairs within spread say nothing; one that is told apart on both links decides, and if there is none, nothing."""
    assert rank_cells(tmp_path / "run", first, second) == code
    shown = capsys.readouterr().out
    assert all(line in shown for line in said), shown
