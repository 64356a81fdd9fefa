"""What can be known to be wrong before any rank starts: each fault is one line, and nothing is left running.

The same checks run again inside the ranks where a library user may come without this; here they cost no process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

from torch import nn

from bench.chance import find_draw
from bench.judge import PEERS, REFEREE
from bench.parser import torchrun_ranks
from bench.store import REPORT
from bench.trial import find_changed
from common.blocks import check_blocks
from common.device import device_of
from common.engine import SHORT_NAMES, compilers_of, import_path, is_own, load_engine
from common.errors import ConfigError, EngineError, ParityError
from common.harness.grades import SHARDED
from common.harness.workload import Workload
from common.imports import refusing_exits
from common.job import JobConfig
from common.models import build_task
from common.plan import BucketPlan, build_plan
from common.policy import DTYPES
from common.shardable import check_shardable

LARGEST_SEED = 2**63 - 1
"""What torch's generators take."""
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_WITH_DROPOUT = (nn.MultiheadAttention, nn.RNNBase)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
RANK_BYTES = 300 * 2**20
"""What a rank process needs before it holds a model: Python, torch and gloo."""


@refusing_exits()
def settle(job: JobConfig, reference: str, engines: Iterable[str], out: Path, *, alive: int = 1) -> JobConfig:
    """The job as it will run on `engines` against `reference`, recorded in `out`; refuses one that cannot.

    Args:
        alive: how many engines hold ranks of their own at the same time; in torchrun's they share them.

    Returns:
        The job; without a sequence length, if the model takes none.

    Raises:
        ConfigError: what is wrong, what was expected, and the way out.
    """
    _check_ranks(job)
    device_of(job.device).check(_processes_here(job), job.link)
    if job.seed > LARGEST_SEED:
        raise ConfigError(f"seed: expected at most {LARGEST_SEED}, found {job.seed}")
    engines = tuple(engines)
    names = (reference, *engines)
    for name in names:
        _load_engine(name)
    if not job.is_judged and SHORT_NAMES["ddp"] in map(import_path, engines):
        raise ConfigError(
            "engine ddp: waits for the result of an all-reduce, which a process group that moves nothing never has; "
            "leave ddp out of --engines on link fake"
        )
    used = names if job.is_judged else engines  # where nothing is judged the reference does not run
    workload = _load_workload(job)
    model = workload.model
    plan = build_plan(model, job.plan)
    _check_disabled_passes(job, used)
    _check_block_backend(model, job, plan, used)
    _check_trainable(model, job, names)
    _check_chance(workload)
    _check_memory(model, job, alive)
    at_home = [compilers_of(name, job) for name in used if not is_own(name)]  # the user's own may do without
    if any(compilers.model == "inductor" for compilers in at_home):
        check_compiler("backend")
    if any(compilers.blocks == "inductor" for compilers in at_home):
        check_compiler("block_backend")
    check_writable(out)
    if not all(map(is_own, used)):  # a user's own engine may make of a model what it cannot be by itself
        _check_forward(workload.job)
    return workload.job


def check_compiler(option: str) -> None:
    """See that Inductor, which the job has as its `option`, finds what it compiles C++ with.

    Raises:
        ConfigError: no compiler, or no Python headers.
    """
    without = f"or use --{option.replace('_', '-')} aot_eager, which needs none"
    compiler = os.environ.get("CXX", "g++")
    if not _runs(compiler):
        others = [name for name in ("c++", "clang++") if shutil.which(name)]
        way_out = f"set CXX={others[0]}" if others else "install one (Debian, Ubuntu: apt install g++)"
        raise ConfigError(f"{option} inductor: needs a C++ compiler, cannot run {compiler!r}; {way_out}, {without}")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise ConfigError(
            f"{option} inductor: needs Python's C headers, found no Python.h in {headers}; "
            f"install them (Debian, Ubuntu: apt install python3-dev), {without}"
        )


def check_writable(folder: Path, option: str = "out") -> None:
    """See that files and folders can be made in `folder`, which need not exist yet; the user named it by `option`.

    Raises:
        ConfigError: it, or the nearest folder above it that exists, is none or takes no files.
    """
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise ConfigError(
            f"{option} {folder}: expected a folder, found that {nearest} is a file; give another --{option}"
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{option} {folder}: cannot write in {nearest}; give another --{option}, or change its permissions"
        )


def _check_ranks(job: JobConfig) -> None:
    launched = torchrun_ranks()
    if launched is not None and launched != job.ranks:
        raise ConfigError(
            f"ranks: torchrun started {launched}, --ranks asks for {job.ranks}; leave --ranks out, "
            f"or start with --nproc-per-node {job.ranks}"
        )


