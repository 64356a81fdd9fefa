"""The compiled engine on real ranks, against torch's `fully_shard`, for the shapes and models users bring."""

from __future__ import annotations

import pytest
import torch

from common.gradient import Transport
from common.harness.launch import RankPool
from parity_tests.compiled_cases import (
    Build,
    Empty,
    Frozen,
    Narrow,
    Repeats,
    Tied,
    against_eager,
    against_torch,
    eval_then_train,
    state_dict_round_trip,
    uncompiled_against_compiled,
)

FP32 = (None, None)
MIXED = (torch.bfloat16, torch.float32)
PURE = (torch.bfloat16, torch.bfloat16)
HALF = (torch.float16, torch.float16)


@pytest.mark.parametrize(
    ("build", "plan", "policy", "reshard", "ranks"),
    [
        (Repeats, "model", FP32, True, 3),
        (Repeats, "model", PURE, False, 2),
        (Frozen, "block", FP32, True, 3),
        (Frozen, "block", MIXED, False, 2),
        (Tied, "block", FP32, True, 3),
        (Tied, "block", PURE, True, 4),
        (Narrow, "embed,squeeze,head", FP32, True, 4),
        (Narrow, "model", MIXED, True, 3),
        (Repeats, "block", FP32, True, 1),
        (Repeats, "block", HALF, True, 1),
        (Tied, "block", PURE, True, 1),
        (Tied, "block", (torch.bfloat16, torch.float16), True, 1),
    ],
)
def test_odd_models_equal_torch_bitwise(
    pool: RankPool,
    build: Build,
    plan: str,
    policy: tuple[torch.dtype | None, torch.dtype | None],
    reshard: bool,
    ranks: int,
) -> None:
    """Repeated reads, frozen and tied parameters, empty shards: torch's bits, in loss and in every gradient."""
    assert pool.run(against_torch, build, plan, policy, reshard, ranks=ranks, timeout_s=120) == [[]] * ranks


@pytest.mark.parametrize("transport", [Transport.NATIVE, Transport.ORDERED])
@pytest.mark.parametrize("ranks", [2, 3])
def test_parameters_of_no_elements_equal_eager_bitwise(pool: RankPool, transport: Transport, ranks: int) -> None:
    """Shapes [0, 4] and [4, 0], in a bucket with others and alone; torch's `fully_shard` cannot reduce them."""
    plan = "embed,rowless,widthless,head"
    assert pool.run(against_eager, Empty, plan, transport, ranks=ranks, timeout_s=120) == [[]] * ranks


@pytest.mark.parametrize("build", [Repeats, Tied])
def test_the_uncompiled_form_has_the_same_bits(pool: RankPool, build: Build) -> None:
    """The parametrization alone, plan `param`, is what the graph is made of, also when gradients accumulate."""
    assert pool.run(uncompiled_against_compiled, build, ranks=2, timeout_s=120) == [[]] * 2


def test_a_forward_without_gradients_equals_one_with(pool: RankPool) -> None:
    """Evaluation has a graph of its own, the same numbers, and leaves training intact."""
    for same, has_gradient in pool.run(eval_then_train, ranks=2, timeout_s=120):
        assert same and all(has_gradient)


def test_state_dicts_load_between_compiled_steps(pool: RankPool) -> None:
    """Loaded values reach the compiled graph, which holds no copy of a parameter."""
    assert pool.run(state_dict_round_trip, ranks=2, timeout_s=120) == [(True, False)] * 2
