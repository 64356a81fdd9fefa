"""The eager engine: against torch's own `fully_shard`, against the plain model, and by what its schedule does when."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from common.harness.launch import RankPool
from common.job import JobConfig
from common.plan import build_plan
from parity_tests import eager_cases as cases
from parity_tests import eager_flow_cases as flow
from parity_tests import eager_misuse_cases as misuse

FP32: dict[str, Any] = {}
BF16_FP32 = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
BF16_BF16 = {"param_dtype": "bf16", "reduce_dtype": "bf16"}
PRECISIONS = pytest.mark.parametrize("precision", [FP32, BF16_FP32, BF16_BF16], ids=["fp32", "bf16-fp32", "bf16-bf16"])
RESHARD = pytest.mark.parametrize("reshard", ["always", "never"])
PLANS = pytest.mark.parametrize("plan", ["param", "block", "model"])


def with_reshard(first: Sequence[Any], second: Sequence[Any]) -> list[tuple[Any, Any, str]]:
    """Every pair of the two, and reshard in turns, so that each value of any meets each of any other."""
    return [(a, b, ("always", "never")[(i + j) % 2]) for i, a in enumerate(first) for j, b in enumerate(second)]


@PRECISIONS
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_eager_equals_torch_fully_shard_bitwise(pool: RankPool, ranks: int, precision: dict[str, Any]) -> None:
    """Losses and local gradients of three SGD steps have the bits of torch's, same grouping and native collectives."""
    assert pool.run(cases.against_torch, {}, precision, 3, ranks=ranks) == [[]] * ranks


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"bare": True}, {"plan": "model"}),
        ({"tied": True}, {}),
        ({"recompute": True}, {}),
        ({}, {"reshard_after_forward": "never"}),
        ({"bare": True}, {"plan": "blocks.0+blocks.2,head"}),
    ],
    ids=["one-group", "tied", "recompute", "never", "named"],
)
def test_eager_equals_torch_fully_shard_bitwise_when_grouped_otherwise(
    pool: RankPool, options: dict[str, bool], changes: dict[str, Any]
) -> None:
    """The same with other plans, tied weights, activation checkpointing and without resharding, at 3 ranks.

    The root has no parameters of its own where they would share a group: torch lays a group out children first, this
    project in registration order, and gloo's sum of 3 ranks depends on the place in the message.
    """
    assert pool.run(cases.against_torch, options, changes, 3, ranks=3) == [[]] * 3


@pytest.mark.parametrize(
    ("ranks", "model", "precision"),
    [
        (2, "gpt-debug", FP32),
        (2, "llama-debug", BF16_FP32),
        (2, "gpt-debug-tied", BF16_FP32),
        (4, "llama-debug", FP32),
        (4, "gpt-debug-tied", FP32),
        (4, "gpt-debug", BF16_FP32),
    ],
)
def test_eager_equals_torch_fully_shard_bitwise_on_registry_models(
    pool: RankPool, ranks: int, model: str, precision: dict[str, Any]
) -> None:
    """The project's own models, sharded by block, have the bits of torch's fully_shard: any two settings together."""
    assert pool.run(cases.against_torch_registry, model, precision, ranks=ranks) == [[]] * ranks


@pytest.mark.parametrize(
    ("ranks", "plan", "precision"),
    [
        *((3, plan, precision) for plan in ("param", "block", "model") for precision in (FP32, BF16_FP32, BF16_BF16)),
        *((1, plan, precision) for plan, precision in (("param", BF16_FP32), ("block", FP32), ("model", BF16_BF16))),
    ],
)
def test_ordered_gradient_is_the_sum_in_rank_order_over_the_world_size(
    pool: RankPool, ranks: int, plan: str, precision: dict[str, Any]
) -> None:
    """Whatever the plan, gradients have the bits of ((g0 + g1) + g2) / 3 of a plain model, losses those of its loss."""
    assert pool.run(cases.against_plain, {}, {"plan": plan, **precision}, ranks=ranks) == [[]] * ranks


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"tied": True}, {}),
        ({"tied": True}, {"plan": "param"}),
        ({"recompute": True}, {}),
        ({"recompute": True}, {"plan": "param"}),
        ({}, {"reshard_after_forward": "never"}),
        ({}, {"plan": "blocks.0+blocks.2,head"}),
    ],
)
def test_gradients_equal_the_plain_models_in_every_setting(
    pool: RankPool, options: dict[str, bool], changes: dict[str, Any]
) -> None:
    """Tied weights, recomputation, named groups and kept weights change no bit, on 3 ranks, where order tells."""
    assert pool.run(cases.against_plain, options, changes, ranks=3) == [[]] * 3


