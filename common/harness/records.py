"""What a run leaves behind: one `RunRecord` per engine as JSON, its step-0 gradients as tensors beside it.

Records are the only interface between running and judging: comparison and tables read them, never processes.

    runs/<run>/report.json          the job, the verdicts (see `common.harness.compare`)
    runs/<run>/<engine>.json        a RunRecord
    runs/<run>/<engine>.grads.pt    {parameter name: whole gradient of step 0}

All floats are stored at full precision, sizes in bytes, times in seconds. JSON has no number for NaN and the
infinities: they are stored as the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from common.errors import ConfigError
from common.harness.memory_record import StepMemory, Timeline
from common.job import FAKE_LINK

SCHEMA_VERSION = 2

T = TypeVar("T")


@dataclass(frozen=True)
class CollectiveCount:
    """How often one kind of collective ran in one phase of a step, and what it carried.

    Attributes:
        phase: "forward", "backward" or "optimizer".
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", ...
        count: operations on one rank.
        bytes: sum over operations of the whole buffer's size (the gathered output, the unreduced input).
    """

    phase: str
    kind: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Environment:
    """Where a run took place; times of two environments are never compared.

    Attributes:
        machine: the processor's family, and the vector instructions that torch's kernels use on it.
        commit: of this project.
    """

    torch: str
    python: str
    platform: str
    machine: str
    commit: str

    @classmethod
    def here(cls) -> Environment:
        """This process's environment; `commit` is "unknown" outside a git checkout."""
        root = Path(__file__).resolve().parents[2]
        git = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=False,
        )
        return cls(
            torch=torch.__version__,
            python=platform.python_version(),
            platform=platform.platform(),
            machine=f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
            commit=git.stdout.strip() or "unknown",
        )


