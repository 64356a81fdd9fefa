"""Ranks that torchrun started: the results of a pool, and the name of the rank that failed or hung.

`bench` there has all engines in the same processes. What each did is held against runs of one engine alone, in a pool.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.harness.launch import RankPool, launched_by_torchrun, open_ranks
from common.harness.records import RunRecord
from common.job import JobConfig
from parity_tests import faulty
from parity_tests.cli_calls import Ran, run_process
from parity_tests.runs import Runs

ENGINES = "parity_tests.engines"
JOB = JobConfig(model=f"{ENGINES}.models:bigram", steps=2, batch=4, seq=16, backend="aot_eager")
WORDS = ("--model", JOB.model, "--steps", "2", "--batch", "4", "--seq", "16", "--backend", "aot_eager")
LAUNCHER = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LINKS = ("gloo", "2ms,50MB/s")
AGREEING = ("eager", "compiled", "torch-fsdp2")


def run_module(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        env=os.environ | environ,
        timeout=120,
        check=False,
    )


def run_under_torchrun(task: str) -> subprocess.CompletedProcess[str]:
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return run_module(*launcher, "-m", "parity_tests.torchrun_job", task, "2", OMP_NUM_THREADS="1")


@pytest.fixture(scope="module")
def joined() -> subprocess.CompletedProcess[str]:
    """Ranks of torchrun that work, print what came of it, and then hang."""
    return run_under_torchrun("hang")


def test_ranks_of_torchrun_give_what_a_pool_gives(pool: RankPool, joined: subprocess.CompletedProcess[str]) -> None:
    """The same calls in the ranks of torchrun: same results on all ranks, progress of one's own, ranks checked."""
    assert not launched_by_torchrun() and isinstance(open_ranks(2), RankPool)
    assert joined.stdout, joined.stderr
    first, second, third, events, refused = json.loads(joined.stdout)
    assert first == json.loads(json.dumps(pool.run(faulty.gather_values, 10, ranks=2)))
    assert second == json.loads(json.dumps(pool.run(faulty.gather_compiled, ranks=2)))
    assert third == [0, 1]
    assert events == ["0: step 1/2", "0: step 2/2", "0: closing 0"]
    assert refused.startswith("2 ranks: the job wants 3, torchrun started 2") and "--nproc-per-node 3" in refused


def test_hanging_rank_of_torchrun_names_itself(joined: subprocess.CompletedProcess[str]) -> None:
    """Without a pool too, the rank that hangs says so in one line and ends with exit code 3; torchrun ends the rest."""
    error = joined.stderr
    assert any(line.startswith("rank 1 at spin (parity_tests/faulty.py:") for line in error.splitlines()), error
    assert joined.returncode == 1 and re.search(r"rank *: 1.*\n *exitcode *: 3 ", error), error


def test_raising_rank_without_a_pool_names_itself() -> None:
    """An error in a joined rank is a RankError with that rank; port 0 lets the system choose one."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = run_module("parity_tests.torchrun_job", "raise", "1", **alone)
    assert (done.returncode, done.stderr) == (3, "rank 0: ValueError: bad value on rank 0\n")


@dataclass(frozen=True)
class Benched:
    """One benchmark in ranks of torchrun: what rank 0 printed, what rank 1 did, and the folder."""

    ran: Ran
    rank1: dict[str, str]
    folder: Path

    def record(self, cell: int, engine: str) -> RunRecord:
        return RunRecord.from_dict(json.loads((self.folder / f"cell-{cell}" / f"{engine}.json").read_text()))


@pytest.fixture(scope="module")
def benched(tmp_path_factory: pytest.TempPathFactory) -> Benched:
    """Three engines that agree and one that sums gradients, on gloo and on the emulated link."""
    out, logs = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("logs")
    launcher = (*LAUNCHER, "--redirects", "1:3", "--log-dir", str(logs))
    timed = ("--engines", ",".join((*AGREEING, f"{ENGINES}.summing")), "--turns", "3", "--turn-steps", "2")
    swept = (word for link in LINKS for word in ("--sweep", f"link={link}"))
    ran = run_process(*launcher, "-m", "bench", "bench", *WORDS, *timed, *swept, "--out", str(out), "--format", "json")
    (folder,) = out.iterdir()
    return Benched(ran, {path.name: path.read_text() for path in logs.rglob("1/*.log")}, folder)


def test_bench_under_torchrun_times_every_engine(benched: Benched) -> None:
    """A row per engine and link, figures for all that agree, every turn of both ranks; the exit code is the verdict."""
    assert re.search(r"Root Cause.*?exitcode *: 1 ", benched.ran.err, re.DOTALL), benched.ran.err
    found = [(cell["link"], row["engine"]) for cell in benched.ran.json["cells"] for row in cell["rows"]]
    assert found == [(link, engine) for link in LINKS for engine in (*AGREEING, f"{ENGINES}.summing")]
    for number, cell in enumerate(benched.ran.json["cells"], 1):
        *right, wrong = cell["rows"]
        assert all(row["step_s"]["median"] > 0 and not row["failures"] for row in right)
        assert wrong["step_s"] is None and "reached none" in wrong["failures"][0]
        assert all((row["busy_s"] is None) == (cell["link"] == "gloo") for row in right)
        for turns in json.loads((benched.folder / f"cell-{number}" / "turns.json").read_text()).values():
            assert [[len(rank["loaded"]) for rank in ranks] for ranks in turns] == [[2, 2]] * 3


@pytest.mark.parametrize("engine", AGREEING)
def test_engines_side_by_side_do_what_each_does_alone(benched: Benched, runs: Runs, engine: str) -> None:
    """Bits, collectives, and bytes at the start and at the peak of each rank: other engines in the process add none."""
    alone = runs(engine, JOB)[0]
    for cell in (1, 2):
        found = benched.record(cell, engine)
        for what in ("losses", "grad_digests", "collectives", "predicted", "memory", "world_size"):
            assert getattr(found, what) == getattr(alone, what), what


def test_one_rank_of_torchrun_prints_and_writes(benched: Benched) -> None:
    """Rank 1 says nothing on either stream."""
    assert benched.rank1 == {"stdout.log": "", "stderr.log": ""}
    assert "records: " in benched.ran.err


def test_rank_that_hangs_in_its_turn_names_itself_under_torchrun(tmp_path: Path) -> None:
    """Each turn has the whole timeout: two slow ones, longer than it together, pass; in the third rank 1 is named."""
    timed = ("--engines", f"{ENGINES}.slow_then_hanging_in_turn", "--turns", "3", "--turn-steps", "2")
    ran = run_process(
        *LAUNCHER, "-m", "bench", "bench", *WORDS, *timed, "--link", "none", "--timeout", "5", "--out", str(tmp_path)
    )
    assert ran.out == ""
    assert re.search(r"^rank 1 at .*in_turn\.py:\d+\) \(at turn 2\) did not finish within 5 s$", ran.err, re.M), ran.err
    assert re.search(r"rank *: 1 .*\n *exitcode *: 3 ", ran.err), ran.err
