"""The judge passes what is honest and fails what is not, names what differs, and refuses what cannot be compared."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from common.engine import load_engine
from common.errors import ConfigError
from common.harness.compare import compare_runs
from common.harness.grades import (
    Grade,
    Z,
    referee_job,
    unit_roundoff,
)
from common.harness.launch import RankPool
from common.harness.memory_record import StepMemory
from common.harness.peers import PEERS
from common.harness.records import Environment, Run, RunRecord
from common.harness.train import assemble
from common.job import JobConfig
from common.models import build_model
from common.policy import DTYPES
from parity_tests.planted import EVERYWHERE, ON_TARGET, TARGET, run_planted
from parity_tests.runs import Runs

SMALL = JobConfig(steps=4, batch=12, seq=32, backend="eager")
PRECISIONS = {
    "fp32": SMALL,
    "bf16": replace(SMALL, param_dtype="bf16"),
    "bf16 throughout": replace(SMALL, param_dtype="bf16", reduce_dtype="bf16"),
}


@pytest.fixture(scope="module")
def planted(pool: RankPool) -> dict[tuple[str, JobConfig], Run]:
    """Runs with planted faults, each trained once."""

    class Planted(dict[tuple[str, JobConfig], Run]):
        def __missing__(self, key: tuple[str, JobConfig]) -> Run:
            fault, job = key
            results = pool.run(run_planted, fault, job, ranks=job.ranks, timeout_s=120)
            self[key] = assemble(f"planted: {fault}", job, results)
            return self[key]

    return Planted()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("engine", "ranks", "model"),
    [("ddp", 2, "llama-debug"), ("ddp", 3, "gpt-debug-tied"), ("torch-fsdp2", 4, "llama-debug")],
)
def test_another_order_of_sums_passes(runs: Runs, engine: str, ranks: int, model: str, precision: str) -> None:
    """Torch's own data-parallel engines hold REDUCTION_ORDER against one process, and are not bitwise equal to it."""
    job = replace(PRECISIONS[precision], model=model, ranks=ranks)
    report = compare_runs(runs("single", job), runs(engine, job), runs.referee(job))
    assert report.asked is Grade.REDUCTION_ORDER
    assert report.passed, report.reasons
    assert report.reached is Grade.REDUCTION_ORDER
    assert report.margin is not None and report.margin > 1


def test_longer_chains_of_sums_pass(runs: Runs) -> None:
    """One process sums bf16 embedding gradients in chains four times as long as four ranks do, and is not blamed."""
    job = replace(PRECISIONS["bf16"], ranks=4)
    report = compare_runs(runs("torch-fsdp2", job), runs("single", job), runs.referee(job))
    worst = max(row.ratio for row in report.params if row.ratio is not None)
    assert worst > 2, "else nothing is claimed here"
    assert report.passed, report.reasons


def test_adam_passes_over_steps(runs: Runs) -> None:
    """AdamW turns tiny differences into whole updates of tiny gradients; losses and norms stay within bounds."""
    job = replace(SMALL, optimizer="adamw", lr=3e-3, steps=8)
    report = compare_runs(runs("single", job), runs("ddp", job), runs.referee(job))
    assert report.passed, report.reasons


def test_the_hand_written_engine_is_honest(runs: Runs, planted: dict[tuple[str, JobConfig], Run]) -> None:
    """The engine that faults are planted in passes without one, in every precision: what fails below is the fault."""
    for job in PRECISIONS.values():
        report = compare_runs(runs("single", job), planted["honest", job], runs.referee(job))
        assert report.passed, report.reasons


INVISIBLE = {("averaged in bf16", "bf16")}
"""One of 30 gradients rounded to bf16 once more, where all were computed in bf16: within the error of computing it."""


