"""Initial parameters that depend on the seed and on each parameter's name, and on nothing else.

Every parameter is drawn from a generator of its own, always whole, in fp32 and on the CPU, and copied from there to
the parameter. So neither sharding, order, world size nor device changes a value; a float64 model holds exactly the fp32
values, a bf16 model their roundings.

Source: GPT-2's scheme: standard deviation 0.02, and 0.02 / sqrt(2 * n_layers) for the projections that add to the
residual stream, since 2 * n_layers of them are summed.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from common.errors import ConfigError
from common.models.base import LanguageModel
from common.seed import seed_for

STD = 0.02


def initialise(model: nn.Module, seed: int) -> None:
    """Give every parameter of `model` its initial value, in place.

    A tied parameter is drawn once, by the first of its names. Works on any module; only a `LanguageModel` says
    which projections add to its residual stream.

    Raises:
        ConfigError: a parameter on the meta device.
    """
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.is_meta:
                raise ConfigError(
                    f"initialise: parameter {name!r} is on the meta device and has no memory; call materialise first"
                )
            param.copy_(initial_value(model, name, seed))


def initial_value(model: nn.Module, name: str, seed: int) -> torch.Tensor:
    """The whole initial value of the parameter called `name`, in fp32 on the CPU.

    Biases are zeros, other vectors (scales of norms) ones, and all else is normal.
    """
    shape = model.get_parameter(name).shape
    if name.rpartition(".")[2] == "bias":
        return torch.zeros(shape, device="cpu", dtype=torch.float32)
    if len(shape) < 2:
        return torch.ones(shape, device="cpu", dtype=torch.float32)
    generator = torch.Generator(device="cpu").manual_seed(seed_for("parameter", seed, name))
    values = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
    return values.mul_(_std(model, name))


def materialise(model: LanguageModel, *, device: torch.device, dtype: torch.dtype) -> None:
    """Replace every parameter by an uninitialised one on `device` in `dtype`; tied ones stay one object.

    `nn.Module.to_empty` would make two parameters of a tied one when it leaves the meta device.
    """
    assert next(model.buffers(), None) is None, "models of the registry have no buffers"
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for key, old in list(module.named_parameters(recurse=False)):
            if old not in made:
                made[old] = nn.Parameter(torch.empty(old.shape, device=device, dtype=dtype), old.requires_grad)
            setattr(module, key, made[old])


def _std(model: nn.Module, name: str) -> float:
    if isinstance(model, LanguageModel) and name.removesuffix(".weight").endswith(model.RESIDUAL_OUTPUTS):
        return STD / math.sqrt(2 * model.config.n_layers)
    return STD
