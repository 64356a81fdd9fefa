"""What the pattern of a wrong step-0 gradient suggests went wrong: hints beside a verdict, never the verdict itself.

    the gradient is ...                       likely
    zero                                      never reduced, or never written
    a times what it should be                 W: summed over ranks; 1/W: averaged twice; sqrt(W): a norm of one shard
    itself, some rows on                      a shard put back at the wrong place
    another parameter's                       a bucket unpacked in another order
    itself, its values in other places        permuted or transposed
    wrong in the rows of one rank alone       padding or an uneven shard, where rows are left over
    zero in many rows that should not be      a use of the parameter is missing: a tied weight untied
    of other tokens than its loss             another micro-batch
    the mean less one rank's part             a rank left out of the sum
    unlike the mean                           permuted, transposed, of other data
    on the grid of a narrower dtype           reduced or stored in it
    off by as much as a rounding              something is cast; noise and other arithmetic look the same

What the numbers prove is said as it is; of what they only suggest, examples are given. Patterns of a whole run, over
losses, steps and updates, are in `run_causes`.
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
"""Relative error below which one explanation is believed; of a factor near 1, the same share of what it is off."""
_ROUNDED = math.sqrt(1 / 12 * 1 / 2)
"""Root mean square of a rounding's relative error, in eps: uniform within half a step, of numbers x spread over [1, 2],
of which the mean of 1 / x^2 is a half."""
_APART = 8
"""How many times smaller an error than a rounding is no longer one of it; bf16 and fp16 are this far apart."""
_FEW = 16
"""A tensor of fewer elements may lie on a coarse grid by chance."""
_SAME = 1e-3
"""Relative error, at most, of sorted values that are the same; sorted samples of n numbers are 1 / sqrt(n) apart."""
_SHOWN = 1e-5
"""How far from 1 a factor can be told from rounding in float32, and be shown in six digits."""


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
        limit = CLOSE * min(1.0, relative_error(self.gradient, self.truth))
        for name, other in truths.items():
            is_like = name != self.name and other.shape == self.truth.shape and bool(other.any())
            if is_like and relative_error(self.gradient, other.double()) < limit:
                return f"holds the gradient of {name!r}: a bucket unpacked in another order"
        return self._by_rows() if self.truth.dim() and len(self.truth) > 1 else None

    def _by_rows(self) -> str | None:
        """An explanation from which rows are wrong."""
        rows = len(self.truth)
        ours, theirs = self.gradient.reshape(rows, -1), self.truth.reshape(rows, -1)
        wrong = (row_errors(ours, theirs) > CLOSE).nonzero().flatten().tolist()
        has_values = theirs.any(1)
        for rank, chunk in enumerate(_chunks(rows, self.ranks)):
            # a table's rows of tokens that do not occur are right whatever happens, and prove nothing
            proven = bool(has_values[: chunk.start].any() or has_values[chunk.stop :].any())
            if wrong and proven and set(wrong) <= set(chunk):
                whose = f"of rank {rank}" + (", the last," if rank == self.ranks - 1 else "")
                which = f"all rows {whose}" if wrong == list(chunk) else f"{len(wrong)} of {len(chunk)} rows {whose}"
                part = _explain(ours[wrong], theirs[wrong], self.ranks)
                few = None if part else _few_elements(ours[wrong], theirs[wrong])
                uneven = "; perhaps padding, or an uneven shard" if rows % self.ranks and not few else ""
                how = part or few or "no multiple of what they should be"
                return f"{which} are wrong, the others right: {how}{uneven}"
        lost = [i for i in wrong if not ours[i].any() and theirs[i].any()]
        if lost and len(lost) > len(wrong) / 2 and tokens_seen(ours, theirs) != "fewer":
            return (
                f"zero in {len(lost)} rows that should not be, as if a use of it is missing: a tied weight untied, "
                "or rows never written"
            )
        return None


def _explain(gradient: Tensor, truth: Tensor, ranks: int) -> str | None:
    """Zero, not finite, a multiple, rolled rows, or values in other places; None if it is none of these."""
    ours, theirs = float(gradient.norm()), float(truth.norm())
    if not math.isfinite(theirs):
        return "what it should be is not finite: nothing can be told"
    if not math.isfinite(ours):
        return "not finite: an overflow, or memory that was never written"
    if theirs == 0:
        return "zero, as it should be" if ours == 0 else "the right gradient is zero, and this one is not"
    if ours == 0:
        return "zero: never reduced, or never written"
    factor = float((gradient / theirs * (truth / theirs)).sum())
    off = abs(factor - 1)
    if off > _SHOWN and relative_error(gradient, factor * truth) < CLOSE * min(1.0, 2 * off):
        alone = "" if truth.numel() > 1 else " (a single element, of which any error is a multiple)"
        return _of_factor(factor, ranks) + alone
    error = relative_error(gradient, truth)
    for rows in (1, -1) if truth.dim() and len(truth) > 2 else ():
        # the whole, or each shard by itself
        rolled = truth.roll(rows, 0), torch.cat([shard.roll(rows, 0) for shard in truth.chunk(ranks)])
        if any(relative_error(gradient, other) < CLOSE * min(1.0, error) for other in rolled):
            return f"rolled by {rows:+d} row: a shard put back at the wrong place"
    sorted_error = relative_error(gradient.flatten().sort().values, truth.flatten().sort().values)
    if error > CLOSE and sorted_error < min(_SAME, CLOSE / math.sqrt(truth.numel())):
        return "the same values in other places: permuted, transposed, or put back at the wrong place"
    return None


def _few_elements(gradient: Tensor, truth: Tensor) -> str | None:
    """How many elements are wrong, if a few make up the error; None if many do."""
    errors = (gradient - truth).square().flatten().sort(descending=True).values
    count = int((errors.cumsum(0) < (1 - CLOSE**2) * errors.sum()).sum()) + 1
    return f"{count} of their {len(errors)} elements make up the error" if 4 * count <= len(errors) else None


def _of_factor(factor: float, ranks: int) -> str:
    """What a gradient of `factor` times the mean suggests."""
    if abs(factor - 1) <= CLOSE:
        shown = 1 + float(f"{factor - 1:.2g}")
        return f"scaled by {shown:.6g}, all elements alike: a divisor or a loss scale of its own"
    root = math.sqrt(ranks)
    known = [
        (float(ranks), f"{ranks} times the mean", "summed over ranks, not averaged"),
        (1 / ranks, f"1/{ranks} of the mean", "averaged twice"),
        (2.0, "2 times the mean", "added twice"),
        (root, f"sqrt({ranks}) times the mean", "scaled by the norm of one rank's shard, not of all"),
        (1 / root, f"1/sqrt({ranks}) of the mean", "scaled by the norm of one rank's shard, not of all"),
        (-1.0, "the wrong sign", ""),
    ]
    fitting = [(what, cause) for value, what, cause in known if abs(factor / value - 1) < CLOSE / 2]
    if not fitting:
        return f"{factor:.3g} times the mean: a divisor or a loss scale of its own"
    what, _ = fitting[0]
    causes = ", or ".join(cause for _, cause in fitting if cause)
    return f"{what}: {causes}" if causes else what


def _of_all(names: list[str], candidate: Mapping[str, Tensor], referee: Mapping[str, Tensor], ranks: int) -> str | None:
    """What the gradients of `names`, each of which shows no pattern, suggest together; None if nothing.

    None of them is zero or not finite, nor should it be.
    """
    ours = [candidate[name].double() for name in names]
    theirs = [referee[name].double() for name in names]
    error = math.hypot(*(float((a - b).norm()) for a, b in zip(ours, theirs, strict=True)))
    own, size = (math.hypot(*(float(tensor.norm()) for tensor in tensors)) for tensors in (ours, theirs))
    if error < CLOSE * size:
        return _of_rounding([candidate[name] for name in names], error / size)
    tokens = [tokens_seen(a, b) for a, b in zip(ours, theirs, strict=True)]
    if "other" in tokens:
        return "rows that should be zero are not, as if of other tokens than the loss: another micro-batch"
    cosine = float(sum((a / own * (b / size)).sum() for a, b in zip(ours, theirs, strict=True)))
    factor = cosine * own / size
    # what is missing is a rank's own gradient / W: 1 / W of the mean on average, 1 / sqrt(W) of its size if all noise
    is_part = 1 / (2 * ranks) < 1 - factor < 3 / (2 * ranks) and error < 1.5 * size / math.sqrt(ranks)
    if ranks > 1 and is_part:
        return (
            f"about {factor:.2g} of the mean, and what is missing is as large as one rank's part: as if a rank is left "
            "out of the sum, or a part of the batch"
        )
    if abs(cosine) < CLOSE:
        return "bears no relation to the right one: permuted, transposed, or of other data"
    return (
        f"about {factor:.2g} of the mean, and much else: the cause is not known; for example never reduced, each rank "
        "keeps its own; or other data"
    )


def _of_rounding(gradients: list[Tensor], error: float) -> str | None:
    dtype = narrow_grid(gradients, gradients[0].dtype)
    if dtype is not None:
        return f"off by {error:.1g}, every element a {dtype} number: reduced or stored in {dtype}"
    return of_small_error(error, "something that leads to it")


def of_small_error(error: float, what: str) -> str | None:
    """What a relative error of this size suggests, from its size alone; None if no cast to a narrow dtype is so small.

    Args:
        what: what may be cast.
    """
    sizes = {name: _ROUNDED * torch.finfo(dtype).eps for name, dtype in _NARROW.items()}
    if not error >= min(sizes.values()) / _APART:
        return None
    narrow = min(sizes, key=lambda name: abs(math.log(error / sizes[name])))
    times = " many times" if error > sizes[narrow] * _APART else ""
    return (
        f"off by {error:.1g}, as large as by rounding to {narrow}{times}: {what} may be cast; noise, or a slightly "
        "different computation, would look the same"
    )


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


def _chunks(rows: int, ranks: int) -> Iterator[range]:
    """The rows of each rank."""
    size = -(-rows // ranks)
    for rank in range(ranks):
        yield range(min(rank * size, rows), min((rank + 1) * size, rows))


def narrow_grid(gradients: Iterable[Tensor], wide: torch.dtype) -> str | None:
    """The dtype narrower than `wide` in which every element of every gradient is exact; None if there is none.

    A mean over ranks in `wide` does not leave all of them there: sums of narrow numbers need more digits.
    """
    large = [gradient for gradient in gradients if gradient.numel() >= _FEW and gradient.any()]
    for name, narrow in _NARROW.items():
        if large and narrow.itemsize < wide.itemsize and all(_is_exact(gradient, narrow) for gradient in large):
            return name
    return None


def _is_exact(tensor: Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)