@pytest.mark.parametrize(
    ("plan", "options", "reshard"),
    with_reshard(["param", "block", "model"], [{}, {"tied": True}, {"recompute": True}]),
)
def test_collectives_are_one_per_bucket_and_phase(
    pool: RankPool, plan: str, options: dict[str, bool], reshard: str
) -> None:
    """With G buckets: G gathers in forward, G (or none, if weights are kept) and G reductions in backward."""
    buckets = len(build_plan(cases.make_net(**options), plan).buckets)
    changes = {"plan": plan, "reshard_after_forward": reshard}
    again = {"all_gather": buckets} if reshard == "always" else {}
    expected = {"forward": {"all_gather": buckets}, "backward": {**again, "all_to_all": buckets}}
    assert pool.run(cases.collectives, options, changes, ranks=2) == [expected] * 2


def test_native_transport_reduces_by_reduce_scatter(pool: RankPool) -> None:
    """`native` sends one reduce-scatter per bucket and nothing else."""
    counts = pool.run(cases.collectives, {}, {"plan": "model", "transport": "native"}, ranks=2)[0]
    assert counts == {"forward": {"all_gather": 1}, "backward": {"all_gather": 1, "reduce_scatter": 1}}


@PLANS
def test_one_rank_has_no_collectives(pool: RankPool, plan: str) -> None:
    """On one rank nothing travels."""
    counts = pool.run(cases.collectives, {}, {"plan": plan, "param_dtype": "bf16"}, ranks=1)
    assert counts == [{"forward": {}, "backward": {}}]


def assert_order(log: list[str], *events: str) -> None:
    """Each event is in the log once, in this order."""
    for event in events:
        assert log.count(event) == 1, f"{event}: {log.count(event)} times in {log}"
    places = [log.index(event) for event in events]
    assert places == sorted(places), f"{events} are at {places} of {log}"


def halves(log: list[str]) -> tuple[list[str], list[str]]:
    """The forward and the backward part of a step's log."""
    middle = log.index("-- backward")
    return log[:middle], log[middle + 1 :]


@pytest.mark.parametrize("step", [0, 1])
def test_gathers_are_launched_one_bucket_ahead_and_waited_for_at_use(pool: RankPool, step: int) -> None:
    """The next bucket's gather is launched before a block computes and waited for after; in backward likewise."""
    logs = pool.run(cases.events, {}, {}, step + 1, ranks=2)
    assert logs[0] == logs[1], "ranks differ in order"
    forward, backward = halves(logs[0][step])
    for i in range(2):
        after = f"blocks.{i + 1}"
        assert_order(forward, f"launch_gather {after}", f"forward {i}", f"wait_gather {after}", f"forward {i + 1}")
        before = f"blocks.{i}"
        assert_order(backward, f"launch_gather {before}", f"backward {i + 1}", f"wait_gather {before}", f"backward {i}")


def test_reductions_run_beside_the_next_blocks_backward(pool: RankPool) -> None:
    """A reduction is launched after its block's backward and waited for after the next one's; the last at the end."""
    _, backward = halves(pool.run(cases.events, {}, {}, 1, ranks=2)[0][0])
    for i in (2, 1):
        assert_order(
            backward,
            f"backward {i}",
            f"free blocks.{i}",
            f"launch_reduce blocks.{i}",
            f"backward {i - 1}",
            f"wait_reduce blocks.{i}",
            f"launch_reduce blocks.{i - 1}",
        )
    assert backward[-1].startswith("wait_reduce")


