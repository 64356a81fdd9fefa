"""Reductions in rank order: ((r0 op r1) op r2) op ..., in the tensor's own dtype.

The same sum as `sum_in_rank_order` (see [Note: rank order] in common/gradient.py): an element depends on nothing but
its addends, so how a message is packed changes no bit, and the emulated link's native reduce-scatter equals the
ordered transport. A mean is the sum divided by the number of ranks. A premultiplied sum is what NCCL makes of it: each
rank multiplies what it sends by its own factor, rounded to the tensor's dtype as the products are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import EngineError

_COMBINE: dict[str, Callable[[Tensor, Tensor], object]] = {
    "SUM": lambda total, piece: total.add_(piece),
    "AVG": lambda total, piece: total.add_(piece),
    "PRODUCT": lambda total, piece: total.mul_(piece),
    "MIN": lambda total, piece: torch.minimum(total, piece, out=total),
    "MAX": lambda total, piece: torch.maximum(total, piece, out=total),
    "BAND": lambda total, piece: total.bitwise_and_(piece),
    "BOR": lambda total, piece: total.bitwise_or_(piece),
    "BXOR": lambda total, piece: total.bitwise_xor_(piece),
    "PREMUL_SUM": lambda total, piece: total.add_(piece),
}

REDUCTIONS = tuple(_COMBINE)


@dataclass(frozen=True)
class ReduceOp:
    """How the tensors of all ranks become one: what torch's `ReduceOp` of that name means.

    Attributes:
        name: one of `REDUCTIONS`.
        factor: this rank's, of a PREMUL_SUM.
    """

    name: str
    factor: float | None = None

    def check(self, dtype: torch.dtype) -> None:
        """Refuse what has no meaning or cannot be done, before anything is sent.

        Raises:
            EngineError: with the way out.
        """
        if self.name not in _COMBINE:
            raise EngineError(f"link: expected a reduction of {', '.join(_COMBINE)}, found {self.name}")
        is_exact = not (dtype.is_floating_point or dtype.is_complex)
        if self.name == "AVG" and is_exact:
            raise EngineError(f"link: a mean of {dtype} is no {dtype}; use SUM, and divide in a floating dtype")
        if self.name == "PREMUL_SUM" and not dtype.is_floating_point:
            raise EngineError(f"link: PREMUL_SUM is for floating dtypes, found {dtype}; use SUM, and multiply apart")
        if self.name == "PREMUL_SUM" and self.factor is None:
            raise EngineError("link: the factor of this PREMUL_SUM is not known; use SUM, and multiply apart")
        if (self.name in ("MIN", "MAX") and dtype.is_complex) or (
            self.name in ("BAND", "BOR", "BXOR") and not is_exact
        ):
            raise EngineError(f"link: {self.name} has no meaning for {dtype}")
        if dtype.is_floating_point and dtype.itemsize == 1:
            raise EngineError(f"link: {dtype} cannot be added; reduce in bf16 or fp32")

    def sent(self, tensor: Tensor) -> Tensor:
        """What this rank sends of its tensor."""
        return tensor if self.factor is None else tensor.detach() * tensor.new_tensor(self.factor)

    def reduce_into(self, total: Tensor, pieces: Sequence[Tensor]) -> None:
        """Write the reduction of `pieces`, one per rank as they were sent, into `total`, which is none of them."""
        combine = _COMBINE[self.name]
        total.copy_(pieces[0])
        for piece in pieces[1:]:
            combine(total, piece)
        if self.name == "AVG":
            # part by part, as front ends see complex numbers that view them as real ones
            (torch.view_as_real(total) if total.is_complex() else total).div_(len(pieces))
