"""How far apart two tensors are: in L2, and in units in the last place."""

from __future__ import annotations

import math

import numpy as np
import torch

_BITS = {
    1: (torch.int8, np.uint8),
    2: (torch.int16, np.uint16),
    4: (torch.int32, np.uint32),
    8: (torch.int64, np.uint64),
}


def relative_error(tensor: torch.Tensor, truth: torch.Tensor, least: float = 0.0) -> float:
    """L2 norm of `tensor - truth` over that of `truth`, in float64; over `least` if that is more.

    Returns:
        0 if both are zero; infinity if only `truth` is, and `least` is 0.
    """
    difference = float(torch.linalg.vector_norm(tensor.double() - truth.double()))
    norm = max(float(torch.linalg.vector_norm(truth.double())), least)
    if norm == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / norm


def worst_row_error(tensor: torch.Tensor, truth: torch.Tensor, least: float = 0.0) -> tuple[float, int]:
    """The largest relative error of a row of `tensor` [rows, ...], and which row; see [Note: rows] in `grades`.

    Args:
        tensor, truth: of the same shape; without dimensions it is one row.
        least: norm of the whole tensor below which `truth` counts as zero.

    Returns:
        Error and row; (0, 0) for a tensor without elements.
    """
    if truth.numel() == 0:
        return 0.0, 0
    errors = row_errors(tensor, truth, least)
    return float(errors.max()), int(errors.argmax())


def row_errors(tensor: torch.Tensor, truth: torch.Tensor, least: float = 0.0) -> torch.Tensor:
    """The relative error of each row of `tensor` [rows, ...], as float64 [rows]; arguments as in `worst_row_error`."""
    rows = truth.shape[0] if truth.dim() else 1
    truth = truth.double().reshape(rows, -1)
    norms = torch.linalg.vector_norm(truth, dim=1)
    mean = max(float(torch.linalg.vector_norm(truth)), least) / math.sqrt(rows)
    scale = torch.hypot(norms, torch.tensor(mean / math.sqrt(truth.shape[1]), dtype=torch.float64))
    differences = torch.linalg.vector_norm(tensor.double().reshape(rows, -1) - truth, dim=1)
    return torch.where(differences == 0, 0.0, differences / scale)


def max_ulp(first: torch.Tensor, second: torch.Tensor) -> int | None:
    """How many representable numbers lie between two tensors' elements, at most; None for different dtypes.

    -0.0 and 0.0 are neighbours.
    """
    if first.dtype != second.dtype or first.shape != second.shape:
        return None
    if first.numel() == 0:
        return 0
    a, b = _ordinals(first), _ordinals(second)
    return int(np.where(a > b, a - b, b - a).max())


def _ordinals(tensor: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.unsignedinteger]]:
    """Unsigned integers in the order of the floating-point numbers that share their bits."""
    signed, unsigned = _BITS[tensor.element_size()]
    bits = tensor.detach().contiguous().reshape(-1).view(signed).numpy().view(unsigned)
    sign = unsigned(1 << (8 * tensor.element_size() - 1))
    return np.where(bits & sign, ~bits, bits | sign)
