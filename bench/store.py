"""One comparison on disk: a folder with a report and one record per engine, from which all tables can be made again.

runs/<time>-<model>-<ranks>ranks-<dtype>/report.json      job, order of the engines, one ParityReport per pair
                                         <engine>.json    see `common.harness.records`; so are the gradients
                                         float64.json     the referee's
                                         rounded-1.json   a peer's; so rounded-2
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.baseline import Baseline, Change, Held, changes, regressions
from bench.explain import Explanation
from bench.judge import failures
from bench.stages import Bisection
from common.errors import ConfigError
from common.harness.grades import Grade
from common.harness.records import RunRecord, engine_file, json_ready, number_of, row_of
from common.harness.report import Divergence, ParamRow, ParityReport, StepRow, TrendRow
from common.job import JobConfig

SCHEMA_VERSION = 1
REPORT = "report"
"""Name of the report's file, which no engine may have."""
EXPLANATION = "explanation.json"
BENCH = "bench"
"""Name of a benchmark's file."""
LATEST = "latest"
MODEL_CHARACTERS = 80
"""Of a model's name in a folder's; file systems take names of 255 bytes, and a model with its fields can be longer."""


@dataclass(frozen=True)
class Comparison:
    """All that is known of one comparison, but for its gradients.

    Attributes:
        created: local time with its offset, ISO 8601.
        reference: the engine that the others are judged against.
        records: by engine name, in the order of the tables: the reference, the candidates, the referee.
        reports: one per judged pair.
        bisections: of the engines that were judged stage by stage too.
        explanation: of the pair that was replayed, if one was.
        held: the baseline that it is held against, if there is one.
    """

    created: str
    job: JobConfig
    reference: str
    records: Mapping[str, RunRecord]
    reports: tuple[ParityReport, ...]
    bisections: tuple[Bisection, ...] = ()
    explanation: Explanation | None = None
    held: Held | None = None

    @property
    def disagreements(self) -> list[str]:
        """Why parity does not hold, a line each; none if it does."""
        return failures(self.reports, self.records)

    @property
    def regressions(self) -> list[str]:
        """What is worse than in the baseline, a line each."""
        return regressions(self.held.baseline, self.records, self.reports) if self.held else []

    @property
    def changes(self) -> list[Change]:
        """Every figure of the baseline beside this comparison's."""
        return changes(self.held.baseline, self.records, self.reports) if self.held else []

    @property
    def failures(self) -> list[str]:
        """What is wrong, a line each: where engines disagree, then what is worse than in the baseline."""
        return self.disagreements + self.regressions

    @property
    def holds(self) -> bool:
        """The verdict."""
        return not self.failures

    def to_baseline(self) -> Baseline:
        """What later comparisons can be held against."""
        return Baseline.of(self.job, self.reference, self.records, self.reports)

    def to_dict(self) -> dict[str, Any]:
        """All but the records, as JSON-ready data."""
        data: dict[str, Any] = json_ready(
            {
                "schema": SCHEMA_VERSION,
                "created": self.created,
                "holds": self.holds,
                "failures": self.failures,
                "job": self.job.to_dict(),
                "reference": self.reference,
                "engines": list(self.records),
                "comparisons": [report.to_dict() for report in self.reports],
                "bisections": [dataclasses.asdict(each) for each in self.bisections],
                "explanation": self.explanation and dataclasses.asdict(self.explanation),
                "held": self.held and self.held.to_dict(),
            }
        )
        return data


def make_run_folder(out: Path, job: JobConfig, now: datetime) -> Path:
    """Make a new folder for a run in `out`, named by time and job.

    Raises:
        ConfigError: the folder cannot be made.
    """
    model = re.sub(r"[^A-Za-z0-9.]+", "-", job.model)[:MODEL_CHARACTERS]
    name = f"{now:%Y%m%d-%H%M%S}-{model}-{job.ranks}ranks-{job.param_dtype}"
    for suffix in ("", *(f"-{i}" for i in range(2, 1000))):
        folder = out / (name + suffix)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"out {out}: cannot make a folder in it: {error.strerror}; give another --out") from None
        return folder
    raise ConfigError(f"out {out}: expected a free name for the run, found {name} and 998 more taken")


def save_comparison(folder: Path, comparison: Comparison) -> None:
    """Write the report, and the explanation if there is one; the records are there already."""
    data = comparison.to_dict()
    del data["explanation"]
    _file(folder).write_text(json.dumps(data, indent=1, allow_nan=False))
    if comparison.explanation is not None:
        save_explanation(folder, comparison.explanation)


