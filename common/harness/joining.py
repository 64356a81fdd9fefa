"""Ranks put together to one process: what one would have in the place of what each of several ranks has.

    parameters, gradients        rank 0's: they are gathered already
    loss, a rank's own gradient  the mean over ranks, taken in float64
    the batch                    ranks' rows, one after the other
    outputs                      so too, in whichever dimension the batch is
    gradients of outputs         so too, and W times as small, since a rank's loss is the mean over its own rows
    parameters read, buffers     what each rank should have alike: of these the furthest from what it should be

An output that is as large on a rank as on one process, and has the same bits on all ranks, such as that of a table of
positions, holds nothing of the batch; it is taken as it is, and its gradient is averaged.

Left out: what else a rank makes of its rows, such as a mean over them, which one process does not have at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.harness.distance import relative_error
from common.harness.instruments.walk import WHOLE, Phase, Place, Walk, What

BATCH = (What.BATCH, What.OUTPUT, What.OUTPUT_GRADIENT)
"""What a rank has its own rows of."""
UNJOINED = "each rank makes something of its own rows that one process does not have"


@dataclass(frozen=True)
class Joined:
    """What one process would have.

    Attributes:
        dim: along which ranks have their shares; None if each has all of it.
    """

    tensor: torch.Tensor
    dim: int | None


def side_by_side(place: Place, walks: Sequence[Walk]) -> torch.Tensor:
    """The tensors of all ranks: rows of the batch one after the other, what each rank has for itself stacked."""
    if place.what in WHOLE or len(walks) == 1:
        return walks[0][place]
    tensors = [walk[place] for walk in walks]
    return torch.cat(tensors) if place.what in BATCH and tensors[0].dim() else torch.stack(tensors)


def join(place: Place, walks: Sequence[Walk], one: torch.Tensor | None) -> Joined | None:
    """What one process would have in the place of all ranks; None if it has nothing of the kind.

    Args:
        one: what one process does have, if that is known.
    """
    if place.what in WHOLE or len(walks) == 1:
        return Joined(walks[0][place], 0)
    tensors = [walk[place] for walk in walks]
    if place.what in (What.LOSS, What.LOCAL_GRADIENT):
        return Joined(_mean(tensors), None)
    if place.what not in BATCH:
        return Joined(tensors[0] if one is None else _furthest(tensors, one), None)
    if one is not None and all(tensor.shape == one.shape for tensor in tensors):
        return _without_batch(place, walks, tensors)
    dim = 0 if one is None else _batch_dim(tensors, one)
    if dim is None or not tensors[0].dim():
        return None
    rows = torch.cat(tensors, dim)
    return Joined(rows / len(walks) if place.what is What.OUTPUT_GRADIENT else rows, dim)


def _without_batch(place: Place, walks: Sequence[Walk], tensors: Sequence[torch.Tensor]) -> Joined | None:
    """Of what is as large on each rank as on one process: what holds nothing of the batch."""
    if place.what is What.BATCH:
        return Joined(tensors[0], None)  # such as a number that goes with every batch
    output = Place(Phase.FORWARD, What.OUTPUT, place.name)
    first, *others = [walk.get(output) for walk in walks]
    if first is None or not all(other is not None and torch.equal(other, first) for other in others):
        return None
    return Joined(_mean(tensors) if place.what is What.OUTPUT_GRADIENT else tensors[0], None)


def _mean(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.double() for tensor in tensors]).mean(0).to(tensors[0].dtype)


def _furthest(tensors: Sequence[torch.Tensor], one: torch.Tensor) -> torch.Tensor:
    """Of tensors that should all be equal, the one that is furthest from what it should be."""

    def distance(tensor: torch.Tensor) -> float:
        error = relative_error(tensor, one) if tensor.shape == one.shape else math.inf
        return math.inf if math.isnan(error) else error

    return max(tensors, key=distance)


def _batch_dim(tensors: Sequence[torch.Tensor], one: torch.Tensor) -> int | None:
    """The dimension in which the ranks' tensors add up to one process's."""
    for dim in range(one.dim()):
        sizes = [list(tensor.shape) for tensor in tensors]
        if any(len(size) != one.dim() for size in sizes):
            return None
        whole = sum(size.pop(dim) for size in sizes)
        rest = [*one.shape[:dim], *one.shape[dim + 1 :]]
        if whole == one.shape[dim] and all(size == rest for size in sizes):
            return dim
    return None
