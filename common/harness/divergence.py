"""Where two walks through one step part: each place of the step on both sides, in order, and what is wrong there.

Two runs of as many ranks are laid side by side rank by rank; otherwise ranks are put together to one process's step
first, see `joining`.

A place is astray if its error against the float64 walk exceeds what the grade allows a gradient of that size, see
[Note: error model] in `grades`. That bound was derived for gradients. On the way to them errors are rather smaller, and
it names a place here, it fails nothing.
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
from common.harness.joining import BATCH, UNJOINED, join, side_by_side


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
        is_comparable: false of what ranks have for themselves and one process does not have at all.
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
    is_comparable: bool = True

    @property
    def is_astray(self) -> bool:
        """Whether the candidate is further from float64 than its grade allows."""
        if self.note is not None:
            return self.is_comparable
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
        dim: else, the one along which ranks have their shares; None if each has all of it.
        whole, truth: the candidate's as one process would have it, and the same in float64, None if there is none.
    """

    place: Place
    row: PlaceRow
    reference: torch.Tensor
    candidate: torch.Tensor
    stacked: bool = False
    dim: int | None = 0
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
    alone = [side[0][place] for side in (reference, candidate) if len(side) == 1]
    one = truth if truth is not None else next(iter(alone), None)
    their_whole, our_whole = join(place, reference, one), join(place, candidate, one)
    alike = len(reference) == len(candidate)
    dim: int | None = 0
    if alike:
        theirs, ours = side_by_side(place, reference), side_by_side(place, candidate)
    elif their_whole is None or our_whole is None:
        return _Pair(place, replace(_noted(place, UNJOINED), is_comparable=False), nothing, nothing)
    else:
        theirs, ours, dim = their_whole.tensor, our_whole.tensor, our_whole.dim
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
    pair = _Pair(place, row, theirs, ours, stacked, dim)
    if truth is None or not truth.is_floating_point() or their_whole is None or our_whole is None:
        return pair
    if not truth.shape == our_whole.tensor.shape == their_whole.tensor.shape:
        return pair
    their_error, our_error = (relative_error(each.tensor, truth) for each in (their_whole, our_whole))
    limit = bound.gradient_limit(their_error, truth.numel())
    row = replace(row, reference_error=their_error, candidate_error=our_error, limit=limit)
    return replace(pair, row=row, whole=our_whole.tensor, truth=truth)


def _noted(place: Place, note: str) -> PlaceRow:
    return PlaceRow(place.phase, place.what, place.name, 0, 0, None, math.inf, note=note)


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
        where=describe_elements(_differing(theirs, ours), pair.place, ranks, stacked=pair.stacked, dim=pair.dim),
        index=tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), theirs.shape)),
        reference_value=float(theirs.reshape(-1)[flat]),
        candidate_value=float(ours.reshape(-1)[flat]),
        causes=causes,
    )


def describe_elements(
    differing: torch.Tensor, place: Place, ranks: int, *, stacked: bool = False, dim: int | None = 0
) -> str:
    """Which elements are marked, in words: all, some rows, and whose they are.

    Args:
        differing: [rows, ...], or [ranks, rows, ...] if `stacked`; bool.
        place: where; a parameter's rows are sharded as `torch.chunk` cuts them, a batch's by equal shares.
        ranks: of the candidate.
        dim: along which ranks have their shares; None if each has all of it.
    """
    count, total = int(differing.sum()), differing.numel()
    if not count:
        return "no element"
    amount = f"all {total} elements" if count == total else f"{count} of {total} elements"
    if stacked:
        marked = differing.reshape(ranks, -1).any(1).nonzero().flatten().tolist()
        return amount if len(marked) == ranks else f"{amount}, on rank {' and '.join(map(str, marked))} only"
    differing = differing.movedim(dim, 0) if dim else differing
    rows = differing.shape[0] if differing.dim() else 1
    if rows < 2:
        return amount
    marked = differing.reshape(rows, -1).any(1).nonzero().flatten().tolist()
    if len(marked) < rows:
        amount += f", in {len(marked)} of {rows} {f'slices of dimension {dim}' if dim else 'rows'} ({_ranges(marked)})"
    if dim is None:
        return amount
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
    if pair.whole is not None and pair.truth is not None and place.what in (What.GRADIENT, What.LOCAL_GRADIENT):
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