@RESHARD
def test_each_launch_is_waited_for_and_each_gather_is_freed(pool: RankPool, reshard: str) -> None:
    """No gather or reduction is lost, none is waited for twice, and never more than one is launched ahead."""
    log = [event for event in pool.run(cases.events, {}, {"reshard_after_forward": reshard}, 1, ranks=2)[0][0]]
    for launch, end in (("launch_gather", "wait_gather"), ("wait_gather", "free"), ("launch_reduce", "wait_reduce")):
        assert _names(log, launch) == _names(log, end)
    in_flight = 0
    for event in log:
        in_flight += event.startswith("launch_gather") - event.startswith("wait_gather")
        assert 0 <= in_flight <= 1


def _names(log: Iterable[str], event: str) -> list[str]:
    return sorted(line.removeprefix(event + " ") for line in log if line.startswith(event + " "))


def test_gather_launched_in_vain_is_dropped(pool: RankPool) -> None:
    """A forward that stops where the last one went on drops the gather it launched, and ends with shards only."""
    for log, held in pool.run(flow.misprediction, ranks=2):
        assert held == {"DTensor"}
        assert_order(log, "launch_gather right", "discard_gather right")
        assert "wait_gather right" not in log
        assert _names(log, "launch_reduce") == _names(log, "wait_reduce") == ["left", "mixed"]


