"""The likely cause of a wrong gradient, loss or step, told from numbers alone; each case is made by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from common.harness.causes import likely_causes
from common.harness.grades import referee_job
from common.harness.records import Environment, Run, RunRecord
from common.harness.run_causes import run_causes
from common.job import JobConfig

_GENERATOR = torch.Generator().manual_seed(3)
TRUTHS = {
    "table": torch.cat([torch.randn(6, 4, generator=_GENERATOR), torch.zeros(4, 4)]),  # tokens 6 to 9 do not occur
    "up": torch.randn(7, 4, generator=_GENERATOR),
    "gate": torch.randn(7, 4, generator=_GENERATOR),
    "bias": torch.randn(24, generator=_GENERATOR),
}
OTHER = {name: torch.randn(truth.shape, generator=_GENERATOR) for name, truth in TRUTHS.items()}
Change = Callable[[Tensor], Tensor]


def without_rows(first: int, last: int) -> Change:
    """The rows from `first` up to `last` are zero."""
    return lambda truth: torch.cat([truth[:first], torch.zeros_like(truth[first:last]), truth[last:]])


CASES: list[tuple[str, str, int, Change, str]] = [
    ("zero", "up", 2, torch.zeros_like, "zero: never reduced, or never written"),
    ("sum of 3", "up", 3, lambda truth: 3 * truth, "3 times the mean: summed over ranks, not averaged"),
    ("sum of 2", "up", 2, lambda truth: 2 * truth, "2 times the mean: summed over ranks, not averaged, or added twice"),
    ("added twice", "up", 3, lambda truth: 2 * truth, "2 times the mean: added twice"),
    ("two of 4", "up", 4, lambda truth: 2 * truth, "2 times the mean: added twice, or scaled by the norm of one rank"),
    ("averaged twice", "up", 4, lambda truth: truth / 4, "1/4 of the mean: averaged twice"),
    ("norm of a shard", "up", 2, lambda truth: math.sqrt(2) * truth, "the norm of one rank's shard, not of all"),
    ("norm of all, a shard's gradient", "up", 3, lambda truth: truth / math.sqrt(3), "1/sqrt(3) of the mean"),
    ("sign", "bias", 2, lambda truth: -truth, "the wrong sign"),
    ("loss scale", "up", 2, lambda truth: 65536 * truth, "6.55e+04 times the mean: a divisor or a loss scale"),
    ("rolled", "up", 2, lambda truth: truth.roll(1, 0), "rolled by +1 row"),
    ("neighbour", "up", 2, lambda truth: TRUTHS["gate"], "holds the gradient of 'gate': a bucket unpacked in another"),
    ("last rank", "up", 2, without_rows(4, 7), "all rows of rank 1, the last, are wrong, the others right: zero"),
    ("first rank", "up", 2, without_rows(0, 4), "all rows of rank 0 are wrong, the others right: zero"),
    ("one row", "up", 3, without_rows(6, 7), "all rows of rank 2, the last, are wrong"),
    ("padding", "up", 2, without_rows(6, 7), "1 of 3 rows of rank 1, the last, are wrong, the others right: zero"),
    ("one use of two", "up", 1, without_rows(1, 6), "zero in 5 rows that should not be, as if a use of it is missing"),
    ("other tokens", "table", 2, lambda truth: OTHER["table"] * truth.roll(3, 0).sign(), "another micro-batch"),
    (
        "other data",
        "up",
        2,
        lambda truth: truth + OTHER["up"],
        "the cause is not known; for example never reduced, each rank keeps its own; or other data",
    ),
    ("rank left out", "up", 2, lambda truth: (truth + OTHER["up"]) / 2, "as if a rank is left out of the sum"),
    (
        "bf16",
        "bias",
        2,
        lambda truth: truth.bfloat16().float(),
        "every element a bf16 number: reduced or stored in bf16",
    ),
    ("size of bf16", "bias", 2, lambda truth: truth + 2e-3 * OTHER["bias"], "as large as by rounding to bf16: "),
    ("size of fp16", "bias", 2, lambda truth: truth + 3e-4 * OTHER["bias"], "as large as by rounding to fp16: "),
    ("noise", "bias", 2, lambda truth: truth + 2e-3 * OTHER["bias"], "may be cast; noise, or a slightly different"),
    (
        "large noise",
        "bias",
        2,
        lambda truth: truth + 0.04 * OTHER["bias"],
        "as by rounding to bf16 many times: something",
    ),
    ("scaled a little", "up", 2, lambda truth: 1.01 * truth, "scaled by 1.01, all elements alike"),
    ("scaled by less", "up", 2, lambda truth: 0.9985 * truth, "scaled by 0.9985, all elements alike"),
    (
        "columns rolled",
        "up",
        2,
        lambda truth: truth.roll(2, 1),
        "the same values in other places: permuted, transposed",
    ),
    ("rows flipped", "up", 2, lambda truth: truth.flip(0), "the same values in other places"),
    ("two rows swapped", "up", 2, lambda truth: truth[[0, 1, 2, 3, 4, 6, 5]], "the same values in other places"),
]


@pytest.mark.parametrize(("name", "ranks", "change", "cause"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_causes_of_one_wrong_gradient(name: str, ranks: int, change: Change, cause: str) -> None:
    """One parameter is wrong in one way, and that way is named, with the parameter."""
    (line,) = likely_causes([name], TRUTHS | {name: change(TRUTHS[name])}, TRUTHS, ranks)
    assert line.startswith(f"{name!r}: ")
    assert cause in line


def test_causes_are_grouped() -> None:
    """Parameters that are wrong in one way share a line, in the model's order; another way has a line of its own."""
    wrong = {"table": TRUTHS["table"] * 3, "up": TRUTHS["up"] * 3, "gate": -TRUTHS["gate"]}
    lines = likely_causes(list(wrong), TRUTHS | wrong, TRUTHS, 3)
    assert [line.split(":")[0] for line in lines] == ["'table' and 1 more", "'gate'"]