def _processes_here(job: JobConfig) -> int:
    """How many of the job's processes this machine runs, for one engine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", job.processes)) if torchrun_ranks() else job.processes


def _load_engine(name: str) -> None:
    if name in (REFEREE, *PEERS, REPORT):
        raise ConfigError(f"engine {name!r}: a run has a file of that name that is no engine's; rename the module")
    try:
        load_engine(name)
    except ParityError:
        raise
    except Exception as error:
        raise ConfigError(f"engine {name!r}: importing it raised {_told(error)}") from error


def _load_workload(job: JobConfig) -> Workload:
    """What the job trains, on the meta device if it can be built there.

    A user's function may compute with real numbers while it builds, or its batches while they are made; then it is
    built as the ranks build it.
    """
    for device in ("meta", "cpu"):
        doing = "building it"
        try:
            built = build_task(job.model, seed=job.seed, dtype=DTYPES[job.dtype], device=device)
            doing = "its batch function"
            return Workload.of(built, job)
        except ParityError:
            raise
        except Exception as error:
            if device == "cpu":
                raise ConfigError(f"model {job.model!r}: {doing} raised {_told(error)}") from error
    raise AssertionError("the second way returns or raises")


def _check_trainable(model: nn.Module, job: JobConfig, engines: Iterable[str]) -> None:
    """See that the model can be sharded, has something to train, and means the same however the batch is shared out."""
    if not any(param.requires_grad for param in model.parameters()):
        raise ConfigError(f"model {job.model!r}: no parameter requires a gradient, so there is nothing to train")
    for name, param in model.named_parameters():
        if param.is_complex():
            raise ConfigError(
                f"model {job.model!r}: parameter {name!r}: expected a real dtype, found {param.dtype}; make its "
                "real and imaginary parts a dimension of their own, as torch.view_as_real does"
            )
    if any(import_path(name) in SHARDED for name in engines):
        try:
            check_shardable(model.named_parameters(), next(model.parameters()).device.type)
        except EngineError as error:
            raise ConfigError(f"model {job.model!r}: {error}") from None
    for name, module in model.named_modules():
        if not module.training:
            continue
        what = f"model {job.model!r}: module {name or '(root)'!r}, a {type(module).__name__} in training mode,"
        drops = isinstance(module, _DROPOUTS) and module.p > 0
        drops_inside = isinstance(module, _WITH_DROPOUT) and module.dropout > 0
        if drops or drops_inside or isinstance(module, nn.RReLU):
            raise ConfigError(f"{what} draws other numbers on each engine; build it without dropout, or call .eval()")
        if isinstance(module, _BATCH_NORMS):
            raise ConfigError(f"{what} depends on how ranks share the batch; use another norm, or call .eval() on it")


def _check_chance(workload: Workload) -> None:
    """See that a user's model and loss draw no random numbers by themselves; those at home draw none."""
    draw = find_draw(workload) if workload.job.has_own_model else None
    if draw is not None:
        raise ConfigError(
            f"model {workload.job.model!r}: its forward or loss calls {draw}, which draws other numbers on each "
            "engine; build it without dropout or noise, or call .eval()"
        )


def _check_forward(job: JobConfig) -> None:
    """See that a user's model runs on its batches and leaves its parameters as they are; those at home do."""
    if not job.has_own_model:
        return
    try:
        changed = find_changed(job)
    except ParityError:
        raise
    except Exception as error:
        raise ConfigError(f"model {job.model!r}: its forward or loss raised {_told(error)}") from error
    if changed is not None:
        raise ConfigError(
            f"model {job.model!r}: expected a forward and loss that change no parameter, found that they change "
            f"{changed!r}, which in a sharded model would be a copy; compute with a changed value instead "
            "(weight / weight.norm()), and build embeddings without max_norm"
        )


def _check_disabled_passes(job: JobConfig, engines: Iterable[str]) -> None:
    """See that an engine has the passes that are disabled; one of the user's own may."""
    may_have = [is_own(name) or import_path(name) == SHORT_NAMES["compiled"] for name in engines]
    if job.disabled_passes and not any(may_have):
        raise ConfigError(
            f"disabled_passes: expected an engine with passes to leave {job.disabled_passes[0]} out of, found "
            f"{', '.join(engines)}; add compiled to --engines, or leave --disabled-passes out"
        )


def _check_block_backend(model: nn.Module, job: JobConfig, plan: BucketPlan, engines: Iterable[str]) -> None:
    """See that an engine lets its blocks be compiled, and that the model has some without hooks inside."""
    if job.block_backend == "eager":
        return
    followers = [name for name in engines if compilers_of(name, job).blocks]
    if not followers:
        raise ConfigError(
            f"block_backend {job.block_backend}: expected an engine that leaves the model's code as it is, found "
            f"{', '.join(engines)}; add one, such as eager, to --engines, or leave --block-backend out"
        )
    has_hooks = any(import_path(name) in SHARDED for name in followers)  # not so ddp, and who knows a user's own engine
    check_blocks(model, job, plan if has_hooks else None)


def _check_memory(model: nn.Module, job: JobConfig, alive: int) -> None:
    """See that this machine holds the least that the ranks on it need: each builds the whole model before sharding."""
    here = _processes_here(job) * (1 if torchrun_ranks() else alive)
    model_bytes = sum(param.numel() * param.element_size() for param in model.parameters())
    needed = here * (model_bytes + RANK_BYTES)
    held = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > held:
        raise ConfigError(
            f"model {job.model!r} on {here} ranks: needs at least {_gigabytes(needed)}, since each rank builds the "
            f"whole model before it shards it, and this machine has {_gigabytes(held)}; use fewer ranks or a smaller "
            "model"
        )


def _runs(program: str) -> bool:
    try:
        return subprocess.run([program, "--version"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _told(error: BaseException) -> str:
    """An error of the user's own code on one line, with the place that raised it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text} ({place.filename}:{place.lineno})"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
