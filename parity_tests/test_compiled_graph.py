"""What the passes make of the graph: counts, order, payload, memory; in one process, on a fake process group."""

from __future__ import annotations

import copy
import re
from functools import cache
from itertools import chain

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx import Graph, Node

from common.gradient import Transport
from common.job import PASSES
from common.mesh import build_mesh
from common.plan import build_plan
from common.policy import MixedPrecisionPolicy
from fsdp_compiled import SimpleFSDPModule, data_parallel, graph
from parity_tests.graph_cases import (
    ALL_TO_ALL,
    BLOCKS,
    GATHER,
    MATMULS,
    REDUCE_SCATTER,
    WAIT,
    Net,
    calls,
    fake_ranks,
    sources,
    trace,
)

TOKENS = torch.arange(12).view(2, 6)


def traced(
    plan: str = "block",
    *,
    world_size: int = 4,
    reshard_after_forward: bool = True,
    prefetch: bool = True,
    rank: int = 0,
    transport: Transport = Transport.NATIVE,
    policy: MixedPrecisionPolicy | None = None,
    model: nn.Module | None = None,
    train: bool = True,
    disabled: tuple[str, ...] = (),
) -> list[Graph]:
    """The graphs of one step of a sharded `Net` (or `model`)."""
    model = model or Net()
    buckets = build_plan(model, plan, reshard_after_forward=reshard_after_forward, prefetch=prefetch)
    with fake_ranks(world_size, rank):
        data_parallel(
            model,
            build_mesh(),
            plan=buckets,
            mp_policy=policy,
            backend="aot_eager",
            transport=transport,
            disabled_passes=disabled,
        )
        return trace(model, TOKENS, train=train)


@cache
def graphs_of(plan: str = "block", world_size: int = 4, reshard_after_forward: bool = True) -> list[Graph]:
    """The graphs of a `Net`, for tests that only look at them: each setting is traced once."""
    return traced(plan, world_size=world_size, reshard_after_forward=reshard_after_forward)


@pytest.fixture
def graphs() -> list[Graph]:
    """Those of the plan `block` with all else at its default."""
    return graphs_of()


# What a backward under aot_eager takes as an argument: matmul weights, and both parameters of LayerNorm.
READ_BY_BACKWARD = {"param": BLOCKS * (2 + 2) + 2 + 1, "block": BLOCKS + 1, "model": 1}
BUCKETS = {"param": BLOCKS * (4 + 2) + 1 + 2 + 1, "block": BLOCKS + 2, "model": 1}


@pytest.mark.parametrize("plan", ["param", "block", "model"])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_collectives_per_graph_are_those_of_the_plan(plan: str, reshard_after_forward: bool) -> None:
    """One gather per bucket in forward, one per bucket that backward reads, one reduction per bucket."""
    forward, backward = graphs_of(plan, reshard_after_forward=reshard_after_forward)
    assert len(calls(forward, GATHER)) == BUCKETS[plan]
    assert len(calls(backward, GATHER)) == (READ_BY_BACKWARD[plan] if reshard_after_forward else 0)
    assert len(calls(backward, REDUCE_SCATTER)) == BUCKETS[plan]
    assert not calls(forward, REDUCE_SCATTER, ALL_TO_ALL)


def test_named_plan_leaves_the_rest_in_one_bucket() -> None:
    """Buckets by name are kept as named, across modules, and what is left over travels together."""
    forward, backward = traced("blocks.0+blocks.2,norm", model=Net(blocks=3))
    assert len(calls(forward, GATHER)) == len(calls(backward, REDUCE_SCATTER)) == 3


