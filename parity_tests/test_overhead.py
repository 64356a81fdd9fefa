"""What the eager engine costs beside torch's: Python counted in calls, memory in bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.harness.launch import RankPool
from common.job import JobConfig
from parity_tests.overhead_cases import calls
from parity_tests.runs import Runs
from parity_tests.test_memory import gaps


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_makes_at_most_half_of_torchs_calls(pool: RankPool, ranks: int) -> None:
    """200 small parameters in 20 groups, compute near zero."""
    ours = pool.run(calls, "ours", 20, ranks=ranks)[0]["step"]
    theirs = pool.run(calls, "torch", 20, ranks=ranks)[0]["step"]
    assert ours <= 0.5 * theirs, f"{ours} calls, torch {theirs}"


def test_set_up_is_linear_in_the_number_of_modules(pool: RankPool) -> None:
    """Four times the groups, at most four times the calls: what does not grow only makes that less."""
    pool.run(calls, "ours", 10, ranks=2)  # fills torch's caches
    small, large = (pool.run(calls, "ours", groups, ranks=2)[0]["setup"] for groups in (10, 40))
    assert large <= 4 * small, f"{small} calls for 10 groups, {large} for 40"


@pytest.mark.parametrize("reshard", ["always", "never"])
@pytest.mark.parametrize(("param_dtype", "reduce_dtype"), [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")])
@pytest.mark.parametrize(("ranks", "transport"), [(2, "ordered"), (2, "native"), (3, "native")])
@pytest.mark.parametrize("model", ["llama-debug", "gpt-debug-tied"])
def test_peak_is_at_most_torchs(
    runs: Runs, model: str, ranks: int, transport: str, param_dtype: str, reduce_dtype: str, reshard: str
) -> None:
    """Where weights outweigh activations; what the eager engine leaves free to align whole parameters is its own.

    Beyond 2 ranks an ordered reduction receives more than a reduce-scatter does, so none is here.
    """
    job = JobConfig(
        model=model,
        ranks=ranks,
        batch=ranks,
        seq=32,
        steps=1,
        link="none",
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        reshard_after_forward=reshard,
        transport=transport,
    )
    theirs = runs("torch-fsdp2", replace(job, transport="auto"))[0].memory
    aligning = gaps(model, ranks) * (4 if param_dtype == "fp32" else 2)
    for memory, torchs in zip(runs("eager", job)[0].memory, theirs, strict=True):
        assert memory.peak_bytes <= torchs.peak_bytes + aligning
