"""Baselines on disk: one JSON file, its keys sorted, so that a change of it is read in a review."""

from __future__ import annotations

import json
from pathlib import Path

from bench.baseline import Baseline
from bench.preflight import check_writable
from bench.store import naming, read_json
from common.errors import ConfigError

_WAY_OUT = "take it anew with --save-baseline"


def load_baseline(path: Path) -> Baseline:
    """Read a baseline.

    Raises:
        ConfigError: the file is missing, broken, or of another schema version.
    """
    data = read_json(path, "baseline", _WAY_OUT)
    with naming(path, "baseline", _WAY_OUT):
        return Baseline.from_dict(data)


def save_baseline(path: Path, baseline: Baseline) -> None:
    """Write a baseline, and the folders above it that are not there.

    Raises:
        ConfigError: it cannot be written.
    """
    text = json.dumps(baseline.to_dict(), indent=1, sort_keys=True, allow_nan=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    except OSError as error:
        raise ConfigError(f"save-baseline {path}: cannot be written: {error.strerror}; name another file") from None


def check_savable(path: Path) -> None:
    """See that a baseline can be written to `path`.

    Raises:
        ConfigError: it is a folder, or in a place that takes no files.
    """
    if path.is_dir():
        raise ConfigError(f"save-baseline {path}: expected a file, found a folder; name a file in it")
    check_writable(path.parent, "save-baseline")
