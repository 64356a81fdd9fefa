"""Grades, their bounds, and the distances that they bound."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from common.harness.compare import job_key
from common.harness.distance import max_ulp, relative_error, worst_row_error
from common.harness.grades import (
    ErrorBound,
    Grade,
    Z,
    expected_grade,
    referee_job,
    root_mean_square,
    unit_roundoff,
)
from common.job import PASSES, JobConfig

NATIVE_3 = {"ranks": 3, "transport": "native"}
WITHOUT_SUMS = [name for name in PASSES if name != "bucket_reductions"]


@pytest.mark.parametrize(
    ("options", "reference", "candidate", "grade"),
    [
        ({}, "eager", "compiled", Grade.BITWISE),
        ({"ranks": 4, "batch": 12}, "eager", "compiled", Grade.BITWISE),
        ({"ranks": 4, "transport": "native"}, "eager", "compiled", Grade.BITWISE),
        ({"ranks": 4, "transport": "native"}, "eager", "torch-fsdp2", Grade.BITWISE),
        ({"ranks": 4, "transport": "native", "plan": "param"}, "eager", "torch-fsdp2", Grade.REDUCTION_ORDER),
        ({"plan": "param"}, "eager", "compiled", Grade.REDUCTION_ORDER),  # taps, see grades.py
        ({"plan": "param"}, "eager", "torch-fsdp2", Grade.BITWISE),
        ({"ranks": 4, "transport": "native", "plan": "param"}, "eager", "compiled", Grade.REDUCTION_ORDER),
        ({"ranks": 4}, "eager", "torch-fsdp2", Grade.REDUCTION_ORDER),
        ({"ranks": 2}, "torch-fsdp2", "compiled", Grade.BITWISE),
        ({"ranks": 2}, "single", "eager", Grade.REDUCTION_ORDER),
        ({"ranks": 2}, "ddp", "eager", Grade.REDUCTION_ORDER),
        ({"ranks": 3, "disabled_passes": PASSES}, "eager", "compiled", Grade.BITWISE),
        ({"disabled_passes": PASSES, "transport": "native"}, "eager", "compiled", Grade.BITWISE),
        (NATIVE_3 | {"disabled_passes": ["bucket_reductions"]}, "eager", "compiled", Grade.REDUCTION_ORDER),
        (NATIVE_3 | {"disabled_passes": ["bucket_reductions"]}, "eager", "torch-fsdp2", Grade.BITWISE),
        (NATIVE_3 | {"disabled_passes": WITHOUT_SUMS}, "eager", "compiled", Grade.BITWISE),
        ({"block_backend": "aot_eager"}, "eager", "compiled", Grade.BITWISE),
        ({"block_backend": "aot_eager"}, "single", "ddp", Grade.REDUCTION_ORDER),
        ({"block_backend": "inductor"}, "eager", "compiled", Grade.COMPILER),
        ({"block_backend": "inductor"}, "eager", "torch-fsdp2", Grade.COMPILER),
        ({"block_backend": "inductor"}, "single", "ddp", Grade.COMPILER),
        ({"block_backend": "inductor"}, "single", "compiled", Grade.REDUCTION_ORDER),
        ({"block_backend": "inductor"}, "single", "my.engine", Grade.COMPILER),
        ({"backend": "inductor"}, "eager", "compiled", Grade.COMPILER),
        ({"backend": "inductor"}, "eager", "torch-fsdp2", Grade.BITWISE),
        ({"backend": "inductor"}, "single", "compiled", Grade.COMPILER),
        ({"backend": "inductor"}, "compiled", "compiled", Grade.BITWISE),
        ({"backend": "inductor"}, "eager", "my.engine", Grade.COMPILER),
        ({}, "eager", "my.engine", Grade.REDUCTION_ORDER),
        ({}, "fsdp_eager.parallelize", "compiled", Grade.BITWISE),
    ],
    ids=str,
)
def test_expected_grade(options: dict[str, object], reference: str, candidate: str, grade: Grade) -> None:
    """Bitwise exactly where both sides add the same terms in the same order; Inductor on either side is COMPILER."""
    job = JobConfig.from_dict(JobConfig(backend="aot_eager").to_dict() | options)
    assert expected_grade(job, reference, candidate) is grade
    assert expected_grade(job, candidate, reference) is grade


def test_expected_grade_of_two_jobs() -> None:
    """Another plan keeps rank-ordered sums and reorders native ones on more than two ranks; so does a world size."""
    job = JobConfig(backend="aot_eager", ranks=4)
    other_plan = replace(job, plan="param")
    assert expected_grade(job, "eager", "compiled", candidate_job=other_plan) is Grade.BITWISE
    native, native_plan = (replace(each, transport="native") for each in (job, other_plan))
    assert expected_grade(native, "eager", "compiled", candidate_job=native_plan) is Grade.REDUCTION_ORDER
    unpacked = replace(native, disabled_passes=("bucket_reductions",))
    assert expected_grade(native, "compiled", "compiled", candidate_job=unpacked) is Grade.REDUCTION_ORDER
    assert expected_grade(native_plan, "compiled", "compiled", candidate_job=unpacked) is Grade.BITWISE
    assert expected_grade(job, "eager", "eager", candidate_job=replace(job, ranks=2)) is Grade.REDUCTION_ORDER
    assert expected_grade(replace(job, link="nccl"), "eager", "torch-fsdp2") is Grade.BITWISE


def test_referee_job_trains_the_same_in_float64() -> None:
    """The referee differs from its job in dtypes alone, as far as training goes."""
    job = JobConfig(model="gpt-debug", param_dtype="bf16", seed=3, ranks=3)
    referee = referee_job(job)
    assert job_key(referee.to_dict(), dtypes=False) == job_key(job.to_dict(), dtypes=False)
    assert {referee.dtype, referee.param_dtype, referee.reduce_dtype} == {"fp64"}
    assert referee.mp_policy.param_dtype is None


@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize("reduce_dtype", ["fp32", "bf16"])
def test_the_floor_is_what_the_contract_rounds(ranks: int, reduce_dtype: str) -> None:
    """Exact gradients, cast to bf16, summed rank by rank and divided: the error is below the floor, and not far."""
    job = JobConfig(param_dtype="bf16", reduce_dtype=reduce_dtype, ranks=ranks, batch=ranks)
    bound = ErrorBound.of(Grade.REDUCTION_ORDER, job, reference_ranks=1, candidate_ranks=ranks)
    dtype = torch.float32 if reduce_dtype == "fp32" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(ranks, 10_000, generator=generator, dtype=torch.float64)
    total = torch.zeros(10_000, dtype=dtype)
    for local in exact:
        total += local.bfloat16().to(dtype)
    error = relative_error((total / ranks).float(), exact.mean(0))
    assert bound.floor / 5 < error < bound.floor


def test_a_lucky_reference_decides_nothing() -> None:
    """With no error at all on the reference the limit is the floor and chance, and smaller the larger the tensor."""
    bound = ErrorBound.of(Grade.REDUCTION_ORDER, JobConfig(), reference_ranks=2, candidate_ranks=2)
    small, large = bound.gradient_limit(0.0, 64), bound.gradient_limit(0.0, 4096 * 4096)
    assert bound.floor < large < 1.2 * bound.floor < small < 7 * bound.floor


def test_limits_grow_with_grade_and_reference_error() -> None:
    """COMPILER allows twice what REDUCTION_ORDER does, and an error r times the reference's fails for r of 10."""
    bounds = [
        ErrorBound.of(grade, JobConfig(), reference_ranks=2, candidate_ranks=2)
        for grade in (Grade.REDUCTION_ORDER, Grade.COMPILER)
    ]
    weak, weaker = (bound.gradient_limit(1e-3, 64 * 64) for bound in bounds)
    assert weaker == pytest.approx(2 * weak, rel=1e-6)  # the floor is far below 1e-3
    assert 1e-3 < weak < weaker < 1e-2