@pytest.mark.parametrize("world_size", [3, 4, 16])
def test_message_sizes_are_padded_shards_times_ranks(world_size: int) -> None:
    """A gather returns, and a reduction takes, world * sum of ceil(d0 / world) * rest elements of its bucket."""
    model = Net()
    plan = build_plan(model, "block")
    shapes = {name: param.shape for name, param in model.named_parameters()}
    expected = [
        world_size * sum(-(-shapes[p][0] // world_size) * shapes[p][1:].numel() for p in bucket.params)
        for bucket in plan.buckets
    ]
    forward, backward = graphs_of(world_size=world_size)
    assert [node.meta["val"].numel() for node in calls(forward, GATHER)] == expected
    reduced = [node.args[0].meta["val"].numel() for node in calls(backward, REDUCE_SCATTER)]
    assert reduced == list(reversed(expected))


def test_payload_of_a_gather_is_in_registration_order(graphs: list[Graph]) -> None:
    """The block uses norm, up, down but registers down, up, norm: its message is packed as registered."""
    forward, _ = graphs
    block = calls(forward, GATHER)[1]
    names = [source.meta["val"].shape for source in sources(block)]
    assert names == [(3, 14), (3,), (4, 10), (4,), (3,), (3,)]  # rank 0 of 4: down, up, norm; weight before bias


def test_payload_of_a_reduction_is_in_registration_order(graphs: list[Graph]) -> None:
    """The same order as the gather's, whatever order backward produces gradients in."""
    _, backward = graphs
    packed = calls(backward, REDUCE_SCATTER)[1].args[0]
    assert isinstance(packed, Node)
    (cat,) = packed.all_input_nodes
    sizes = [side.meta["val"].shape[1] for side in cat.all_input_nodes]
    assert sizes == [3 * 14, 3, 4 * 10, 4, 3, 3]


def order(graph: Graph) -> str:
    """The graph as a string: A gather, R reduction, w its wait, W a gather's wait, m matmul."""
    letters = {GATHER: "A", REDUCE_SCATTER: "R", ALL_TO_ALL: "R"} | dict.fromkeys(MATMULS, "m")
    text = ""
    for node in calls(graph, WAIT, *letters):
        text += letters.get(node.target) or ("W" if node.args[0].target is GATHER else "w")
    return text


def test_forward_launches_the_next_gather_before_this_blocks_compute(graphs: list[Graph]) -> None:
    """Each gather but the first stands before the wait of the one ahead, so it travels during that one's matmuls."""
    forward, _ = graphs
    assert order(forward) == "A" + "AW" + BLOCKS * "AWmm" + "Wm"


def test_without_prefetch_a_gather_waits_for_its_turn() -> None:
    """The plan's prefetch flag is what moves the gathers: without it each is launched where it is needed."""
    forward, _ = traced(prefetch=False)
    assert order(forward) == "AW" + BLOCKS * "AWmm" + "AWm"


def test_backward_overlaps_gathers_and_reductions_with_compute(graphs: list[Graph]) -> None:
    """A gather is launched before the matmuls of the block ahead, a reduction waited for after the next is launched."""
    _, backward = graphs
    assert order(backward) == "mAAWmR" + (BLOCKS - 1) * "AWmmmmRw" + "WmmmmRw" + "Rww"


def passes(*disabled: str) -> list[str]:
    """The names of all passes of a pipeline, graph by graph."""
    with fake_ranks(2):
        pipeline = graph.Pipeline(build_plan(Net()), build_mesh(), Transport.NATIVE, MixedPrecisionPolicy(), disabled)
        lists = [pipeline.joint({}), pipeline.forward(), pipeline.backward(), pipeline.inference({})]
    return [getattr(each, "func", each).__name__ for each in chain(*lists)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", PASSES)
def test_a_disabled_pass_is_left_out_alone(name: str) -> None:
    """Each name that can be disabled is a pass of the pipeline; disabled, it is gone and all others are there."""
    assert name in passes()
    assert passes(name) == [other for other in passes() if other != name]


def test_without_prefetch_gathers_each_is_waited_for_before_the_next_is_launched() -> None:
    """In forward and in backward, whatever the plan's flag; buckets stay what they are."""
    forward, backward = traced(disabled=("prefetch_gathers",))
    assert order(forward) == "AW" + BLOCKS * "AWmm" + "AWm"
    assert re.sub("[^AW]", "", order(backward)) == READ_BY_BACKWARD["block"] * "AW"
    assert len(calls(backward, REDUCE_SCATTER)) == BUCKETS["block"]


def test_without_delay_reduction_waits_each_is_waited_for_before_the_next_is_launched() -> None:
    """Nothing is computed and nothing gathered between a reduction and its wait."""
    _, backward = traced(disabled=("delay_reduction_waits",))
    assert order(backward).count("Rw") == BUCKETS["block"]


@pytest.mark.parametrize("transport", [Transport.NATIVE, Transport.ORDERED])
def test_without_bucketing_each_parameter_travels_alone(transport: Transport) -> None:
    """Gathers and reductions are bucketed by passes of their own: without one, that way has the messages of `param`."""
    kind = REDUCE_SCATTER if transport is Transport.NATIVE else ALL_TO_ALL
    both = (("bucket_gathers", "bucket_reductions"), "param", "param")
    alone = ((("bucket_gathers",), "param", "block"), (("bucket_reductions",), "block", "param"))
    for disabled, gathers, reductions in (both, *(alone if transport is Transport.NATIVE else ())):
        forward, backward = traced(disabled=disabled, transport=transport)
        assert len(calls(forward, GATHER)) == BUCKETS[gathers]
        assert len(calls(backward, GATHER)) == READ_BY_BACKWARD[gathers]
        assert len(calls(backward, kind)) == BUCKETS[reductions]


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ordered_transport_adds_ranks_in_order(dtype: torch.dtype, rank: int) -> None:
    """The reduction travels as an all-to-all and is summed as ((r0 + r1) + r2) + r3, then divided by 4."""
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    _, backward = traced("model", transport=Transport.ORDERED, rank=rank, policy=policy, model=Net(blocks=1))
    assert not calls(backward, REDUCE_SCATTER)
    (start,) = calls(backward, ALL_TO_ALL)
    assert start.meta["val"].dtype is dtype
    (node,) = calls(backward, torch.ops.aten.div.Tensor)
    assert node.args[1] == 4
    node = node.args[0]
    addends = []
    for _ in range(3):
        assert node.target is torch.ops.aten.add.Tensor
        node, addend = node.args
        addends.insert(0, addend)
    addends.insert(0, node)
    own = addends.pop(rank)
    assert own.target is torch.ops.aten.view.default and own.args[0].target is torch.ops.aten.cat.default
    assert [(addend.target, addend.args[1:]) for addend in addends] == [
        (torch.ops.aten.select.int, (0, place)) for place in range(3)
    ]
    assert start.args[1] == start.args[2] == [0 if r == rank else own.meta["val"].numel() for r in range(4)]
    for message, rows in ((own.args[0], [rank]), (start.args[0], [r for r in range(4) if r != rank])):
        places = [piece.args[2] for piece in message.args[0]]
        assert places == sorted(places) and set(places) == set(rows)


def test_mixed_precision_moves_the_narrow_dtype_and_reduces_in_the_wide_one() -> None:
    """bf16 is cast before the gather, gradients are cast before the reduction."""
    forward, backward = traced(policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32), model=Net(blocks=1))
    assert {node.meta["val"].dtype for node in calls(forward, GATHER)} == {torch.bfloat16}
    assert {node.meta["val"].dtype for node in calls(backward, GATHER)} == {torch.bfloat16}
    assert {node.meta["val"].dtype for node in calls(backward, REDUCE_SCATTER)} == {torch.float32}


def test_resharding_saves_shards_and_never_a_gathered_weight(graphs: list[Graph]) -> None:
    """Nothing but the shards themselves that forward hands to backward is computed from parameters alone."""
    forward, _ = graphs
    saved = forward.output_node().all_input_nodes
    derived = [node for node in saved if node.op != "placeholder" and set(map(_is_param, sources(node))) == {True}]
    assert not derived
    forward, _ = graphs_of(reshard_after_forward=False)
    saved = forward.output_node().all_input_nodes
    assert any(node.op != "placeholder" and set(map(_is_param, sources(node))) == {True} for node in saved)


def _is_param(placeholder: Node) -> bool:
    return placeholder.meta["val"].is_floating_point()


def test_a_tied_weight_travels_once() -> None:
    """Tied weights are gathered and reduced once, whether or not a bucket could hide a repetition."""
    model = Net(tied=True)
    forward, backward = traced("param", model=model)
    assert dict(model.head.named_parameters())["weight"] is dict(model.embed.named_parameters())["weight"]
    assert len(calls(forward, GATHER)) == len(calls(backward, REDUCE_SCATTER)) == BUCKETS["param"] - 1
    assert len(calls(backward, GATHER)) == READ_BY_BACKWARD["param"]
    forward, backward = traced(model=Net(tied=True))
    for each, kind in ((forward, GATHER), (backward, GATHER), (backward, REDUCE_SCATTER)):
        assert len(calls(each, kind)) == BUCKETS["block"] - 1
    packed = calls(backward, REDUCE_SCATTER)[-1].args[0]
    assert isinstance(packed, Node) and packed.meta["val"].numel() == 4 * (4 * 10 + 3 + 3)


class ReadThrice(nn.Module):
    """One weight, three reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 10)
        self.square = nn.Linear(10, 10, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids [batch, seq] to [batch, seq, 10]."""
        return self.square(self.square(self.square(self.embed(tokens))))


def test_three_reads_of_one_weight_are_one_gather_and_one_reduction() -> None:
    """Also under the plan `param`, where no bucket hides a repeated gather."""
    forward, backward = traced("param", model=ReadThrice())
    assert len(calls(forward, GATHER)) == 2
    assert len(calls(backward, GATHER)) == 1
    assert len(calls(backward, REDUCE_SCATTER)) == 2


def test_frozen_parameters_are_gathered_and_not_reduced() -> None:
    """A frozen block stays frozen, is gathered in forward, and sends no gradient."""
    model = Net()
    model.blocks[1].requires_grad_(False)
    forward, backward = traced(model=model)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == [
        name for name, _ in model.named_parameters() if name.startswith("blocks.1.")
    ]
    assert len(calls(forward, GATHER)) == BUCKETS["block"]
    assert len(calls(backward, REDUCE_SCATTER)) == BUCKETS["block"] - 1


def test_inference_buckets_and_prefetches_too(graphs: list[Graph]) -> None:
    """A forward without gradients has the same gathers in the same order, and no second graph."""
    (forward,) = traced(train=False)
    assert len(calls(forward, GATHER)) == BUCKETS["block"]
    assert order(forward) == order(graphs[0])


def test_two_models_of_one_class_keep_their_own_policies() -> None:
    """The swapped class holds no policy: the second model computes in its own dtype."""
    with fake_ranks(2):
        first, second = Net(blocks=1), Net(blocks=1)
        for model, policy in ((first, MixedPrecisionPolicy(torch.bfloat16)), (second, MixedPrecisionPolicy())):
            data_parallel(model, build_mesh(), mp_policy=policy, backend="aot_eager")
        assert first(TOKENS).dtype is torch.bfloat16
        assert second(TOKENS).dtype is torch.float32


def test_parameters_stay_what_they_were() -> None:
    """Names, order, global shapes, requires_grad and classes survive; values are sharded DTensors."""
    plain = Net()
    plain.blocks[0].norm.weight.requires_grad_(False)
    sharded = copy.deepcopy(plain)
    with fake_ranks(4, rank=3):
        data_parallel(sharded, build_mesh(), backend="aot_eager")
        state = sharded.state_dict()
        assert list(state) == list(plain.state_dict())
        for (name, old), (other, new) in zip(plain.named_parameters(), sharded.named_parameters(), strict=True):
            assert name == other and isinstance(new, nn.Parameter) and isinstance(new.data, DTensor)
            assert (new.shape, new.requires_grad, new.dtype) == (old.shape, old.requires_grad, old.dtype)
            assert isinstance(state[name], DTensor) and state[name].stride() == old.stride()
            rows = old.detach().chunk(4)
            assert torch.equal(new.to_local(), rows[3] if len(rows) > 3 else old.detach()[:0])
    assert isinstance(sharded.head, nn.Linear) and isinstance(sharded.head, SimpleFSDPModule)


def test_floating_inputs_and_outputs_of_the_root_are_cast() -> None:
    """Inputs reach the matmul in the compute dtype, and the output leaves in the output dtype."""
    with fake_ranks(2):
        model = nn.Linear(6, 4)
        policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)
        data_parallel(model, build_mesh(), mp_policy=policy, plan=build_plan(model, "model"), backend="aot_eager")
        assert model(torch.ones(2, 6)).dtype is torch.float64
        matmuls = [node for graph in trace(model, torch.ones(2, 6)) for node in calls(graph, *MATMULS)]
    assert {node.meta["val"].dtype for node in matmuls} <= {torch.bfloat16}


def test_dtypes_of_one_bucket_travel_apart() -> None:
    """A bucket that holds fp64 and fp32 parameters sends one message per dtype, both by the plan's names."""
    model = Net()
    model.blocks[1].norm.to(torch.float64)
    model.blocks[1].register_forward_pre_hook(lambda block, args: (args[0].double(),))
    model.blocks[1].up.to(torch.float64)
    model.blocks[1].down.weight.data = model.blocks[1].down.weight.data.double()
    model.blocks[1].down.bias.data = model.blocks[1].down.bias.data.double()
    model.blocks[1].register_forward_hook(lambda block, args, output: output.float())
    forward, _ = traced("model", model=model)
    assert sorted(str(node.meta["val"].dtype) for node in calls(forward, GATHER)) == ["torch.float32", "torch.float64"]
