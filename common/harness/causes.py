"""What a pattern of errors suggests went wrong: hints beside a verdict, never the verdict itself.

    the gradient is ...             likely
    W times what it should be       summed over ranks, not averaged
    1/W of it                       averaged twice
    zero                            never reduced, or never written
    itself, some rows on            a shard put back at the wrong place
    all on a narrower dtype's grid  reduced or stored in that dtype

Left out: patterns over steps, and which module is to blame.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from common.harness.distance import relative_error

_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
_CLOSE = 0.1
"""Relative error below which one explanation is believed; the faults looked for here are off by 0.5 and more."""
_FEW = 16
"""A tensor of fewer elements may lie on a coarse grid by chance."""


@dataclass(frozen=True)
class _Suspect:
    name: str
    gradient: torch.Tensor
    truth: torch.Tensor
    ranks: int

    def cause(self) -> str | None:
        """The explanation that fits; None if none does."""
        gradient, truth = self.gradient.double(), self.truth.double()
        if not gradient.any() and truth.any():
            return "zero: never reduced, or never written"
        for factor, cause in self._factors().items():
            if relative_error(gradient, factor * truth) < _CLOSE:
                return cause
        for rows in (1, -1) if truth.dim() and truth.shape[0] > 1 else ():
            if relative_error(gradient, truth.roll(rows, 0)) < _CLOSE:
                return f"rolled by {rows:+d} row: a shard put back at the wrong place"
        return None

    def _factors(self) -> dict[float, str]:
        if self.ranks == 1:
            return {-1.0: "the wrong sign"}
        return {
            float(self.ranks): f"{self.ranks} times the mean: summed over ranks, not averaged",
            1.0 / self.ranks: f"1/{self.ranks} of the mean: averaged twice",
            -1.0: "the wrong sign",
        }


def likely_causes(
    names: Iterable[str], candidate: Mapping[str, torch.Tensor], referee: Mapping[str, torch.Tensor], ranks: int
) -> tuple[str, ...]:
    """One line per cause that explains some of the parameters `names`, with how many it explains."""
    found: dict[str, list[str]] = {}
    for name in names:
        cause = _Suspect(name, candidate[name], referee[name], ranks).cause()
        if cause is not None:
            found.setdefault(cause, []).append(name)
    return tuple(
        f"{names[0]!r}{f' and {len(names) - 1} more' if names[1:] else ''}: {cause}" for cause, names in found.items()
    )


def narrow_grid(gradients: Mapping[str, torch.Tensor], wide: torch.dtype) -> str | None:
    """The dtype narrower than `wide` in which every element of every gradient is exact; None if there is none.

    A mean over ranks in `wide` does not leave all of them there: sums of narrow numbers need more digits.
    """
    large = [gradient for gradient in gradients.values() if gradient.numel() >= _FEW and gradient.any()]
    for name, narrow in _NARROW.items():
        if large and narrow.itemsize < wide.itemsize and all(_is_exact(gradient, narrow) for gradient in large):
            return name
    return None


def _is_exact(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)