WIDE, OTHER_WIDE = torch.randn(2, 64, 24, generator=_GENERATOR)


def cause_of(gradient: Tensor, truth: Tensor, ranks: int = 2) -> str:
    """The one line on a gradient, "" if there is none."""
    return "".join(likely_causes(["it"], {"it": gradient}, {"it": truth}, ranks))


def test_no_relation_is_no_rank_left_out() -> None:
    """What has nothing of the mean is of other data; a rank left out leaves most of the mean."""
    for ranks in (2, 4):
        assert "bears no relation to the right one" in cause_of(OTHER_WIDE, WIDE, ranks)
        parts = torch.randn(ranks, *WIDE.shape, generator=torch.Generator().manual_seed(ranks))
        assert "a rank is left out" in cause_of(parts[1:].sum(0) / ranks, parts.mean(0), ranks)
        assert "the cause is not known" in cause_of(parts[0], parts.mean(0), ranks)


def test_a_multiple_is_no_direction_it_merely_has() -> None:
    """Three times the mean and a quarter of that in another direction is no sum over three ranks."""
    assert "summed" not in cause_of(3 * WIDE + 0.8 * OTHER_WIDE, WIDE, 3)


def test_what_is_alike_anyway_proves_no_mix_up() -> None:
    """Noise on rows that are alike is no roll of them, and noise on a gradient that is like another's not the other."""
    alike = torch.ones(64, 24) + 0.01 * WIDE
    lines = likely_causes(
        ["it"], {"it": alike + 0.02 * OTHER_WIDE}, {"it": alike, "twin": alike + 0.01 * OTHER_WIDE}, 2
    )
    assert not any("rolled" in line or "twin" in line for line in lines)


@pytest.mark.parametrize(("rows", "is_uneven"), [(64, False), (63, True)])
def test_padding_is_named_only_where_rows_are_left_over(rows: int, is_uneven: bool) -> None:
    """An even shard has no padding that could be the cause."""
    gradient = WIDE[:rows].clone()
    gradient[40:43] = 0
    line = cause_of(gradient, WIDE[:rows])
    assert "3 of 3" in line and "zero: never reduced" in line
    assert ("padding" in line) is is_uneven