@pytest.mark.parametrize("grade", [Grade.REDUCTION_ORDER, Grade.COMPILER])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("fault", [fault for fault in (*EVERYWHERE, *ON_TARGET) if fault != "honest"])
def test_a_planted_fault_fails(
    runs: Runs, planted: dict[tuple[str, JobConfig], Run], fault: str, precision: str, grade: Grade
) -> None:
    """Every fault, planted in all parameters or in one of 30, fails in every grade; the one is named first."""
    job = PRECISIONS[precision]
    report = compare_runs(runs("single", job), planted[fault, job], runs.referee(job), grade=grade)
    assert report.passed is ((fault, precision) in INVISIBLE)
    if fault in ON_TARGET and not report.passed:
        assert TARGET in report.reasons[0]
        assert not any(row.name != TARGET and row.candidate_error > row.limit for row in report.params)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("all sum", "'tok_embeddings.weight' and 29 more: 2 times the mean"),
        ("sum", f"{TARGET!r}: 2 times the mean"),
        ("divided twice", f"{TARGET!r}: 1/2 of the mean"),
        ("rolled by one row", f"{TARGET!r}: rolled by +1 row"),
        ("last row dropped", "row 63 of 64"),
        ("all averaged in bf16", "every element of every gradient of planted: all averaged in bf16 is a bf16 number"),
    ],
)
def test_a_fault_is_explained(runs: Runs, planted: dict[tuple[str, JobConfig], Run], fault: str, cause: str) -> None:
    """The pattern of errors tells the likely cause, in bf16 too."""
    for precision in ("fp32", "bf16"):
        job = PRECISIONS[precision]
        report = compare_runs(runs("single", job), planted[fault, job], runs.referee(job))
        assert any(cause in line for line in (*report.reasons, *report.causes)), (report.reasons, report.causes)


def record(engine: str = "eager", **options: object) -> RunRecord:
    """Two steps, two ranks, parameters "first" and "last"."""
    job = JobConfig(steps=2, backend="aot_eager")
    values: dict[str, object] = {
        "engine": engine,
        "job": job.to_dict(),
        "world_size": 2,
        "environment": Environment("", "", "", "", ""),
        "losses": [[2.0, 4.0], [1.0, 3.0]],
        "grad_norms": [5.0, 5.0],
        "grad_digests": [{"first": "a", "last": "b"}, {"first": "c", "last": "d"}],
        "param_norms": [{"first": 3.0, "last": 4.0}] * 2,
        "memory": [StepMemory(10, 20)] * 2,
    }
    return RunRecord(**values | options)  # type: ignore[arg-type]


def gradients() -> dict[str, torch.Tensor]:
    """Step-0 gradients with the norms that `record` states."""
    return {"first": torch.tensor([[3.0, 0.0]]), "last": torch.tensor([0.0, 4.0])}


def test_equal_records_are_bitwise_equal() -> None:
    """Equal losses and digests reach BITWISE, without a referee, and nothing diverges."""
    report = compare_runs((record(), gradients()), (record("compiled"), gradients()))
    assert report.asked is report.reached is Grade.BITWISE
    assert report.passed and not report.reasons and report.first_divergence is None
    assert [row.max_ulp for row in report.params] == [0, 0]


@pytest.mark.parametrize(
    ("change", "step", "what"),
    [
        ({"losses": [[2.0, 4.0], [1.0, math.nextafter(3.0, 4.0)]]}, 1, "loss"),
        ({"grad_digests": [{"first": "a", "last": "b"}, {"first": "x", "last": "d"}]}, 1, "gradient of 'first'"),
        ({"grad_digests": [{"first": "x", "last": "x"}, {"first": "c", "last": "d"}]}, 0, "gradient of 'last'"),
    ],
)
def test_one_changed_bit_is_named(change: dict[str, object], step: int, what: str) -> None:
    """One bit of one loss or gradient at one step fails BITWISE; backward reaches the last parameter first."""
    report = compare_runs((record(), gradients()), (record("compiled", **change), gradients()))
    assert not report.passed and report.reached is None
    assert report.first_divergence is not None
    assert (report.first_divergence.step, report.first_divergence.what) == (step, what)
    assert f"step {step}: {what}" in report.reasons[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"losses": [[2.0, 4.0], [1.0, math.nan]]}, "compiled, step 1: loss of rank 1 is nan"),
        ({"param_norms": [{"first": 3.0, "last": math.inf}] * 2}, "compiled, step 0: gradient of 'last' has norm inf"),
        ({"losses": [[2.0, 4.0]]}, "compiled recorded 1 of 2 steps"),
        (
            {"grad_digests": [{"first": "a", "last": "b"}, {"first": "c"}]},
            "gradient of 'last': compiled has one at step",
        ),
    ],
)
@pytest.mark.parametrize("with_referee", [False, True])
def test_broken_numbers_fail(change: dict[str, object], reason: str, with_referee: bool) -> None:
    """NaN, infinity and missing steps fail in any grade, with the place in the reason."""
    reference, candidate = (record(), gradients()), (record("compiled", **change), gradients())
    report = compare_runs(reference, candidate, referee_of(record()) if with_referee else None)
    assert not report.passed and report.reached is None
    assert any(reason in line for line in report.reasons), report.reasons


