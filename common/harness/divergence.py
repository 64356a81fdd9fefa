"""Where two walks through one step part: each place of the step on both sides, in order, and what is wrong there.

Two runs of as many ranks are laid side by side rank by rank; otherwise ranks are put together to one process's step
first: outputs are the ranks' rows one after the other, in whichever dimension the batch is, gradients of outputs too
but W times as small, since a rank's loss is the mean over its own rows, and gradients before reduction are averaged in
float64. An output that is as large on a rank as on one process, such as that of a table of positions, holds nothing of
the batch: ranks have the same, and its gradient is averaged.

A place is astray if its error against the float64 walk exceeds what the grade allows a gradient of that size, see
[Note: error model] in `grades`. That bound was derived for gradients. On the way to them errors are rather smaller, and
it names a place here, it fails nothing.

Left out: tensors that ranks cut in yet another way are compared only between as many ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from common.harness.causes import likely_causes
from common.harness.distance import max_ulp, relative_error
from common.harness.grades import ErrorBound
from common.harness.instruments.walk import WHOLE, Phase, Place, Walk, What

UNJOINED = "ranks have other shapes than one process, and are not put together"
BATCH = (What.BATCH, What.OUTPUT, What.OUTPUT_GRADIENT)
"""What a rank has its own rows of."""


@dataclass(frozen=True)
class PlaceRow:
    """One place on both sides.

    Attributes:
        phase, what, name: the place.
        elements: of one side's tensor, all ranks together.
        differing: how many differ in bits.
        max_ulp: the largest distance; None for different dtypes.
        relative_distance: L2 norm of the difference over the reference's.
        reference_error, candidate_error: relative L2 error against float64; None where that has no such tensor.
        limit: the largest `candidate_error` that is not astray.
        note: what can't be compared, and why; else None.
    """

    phase: str
    what: str
    name: str
    elements: int
    differing: int
    max_ulp: int | None
    relative_distance: float
    reference_error: float | None = None
    candidate_error: float | None = None
    limit: float | None = None
    note: str | None = None

    @property
    def is_astray(self) -> bool:
        """Whether the candidate is further from float64 than its grade allows."""
        if self.note is not None:
            return self.note != UNJOINED
        return self.limit is not None and self.candidate_error is not None and not self.candidate_error <= self.limit

    @property
    def place(self) -> str:
        """The place, in words."""
        return f"{self.phase}: {self.what}" + (f" of {self.name!r}" if self.name else "")


@dataclass(frozen=True)
class Finding:
    """The first place where two sides part.

    Attributes:
        row: the place.
        breaks_promise: out of proportion, or other bits where equal ones were asked; else it is rounding.
        where: which elements differ, in words.
        index: of the element that is furthest off, in the tensor of all ranks.
        reference_value, candidate_value: that element.
        causes: what the pattern suggests, the most specific first.
    """

    row: PlaceRow
    breaks_promise: bool
    where: str
    index: tuple[int, ...]
    reference_value: float
    candidate_value: float
    causes: tuple[str, ...]


@dataclass(frozen=True)
class WalkComparison:
    """Two walks, compared.

    Attributes:
        rows: every place, in the order of the reference's step.
        finding: where they part; None if no bit differs.
    """

    rows: tuple[PlaceRow, ...]
    finding: Finding | None


@dataclass(frozen=True)
class _Pair:
    """One place on both sides.

    Attributes:
        reference, candidate: tensors of all ranks, as they are compared.
        stacked: whether these have a dimension of ranks in front.
        whole, truth: the candidate's as one process would have it, and the same in float64, None if there is none.
    """

    place: Place
    row: PlaceRow
    reference: torch.Tensor
    candidate: torch.Tensor
    stacked: bool = False
    whole: torch.Tensor | None = None
    truth: torch.Tensor | None = None


def compare_walks(
    reference: Sequence[Walk],
    candidate: Sequence[Walk],
    referee: Walk | None,
    bound: ErrorBound,
    *,
    bitwise: bool = False,
) -> WalkComparison:
    """Lay two steps side by side.

    Args:
        reference, candidate: a walk of each rank; one for an engine that is not data parallel.
        referee: the same step in float64 on one process.
        bound: of the grade that was asked, or the weakest where equal bits were.
        bitwise: equal bits were asked for, so the first that differ are the finding.
    """
    pairs = [_pair(place, reference, candidate, referee, bound) for place in reference[0]]
    extra = [place for place in candidate[0] if place not in reference[0]]
    pairs += [_pair(place, reference, candidate, referee, bound) for place in extra]
    astray = next((pair for pair in pairs if pair.row.is_astray or (bitwise and pair.row.differing)), None)
    found = astray or next((pair for pair in pairs if pair.row.differing), None)
    finding = None if found is None else _finding(found, pairs, len(candidate), breaks_promise=astray is not None)
    return WalkComparison(tuple(pair.row for pair in pairs), finding)


def _pair(
    place: Place, reference: Sequence[Walk], candidate: Sequence[Walk], referee: Walk | None, bound: ErrorBound
) -> _Pair:
    nothing = torch.empty(0)
    for side, walks in (("reference", reference), ("candidate", candidate)):
        if any(place not in walk for walk in walks[: 1 if place.what in WHOLE else None]):
            return _Pair(place, _noted(place, f"the {side} has none"), nothing, nothing)
    truth = referee.get(place) if referee is not None else None
    one = (
        truth
        if truth is not None
        else next((side[0][place] for side in (reference, candidate) if len(side) == 1), None)
    )
    alike = len(reference) == len(candidate)
    theirs, ours = (
        _side_by_side(place, walks) if alike else _whole(place, walks, one) for walks in (reference, candidate)
    )
    if theirs is None or ours is None:
        return _Pair(place, _noted(place, UNJOINED), nothing, nothing)
    if theirs.shape != ours.shape:
        note = f"expected shape {list(theirs.shape)}, found {list(ours.shape)}"
        return _Pair(place, _noted(place, note), nothing, nothing)
    row = PlaceRow(
        phase=place.phase,
        what=place.what,
        name=place.name,
        elements=theirs.numel(),
        differing=int(_differing(theirs, ours).sum()),
        max_ulp=max_ulp(theirs, ours) if theirs.is_floating_point() else None,
        relative_distance=relative_error(ours, theirs),
    )
    stacked = alike and len(reference) > 1 and place.what not in WHOLE and place.what not in BATCH
    their_whole, our_whole = (_whole(place, walks, one) for walks in (reference, candidate))
    if truth is None or not truth.is_floating_point() or their_whole is None or our_whole is None:
        return _Pair(place, row, theirs, ours, stacked)
    if truth.shape != our_whole.shape or truth.shape != their_whole.shape:
        return _Pair(place, row, theirs, ours, stacked)
    their_error, our_error = relative_error(their_whole, truth), relative_error(our_whole, truth)
    limit = bound.gradient_limit(their_error, truth.numel())
    row = replace(row, reference_error=their_error, candidate_error=our_error, limit=limit)
    return _Pair(place, row, theirs, ours, stacked, our_whole, truth)


def _noted(place: Place, note: str) -> PlaceRow:
    return PlaceRow(place.phase, place.what, place.name, 0, 0, None, math.inf, note=note)


def _side_by_side(place: Place, walks: Sequence[Walk]) -> torch.Tensor:
    """The tensors of all ranks: rows of the batch one after the other, what each rank has for itself stacked."""
    if place.what in WHOLE or len(walks) == 1:
        return walks[0][place]
    tensors = [walk[place] for walk in walks]
    return torch.cat(tensors) if place.what in BATCH and tensors[0].dim() else torch.stack(tensors)


def _whole(place: Place, walks: Sequence[Walk], one: torch.Tensor | None) -> torch.Tensor | None:
    """What one process would have in the place of all ranks; `one` is what one has. None if there is no way to tell."""
    if place.what in WHOLE or len(walks) == 1:
        return walks[0][place]
    tensors = [walk[place] for walk in walks]
    if place.what in (What.LOSS, What.LOCAL_GRADIENT):
        return _mean(tensors)
    if place.what not in BATCH or not tensors[0].dim():
        return tensors[0]
    if one is not None and all(tensor.shape == one.shape for tensor in tensors):
        return _mean(tensors) if place.what is What.OUTPUT_GRADIENT else _furthest(tensors, one)
    dim = 0 if one is None else _batch_dim(tensors, one)
    if dim is None:
        return None
    rows = torch.cat(tensors, dim)
    return rows / len(walks) if place.what is What.OUTPUT_GRADIENT else rows


def _mean(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.double() for tensor in tensors]).mean(0).to(tensors[0].dtype)


def _furthest(tensors: Sequence[torch.Tensor], one: torch.Tensor) -> torch.Tensor:
    """Of tensors that should all be equal, the one that is furthest from what it should be."""
    return max(tensors, key=lambda tensor: relative_error(tensor, one))


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


def _differing(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Which elements differ, [shape]; NaN is NaN."""
    return (first != second) & ~(first.isnan() & second.isnan())


