"""How equal two runs must be: three grades, which grade a pair of engines can keep, and what each grade allows.

    BITWISE           equal bits: losses of every rank, every gradient, every step
    REDUCTION_ORDER   the same arithmetic, summed in another order
    COMPILER          a compiler fused operations and kept intermediates wider

The last two are judged against a float64 run of the same step on one process, the referee. What follows is derived
from rounding alone; nothing in it was fitted to a run. `docs/numerics.md` says it at length, with what was measured.

[Note: error model]
Let e be the relative L2 error of one parameter's gradient against float64, e_ref of the reference engine and e_cand of
the candidate. A gradient's error is the sum of very many roundings of either sign, so it is a random vector with about
nu independent directions and a scale sigma in each, and e^2 is sigma^2 times a chi-square with nu degrees of freedom
over nu. The candidate passes if

    e_cand <= Q(nu) * sqrt((S * e_ref)^2 + floor^2)

sigma   No formula predicts it: it depends on depth and on cancellation. It is measured: e_ref is a draw of it, on the
        same parameter, in the same dtypes.
floor   Roundings that the contract itself puts in, whatever the order, so that a lucky e_ref decides nothing: one of
        the local gradient to the compute dtype, W in the reduction (W - 1 additions, one division), one to store. Each
        is at most a unit roundoff u = eps / 2 of its dtype, independent, so they add in quadrature:
        floor^2 = u_compute^2 + W * u_reduce^2 + u_store^2.
S       How much larger the candidate's sigma may be. Roundings of n terms in a chain grow like sqrt(n).
        REDUCTION_ORDER: 2 = sqrt(4), a kernel that is given another shape may run chains four times as long (blocks
        of 96 to 384 terms). COMPILER: 4 = sqrt(16), where one side rounds after each of 16 operations of a chain that
        the other side fuses and rounds once. A candidate that splits the batch over fewer ranks than the reference has
        chains over tokens that are longer by that ratio, r. W chains of n / W terms of one sign, each with an error of
        u * sqrt(n / W) of its W-th of the sum, err by u * sqrt(n) / W together: S grows by r.
Q(nu)   Both errors fluctuate. The log of the ratio of two chi-square norms is about normal with variance 1 / nu
        (Fisher), so exp(z / sqrt(nu)) is passed by chance once in 3.5 million for z = 5.
nu      Fewer than elements: a weight's gradient is a sum of outer products, so its rows share directions and its
        columns share tokens. The square root of the number of elements is what is left if all rows share one.

[Note: rows]
Sharding goes by rows, so its faults do too: a row lost to padding is a hundredth of a large gradient's norm, and all of
its own. The same bound therefore also holds for the worst row: its error, relative to the row's norm. A row of m
elements may be small by chance, the more easily the fewer they are, so a share 1 / sqrt(m) of the mean row is added (in
quadrature) to what it is relative to. The worst of many rows fluctuates less than one, so Q(nu) covers it.

[Note: error over steps]
After step 0 the parameters differ too, so errors feed on themselves, and where training is unstable it multiplies them,
a thousandfold and more; a state that training has driven into a corner may also be rounded worse than the first one. No
formula knows either, so both are measured, by draws of what an honest run may do: the reference is one, two peers are
others, runs of one process in the same dtypes whose weights were rounded once more at the start. Of each step's loss,
whole norm and norms by parameter the relative difference to the referee is taken in units of a floor that follows from
step 0, where errors are measured on many elements. An error of e in a gradient changes what the steps gain by at most e
of it: for the loss, floor_t = u_compute + e * (total variation of the loss up to t) / loss, with e of the whole
gradient. Updates with independent errors add up as a random walk: for norms, floor_t = e * sqrt(1 + t), with e of the
parameter. What the draws make of it up to step t, at the most, is

    own_t      root mean square over the draws, of this number
    common_t   the same over all parameters too: one number is near zero by chance now and then, all are not; 0 for the
               loss, whose floor is of another kind

and a candidate whose roundings are S times as large stays within

    scale_t = floor_t * sqrt(1 + S^2 * (own_t^2 + common_t^2)),    root mean square over t of r_t / scale_t <= z

Each step counts in units of its own, so that a late step that has been blown up hides no early fault. Where z * scale_t
reaches 1, a gradient of zero would pass; such steps say nothing, are not judged, and the report says so.

[Note: taps]
Hooks learn from the graph of autograd that a module's backward is done: a tap on its inputs, an operation of its own,
waits for their gradients. The gradient of an input that the module uses several times is then summed inside the tap,
before what comes from outside is added: (a + b) + c where autograd alone would have (c + a) + b. A block's input is
used nowhere else, so plans `block` and `model` change nothing. A plan that taps parts of a block does: the input of a
norm also runs on beside it, round the block. `param` and plans by name are therefore bitwise between engines with the
same taps, and in another order of sums against those without, the compiled engine among them.

Left out: parameters after the step. Under Adam the sign of a tiny gradient decides an update, so they are no gate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from common.engine import SHORT_NAMES, compilers_of, import_path
from common.gradient import Transport, plan_reduction
from common.job import JobConfig
from common.policy import DTYPES

Z = 5.0
"""Standard deviations that chance is granted; one-sided 2.9e-7."""


class Grade(StrEnum):
    """How equal two runs are, the strictest first."""

    BITWISE = "bitwise"
    REDUCTION_ORDER = "reduction-order"
    COMPILER = "compiler"

    def covers(self, other: Grade) -> bool:
        """Whether a pair that keeps this grade keeps `other` too."""
        order = list(Grade)
        return order.index(self) <= order.index(other)


SPREAD = {Grade.REDUCTION_ORDER: 2.0, Grade.COMPILER: 4.0}
"""S of [Note: error model]."""

_OURS = (SHORT_NAMES["eager"], SHORT_NAMES["compiled"])
_TORCHS = (SHORT_NAMES["torch-fsdp2"], SHORT_NAMES["torch-fsdp2-prefetch"])
SHARDED = (*_OURS, *_TORCHS)
"""Import paths of the engines that shard parameters."""


def expected_grade(
    job: JobConfig,
    reference: str,
    candidate: str,
    *,
    candidate_job: JobConfig | None = None,
) -> Grade:
    """The strictest grade that two engines on one job can be asked for.

    Args:
        job: what the reference ran.
        reference, candidate: engine names.
        candidate_job: what the candidate ran, if it is another job (another plan, world size or backend).
    """
    first = _Side(import_path(reference), job)
    second = _Side(import_path(candidate), candidate_job or job)
    if first == second:
        return Grade.BITWISE  # an engine against itself
    if any("inductor" in compilers_of(side.path, side.job).all for side in (first, second)):
        return Grade.COMPILER
    same_order = first.path in SHARDED and second.path in SHARDED and first.sums_like(second)
    return Grade.BITWISE if same_order else Grade.REDUCTION_ORDER


def referee_job(job: JobConfig) -> JobConfig:
    """The job that the engine `single` runs as referee of `job`: all of it in float64, from the same values."""
    uncompiled = replace(job, backend="eager", block_backend="eager", disabled_passes=())
    return replace(uncompiled, dtype="fp64", param_dtype="fp64", reduce_dtype="fp64")


@dataclass(frozen=True)
class _Side:
    """One engine on one job, and what decides the order of its sums."""

    path: str
    job: JobConfig

    @property
    def is_ordered(self) -> bool:
        """Whether ranks are summed in rank order, see [Note: rank order] in `common.gradient`."""
        reduction = plan_reduction(
            world_size=self.job.ranks,
            reduce_dtype=DTYPES[self.job.reduce_dtype],
            backend=self.job.process_group,
            transport=Transport(self.job.transport),
        )
        return self.path in _OURS and reduction.transport is Transport.ORDERED

    @property
    def taps(self) -> str | None:
        """The plan, where its hooks split sums of gradients; see [Note: taps]."""
        has_hooks = self.path in (SHORT_NAMES["eager"], *_TORCHS)
        return self.job.plan if has_hooks and self.job.plan not in ("block", "model") else None

    @property
    def packing(self) -> str:
        """The plan by which gradients share messages; a compiled graph that does not bucket them sends each alone."""
        is_compiled = self.path == SHORT_NAMES["compiled"]
        return "param" if is_compiled and "bucket_reductions" in self.job.disabled_passes else self.job.plan

    def sums_like(self, other: _Side) -> bool:
        """Whether both add the same terms in the same order.

        Inside a rank: the same [Note: taps]. Over two ranks: a + b = b + a. Over more: both in rank order, or both by
        the backend and packed alike; `torch-fsdp2` packs the plan `param` in its own way.
        """
        if self.job.ranks != other.job.ranks or self.taps != other.taps:
            return False
        if self.job.ranks <= 2 or (self.is_ordered and other.is_ordered):
            return True
        packed_alike = self.packing == other.packing and not (
            self.packing == "param" and (self.path in _TORCHS) != (other.path in _TORCHS)
        )
        return not self.is_ordered and not other.is_ordered and packed_alike


@dataclass(frozen=True)
class ErrorBound:
    """What one grade allows a candidate; the notes at the top derive it.

    Attributes:
        spread: S.
        floor: the least relative error that is taken seriously.
        compute_roundoff: unit roundoff of the dtype that computes.
    """

    spread: float
    floor: float
    compute_roundoff: float

    @classmethod
    def of(cls, grade: Grade, job: JobConfig, *, reference_ranks: int, candidate_ranks: int) -> ErrorBound:
        """The bound for a candidate on `candidate_ranks` that runs `job` in this grade; not for `BITWISE`."""
        compute, reduce, store = (
            unit_roundoff(DTYPES[name]) for name in (job.param_dtype, job.reduce_dtype, job.dtype)
        )
        ranks = max(reference_ranks, candidate_ranks)
        return cls(
            spread=SPREAD[grade] * max(1.0, reference_ranks / candidate_ranks),
            floor=math.sqrt(compute**2 + ranks * reduce**2 + store**2),
            compute_roundoff=compute,
        )

    def gradient_limit(self, reference_error: float, elements: int) -> float:
        """Largest relative error at step 0 of a gradient of `elements` elements, and of its worst row."""
        chance = math.exp(Z / math.sqrt(math.sqrt(max(elements, 1))))
        return chance * math.hypot(self.spread * reference_error, self.floor)

    def loss_floors(self, gradient_error: float, losses: list[float]) -> list[float]:
        """[step], the relative error of the loss that is taken seriously; see [Note: error over steps].

        Args:
            gradient_error: relative error of the reference's whole gradient at step 0.
            losses: [step], the referee's.
        """
        error = max(gradient_error, self.floor)
        variation, floors = 0.0, []
        for before, loss in zip([losses[0], *losses], losses, strict=False):
            variation += abs(loss - before)
            floors.append(self.compute_roundoff + (error * variation / abs(loss) if loss else 0.0))
        return floors

    def norm_floors(self, gradient_error: float, steps: int) -> list[float]:
        """[step], the same for the norm of a gradient whose error at step 0 is `gradient_error` on the reference."""
        error = max(gradient_error, self.floor)
        return [error * math.sqrt(1 + step) for step in range(steps)]

    def scales(self, floors: list[float], own: list[float], common: list[float]) -> list[float]:
        """[step], how far a candidate may be off, but for chance: `floors` times what the draws made of them."""
        rows = zip(floors, own, common, strict=True)
        return [floor * math.hypot(1.0, self.spread * math.hypot(*drawn)) for floor, *drawn in rows]


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of rounding a number to `dtype`."""
    return torch.finfo(dtype).eps / 2


def root_mean_square(values: list[float]) -> float:
    """Root of the mean of squares; 0 for no values."""
    return math.sqrt(sum(value * value for value in values) / len(values)) if values else 0.0
