"""Ranks that torchrun started: the results of a pool, and the name of the rank that failed or hung."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

from common.harness.launch import RankPool, launched_by_torchrun, open_ranks
from parity_tests import faulty


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


def test_ranks_of_torchrun_give_what_a_pool_gives(pool: RankPool) -> None:
    """The same calls in the ranks of torchrun: same results on all ranks, progress of one's own, ranks checked."""
    assert not launched_by_torchrun() and isinstance(open_ranks(2), RankPool)
    done = run_under_torchrun("work")
    assert done.returncode == 0, done.stderr
    first, second, third, events, refused = json.loads(done.stdout)
    assert first == json.loads(json.dumps(pool.run(faulty.gather_values, 10, ranks=2)))
    assert second == json.loads(json.dumps(pool.run(faulty.gather_compiled, ranks=2)))
    assert third == [0, 1]
    assert events == ["0: step 1/2", "0: step 2/2", "0: closing 0"]
    assert refused.startswith("2 ranks: the job wants 3, torchrun started 2") and "--nproc-per-node 3" in refused


def test_hanging_rank_of_torchrun_names_itself() -> None:
    """Without a pool too, the rank that hangs says so in one line and ends with exit code 3; torchrun ends the rest."""
    done = run_under_torchrun("hang")
    lines = done.stderr.splitlines()
    assert any(line.startswith("rank 1 at spin (parity_tests/faulty.py:") for line in lines), done.stderr
    assert done.returncode == 1 and re.search(r"rank *: 1.*\n *exitcode *: 3 ", done.stderr), done.stderr


def test_raising_rank_without_a_pool_names_itself() -> None:
    """An error in a joined rank is a RankError with that rank; port 0 lets the system choose one."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = run_module("parity_tests.torchrun_job", "raise", "1", **alone)
    assert (done.returncode, done.stderr) == (3, "rank 0: ValueError: bad value on rank 0\n")