def test_a_lone_element_is_counted() -> None:
    """A wrong element makes its row wrong, and no more than itself is named: no padding, though rows are left over."""
    gradient = WIDE[:63].clone()
    gradient.view(-1)[gradient.abs().argmax()] = 0
    line = cause_of(gradient, WIDE[:63])
    assert "1 of 3" in line and "1 of their 24 elements make up the error" in line and "padding" not in line


NONE, ONE, TINY = torch.zeros(0, 4), torch.tensor([2.0]), torch.full((3,), 1e-170, dtype=torch.float64)
EDGES: list[tuple[str, Tensor, Tensor, str]] = [
    ("right is zero", WIDE, torch.zeros_like(WIDE), "the right gradient is zero, and this one is not"),
    ("right has a norm of zero", torch.ones(3), TINY, "the right gradient is zero, and this one is not"),
    ("has a norm of zero", TINY, torch.ones(3), "zero: never reduced"),
    ("both are zero", -torch.zeros(3), torch.zeros(3), "zero, as it should be"),
    ("no element", NONE, NONE, "zero, as it should be"),
    ("nan", WIDE.clone().fill_(math.nan), WIDE, "'it': not finite"),
    ("inf", torch.where(WIDE > 2, math.inf, WIDE), WIDE, "'it': not finite"),
    ("right is nan", WIDE, WIDE * math.nan, "what it should be is not finite"),
    ("right is inf", WIDE, torch.where(WIDE > 2, math.inf, WIDE), "what it should be is not finite"),
    ("one element", 3.7 * ONE, ONE, "3.7 times the mean: a divisor or a loss scale of its own (a single element, of"),
    ("one element of none", torch.tensor(1.0), torch.tensor(0.0), "the right gradient is zero"),
    ("one element, right", ONE, ONE, ""),
    ("right", WIDE, WIDE, ""),
    ("rounding of fp32", WIDE * (1 + 2e-7), WIDE, ""),
]


@pytest.mark.parametrize(("gradient", "truth", "cause"), [case[1:] for case in EDGES], ids=[case[0] for case in EDGES])
def test_nothing_is_divided_by_nothing(gradient: Tensor, truth: Tensor, cause: str) -> None:
    """Zero, not finite, empty or of one element, on either side: a plain line or none, never an error."""
    line = cause_of(gradient, truth)
    assert cause in line and bool(cause) is bool(line)


@pytest.mark.parametrize("bad", [0.0, math.inf, math.nan])
def test_rows_that_should_be_zero_are_no_multiple(bad: float) -> None:
    """Rows of one rank that are wrong where zero, or nothing finite, is right."""
    truth = WIDE.clone()
    truth[50:52] = 0
    gradient = truth.clone()
    gradient[50:52] = bad or 7.0
    assert ("the right gradient is zero" if bad == 0 else "not finite") in cause_of(gradient, truth)


# Whole runs: three steps, two ranks, two parameters

NAMES = ("table", "up")


def run(engine: str = "compiled", **changed: object) -> Run:
    """A run with all numbers right but those that are changed."""
    gradients = {name: TRUTHS[name] for name in NAMES}
    norms = [{name: float(gradients[name].norm()) * (1 - step / 10) for name in NAMES} for step in range(3)]
    values: dict[str, object] = {
        "engine": engine,
        "job": JobConfig(steps=3, backend="aot_eager").to_dict(),
        "world_size": 2,
        "environment": Environment("", "", "", "", ""),
        "losses": [[5.0, 5.2], [4.0, 4.2], [3.0, 3.2]],
        "grad_norms": [math.hypot(*step.values()) for step in norms],
        "grad_digests": [{name: f"{name} {step}" for name in NAMES} for step in range(3)],
        "param_norms": norms,
        "update_norms": [{name: 0.1 * step[name] for name in NAMES} for step in norms],
    }
    kept = changed.pop("gradients", gradients)
    return RunRecord(**values | changed), kept  # type: ignore[arg-type,return-value]


