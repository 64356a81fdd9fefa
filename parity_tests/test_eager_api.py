"""The API of FSDP2 on the eager engine: scripts that run with torch's `fully_shard` give the same bits with ours.

What torch refuses or does wrong is held against formulas.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed.fsdp as torch_fsdp

import fsdp_eager
from common.harness.launch import RankPool
from parity_tests import eager_api_cases as cases

MANY = {"hybrid_3": 6, "hybrid_halves": 8}
"""Ranks of scripts that need more than 4: 3 replicas of 2; 2 of 4, of which backward gathers over 2."""
ON_FOUR = (
    "hybrid_2",
    "hybrid_2_keeps",
    "hybrid_bf16",
    "hybrid_fp16",
    "reshard_to_half",
    "reduce_replicas_only_at_the_last",
)


@pytest.mark.parametrize("name", [name for name in cases.SCRIPTS if name not in MANY])
def test_script_gives_the_bits_of_torchs_fully_shard(pool: RankPool, name: str) -> None:
    """What a user's script computes, it computes with either; 2 ranks, or 2 of 2, whose sums have one order."""
    ranks = 4 if name in ON_FOUR else 2
    assert pool.run(cases.differences, name, ranks=ranks) == [[]] * ranks


@pytest.fixture(scope="module")
def many() -> Iterator[RankPool]:
    """Up to 8 ranks."""
    with RankPool(8) as pool:
        yield pool


@pytest.mark.parametrize(("name", "ranks"), MANY.items())
def test_script_on_many_ranks_gives_the_bits_of_torchs_fully_shard(many: RankPool, name: str, ranks: int) -> None:
    """The same where the sum over replicas has an order, and where a number reshards within a replica."""
    assert many.run(cases.differences, name, ranks=ranks, timeout_s=120) == [[]] * ranks


def test_division_on_three_replicas_is_right(many: RankPool) -> None:
    """Gradients of 3 replicas of 2 are those of the sum over 6 ranks, divided by what was asked for."""
    assert many.run(cases.divided, "ordered", 3, ranks=6, timeout_s=120) == [[]] * 6


def test_hybrid_reshards_to_a_part_of_a_replica(many: RankPool) -> None:
    """2 replicas of 4 that keep halves for backward: gradients are the mean over all 8 ranks."""
    assert many.run(cases.ordered_hybrid, 2, 2, ranks=8, timeout_s=120) == [[]] * 8


