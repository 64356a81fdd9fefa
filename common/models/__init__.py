"""The models that jobs train, by name: those of the registry, in any size, and the user's own as `module:function`.

The user's own may be a task, which brings batches and a loss of its own, see `common.task`.

Source: the published configurations (see each model's file); `-debug`, `-tiny` and `-small` are ours, on byte tokens.
Left out: loading pre-trained weights.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from common.errors import ConfigError
from common.imports import import_named
from common.models.base import LanguageModel, ModelConfig, check_seq, hint
from common.models.init import initial_value, initialise, materialise
from common.models.spec import CONFIGS, FAMILIES, construct, read_spec, settable_fields
from common.task import Task, as_task

__all__ = [
    "LanguageModel",
    "ModelConfig",
    "ModelInfo",
    "ModelLimits",
    "build_model",
    "build_task",
    "check_seq",
    "describe_fields",
    "describe_models",
    "initial_value",
    "initialise",
    "model_limits",
    "model_names",
]


@dataclass(frozen=True)
class ModelInfo:
    """One line of the list of models.

    Attributes:
        name: what `build_model` takes.
        config: its hyperparameters.
        params: number of parameters; a tied one counts once.
    """

    name: str
    config: ModelConfig
    params: int


@dataclass(frozen=True)
class ModelLimits:
    """What a model can take, as far as it says so.

    Attributes:
        vocab_size: number of token ids, or None if the model does not say.
        max_seq_len: longest sequence in tokens, or None if the model does not say.
    """

    vocab_size: int | None
    max_seq_len: int | None


def model_names() -> tuple[str, ...]:
    """The names of the registry, smallest model of a family first."""
    return tuple(CONFIGS)


def describe_fields() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Every field that `NAME,FIELD=VALUE` can set: what it takes, and the classes of the models that have it."""
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for config, model in FAMILIES.items():
        for name, takes in settable_fields(config).items():
            found[name] = (takes, (*found.get(name, ("", ()))[1], model.__name__))
    return found


def describe_models() -> list[ModelInfo]:
    """Every model of the registry with its parameter count; allocates nothing."""
    infos = []
    for name in model_names():
        model = _construct(name)
        infos.append(ModelInfo(name, model.config, sum(param.numel() for param in model.parameters())))
    return infos


def model_limits(model: nn.Module) -> ModelLimits:
    """Read vocabulary and longest sequence from `model.config`, by our names or those of Hugging Face."""
    config = getattr(model, "config", None)
    longest = getattr(config, "max_seq_len", getattr(config, "max_position_embeddings", None))
    return ModelLimits(getattr(config, "vocab_size", None), longest)


def build_model(
    name: str, *, seed: int, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> nn.Module:
    """Build a model: one of the registry, or the user's own.

    Args, Raises: see `build_task`; of a task this is its model.
    """
    built = build_task(name, seed=seed, dtype=dtype, device=device)
    return built.model if isinstance(built, Task) else built


def build_task(
    name: str, *, seed: int, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> nn.Module | Task:
    """Build what is trained: a model that takes token ids, or the user's model with batches and a loss of its own.

    A model of the registry is initialised by `initialise`. The user's own keeps the values that its function gave
    it, drawn with torch's generators at `seed`, and is then cast; the generators are put back afterwards.

    Args:
        name: one of `model_names()`, alone or with fields of its config changed (see `common.models.spec`), or
            `module:function`; the function takes no arguments and returns an `nn.Module` or a task, see `common.task`.
        seed: decides the parameters.
        dtype: dtype of the floating-point parameters, and of a user model's real floating-point buffers.
        device: where the parameters live, the CPU by default; on "meta" nothing is allocated or initialised.

    Raises:
        ConfigError: no such model, field, module or function, a config that no model can have, or a function that
            returns neither. What the user's own code raises is passed on as it is.
    """
    place = torch.device("cpu" if device is None else device)
    if ":" in name:
        return _build_users(name, seed, dtype, place)
    model = _construct(name)
    materialise(model, device=place, dtype=dtype)
    if place.type != "meta":
        initialise(model, seed)
    return model


def _construct(name: str) -> LanguageModel:
    """The model called `name` on the meta device."""
    config = read_spec(name)
    if config is not None:
        with torch.device("meta"):
            return construct(config)
    known = ", ".join(model_names())
    file = os.path.join(*name.removesuffix(".py").split(".")) + ".py"
    meant = f" (for a model of {file}, name its function too: {name.removesuffix('.py')}:FUNCTION)"
    meant = meant if os.path.isfile(file) else hint(name.partition(",")[0], model_names())
    raise ConfigError(f"model {name!r} is unknown{meant}; known are {known}, or module:function")


def _build_users(name: str, seed: int, dtype: torch.dtype, device: torch.device) -> nn.Module | Task:
    function = _import_function(name)
    forked = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=forked), torch.device(device):
        torch.manual_seed(seed)
        built = as_task(function(), name)
    model = built.model if isinstance(built, Task) else built
    model.to(device)
    _cast(model, dtype)
    return built


def _import_function(name: str) -> Callable[[], object]:
    """The user's function, from the installed packages or the working directory."""
    path, _, attribute = name.partition(":")
    if path.endswith(".py") or "/" in path:
        dotted = path.removesuffix(".py").strip("./").replace("/", ".")
        raise ConfigError(f"model {name!r}: expected an import path, found a file; write {dotted}:{attribute}")
    if not all(part.isidentifier() for part in (*path.split("."), attribute)):
        other = f"; for another size write {path},{attribute}" if path in CONFIGS else ""
        raise ConfigError(f"model {name!r}: expected module:function, such as my_package.my_model:build{other}")
    where = f" in {os.getcwd()} or among the installed packages"
    way_out = "; run from the folder that holds it, or set PYTHONPATH"
    module = import_named(path, what=f"model {name!r}", way_out=where + way_out)
    function = getattr(module, attribute, None)
    if function is None:
        raise ConfigError(f"model {name!r}: module {path!r} has no {attribute!r}{hint(attribute, vars(module))}")
    if not callable(function):
        raise ConfigError(f"model {name!r}: expected a function, found {attribute!r} of type {type(function).__name__}")
    _check_no_arguments(name, function)
    found: Callable[[], object] = function
    return found


def _check_no_arguments(name: str, function: Callable[..., object]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # a builtin without a signature; the call itself will tell
    required = [
        param.name
        for param in signature.parameters.values()
        if param.default is param.empty and param.kind not in (param.VAR_POSITIONAL, param.VAR_KEYWORD)
    ]
    if required:
        raise ConfigError(
            f"model {name!r}: expected a function without arguments, found one that needs {', '.join(required)}; "
            "wrap it in one that supplies them"
        )


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point parameters and buffers in place.

    Unlike `nn.Module.to`, this leaves complex buffers alone, of which a real dtype would drop the imaginary part.
    """
    for param in model.parameters():
        if param.is_floating_point():
            param.data = param.data.to(dtype)
    for module in model.modules():
        for key, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_floating_point():
                setattr(module, key, buffer.to(dtype))
