"""Reductions in rank order: ((r0 op r1) op r2) op ..., in the tensor's own dtype.

The same sum as `sum_in_rank_order` (see [Note: rank order] in common/gradient.py): an element depends on nothing but
its addends, so how a message is packed changes no bit, and the emulated link's native reduce-scatter equals the
ordered transport. A mean is the sum divided by the number of ranks.

Left out: premultiplied sums. torch keeps their factor from kernels, and gloo has none either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
}

REDUCTIONS = tuple(_COMBINE)


def check_reduction(op: str, dtype: torch.dtype) -> None:
    """Refuse what has no meaning or cannot be done, before anything is sent.

    Raises:
        EngineError: with the way out.
    """
    if op == "PREMUL_SUM":
        raise EngineError(
            "link: torch does not tell a kernel the factor of a PREMUL_SUM (gloo refuses it too); "
            "sum, and multiply apart: set_force_sum_reduction_for_comms(True) on a module of fully_shard"
        )
    if op not in _COMBINE:
        raise EngineError(f"link: expected a reduction of {', '.join(_COMBINE)}, found {op}")
    is_exact = not (dtype.is_floating_point or dtype.is_complex)
    if op == "AVG" and is_exact:
        raise EngineError(f"link: a mean of {dtype} is no {dtype}; use SUM, and divide in a floating dtype")
    if (op in ("MIN", "MAX") and dtype.is_complex) or (op in ("BAND", "BOR", "BXOR") and not is_exact):
        raise EngineError(f"link: {op} has no meaning for {dtype}")
    if dtype.is_floating_point and dtype.itemsize == 1:
        raise EngineError(f"link: {dtype} cannot be added; reduce in bf16 or fp32")


def reduce_into(total: Tensor, pieces: Sequence[Tensor], op: str) -> None:
    """Write the reduction of `pieces`, one per rank, into `total`, which is none of them."""
    combine = _COMBINE[op]
    total.copy_(pieces[0])
    for piece in pieces[1:]:
        combine(total, piece)
    if op == "AVG":
        # part by part, as front ends see complex numbers that view them as real ones
        (torch.view_as_real(total) if total.is_complex() else total).div_(len(pieces))
