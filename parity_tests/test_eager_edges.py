"""The eager engine after steps that were given up, and after forwards that nothing came of."""

from __future__ import annotations

import re

import pytest

from common.harness.launch import RankPool
from parity_tests import eager_edge_cases as cases
from parity_tests import eager_order_cases as order_cases


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


@pytest.mark.parametrize("name", ["other_order", "skipped_by_one", "unused_by_one"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_other_launches_are_named(pool: RankPool, name: str, replicas: int) -> None:
    """Where checks are on, each rank is told what it and another are about to launch, before anything is mixed up."""
    launches = {}
    for rank, message in enumerate(pool.run(order_cases.checked, name, replicas, ranks=2 * replicas)):
        told = re.match(
            rf"EngineError: rank {rank}: expected (launch_\w+ of blocks.\d), found (launch_\w+ of blocks.\d) on rank"
            r" (\d); all ranks must call the same sharded modules in the same order",
            message,
        )
        assert told, message
        launches[rank] = told.groups()
    for own, found, other in launches.values():
        assert own != found == launches[int(other)][0], launches


def test_same_launches_pass_the_check(pool: RankPool) -> None:
    """Checks refuse nothing that is right."""
    assert pool.run(order_cases.checked, "same_order", 2, ranks=4) == ["none"] * 4


def test_wait_in_vain_is_explained(pool: RankPool) -> None:
    """A launch that another rank never makes ends after the group's timeout, with what was waited for."""
    message, _ = pool.run(order_cases.unchecked, ranks=2)
    assert message.startswith("RuntimeError: ") and "rank 0: wait_gather of" in message, message
    assert "all ranks must call the same sharded modules" in message, message
