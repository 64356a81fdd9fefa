"""The Makefile and `.ci/run`: what a fresh machine lacks is named in one line, before anything is installed."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

from parity_tests.cli_calls import ROOT, Ran

STUB = """#!/bin/bash
case "$2" in
  *version_info*) exit {old} ;;
  *ensurepip*) exit {without_venv} ;;
  *) exit 1 ;;
esac
"""


def make(folder: Path, target: str, *words: str, **environ: str) -> Ran:
    """Run a target of our Makefile in a folder that holds nothing else, with a PATH of its own."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    binaries = folder / "bin"
    binaries.mkdir(exist_ok=True)
    for name in ("bash", "touch", "rm", "find"):
        target_path = shutil.which(name)
        assert target_path is not None
        if not (binaries / name).exists():
            (binaries / name).symlink_to(target_path)
    make_path = shutil.which("make")
    assert make_path is not None
    done = subprocess.run(
        (make_path, target, *words),
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PATH": str(binaries)} | environ,
        timeout=60,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def add_python(folder: Path, name: str, *, old: int = 0, without_venv: int = 0) -> None:
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(STUB.format(old=old, without_venv=without_venv))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def own_lines(ran: Ran) -> list[str]:
    """What our recipe says, without make's own line about the recipe that failed."""
    return [line for line in ran.err.splitlines() if not line.startswith("make: ***")]


def test_make_names_a_missing_compiler(tmp_path: Path) -> None:
    """One line with what to do, before anything is installed; another backend does not ask for one."""
    add_python(tmp_path, "python3", old=1)
    ran = make(tmp_path, "parity")
    assert ran.code == 2 and len(own_lines(ran)) == 1 and "C++ compiler, cannot run g++" in own_lines(ran)[0]
    ran = make(tmp_path, "test", CXX="other-cxx")
    assert ran.code == 2 and len(own_lines(ran)) == 1 and "cannot run other-cxx" in own_lines(ran)[0]
    ran = make(tmp_path, "parity", "ARGS=--backend aot_eager")
    assert ran.code == 2 and "Python 3.11 or newer" in own_lines(ran)[0]
    assert not (tmp_path / ".venv").exists()


def test_make_names_an_old_python_and_a_missing_venv_module(tmp_path: Path) -> None:
    """A Python too old, one that is a shim for nothing, and one without venv: one line each, nothing installed."""
    add_python(tmp_path, "python3", old=1)
    add_python(tmp_path, "python3.13", old=127)
    ran = make(tmp_path, "check")
    assert ran.code == 2 and len(own_lines(ran)) == 1 and "needs Python 3.11 or newer" in own_lines(ran)[0]
    add_python(tmp_path, "python3.12", without_venv=1)
    ran = make(tmp_path, "check")
    assert ran.code == 2 and len(own_lines(ran)) == 1 and "python3.12 lacks the venv module" in own_lines(ran)[0]
    assert not (tmp_path / ".venv").exists()


def test_ci_runs_the_three_targets() -> None:
    """`.ci/run` calls check, test and parity with all extras, from wherever it is started, and nothing else."""
    path = ROOT / ".ci" / "run"
    commands = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert commands == [
        "set -euo pipefail",
        'cd "$(dirname "${BASH_SOURCE[0]}")/.."',
        "export EXTRAS=dev,hf",
        "make check",
        "make test",
        "make parity",
    ]
    assert os.access(path, os.X_OK)