def judged(candidate: Run, wrong: tuple[str, ...] = ()) -> str:
    """The first cause of `candidate` against a run that is right."""
    record, gradients = run("single")
    job = referee_job(JobConfig.from_dict(record.job)).to_dict()
    losses = [[loss] for loss in record.mean_losses]
    referee = (replace(record, job=job, world_size=1, losses=losses), {k: v.double() for k, v in gradients.items()})
    return run_causes(run("eager"), candidate, referee, list(wrong))[0]


def norms_with(step: int, name: str, factor: float) -> list[dict[str, float]]:
    """The right norms, but one times `factor` from `step` on."""
    right = run()[0].param_norms
    return [norms | ({name: norms[name] * factor} if i >= step else {}) for i, norms in enumerate(right)]


def updates(*factors: float) -> list[dict[str, float]]:
    """The right updates times a factor for each parameter."""
    pairs = dict(zip(NAMES, factors, strict=True))
    return [{name: norm * pairs[name] for name, norm in step.items()} for step in run()[0].update_norms]


OFF = [[5.0, 5.2], [4.4, 4.6], [4.1, 4.3]]
"""Right at step 0, too high after it."""
TABLE = TRUTHS["table"]
RUNS: list[tuple[str, dict[str, object], str]] = [
    ("equal but for order", {}, "added in another order"),
    ("frozen", {"gradients": {"table": TABLE}}, "'up': no gradient where the reference has one"),
    ("trained", {"gradients": {**run()[1], "more": OTHER["bias"]}}, "'more': a gradient where the reference has none"),
    (
        "untied",
        {"gradients": {"table": TABLE - OTHER["table"], "up": TRUTHS["up"], "head": OTHER["table"]}},
        "'head': only together with 'table' the gradient of 'table': a tied weight untied",
    ),
    (
        "nan",
        {"gradients": {"table": TABLE, "up": TRUTHS["up"].clone().index_fill_(0, torch.tensor([6]), math.nan)}},
        "rank 1",
    ),
    ("same share", {"losses": [[5.0, 5.0], *OFF[1:]]}, "every rank has the same loss"),
    ("buffer of a rank", {"losses": [[5.0, 5.4], *OFF[1:]]}, "the loss of rank 1 alone is off"),
    ("loss summed", {"losses": [[10.0, 10.4], *OFF[1:]]}, "the loss is 2 times what it should be"),
    ("exchanged", {"losses": [[5.2, 5.0], [4.2, 4.0], [3.2, 3.0]]}, "exchanged their shares"),
    (
        "other tokens",
        {"losses": [[5.3, 5.5], *OFF[1:]], "gradients": {"table": TABLE.roll(2, 0), "up": OTHER["up"]}},
        "other tokens",
    ),
    (
        "other weights",
        {"losses": [[5.3, 5.5], *OFF[1:]], "gradients": {"table": TABLE * 1.5, "up": OTHER["up"]}},
        "something else from step 0 on: other weights (another seed, gathered wrongly), another input, or other arith",
    ),
    (
        "cast or not",
        {"losses": [[5.001, 5.201], *OFF[1:]], "gradients": {"table": TABLE * 1.002, "up": TRUTHS["up"] * 0.998}},
        "as by rounding to bf16: an input, a buffer or a weight may be cast; noise, or a slightly different",
    ),
    (
        "no cast",
        {"losses": [[5.1, 5.3], *OFF[1:]], "gradients": {"table": TABLE * 1.05, "up": TRUTHS["up"] * 0.95}},
        "as by rounding to bf16 many times: an input, a buffer or a weight may be cast; noise, or",
    ),
    ("a term more", {"losses": [[5.3, 5.5], *OFF[1:]]}, "most gradients are right: the loss has a term"),
    ("no update", {"losses": OFF, "update_norms": updates(0, 0)}, "zero update at step 0: the learning rate is 0"),
    (
        "one not held",
        {"losses": OFF, "update_norms": updates(0, 1)},
        "'table': zero update at step 0: the optimizer does not",
    ),
    ("another rate", {"losses": OFF, "update_norms": updates(2, 2)}, "updates are 2 times as large at step 0"),
    ("decay", {"losses": OFF, "update_norms": updates(1, 1.5)}, "weight decay, momentum"),
    (
        "stale weights, or right norms alone",
        {"losses": OFF},
        "the norms of the updates of step 0 are right, and the next loss is not: weights from before the update "
        "(gathered once and kept), gradients or updates with the right norm and wrong elements, or other data",
    ),
    (
        "updates unknown",
        {"losses": OFF, "update_norms": []},
        "the gradients of step 0 have the right norms, and the next loss is not",
    ),
    ("infinite update", {"losses": OFF, "update_norms": updates(1, math.inf)}, "update of step 0 is not finite"),
    ("silent", {"param_norms": norms_with(1, "up", 0.0)}, "'up': zero from step 1 on"),
    (
        "late",
        {
            "param_norms": norms_with(1, "up", 1.4),
            "grad_digests": [{"table": f"t{i}", "up": f"u{max(i - 1, 0)}"} for i in range(3)],
        },
        "'up': the bits of the step before",
    ),
    (
        "not cleared",
        {"param_norms": norms_with(1, "up", 1.7)},
        "'up': norm wrong from step 1 on, though the loss before it is right: as if added to what was there, gradients",
    ),
]