@pytest.mark.parametrize(
    ("reshard", "after_forward"), [("always", [0, 0, 0]), ("never", None)], ids=["always", "never"]
)
def test_resharding_frees_the_whole_parameters(pool: RankPool, reshard: str, after_forward: list[int] | None) -> None:
    """A block's whole buffer has the bytes of its padded parameters while it runs, and 0 once it is resharded.

    Each parameter but the last takes whole lines of 32 elements, so that the next one begins aligned.
    """
    ranks = 3
    sizes = [
        [ranks * -(-p.shape[0] // ranks) * p[0].numel() for p in block.parameters()]
        for block in cases.make_net().blocks
    ]
    expected = [4 * (sum(-(-size // 32) * 32 for size in block[:-1]) + block[-1]) for block in sizes]
    for seen in pool.run(cases.storage_bytes, reshard, ranks=ranks):
        assert seen["inside"] == expected
        assert seen["after_forward"] == (expected if after_forward is None else after_forward)
        assert seen["after_backward"] == [0, 0, 0]


@pytest.mark.parametrize(("ranks", "plan"), [(2, "param"), (4, "block"), (4, "model")])
def test_state_dict_has_the_plain_names_and_chunked_shards(pool: RankPool, ranks: int, plan: str) -> None:
    """Names, global shapes and strides are the plain model's; local shapes those of torch.chunk, empty ones too.

    Also between forward and backward, with whole parameters in the modules.
    """
    plain = cases.make_net(tied=True).state_dict()
    changes = {"plan": plan, "reshard_after_forward": "never"}
    for rank, found in enumerate(pool.run(cases.shapes, True, changes, ranks=ranks)):
        assert list(found) == list(plain)
        for name, value in plain.items():
            chunks = value.chunk(ranks)
            local = chunks[rank].shape if rank < len(chunks) else (0, *value.shape[1:])
            assert found[name] == (tuple(value.shape), value.stride(), tuple(local)), name


def test_state_dict_of_one_model_loads_into_another(pool: RankPool) -> None:
    """After load_state_dict, even with whole parameters in the modules, both models compute the same loss."""
    assert pool.run(cases.load_state, ranks=3) == [True] * 3


@PLANS
def test_sharding_keeps_identity(pool: RankPool, plan: str) -> None:
    """Order, tying, requires_grad, users' marks and the original class are kept; frozen parameters get no gradient.

    Modules hold plain tensors while they run and DTensors else; a frozen block trains once it is unfrozen.
    """
    frozen = {name for name, _ in cases.make_net().named_parameters() if name.startswith("blocks.0.")}
    expected = {
        "kept": True,
        "tied": True,
        "marked": True,
        "inside": {"Tensor"},
        "outside": {"DTensor"},
        "without": frozen,
        "still_without": set(),
        "class": "FSDPNet",
        "is_net": True,
    }
    assert pool.run(flow.identity, plan, ranks=3) == [expected] * 3


@pytest.mark.parametrize(
    ("ways", "how", "reshard"),
    with_reshard([["both", "left", "right"], ["twice", "left"], ["left", "left"]], ["each", "sum", "later", "retain"]),
)
def test_gradients_of_any_flow_stay_in_the_error_bound(pool: RankPool, ways: list[str], how: str, reshard: str) -> None:
    """Accumulation, several forwards before backward, a module called twice, one not called, retained graphs.

    In float64, within the bound that the number of terms gives; unused and frozen parameters have no gradient.
    """
    assert pool.run(flow.flow_errors, ways, how, reshard, ranks=2) == [[]] * 2


@RESHARD
@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
def test_forward_without_gradients_leaves_shards_and_training_goes_on(
    pool: RankPool, inference: bool, reshard: str
) -> None:
    """Its loss is the plain model's, everything is given back even if weights are kept, and the next step is right."""
    assert pool.run(flow.eval_then_train, inference, reshard, ranks=2) == [[]] * 2


@RESHARD
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_step_after_one_that_raised_is_a_fresh_models(pool: RankPool, where: str, reshard: str) -> None:
    """An exception in forward or backward leaves nothing behind that changes the next step."""
    assert pool.run(flow.after_failure, where, reshard, ranks=2) == [[]] * 2


@RESHARD
@pytest.mark.parametrize("plan", ["param", "block"])
def test_odd_modules_train(pool: RankPool, plan: str, reshard: str) -> None:
    """Dataclasses in and out, views changed in place, own books of weights, modules never called: same bits."""
    assert pool.run(flow.odd_modules, plan, reshard, ranks=2) == [[]] * 2


def test_input_handed_on_costs_no_gather(pool: RankPool) -> None:
    """A module that returns its own input is gathered once in forward and once in backward, as any other."""
    expected = {f"wait_gather {name}": 2 for name in ("first", "blocks.0", "blocks.1")}
    assert pool.run(flow.passed_through, ranks=2) == [expected] * 2


def test_post_accumulate_hooks_run_once_with_the_sharded_gradient(pool: RankPool) -> None:
    """Hooks of register_post_accumulate_grad_hook run once per step and parameter, as for autograd's own gradients."""
    expected = {f"{name} DTensor": 1 for name, _ in cases.make_net().named_parameters()}
    assert pool.run(flow.post_accumulate_hooks, ranks=2) == [expected] * 2


def test_compiled_blocks_run_with_hooks_outside_of_their_graph(pool: RankPool) -> None:
    """Blocks compiled after sharding give the same bits, and no line of the engine is in a graph."""
    for wrong, graphs, lines in pool.run(flow.compiled_blocks, ranks=2, timeout_s=120):
        assert wrong == []
        assert graphs > 0
        assert lines == []


def test_fully_shard_by_hand_keeps_fsdp2s_contract(pool: RankPool) -> None:
    """Inside-out calls, a list, casts of inputs and outputs, unshard and reshard, a plain slice: as FSDP2 has them."""
    for found in pool.run(misuse.by_hand, ranks=3):
        assert str(found.pop("output")) == "torch.float64"
        assert found == {"wrong": [], "unsharded": "Tensor", "resharded": "DTensor", "slice": "Sequential"}


def test_engine_does_not_use_torchs_own_fsdp() -> None:
    """Importing all of the engine imports nothing of torch.distributed.fsdp."""
    code = (
        "import sys, fsdp_eager, fsdp_eager.parallelize;"
        "print([name for name in sys.modules if name.startswith('torch.distributed.fsdp')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("engine", ["eager", "torch-fsdp2-prefetch", "ddp"])
def test_all_blocks_of_a_kind_share_one_graph(pool: RankPool, engine: str) -> None:
    """Compiled by block, a model of equal blocks is traced once: not per layer, and not again in a later step."""
    job = JobConfig(block_backend="aot_eager", steps=2, seq=16, batch=4, param_dtype="bf16")
    assert pool.run(misuse.graphs_of_blocks, engine, job, ranks=2) == [1] * 2