def test_half_the_loss_gained_fails() -> None:
    """A model that learns half as fast is outside the loss bound, though each step's loss is near the right one."""
    bound = ErrorBound.of(Grade.COMPILER, JobConfig(param_dtype="bf16"), reference_ranks=1, candidate_ranks=2)
    losses = [5.5 - 0.1 * step for step in range(10)]
    slow = [5.5 - 0.05 * step for step in range(10)]
    errors = [abs(ours - theirs) / theirs for ours, theirs in zip(slow, losses, strict=True)]
    floors = bound.loss_floors(0.01, losses)
    scales = bound.scales(floors, [0.2] * 10, [0.0] * 10)
    assert root_mean_square([error / scale for error, scale in zip(errors, scales, strict=True)]) > Z


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_max_ulp_counts_representable_numbers(dtype: torch.dtype) -> None:
    """Three times `nextafter` is 3 ulp, across a power of two and across zero alike; other dtypes have no distance."""
    start = torch.tensor([1.0, -2.0, 0.0, 1e-3], dtype=dtype)
    for value in start.split(1):
        moved = value.clone()
        for _ in range(3):
            moved = torch.nextafter(moved, torch.full_like(moved, 10.0))
        assert max_ulp(value, moved) == max_ulp(moved, value) == 3, value
    assert max_ulp(torch.tensor([-0.0], dtype=dtype), torch.tensor([0.0], dtype=dtype)) == 1
    assert max_ulp(start, start.to(torch.float32 if dtype is torch.float64 else torch.float64)) is None
    assert max_ulp(torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype)) == 0


def test_relative_error_of_nothing() -> None:
    """Zero against zero is no error; anything against zero is infinite, or measured by what is negligible."""
    zero, one = torch.zeros(2), torch.tensor([1.0, 0.0])
    assert relative_error(zero, zero) == 0.0
    assert relative_error(one, zero) == math.inf
    assert relative_error(one, zero, least=4.0) == 0.25


def test_worst_row_error_finds_the_row() -> None:
    """A lost row of average size errs by about 1, whatever the size of the matrix, and its index is told."""
    truth = torch.randn(1000, 16, generator=torch.Generator().manual_seed(0))
    lost = truth.clone()
    lost[-1] = 0
    error, row = worst_row_error(lost, truth)
    assert row == 999 and 0.9 < error <= 1.0
    assert relative_error(lost, truth) < 0.05
    assert worst_row_error(truth, truth) == (0.0, 0)
    assert worst_row_error(torch.zeros(()), torch.tensor(2.0))[0] == pytest.approx(1 / math.sqrt(2))
    assert worst_row_error(torch.empty(0, 4), torch.empty(0, 4)) == (0.0, 0)


def test_unit_roundoff_is_half_an_epsilon() -> None:
    """Rounding a number to a dtype errs by at most its unit roundoff, and gets that near."""
    numbers = 1 + torch.rand(10_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        worst = float(((numbers.to(dtype).double() - numbers) / numbers).abs().max())
        assert 0.9 * unit_roundoff(dtype) < worst <= unit_roundoff(dtype)
