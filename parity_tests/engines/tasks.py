"""Tasks as users bring them, by `module:function`: right ones, and one for each way to be wrong."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from common.task import Batch, Task

Three = tuple[nn.Module, Any, Any]


def draw(step: int, size: int) -> Batch:
    """Eight numbers, and their sum."""
    x = torch.randn(size, 8)
    return x, x.sum(1, keepdim=True)


def mean_square(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, targets)


class Narrowing(nn.Module):
    """Scales in float32, as many norms do, whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scaled = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True, dtype=torch.float32) + 0.1)).to(x.dtype)
        found: torch.Tensor = self.inner(torch.softmax(scaled, -1, dtype=torch.float32).to(x.dtype))
        return found


def linear() -> Three:
    return nn.Linear(8, 1), draw, mean_square


def that_leaves() -> Three:
    """A program's own loss, which ends it."""
    return nn.Linear(8, 1), draw, lambda *_: sys.exit(0)


def as_dataclass() -> Task:
    return Task(nn.Linear(8, 1), draw, nn.MSELoss())


def narrowing() -> Three:
    return Narrowing(), draw, mean_square


def with_data() -> Three:
    """Its samples are made when it is built, and looked at when they are taken: not on the meta device."""
    data = torch.randn(40, 8)

    def take(step: int, size: int) -> Batch:
        chosen = (torch.arange(size) + int(data[0, 0].item() > 9) + step) % len(data)
        return data[chosen], data[chosen].sum(1, keepdim=True)

    return nn.Linear(8, 1), take, mean_square


# --- wrong ones ------------------------------------------------------------------------------------------------------


def of_two() -> Any:
    return nn.Linear(8, 1), draw


def of_a_function() -> Any:
    return draw, draw, mean_square


def of_a_number() -> Any:
    return nn.Linear(8, 1), 3, mean_square


def of_a_word() -> Any:
    return nn.Linear(8, 1), draw, "mse"


def _with(batch: Any) -> Three:
    return nn.Linear(8, 1), batch, mean_square


def without_targets() -> Three:
    return _with(lambda step, size: torch.randn(size, 8))


def of_another_size() -> Three:
    return _with(lambda step, size: (torch.randn(5, 8), torch.randn(size, 1)))


def of_one_number() -> Three:
    return _with(lambda step, size: ({"x": torch.randn(size, 8)}, {"y": [torch.tensor(1.0)]}))


def without_tensors() -> Three:
    return _with(lambda step, size: (None, torch.randn(size, 1)))


def of_a_set() -> Three:
    return _with(lambda step, size: ({torch.randn(size, 8)}, None))


def that_goes_on() -> Three:
    """Another batch at each call, as an iterator gives them."""
    count = itertools.count()
    return _with(lambda step, size: (torch.full((size, 8), float(next(count))), torch.zeros(size, 1)))


def that_fails() -> Three:
    return _with(lambda step, size: [][step])


def that_drops() -> Three:
    return nn.Linear(8, 1), draw, lambda output, targets: F.mse_loss(F.dropout(output, 0.5), targets)


def with_a_loss(loss: Any) -> Three:
    return nn.Linear(8, 1), draw, loss


def with_a_sum() -> Three:
    return with_a_loss(lambda output, targets: F.mse_loss(output, targets, reduction="sum"))


def with_losses() -> Three:
    return with_a_loss(lambda output, targets: F.mse_loss(output, targets, reduction="none"))


def with_a_float() -> Three:
    return with_a_loss(lambda output, targets: 1.0)


def without_gradient() -> Three:
    return with_a_loss(lambda output, targets: F.mse_loss(output.detach(), targets))


def cast_down() -> Three:
    return with_a_loss(lambda output, targets: F.mse_loss(output, targets).bfloat16())


def of_unknown_keys() -> Three:
    return _with(lambda step, size: ({"input": torch.randn(size, 8), "mask": None}, torch.randn(size, 1)))


def with_a_loss_that_fails() -> Three:
    return with_a_loss(lambda output, targets: F.mse_loss(output, targets.sums))


class Wide(nn.Module):
    """Takes what it is given in bf16 only, beside a buffer that stays as wide as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 1)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x.dtype, self.inner.weight.dtype, self.scale.dtype) != (torch.bfloat16, torch.bfloat16, torch.float32):
            raise TypeError(f"found {x.dtype}, {self.inner.weight.dtype} and {self.scale.dtype}")
        found: torch.Tensor = self.inner(x)
        return found.float()


def in_bf16_only() -> Three:
    return Wide(), draw, mean_square