@pytest.mark.parametrize(("changed", "cause"), [case[1:] for case in RUNS], ids=[case[0] for case in RUNS])
def test_causes_of_a_whole_run(changed: dict[str, object], cause: str) -> None:
    """A run that is wrong in one way has that way named first."""
    assert cause in judged(run(**changed))


@pytest.mark.parametrize(
    ("losses", "ours", "truth", "cause"),
    [
        ([[5.3, 5.5], *OFF[1:]], {}, {}, "computes something else from step 0 on"),
        ([[5.3, 5.5], *OFF[1:]], {"it": ONE}, {"it": 0 * ONE}, "computes something else from step 0 on"),
        ([[5.3, 5.5], *OFF[1:]], {"it": NONE}, {"it": NONE}, "most gradients are right"),
        (None, {"it": torch.tensor(math.nan)}, {"it": torch.tensor(1.0)}, "1 of 1 elements are not finite"),
        (None, {"it": ONE}, {"it": 0 * ONE}, "the right gradient is zero"),
    ],
)
def test_a_run_is_divided_by_nothing_either(
    losses: object, ours: dict[str, Tensor], truth: dict[str, Tensor], cause: str
) -> None:
    """No gradient at all, an empty one, or one that should be zero: a line, never an error."""
    right, _ = run("eager")
    candidate = replace(run()[0], losses=losses or right.losses)
    referee = replace(run()[0], losses=[[loss] for loss in right.mean_losses], world_size=1)
    (line,) = run_causes((right, truth), (candidate, ours), (referee, truth), list(truth))
    assert cause in line


def test_a_right_update_that_is_zero_or_infinite_is_no_divisor() -> None:
    """Only updates that have a right norm are compared."""
    right = {"zero": 0.0, "infinite": math.inf, "up": 1.0}
    reference, candidate = (
        replace(run()[0], losses=losses, update_norms=[right | {"zero": 1.0 * more}] * 3)
        for losses, more in ((run()[0].losses, 0), (OFF, 1))
    )
    referee = replace(run()[0], losses=[[loss] for loss in reference.mean_losses], world_size=1)
    (line,) = run_causes((reference, {}), (candidate, {}), (referee, {}), [])
    assert line.startswith("the norms of the updates of step 0 are right")


def test_a_loss_that_should_be_zero_is_no_divisor() -> None:
    """A right loss of zero has no multiple; the candidate's is still told to be off."""
    zero = [[0.0, 0.0]] * 3
    reference, referee = replace(run()[0], losses=zero), replace(run()[0], losses=[[0.0]] * 3, world_size=1)
    (line,) = run_causes((reference, {}), (run()[0], {}), (referee, {}), [])
    assert "computes something else from step 0 on" in line


def test_causes_of_step_0_come_before_those_of_later_steps() -> None:
    """A wrong gradient at step 0 is named, not the wrong losses that follow from it."""
    candidate = run(losses=OFF, gradients={"table": TABLE, "up": -TRUTHS["up"]})
    assert "'up': the wrong sign" in judged(candidate, wrong=("up",))
