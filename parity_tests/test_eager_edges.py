"""The eager engine after steps that were given up, and after forwards that nothing came of."""

from __future__ import annotations

import pytest

from common.harness.launch import RankPool
from parity_tests import eager_edge_cases as cases


@pytest.mark.parametrize("name", cases.EVENTS)
def test_step_after_an_event_is_an_undisturbed_models(pool: RankPool, name: str) -> None:
    """Gradients have the bits of those of a model to which nothing happened; no rank hangs."""
    ranks = 4 if name == "written_before_kept_backward" else 2
    assert pool.run(cases.differences, name, ranks=ranks) == [[]] * ranks


def test_nothing_is_left_behind(pool: RankPool) -> None:
    """A graph that is gone is not waited for, and a parameter gains no hooks."""
    assert pool.run(cases.left_behind, ranks=2) == [{"awaited": 0, "hooks": 0}] * 2


def test_sharding_that_is_refused_changes_nothing(pool: RankPool) -> None:
    """A parameter of the second dtype that cannot be sharded is found before the first dtype's group is made."""
    assert pool.run(cases.retried, ranks=2) == [[]] * 2


def test_state_dict_holds_no_more_than_its_shards(pool: RankPool) -> None:
    """Though the shards of a group share a buffer, what is saved of each is its own."""
    assert pool.run(cases.saved_bytes, ranks=2) == [{}] * 2
