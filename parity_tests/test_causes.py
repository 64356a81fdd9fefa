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
    ("one use of two", "up", 1, without_rows(1, 6), "zero in 5 rows that should not be: a use of it is missing"),
    ("other tokens", "table", 2, lambda truth: truth.roll(3, 0), "another micro-batch"),
    ("other data", "up", 2, lambda truth: truth + OTHER["up"], "never reduced, each rank keeps its own; or other data"),
    ("rank left out", "up", 2, lambda truth: (truth + OTHER["up"]) / 2, "a rank is left out of the sum"),
    (
        "bf16",
        "bias",
        2,
        lambda truth: truth.bfloat16().float(),
        "every element a bf16 number: reduced or stored in bf16",
    ),
    ("cast", "bias", 2, lambda truth: truth + 2e-3 * OTHER["bias"], "as by rounding to bf16"),
    ("fp16 cast", "bias", 2, lambda truth: truth + 3e-4 * OTHER["bias"], "as by rounding to fp16"),
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
        "the same tokens, and computes with other weights",
    ),
    (
        "cast",
        {"losses": [[5.001, 5.201], *OFF[1:]], "gradients": {"table": TABLE * 1.002, "up": TRUTHS["up"] * 0.998}},
        "as by rounding to bf16: an input, a buffer or a weight is cast",
    ),
    ("no update", {"losses": OFF, "update_norms": updates(0, 0)}, "zero update at step 0: the learning rate is 0"),
    (
        "one not held",
        {"losses": OFF, "update_norms": updates(0, 1)},
        "'table': zero update at step 0: the optimizer does not",
    ),
    ("another rate", {"losses": OFF, "update_norms": updates(2, 2)}, "updates are 2 times as large at step 0"),
    ("decay", {"losses": OFF, "update_norms": updates(1, 1.5)}, "weight decay, momentum"),
    ("stale weights", {"losses": OFF}, "weights from before the update"),
    ("silent", {"param_norms": norms_with(1, "up", 0.0)}, "'up': zero from step 1 on"),
    (
        "late",
        {
            "param_norms": norms_with(1, "up", 1.4),
            "grad_digests": [{"table": f"t{i}", "up": f"u{max(i - 1, 0)}"} for i in range(3)],
        },
        "'up': the bits of the step before",
    ),
    ("not cleared", {"param_norms": norms_with(1, "up", 1.7)}, "gradients are not cleared"),
]


@pytest.mark.parametrize(("changed", "cause"), [case[1:] for case in RUNS], ids=[case[0] for case in RUNS])
def test_causes_of_a_whole_run(changed: dict[str, object], cause: str) -> None:
    """A run that is wrong in one way has that way named first."""
    assert cause in judged(run(**changed))


def test_causes_of_step_0_come_before_those_of_later_steps() -> None:
    """A wrong gradient at step 0 is named, not the wrong losses that follow from it."""
    candidate = run(losses=OFF, gradients={"table": TABLE, "up": -TRUTHS["up"]})
    assert "'up': the wrong sign" in judged(candidate, wrong=("up",))
