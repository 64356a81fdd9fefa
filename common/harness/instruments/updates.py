"""By how much one optimizer step moves each parameter: L2 norms of the change, over all ranks.

No grade rests on them, since rounding and Adam's signs decide their digits; but a parameter that does not move at all,
or twice as far, tells why a later loss is wrong.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local_copies(model: nn.Module) -> list[Tensor]:
    """This rank's part of each parameter, copied, in the model's order."""
    return [_local(param).clone() for param in model.parameters()]


def update_norms(model: nn.Module, before: list[Tensor]) -> dict[str, float]:
    """By parameter, the L2 norm of its change since `local_copies` gave `before`; a collective if it is sharded."""
    params = dict(model.named_parameters())
    changes = [_local(param) - old for param, old in zip(params.values(), before, strict=True)]
    squares = torch.stack([change.double().square().sum() for change in changes])
    if any(isinstance(param, DTensor) for param in params.values()):
        whole = torch.tensor([not isinstance(param, DTensor) for param in params.values()], device=squares.device)
        squares[whole] /= dist.get_world_size()  # every rank holds all of it
        dist.all_reduce(squares)
    return {name: math.sqrt(square) for name, square in zip(params, squares.tolist(), strict=True)}


def _local(param: nn.Parameter) -> Tensor:
    value = param.detach()
    return value.to_local() if isinstance(value, DTensor) else value
