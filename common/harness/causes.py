"""What the pattern of a wrong step-0 gradient suggests went wrong: hints beside a verdict, never the verdict itself.

    the gradient is ...                       likely
    zero                                      never reduced, or never written
    a times what it should be                 W: summed over ranks; 1/W: averaged twice; sqrt(W): a norm of one shard
    itself, some rows on                      a shard put back at the wrong place
    another parameter's                       a bucket unpacked in another order
    wrong in the rows of one rank alone       padding, an uneven shard, a rank left out
    zero in many rows that should not be      a use of the parameter is missing: a tied weight untied
    of other tokens than its loss             another micro-batch
    like the mean, and of fewer ranks         a rank left out of the sum
    off by a rounding                         something is cast; on that dtype's grid: reduced or stored in it

Patterns of a whole run, over losses, steps and updates, are in `run_causes`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from common.harness.distance import relative_error, row_errors

_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
CLOSE = 0.1
"""Relative error below which one explanation is believed; the faults looked for here are off by 0.4 and more."""
_ROUNDED = math.sqrt(1 / 12 * 1 / 2)
"""Root mean square of a rounding's relative error, in eps: uniform within half a step, of numbers x spread over [1, 2],
of which the mean of 1 / x^2 is a half."""
_APART = 8
"""How many times smaller an error than a rounding is no longer one of it; bf16 and fp16 are this far apart."""
_FEW = 16
"""A tensor of fewer elements may lie on a coarse grid by chance."""


def likely_causes(
    names: Iterable[str], candidate: Mapping[str, Tensor], referee: Mapping[str, Tensor], ranks: int
) -> tuple[str, ...]:
    """One line per cause that explains some of the parameters `names`, with how many it explains, the first first.

    Args:
        names: parameters whose gradients are wrong.
        candidate, referee: whole gradients of step 0 by parameter; the latter are right.
        ranks: world size of the candidate.
    """
    names = list(names)
    found: dict[str, list[str]] = {}
    unclear = []
    for name in names:
        cause = _Suspect(name, candidate[name].double(), referee[name].double(), ranks).cause(referee)
        if cause is not None:
            found.setdefault(cause, []).append(name)
        else:
            unclear.append(name)
    together = _of_all(unclear, candidate, referee, ranks) if unclear else None
    if together is not None:
        found[together] = unclear
    return tuple(f"{count_names(names)}: {cause}" for cause, names in found.items())


def count_names(names: list[str]) -> str:
    """The first name, and how many more."""
    return f"{names[0]!r}" + (f" and {len(names) - 1} more" if names[1:] else "")


@dataclass(frozen=True)
class _Suspect:
    """One wrong gradient, in float64, and what it should be."""

    name: str
    gradient: Tensor
    truth: Tensor
    ranks: int

    def cause(self, truths: Mapping[str, Tensor]) -> str | None:
        """The explanation that fits; None if none does."""
        whole = _explain(self.gradient, self.truth, self.ranks)
        if whole is not None:
            return whole
        for name, other in truths.items():
            is_like = name != self.name and other.shape == self.truth.shape and bool(other.any())
            if is_like and relative_error(self.gradient, other.double()) < CLOSE:
                return f"holds the gradient of {name!r}: a bucket unpacked in another order"
        return self._by_rows() if self.truth.dim() and len(self.truth) > 1 else None

    def _by_rows(self) -> str | None:
        """An explanation from which rows are wrong."""
        rows = len(self.truth)
        ours, theirs = self.gradient.reshape(rows, -1), self.truth.reshape(rows, -1)
        wrong = (row_errors(ours, theirs) > CLOSE).nonzero().flatten().tolist()
        for rank, chunk in enumerate(_chunks(rows, self.ranks)):
            # a table's rows of tokens that do not occur are right whatever happens, and prove nothing
            proven = any(theirs[i].any() for i in range(rows) if i not in chunk)
            if wrong and proven and set(wrong) <= set(chunk):
                whose = f"of rank {rank}" + (", the last," if rank == self.ranks - 1 else "")
                which = f"all rows {whose}" if wrong == list(chunk) else f"{len(wrong)} of {len(chunk)} rows {whose}"
                part = _explain(ours[wrong], theirs[wrong], self.ranks) or "no multiple of what they should be"
                return f"{which} are wrong, the others right: {part}; padding, or an uneven shard"
        lost = [i for i in wrong if not ours[i].any() and theirs[i].any()]
        if lost and len(lost) > len(wrong) / 2 and not _fewer_tokens(ours, theirs):
            return f"zero in {len(lost)} rows that should not be: a use of it is missing, as of a tied weight untied"
        return None


def _explain(gradient: Tensor, truth: Tensor, ranks: int) -> str | None:
    """Zero, a multiple, or rolled rows; None if it is none of these."""
    if not truth.any():
        return None
    if not gradient.any():
        return "zero: never reduced, or never written"
    factor = float((gradient * truth).sum() / truth.square().sum())
    if abs(factor - 1) > CLOSE and relative_error(gradient, factor * truth) < CLOSE * abs(factor):
        return _of_factor(factor, ranks)
    for rows in (1, -1) if truth.dim() and len(truth) > 2 else ():
        # the whole, or each shard by itself
        rolled = truth.roll(rows, 0), torch.cat([shard.roll(rows, 0) for shard in truth.chunk(ranks)])
        if any(relative_error(gradient, other) < CLOSE for other in rolled):
            return f"rolled by {rows:+d} row: a shard put back at the wrong place"
    return None


def _of_factor(factor: float, ranks: int) -> str:
    """What a gradient of `factor` times the mean suggests."""
    twice = "" if ranks != 2 else ", or added twice"
    known = {
        2.0: "2 times the mean: added twice",
        -1.0: "the wrong sign",
        float(ranks): f"{ranks} times the mean: summed over ranks, not averaged{twice}",
        1.0 / ranks: f"1/{ranks} of the mean: averaged twice",
        math.sqrt(ranks): f"sqrt({ranks}) times the mean: scaled by the norm of one rank's shard, not of all",
        1 / math.sqrt(ranks): f"1/sqrt({ranks}) of the mean: scaled by the norm of one rank's shard, not of all",
    }
    for value, cause in known.items():
        if value != 1.0 and abs(factor / value - 1) < CLOSE / 2:
            return cause
    return f"{factor:.3g} times the mean: a divisor or a loss scale of its own"


def _of_all(names: list[str], candidate: Mapping[str, Tensor], referee: Mapping[str, Tensor], ranks: int) -> str | None:
    """What the gradients of `names`, each of which shows no pattern, suggest together; None if nothing."""
    ours = [candidate[name].double() for name in names]
    theirs = [referee[name].double() for name in names]
    error = math.hypot(*(float((a - b).norm()) for a, b in zip(ours, theirs, strict=True)))
    size = math.hypot(*(float(truth.norm()) for truth in theirs))
    if error < CLOSE * size:
        return _of_rounding([candidate[name] for name in names], error / size)
    tokens = [tokens_seen(a, b) for a, b in zip(ours, theirs, strict=True)]
    if "other" in tokens:
        return "of other tokens than the loss: another micro-batch"
    factor = float(sum((a * b).sum() for a, b in zip(ours, theirs, strict=True))) / size**2
    # what is missing of W parts leaves (W - 1) / W on average; one rank's own gradient leaves 1
    if ranks > 1 and factor < 1 - 1 / (2 * ranks):
        return f"about {factor:.2g} of the mean, and not in every direction: a rank is left out of the sum"
    return "as large as the mean, and not in every direction: never reduced, each rank keeps its own; or other data"


def _of_rounding(gradients: list[Tensor], error: float) -> str | None:
    dtype = narrow_grid({str(i): gradient for i, gradient in enumerate(gradients)}, gradients[0].dtype)
    if dtype is not None:
        return f"off by {error:.1g}, every element a {dtype} number: reduced or stored in {dtype}"
    narrow = nearest_dtype(error)
    if error < _ROUNDED * torch.finfo(_NARROW[narrow]).eps / _APART:
        return None
    return f"off by {error:.1g}, as by rounding to {narrow}: something that leads to it is cast"


def nearest_dtype(error: float) -> str:
    """The narrow dtype whose rounding makes an error of about this size."""
    return min(_NARROW, key=lambda name: abs(math.log(error / (_ROUNDED * torch.finfo(_NARROW[name]).eps))))


def tokens_seen(gradient: Tensor, truth: Tensor) -> str:
    """How the rows that have a gradient differ from those that should: "same", "fewer" or "other".

    Only an embedding's table tells, whose rows of tokens that do not occur are zero.
    """
    if truth.dim() < 2:
        return "same"
    ours, theirs = (tensor.flatten(1).any(1) for tensor in (gradient, truth))
    if bool(theirs.all()) or bool((ours == theirs).all()):
        return "same"
    return "other" if bool((ours & ~theirs).any()) else "fewer"


def _fewer_tokens(ours: Tensor, theirs: Tensor) -> bool:
    return tokens_seen(ours, theirs) == "fewer"


def _chunks(rows: int, ranks: int) -> Iterator[range]:
    """The rows of each rank."""
    size = -(-rows // ranks)
    for rank in range(ranks):
        yield range(min(rank * size, rows), min((rank + 1) * size, rows))


def narrow_grid(gradients: Mapping[str, Tensor], wide: torch.dtype) -> str | None:
    """The dtype narrower than `wide` in which every element of every gradient is exact; None if there is none.

    A mean over ranks in `wide` does not leave all of them there: sums of narrow numbers need more digits.
    """
    large = [gradient for gradient in gradients.values() if gradient.numel() >= _FEW and gradient.any()]
    for name, narrow in _NARROW.items():
        if large and narrow.itemsize < wide.itemsize and all(_is_exact(gradient, narrow) for gradient in large):
            return name
    return None


def _is_exact(tensor: Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)