def test_a_nan_on_both_sides_fails() -> None:
    """Two runs that broke in the same way are equal and still fail."""
    broken = {"losses": [[2.0, 4.0], [math.nan, 3.0]]}
    report = compare_runs((record(**broken), gradients()), (record("compiled", **broken), gradients()))
    assert not report.passed
    assert "eager, step 1" in report.reasons[0]


@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_a_missing_parameter_fails(side: str) -> None:
    """A gradient that only one side has fails and is named, whichever side."""
    whole, less = gradients(), gradients()
    del less["last"]
    pair = [(record(), less), (record("compiled"), whole)]
    report = compare_runs(*(pair if side == "reference" else pair[::-1]))
    assert not report.passed
    assert any("gradient of 'last'" in line and "has none" in line for line in report.reasons)


def test_another_shape_fails() -> None:
    """A gradient of another shape fails, with both shapes."""
    other = gradients() | {"first": torch.tensor([3.0, 0.0])}
    report = compare_runs((record(), gradients()), (record("compiled"), other))
    assert not report.passed
    assert "expected shape [1, 2], found [2] in compiled" in report.reasons[0]


def referee_of(reference: RunRecord) -> Run:
    """A referee for a record made by hand."""
    job = referee_job(JobConfig.from_dict(reference.job))
    made = replace(reference, engine="single", job=job.to_dict(), world_size=1, losses=[[3.0], [2.0]])
    return made, {name: gradient.double() for name, gradient in gradients().items()}


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"model": "gpt-debug"}, {"lr": 0.2}, {"param_dtype": "bf16"}, {"seq": 32}], ids=str
)
def test_different_jobs_are_not_compared(change: dict[str, object]) -> None:
    """Runs that trained something else raise ConfigError and name the option; how they were sharded may differ."""
    job = JobConfig(steps=2, backend="aot_eager").to_dict()
    with pytest.raises(ConfigError, match=next(iter(change))):
        compare_runs((record(), gradients()), (record("compiled", job=job | change), gradients()))
    sharded_otherwise = record("compiled", job=job | {"plan": "param", "reshard_after_forward": "never"})
    assert compare_runs((record(), gradients()), (sharded_otherwise, gradients())).passed


def test_a_weaker_grade_needs_its_referee() -> None:
    """No referee, one in fp32, one of another seed, and one on two ranks are refused."""
    reference, candidate = (record("single"), gradients()), (record("ddp"), gradients())
    good, tensors = referee_of(record())
    assert compare_runs(reference, candidate, (good, tensors)).passed
    bad = [
        None,
        (record("single"), tensors),
        (replace(good, job=good.job | {"seed": 1}), tensors),
        (replace(good, world_size=2), tensors),
    ]
    for referee in bad:
        with pytest.raises(ConfigError, match="referee"):
            compare_runs(reference, candidate, referee)


def test_reports_and_records_are_plain_json() -> None:
    """Infinity and NaN survive JSON, which has no number for them."""
    broken = record(losses=[[2.0, math.nan], [math.inf, -math.inf]])
    text = json.dumps(broken.to_dict(), allow_nan=False)
    losses = RunRecord.from_dict(json.loads(text)).losses
    assert math.isnan(losses[0][1]) and losses[1] == [math.inf, -math.inf]
    report = compare_runs((record(), gradients()), (broken, gradients()), referee_of(record()))
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["passed"] is False and data["asked"] == "bitwise" and data["steps"][0]["loss_diff"] == "nan"


# Over steps

UNSTABLE = replace(SMALL, steps=6, seq=16, lr=1.0)
"""Gradients grow fivefold and fall again; by step 4 training has multiplied a rounding a hundredfold."""


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_unstable_training_is_no_fault(runs: Runs, dtype: str) -> None:
    """Two honest runs pass with room where training multiplies every rounding, also where one is near the referee."""
    job = replace(UNSTABLE, param_dtype=dtype)
    first, second = runs.peers(job)
    for reference, candidate, peers in (
        (runs("single", job), runs("ddp", job), (first, second)),
        (first, second, (runs("single", job), runs("ddp", job))),
    ):
        report = compare_runs(reference, candidate, runs.referee(job), peers=peers, grade=Grade.REDUCTION_ORDER)
        trends = [row for row in report.trends if row.limit is not None]
        assert max(row.candidate_error for row in trends) < Z / 1.5


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_reference_that_is_off_excuses_nothing(runs: Runs, precision: str) -> None:
    """Two engines that are far off pass by each other's error alone; an honest reference is not accused."""
    job = PRECISIONS[precision]
    (record, gradients), referee, peers = runs("ddp", job), runs.referee(job), runs.peers(job)
    high, low = ({name: gradient * factor for name, gradient in gradients.items()} for factor in (1.2, 0.8))
    report = compare_runs((record, high), (record, low), referee, peers=peers, grade=Grade.REDUCTION_ORDER)
    assert not report.passed
    assert any(reason.startswith("the reference ddp is itself off, gradient of ") for reason in report.reasons)
    assert compare_runs(runs("ddp", job), runs("single", job), referee, peers=peers).passed


