"""What the eager engine's Python costs, counted in calls."""

from __future__ import annotations

import pytest

from common.harness.launch import RankPool
from parity_tests.overhead_cases import calls


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