@pytest.mark.parametrize(("transport", "replicas"), [("native", 1), ("ordered", 1), ("native", 2), ("ordered", 2)])
def test_divide_factor_works_on_gloo(pool: RankPool, transport: str, replicas: int) -> None:
    """A factor that is not the number of ranks, on which torch raises here: for one group, or for the whole tree."""
    assert pool.run(cases.divided, transport, replicas, ranks=4) == [[]] * 4


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (3, 1), (4, 1), (4, 2)])
def test_any_dimension_is_cut_unevenly(pool: RankPool, ranks: int, replicas: int) -> None:
    """Convolutions cut along dimensions of 3, 2 and 8: gradients and values are the plain model's, shapes chunk's."""
    for rank, found in enumerate(pool.run(cases.cut_unevenly, replicas, ranks=ranks)):
        shards, index = ranks // replicas, rank % (ranks // replicas)

        def held(size: int, shards: int = shards, index: int = index) -> int:
            chunk = -(-size // shards)
            return max(0, min(chunk, size - index * chunk))

        shapes = [(5, held(3), 3, 3), (held(5),), (2, 5, held(2)), (held(2),), (7, held(8)), (held(7),)]
        assert found == {"wrong": [], "shapes": shapes}


@pytest.mark.parametrize("reshard", [True, False])
def test_ordered_hybrid_gradient_is_the_mean_over_all_ranks(pool: RankPool, reshard: bool) -> None:
    """2 replicas of 2, by the transport in rank order, whether weights are kept for backward or not."""
    assert pool.run(cases.ordered_hybrid, 2, reshard, ranks=4) == [[]] * 4


def log_of(pool: RankPool, replicas: int = 1, **settings: Any) -> tuple[list[str], list[str]]:
    """Forward and backward of a step, as rank 0's schedule logs it."""
    log = pool.run(cases.events, replicas, settings, ranks=2 * replicas)[0]
    middle = log.index("-- backward")
    return log[:middle], log[middle + 1 :]


def test_prefetch_list_launches_all_it_names_at_once(pool: RankPool) -> None:
    """Three gathers named by the root are in flight before the first is waited for."""
    forward, _ = log_of(pool, prefetch_all=True)
    first_wait = forward.index("wait_gather blocks.0")
    assert [f"launch_gather blocks.{i}" in forward[:first_wait] for i in range(3)] == [True] * 3


@pytest.mark.parametrize("limit", [1, 2])
def test_gather_limit_holds(pool: RankPool, limit: int) -> None:
    """However many a list names, no more are in flight ahead of their use than the limit says, and one that many."""
    forward, backward = log_of(pool, prefetch_all=True, limit=limit)
    in_flight = highest = 0
    for event in forward + backward:
        in_flight += event.startswith("launch_gather") - event.startswith(("wait_gather", "discard_gather"))
        highest = max(highest, in_flight)
    assert highest == limit


@pytest.mark.parametrize("messages", [1, 2])
def test_reductions_in_flight_are_those_that_were_allowed(pool: RankPool, messages: int) -> None:
    """With room for n messages, the n + 1st waits for the first."""
    _, backward = log_of(pool, messages=messages)
    in_flight = highest = 0
    for event in backward:
        in_flight += event.startswith("launch_reduce") - event.startswith("wait_reduce")
        highest = max(highest, in_flight)
    assert highest == messages


def test_reduction_over_replicas_hides_behind_the_next_group(pool: RankPool) -> None:
    """With replicas, a group's gradients are there when the group after the next is launched, or backward ends."""
    _, backward = log_of(pool, replicas=2)
    order = [event for event in backward if "reduce" in event]
    launches = [event.removeprefix("launch_reduce ") for event in order if event.startswith("launch_reduce")]
    assert [event.removeprefix("wait_reduce ") for event in order if event.startswith("wait_reduce")] == launches
    for earlier, later in itertools.pairwise(launches):
        assert order.index(f"launch_reduce {later}") < order.index(f"wait_reduce {earlier}")


def test_forward_sees_what_all_ranks_wrote_to_shards(pool: RankPool) -> None:
    """Though whole weights were kept or on their way when DTensors were written to, the next forward is up to date.

    torch goes on with the old ones after `set_reshard_after_backward(False)` and a step, and after an evaluation with
    `reshard_after_forward=False`.
    """
    assert pool.run(cases.stale_weights, ranks=2) == [{name: [] for name in cases.STALE}] * 2


def test_parameters_of_two_dtypes_are_two_groups(pool: RankPool) -> None:
    """Which torch refuses; gradients have the bits of the mean of a plain model's, in each parameter's dtype."""
    assert pool.run(cases.mixed_dtypes, ranks=2) == [{"groups": 2, "wrong": []}] * 2


def test_every_public_name_of_fsdp2_is_here() -> None:
    """What torch's module and its FSDPModule offer exists here, if only to say that it is left out."""
    methods = {name for name in vars(torch_fsdp.FSDPModule) if not name.startswith("_")}
    deprecated = {"set_reduce_scatter_divide_factor"}
    assert methods - deprecated <= set(vars(fsdp_eager.FSDPModule))
    names = {"fully_shard", "FSDPModule", "UnshardHandle", "MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"}
    assert names | {"register_fsdp_forward_method", "share_comm_ctx"} <= set(fsdp_eager.__all__)