@pytest.mark.parametrize("fault", ["of the last step", "zero after step 0"])
def test_unstable_training_hides_no_fault_of_its_first_steps(
    runs: Runs, planted: dict[tuple[str, JobConfig], Run], fault: str
) -> None:
    """A fault after step 0 fails in fp32 and bf16, by its trend: later steps that say nothing do not drown it."""
    for job in (UNSTABLE, replace(UNSTABLE, param_dtype="bf16")):
        report = compare_runs(runs("single", job), planted[fault, job], runs.referee(job), peers=runs.peers(job))
        assert not report.passed
        assert "over steps" in report.reasons[0]


def hand_made(norms: list[float], *, steps: int) -> Run:
    """A run of which only the norms of "first" matter."""
    job = JobConfig(steps=steps, backend="aot_eager").to_dict()
    params = [{"first": norm, "last": 1.0} for norm in norms]
    digests = [{"first": str(norm), "last": "b"} for norm in norms]
    made = record(
        "single",
        job=job,
        losses=[[2.0, 2.0]] * steps,
        grad_norms=[math.hypot(norm, 1.0) for norm in norms],
        grad_digests=digests,
        param_norms=params,
    )
    return made, {"first": torch.tensor([[norms[0], 0.0]]), "last": torch.tensor([0.0, 1.0])}


def test_steps_that_say_nothing_are_not_judged() -> None:
    """Where honest runs part by tenths, a norm off by half is no finding; before that it is, and steps are counted."""
    steps = 4
    truth, true_gradients = hand_made([1.0, 1.0, 1.0, 1.0], steps=steps)
    made = replace(truth, job=referee_job(JobConfig.from_dict(truth.job)).to_dict(), world_size=1)
    referee = (made, {name: gradient.double() for name, gradient in true_gradients.items()})
    honest = hand_made([1.0, 1.0 + 1e-7, 1.0 + 1e-6, 1.3], steps=steps)
    late, early = (hand_made(norms, steps=steps) for norms in ([1.0, 1.0, 1.0, 1.5], [1.0, 1.0, 1.5, 1.0]))
    for candidate, passes in ((late, True), (early, False)):
        report = compare_runs(honest, candidate, referee, peers=[honest], grade=Grade.REDUCTION_ORDER)
        assert report.passed is passes
        trends = {row.what: row for row in report.trends}
        assert trends["gradient norm of 'first' over steps"].judged_steps == 3
        assert trends["loss over steps"].judged_steps == steps
    blown = hand_made([1.0, math.nan, 1.0, 1.0], steps=steps)
    report = compare_runs(honest, early, referee, peers=[blown], grade=Grade.REDUCTION_ORDER)
    assert report.passed  # a peer that is lost at step 1 says that nothing can be said from there on
    assert max(row.judged_steps for row in report.trends if "first" in row.what) == 1


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_peers_differ_by_a_rounding(dtype: str) -> None:
    """Each element moves by a unit roundoff of the compute dtype at most, some by nearly that; each peer otherwise."""
    job = replace(SMALL, param_dtype=dtype)
    plain = dict(build_model(job.model, seed=0).named_parameters())
    found = []
    for name in PEERS:
        model = build_model(job.model, seed=0)
        load_engine(name).parallelize(model, None, job)
        moved = {key: (param / plain[key] - 1).abs().max().item() for key, param in model.named_parameters()}
        size = unit_roundoff(DTYPES[dtype])
        assert all(0 < share < size + unit_roundoff(torch.float32) * 1.01 for share in moved.values())
        assert max(moved.values()) > 0.95 * size
        found.append(model.get_parameter(TARGET))
    assert not torch.equal(*found)