@dataclass(frozen=True)
class RunRecord:
    """What one engine did on one job.

    Attributes:
        engine: the name it was asked for by.
        job: `JobConfig.to_dict()`.
        world_size: ranks that took part; 1 for an engine that is not data parallel.
        environment: where.
        losses: [step][rank], each rank's mean loss over its own sequences.
        grad_norms: [step], L2 norm of the whole gradient, summed in float64.
        grad_digests: [step][parameter], hash of the whole gradient's bits.
        param_norms: [step][parameter], L2 norm of each parameter's whole gradient, in float64.
        update_norms: [step][parameter], L2 norm of what the optimizer changed; no grade rests on it.
        collectives: one step's collectives on rank 0, once warm.
        predicted: what the plan says they should be; None where no formula covers the model.
        memory: one step's on each rank, once warm.
        timeline: of that step, on the rank with the highest peak; None of a GPU. No two steps have the same times.
        first_step_s: time of the first step on the slowest rank, compilation included.
        process_group: backend of the process group; it decides how reductions travel, see `common.gradient`.
    """

    engine: str
    job: dict[str, Any]
    world_size: int
    environment: Environment
    losses: list[list[float]]
    grad_norms: list[float]
    grad_digests: list[dict[str, str]]
    param_norms: list[dict[str, float]]
    update_norms: list[dict[str, float]] = field(default_factory=list)
    collectives: list[CollectiveCount] = field(default_factory=list)
    predicted: list[CollectiveCount] | None = None
    memory: list[StepMemory] = field(default_factory=list)
    timeline: Timeline | None = field(default=None, compare=False)
    first_step_s: float = 0.0
    process_group: str = "gloo"
    schema: int = SCHEMA_VERSION

    @property
    def mean_losses(self) -> list[float]:
        """[step], the mean over ranks: the loss of the whole batch."""
        return [sum(ranks) / len(ranks) for ranks in self.losses]

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON-ready data."""
        data: dict[str, Any] = json_ready(dataclasses.asdict(self))
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RunRecord:
        """The record that `to_dict` described.

        Raises:
            ConfigError: a record of another schema version, or one that is not as `to_dict` wrote it.
        """
        if data.get("schema") != SCHEMA_VERSION:
            raise ConfigError(
                f"record: expected schema {SCHEMA_VERSION}, found {data.get('schema')!r}; run the job again"
            )
        predicted = data["predicted"]
        record = cls(
            **data
            | {
                "environment": Environment(**data["environment"]),
                "collectives": [CollectiveCount(**c) for c in data["collectives"]],
                "predicted": predicted and [CollectiveCount(**c) for c in predicted],
                "memory": [StepMemory.from_dict(m) for m in data["memory"]],
                "timeline": data["timeline"] and Timeline.from_dict(data["timeline"]),
                # float() also reads the strings that stand for numbers which are not finite
                "losses": [[float(loss) for loss in ranks] for ranks in data["losses"]],
                "grad_norms": [float(norm) for norm in data["grad_norms"]],
                "param_norms": [_floats(step) for step in data["param_norms"]],
                "update_norms": [_floats(step) for step in data.get("update_norms", [])],
            }
        )
        _check_record(record)
        return record


def _floats(values: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


Run = tuple[RunRecord, dict[str, torch.Tensor]]
"""A record, and the whole gradients of step 0 by parameter: what is judged."""


def _check_record(record: RunRecord) -> None:
    """Refuse what was edited or cut: values of other types, steps or ranks that are missing."""
    types: dict[str, tuple[type, ...]] = {"int": (int,), "str": (str,), "float": (int, float)}
    parts: list[Any] = [record, record.environment, *record.collectives, *(record.predicted or []), *record.memory]
    parts += [point for each in record.memory for point in (*each.points, *(each.predicted or []))]
    for part in parts:
        for each in dataclasses.fields(part):
            value, expected = getattr(part, each.name), types.get(str(each.type))
            if expected is not None and (not isinstance(value, expected) or isinstance(value, bool)):
                raise ConfigError(f"record: {each.name}: expected {each.type}, found {value!r}; run the job again")
    for name in ("losses", "grad_norms", "grad_digests", "param_norms"):
        found, steps = len(getattr(record, name)), 0 if record.job.get("link") == FAKE_LINK else record.job["steps"]
        if found != steps:
            raise ConfigError(f"record: {name}: expected one for each of {steps} steps, found {found}")
    losses = [len(ranks) for ranks in record.losses]
    for kind, ranks in (("losses", min(losses, default=record.world_size)), ("memory", len(record.memory))):
        if ranks != record.world_size:
            raise ConfigError(f"record: {kind}: expected one for each of {record.world_size} ranks, found {ranks}")


def json_ready(data: Any) -> Any:
    """Nested data with its floats that are not finite written as strings."""
    if isinstance(data, dict):
        return {key: json_ready(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [json_ready(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data


def engine_file(run: Path, engine: str, suffix: str) -> Path:
    """The file of `engine` in the folder `run`; an import path keeps its dots."""
    return run / f"{engine}{suffix}"


def save_record(run: Path, record: RunRecord, gradients: dict[str, torch.Tensor], *, name: str | None = None) -> None:
    """Write a record and its step-0 gradients under the folder `run`, as `name` or else as its engine."""
    run.mkdir(parents=True, exist_ok=True)
    name = name or record.engine
    engine_file(run, name, ".json").write_text(json.dumps(record.to_dict(), indent=1, allow_nan=False))
    torch.save(gradients, engine_file(run, name, ".grads.pt"))


def load_record(run: Path, engine: str) -> Run:
    """Read a record and its step-0 gradients, by the name they were saved under.

    Raises:
        ConfigError: no such record, or one of another schema version.
    """
    path = engine_file(run, engine, ".json")
    if not path.is_file():
        raise ConfigError(f"record: no {path}; runs hold one JSON file per engine")
    record = RunRecord.from_dict(json.loads(path.read_text()))
    gradients: dict[str, torch.Tensor] = torch.load(
        engine_file(run, engine, ".grads.pt"), map_location="cpu", weights_only=True
    )
    return record, gradients


def row_of(cls: type[T], data: dict[str, Any]) -> T:
    """A row of numbers; the fields that are floats may be stored as strings."""
    floats = {field.name for field in dataclasses.fields(cls) if "float" in str(field.type)}  # type: ignore[arg-type]
    return cls(**{name: number_of(value) if name in floats else value for name, value in data.items()})


def number_of(value: Any) -> float | None:
    """A number that may be stored as a string."""
    return None if value is None else float(value)
