"""One benchmark on disk: a folder with its rows, and for each cell the records and raw turns that they come from.

runs/<time>-<model>-<ranks>ranks-<dtype>/bench.json             one entry per cell: job, link, rows
                                         cell-<i>/turns.json    by engine, [turn][rank], every timed step
                                         cell-<i>/<engine>.json see `common.harness.records`
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.benchmark import BenchRow, Spread, TurnsByRank
from bench.store import BENCH, naming, read_json
from common.errors import ConfigError
from common.harness.records import json_ready, number_of
from common.job import JobConfig

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Cell:
    """One job on one link.

    Attributes:
        link: as it was written.
        about: what it costs, and what that imitates.
        rows: one per engine.
    """

    job: JobConfig
    link: str
    about: str
    rows: tuple[BenchRow, ...]


@dataclass(frozen=True)
class Benchmark:
    """All cells of one benchmark.

    Attributes:
        created: local time with its offset, ISO 8601.
        reference: what every engine had to agree with.
        swept: names of what differs between cells.
        torch: version.
    """

    created: str
    reference: str
    swept: tuple[str, ...]
    torch: str
    cells: tuple[Cell, ...]

    @property
    def failures(self) -> list[str]:
        """Why rows have no figures, a line each; none if all do."""
        return [failure for cell in self.cells for row in cell.rows for failure in row.failures]

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        data: dict[str, Any] = json_ready({"schema": SCHEMA_VERSION, **dataclasses.asdict(self)})
        return data


def save_benchmark(folder: Path, benchmark: Benchmark) -> None:
    """Write the rows; records and turns are there already."""
    (folder / f"{BENCH}.json").write_text(json.dumps(benchmark.to_dict(), indent=1, allow_nan=False))


def save_turns(folder: Path, turns: Mapping[str, TurnsByRank]) -> None:
    """Write the raw turns of one cell, by engine, to its folder."""
    data = {
        engine: [[dataclasses.asdict(turn) for turn in ranks] for ranks in taken] for engine, taken in turns.items()
    }
    (folder / "turns.json").write_text(json.dumps(data))


def load_benchmark(folder: Path) -> Benchmark:
    """Read the rows of a benchmark.

    Raises:
        ConfigError: the file is broken, or of another schema version.
    """
    path = folder / f"{BENCH}.json"
    data = read_json(path)
    if data.get("schema") != SCHEMA_VERSION:
        raise ConfigError(
            f"run {folder}: expected a benchmark of schema {SCHEMA_VERSION}, found {data.get('schema')!r}; run it again"
        )
    with naming(path):
        return Benchmark(
            created=data["created"],
            reference=data["reference"],
            swept=tuple(data["swept"]),
            torch=data["torch"],
            cells=tuple(_cell(each) for each in data["cells"]),
        )


def _cell(data: Mapping[str, Any]) -> Cell:
    rows: Sequence[Mapping[str, Any]] = data["rows"]
    return Cell(JobConfig.from_dict(data["job"]), data["link"], data["about"], tuple(_row(row) for row in rows))


def _row(data: Mapping[str, Any]) -> BenchRow:
    spreads = {name: data[name] and Spread(**data[name]) for name in ("step_s", "speed")}
    changed = {"failures": tuple(data["failures"]), "margin": number_of(data.get("margin"))}
    return BenchRow(**{**data, **spreads, **changed})
