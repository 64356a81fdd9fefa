"""Calls of the command line from tests, and the processes that they leave."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import bench.commands
from bench.__main__ import main
from common.harness.launch import RankPool

ROOT = Path(__file__).resolve().parents[1]
FROZEN = ROOT / "parity_tests" / "frozen"
"""The folder of a comparison, as an earlier version stored it."""


@dataclass(frozen=True)
class Ran:
    """What a command left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def call(*words: str) -> Ran:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return Ran(code, out.getvalue(), err.getvalue())


def assert_one_line(ran: Ran, code: int, *expected: str) -> None:
    """One line on stderr that says all of `expected`, nothing on stdout."""
    assert (ran.code, ran.out) == (code, ""), ran
    assert ran.err.startswith("fsdp-parity: ") and ran.err.count("\n") == 1, ran.err
    for text in expected:
        assert text in ran.err, ran.err


class KeptRanks:
    """A pool as a command gets its ranks, which stays open when the command leaves it."""

    is_main = True

    def __init__(self, pool: RankPool) -> None:
        self.run = pool.run

    def __enter__(self) -> KeptRanks:
        return self

    def __exit__(self, *_: object) -> None: ...


def lend(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have commands work on this pool, where starting ranks is not what is claimed: each imports torch, for seconds."""
    monkeypatch.setattr(bench.commands, "open_ranks", lambda ranks: KeptRanks(pool))


def children() -> set[int]:
    """Process ids of this process's children, whatever they are."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended while we looked
            if int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(path.parent.name))
    return found


def environment(**more: str) -> dict[str, str]:
    """Ours, without what pytest or a launcher may have set for ranks."""
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", "RANK", "WORLD_SIZE")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | more


def run_process(*command: str, cwd: Path = ROOT, **environ: str) -> Ran:
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(**environ), cwd=cwd, timeout=300, check=False
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def marked(mark: str) -> set[int]:
    """Processes that were started with `mark` in their environment and have not ended."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"PARITY_MARK={mark}\0".encode() in path.read_bytes():
                found.add(int(path.parent.name))
    return found
