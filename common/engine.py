"""The engine contract: a module that exports `parallelize(model, mesh, job)`, found by name.

An engine's name is its import path; those at home have short names. `parallelize` shards `model` in place and
returns what is called in the training loop - `model` itself or a wrapper around it. Afterwards `model`

- has the parameter names and the order it had before; tied parameters stay one object, frozen ones frozen;
- after `loss.backward()` holds in each `.grad` the mean gradient over ranks, sharded as the parameter is.

An engine that does not split the batch over ranks sets `DATA_PARALLEL = False` in its module and runs on rank 0
alone, on the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from common.errors import ConfigError
from common.imports import import_named
from common.job import JobConfig

SHORT_NAMES = {
    "eager": "fsdp_eager.parallelize",
    "compiled": "fsdp_compiled.parallelize",
    "single": "common.baselines.single",
    "ddp": "common.baselines.ddp",
    "torch-fsdp2": "common.baselines.torch_fsdp2",
    "torch-fsdp2-prefetch": "common.baselines.torch_fsdp2_prefetch",
}
"""Import paths of the engines at home; whatever is not among them is a user's own."""

_BLOCKWISE = ("eager", "torch-fsdp2", "torch-fsdp2-prefetch", "ddp")
NO_COMPILER = "eager"
"""What a job's backend is called that compiles nothing."""


class Parallelize(Protocol):
    """Shard `model` in place over `mesh` as `job` says; return the module to call in the training loop."""

    def __call__(self, model: nn.Module, mesh: DeviceMesh | None, job: JobConfig) -> nn.Module: ...


@dataclass(frozen=True)
class Engine:
    """An engine, loaded.

    Attributes:
        name: the name it was asked for by.
        parallelize: its entry point; `mesh` is None only for an engine that is not data parallel.
        data_parallel: whether each rank takes its own share of the batch.
    """

    name: str
    parallelize: Parallelize
    data_parallel: bool


@dataclass(frozen=True)
class Compilers:
    """The backends that may compile what an engine runs, None where nothing does.

    Attributes:
        model: of the model as a whole.
        blocks: of each repeated block, see `common.blocks`.
    """

    model: str | None
    blocks: str | None

    @property
    def all(self) -> set[str]:
        """Both, where there are any."""
        return {backend for backend in (self.model, self.blocks) if backend is not None}


def import_path(engine: str) -> str:
    """Where the engine of that name, or path, is imported from."""
    return SHORT_NAMES.get(engine, engine)


def is_own(engine: str) -> bool:
    """Whether it is a user's own engine, of which nothing is known."""
    return import_path(engine) not in SHORT_NAMES.values()


def compilers_of(engine: str, job: JobConfig) -> Compilers:
    """What may compile an engine on this job; a user's own is taken to follow both of the job's backends."""
    path = import_path(engine)
    follows_whole = is_own(path) or path == SHORT_NAMES["compiled"]
    follows_blocks = is_own(path) or path in map(import_path, _BLOCKWISE)
    return Compilers(
        model=job.backend if follows_whole and job.backend != NO_COMPILER else None,
        blocks=job.block_backend if follows_blocks and job.block_backend != NO_COMPILER else None,
    )


def load_engine(name: str) -> Engine:
    """Import the engine called `name`.

    Raises:
        ConfigError: no such module, or a module without `parallelize`.
    """
    path = import_path(name)
    known = ", ".join(SHORT_NAMES)
    module = import_named(path, what=f"engine {name!r}", way_out=f"; known engines are {known}, or give an import path")
    parallelize = getattr(module, "parallelize", None)
    if not callable(parallelize):
        raise ConfigError(f"engine {name!r}: module {path!r} does not define parallelize(model, mesh, job)")
    return Engine(name, parallelize, getattr(module, "DATA_PARALLEL", True))