def _finding(pair: _Pair, pairs: Sequence[_Pair], ranks: int, *, breaks_promise: bool) -> Finding:
    theirs, ours = pair.reference, pair.candidate
    causes = _causes(pair, pairs, ranks) if breaks_promise else ()
    if not pair.row.is_astray:
        causes = (*causes, ROUNDING)
    if not theirs.numel():
        return Finding(pair.row, breaks_promise, pair.row.note or "no element", (), math.nan, math.nan, causes)
    distance = (ours.double() - theirs.double()).abs().nan_to_num(nan=math.inf)
    flat = int(distance.argmax())
    return Finding(
        row=pair.row,
        breaks_promise=breaks_promise,
        where=describe_elements(_differing(theirs, ours), pair.place, ranks, stacked=pair.stacked),
        index=tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), theirs.shape)),
        reference_value=float(theirs.reshape(-1)[flat]),
        candidate_value=float(ours.reshape(-1)[flat]),
        causes=causes,
    )


def describe_elements(differing: torch.Tensor, place: Place, ranks: int, *, stacked: bool = False) -> str:
    """Which elements are marked, in words: all, some rows, and whose they are.

    Args:
        differing: [rows, ...], or [ranks, rows, ...] if `stacked`; bool.
        place: where; a parameter's rows are sharded as `torch.chunk` cuts them, a batch's by equal shares.
        ranks: of the candidate.
    """
    count, total = int(differing.sum()), differing.numel()
    if not count:
        return "no element"
    amount = f"all {total} elements" if count == total else f"{count} of {total} elements"
    if stacked:
        marked = differing.reshape(ranks, -1).any(1).nonzero().flatten().tolist()
        return amount if len(marked) == ranks else f"{amount}, on rank {' and '.join(map(str, marked))} only"
    rows = differing.shape[0] if differing.dim() else 1
    if rows < 2:
        return amount
    marked = differing.reshape(rows, -1).any(1).nonzero().flatten().tolist()
    if len(marked) < rows:
        amount += f", in {len(marked)} of {rows} rows ({_ranges(marked)})"
    share = -(-rows // ranks)
    owners = sorted({row // share for row in marked})
    if len(owners) < -(-rows // share):
        whose = "the batch" if place.what in BATCH else "the shards"
        is_padded = rows % ranks and owners == [(rows - 1) // share] and place.what not in BATCH
        amount += f", all of {whose} of rank {' and '.join(map(str, owners))}"
        amount += ", whose shard is padded" if is_padded else ""
    return amount


def _ranges(rows: Sequence[int], most: int = 4) -> str:
    """Ascending numbers, runs drawn together: 0-3, 7."""
    runs: list[list[int]] = []
    for row in rows:
        if runs and row == runs[-1][1] + 1:
            runs[-1][1] = row
        else:
            runs.append([row, row])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:most]]
    return ", ".join(shown) + (", ..." if len(runs) > most else "")


_BY_PLACE: Mapping[tuple[Phase, What], str] = {
    (Phase.WEIGHTS, What.PARAMETER): "the step begins with another parameter: the update before it, or the "
    "initialisation; an optimizer that holds other parameters never trains these",
    (Phase.WEIGHTS, What.BUFFER): "a buffer is another one: ranks or engines do not share it",
    (Phase.INPUT, What.BATCH): "ranks were given other data: the share of the batch, or its seed",
    (Phase.FORWARD, What.READ): "the parameter that computes is not the one that is stored: gathered wrongly, stale, "
    "cast twice, or a tied one that is not tied",
    (Phase.LOSS, What.LOSS): "all outputs agree and the loss does not: how it is averaged, or in which dtype",
    (Phase.GRADIENT, What.GRADIENT): "each rank's own gradient agrees and their mean does not: the reduction",
    (Phase.UPDATE, What.PARAMETER): "gradients agree and the update does not: the optimizer holds other parameters, "
    "or other settings",
}


ROUNDING = (
    "bits differ, and nothing is out of proportion to the rounding of the dtype: sums in another order, or operations "
    "that were fused"
)


def _causes(pair: _Pair, pairs: Sequence[_Pair], ranks: int) -> tuple[str, ...]:
    """What the pattern and the place suggest, the more specific first."""
    place = pair.place
    found: list[str] = []
    if pair.whole is not None and pair.truth is not None and place.what not in BATCH:
        found += likely_causes([place.name], {place.name: pair.whole}, {place.name: pair.truth}, ranks)
    by_place = _BY_PLACE.get((place.phase, place.what))
    if by_place is not None:
        found.append(by_place)
    elif place.phase is Phase.FORWARD:
        found.append(
            f"all that came before agrees, the parameters that {place.name!r} reads included: it computes otherwise, "
            "with an input or a buffer in another dtype, or with another kernel"
        )
    else:
        found.append("forward agrees and this gradient does not: what backward computes with changed in between")
    if sum(other.row.is_astray for other in pairs if other.place.what is place.what) == 1:
        found.append("nothing else of its kind is astray")
    return tuple(found)