def save_explanation(folder: Path, explanation: Explanation) -> None:
    """Write what was found out later, beside the report, which stays as old as it is.

    Raises:
        ConfigError: it cannot be written.
    """
    path = folder / EXPLANATION
    try:
        path.write_text(json.dumps(json_ready(dataclasses.asdict(explanation)), indent=1, allow_nan=False))
    except OSError as error:
        raise ConfigError(f"run {path}: cannot be written: {error.strerror}; copy the run to another folder") from None


def find_run(run: str, out: Path, *, kind: str = "finished run", fits: Callable[[Path], bool] = Path.is_dir) -> Path:
    """The folder that is meant by `run`: a path, a name in `out`, or "latest" of those in `out`.

    Args:
        kind, fits: of "latest", what kind of run is looked for, and whether a folder holds one.

    Raises:
        ConfigError: there is none.
    """
    if run == LATEST:
        files = [path for name in (REPORT, BENCH) for path in out.glob(f"*/{name}.json")] if out.is_dir() else []
        files = [path for path in files if fits(path.parent)]
        if not files:
            raise ConfigError(f"run latest: found no {kind} in {out}; start one first, or give --out")
        return max(files, key=lambda path: (path.stat().st_mtime_ns, path.parent.name)).parent
    for folder in (Path(run), out / run):
        if _file(folder).is_file() or is_benchmark(folder):
            return folder
    raise ConfigError(
        f"run {run}: expected a folder with a {REPORT}.json or a {BENCH}.json, found none; compare and bench write "
        "them, see --out"
    )


def is_benchmark(folder: Path) -> bool:
    """Whether `bench` wrote the folder, not `compare`."""
    return (folder / f"{BENCH}.json").is_file()


def is_comparison(folder: Path) -> bool:
    """Whether `compare` wrote the folder."""
    return _file(folder).is_file()


def load_comparison(folder: Path) -> Comparison:
    """Read a comparison from its files.

    Raises:
        ConfigError: a file is missing, broken, or of another schema version.
    """
    data = read_json(_file(folder))
    if data.get("schema") != SCHEMA_VERSION:
        raise ConfigError(
            f"run {folder}: expected a report of schema {SCHEMA_VERSION}, found {data.get('schema')!r}; run it again"
        )
    with naming(_file(folder)):
        files = {name: engine_file(folder, name, ".json") for name in data["engines"]}
    records = {name: _load_record(path) for name, path in files.items()}
    with naming(_file(folder)):
        return Comparison(
            created=data["created"],
            job=JobConfig.from_dict(data["job"]),
            reference=data["reference"],
            records=records,
            reports=tuple(_report(each) for each in data["comparisons"]),
            bisections=tuple(Bisection.from_dict(each) for each in data.get("bisections", ())),
            explanation=_load_explanation(folder / EXPLANATION),
            held=Held.from_dict(data["held"]) if data.get("held") else None,
        )


@contextmanager
def naming(path: Path, what: str = "run", way_out: str = "run it again") -> Iterator[None]:
    """Turn whatever a file of the wrong shape leads to into one line that names the file."""
    try:
        yield
    except (ConfigError, KeyError, TypeError, ValueError, AttributeError) as error:
        found = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{what} {path}: not as it was written ({found}); {way_out}") from error


def read_json(path: Path, what: str = "run", way_out: str = "run it again") -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        what, way_out: the beginning and the end of the message if there is none.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{what} {path}: cannot be read: {error.strerror}; {way_out}") from None
    except ValueError as error:
        raise ConfigError(f"{what} {path}: expected JSON, found: {error}; {way_out}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{what} {path}: expected a JSON object, found a {type(data).__name__}; {way_out}")
    return data


def _load_explanation(path: Path) -> Explanation | None:
    if not path.exists():
        return None
    data = read_json(path)
    with naming(path):
        return Explanation.from_dict(data)


def _load_record(path: Path) -> RunRecord:
    data = read_json(path)
    with naming(path):
        return RunRecord.from_dict(data)


def _report(data: dict[str, Any]) -> ParityReport:
    """The report that `ParityReport.to_dict` described."""
    divergence = data["first_divergence"]
    return ParityReport(
        **data
        | {
            "asked": Grade(data["asked"]),
            "reached": data["reached"] and Grade(data["reached"]),
            "margin": number_of(data["margin"]),
            "reasons": tuple(data["reasons"]),
            "causes": tuple(data["causes"]),
            "first_divergence": divergence and Divergence(**divergence),
            "params": tuple(row_of(ParamRow, row) for row in data["params"]),
            "steps": tuple(row_of(StepRow, row) for row in data["steps"]),
            "trends": tuple(row_of(TrendRow, row) for row in data["trends"]),
        }
    )


def _file(folder: Path) -> Path:
    return folder / f"{REPORT}.json"
