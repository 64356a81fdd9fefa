"""What the compiled engine keeps, refuses and catches: odd roots, broken passes, what cannot be sharded."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
from torch import nn

from common.errors import ConfigError, EngineError, PassError
from common.gradient import Transport
from common.mesh import build_mesh
from common.plan import build_plan
from common.policy import MixedPrecisionPolicy
from fsdp_compiled import bucket, collectives, data_parallel, graph, torch_private
from parity_tests.graph_cases import (
    ALL_TO_ALL,
    BLOCKS,
    GATHER,
    MATMULS,
    REDUCE_SCATTER,
    WAIT,
    Block,
    Net,
    calls,
    fake_ranks,
)
from parity_tests.test_compiled_graph import BUCKETS, READ_BY_BACKWARD, TOKENS, traced
from parity_tests.torch_private import run_and_get_code


class ReturnsWeight(Net):
    """Hands a whole weight to its caller."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits and the head's weight, flattened into one tensor."""
        return torch.cat([super().forward(tokens).flatten(), self.head.weight.flatten()])


def test_a_weight_that_the_model_returns_is_still_resharded() -> None:
    """What the caller holds is the caller's; backward gathers again all the same."""
    _, backward = traced(model=ReturnsWeight())
    assert len(calls(backward, GATHER)) == READ_BY_BACKWARD["block"]


def test_a_root_of_torchs_own_class_is_traced_whole() -> None:
    """`nn.Sequential` as the root is one graph with the plan's messages, as any other model."""
    model = nn.Sequential(nn.Embedding(13, 10), Block(10, 14), Block(10, 14), nn.Linear(10, 13))
    forward, backward = traced("model", model=model)
    assert len(calls(forward, GATHER)) == len(calls(backward, GATHER)) == len(calls(backward, REDUCE_SCATTER)) == 1


def test_a_bucket_that_graphs_would_split_is_an_error() -> None:
    """Two graphs that hold one parameter each of one bucket are refused; the same graph traced again is not."""
    plan = build_plan(Net(), "model")
    traced_before = [{"head.weight"}]
    graph._check_whole({"head.weight", "norm.weight"}, traced_before, plan)
    with pytest.raises(PassError, match=r"spread over several graphs \('embed.weight' in one, 'head.weight'"):
        graph._check_whole({"embed.weight"}, [{"head.weight"}], plan)


def test_an_unrecognised_gather_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the trace ever stops looking as expected, nothing is left unbucketed in silence."""
    monkeypatch.setattr(collectives, "ALL_GATHER", None)
    with pytest.raises(Exception, match="no all-gather of it was recognised") as error:
        traced(model=Net(blocks=1))
    assert type(error.value.inner_exception) is PassError  # type: ignore[attr-defined]


def test_a_pass_that_leaves_a_bucket_in_pieces_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bucketing that merges nothing does not pass for bucketing."""
    monkeypatch.setattr(bucket, "_merge_gathers", lambda graph, gathers: None)
    with pytest.raises(Exception, match="expected one all-gather, found one each for") as error:
        traced(model=Net(blocks=1))
    assert type(error.value.inner_exception) is PassError  # type: ignore[attr-defined]


def test_a_partitioner_that_ignores_the_tags_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights kept against the plan's word, silent ZeRO-2 memory, are refused."""
    partition = torch_private.min_cut_rematerialization_partition

    def deaf(joint: torch.fx.GraphModule, *args: object, **kwargs: object) -> object:
        for node in joint.graph.nodes:
            node.meta.pop("recompute", None)
        return partition(joint, *args, **kwargs)

    monkeypatch.setattr(torch_private, "min_cut_rematerialization_partition", deaf)
    with pytest.raises(Exception, match="forward keeps the gathered weight"):
        traced(model=Net(blocks=1))


def test_without_tags_weights_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recompute tag is what reshards: without it backward gathers nothing, whatever the plan says."""
    monkeypatch.setattr(graph, "tag_gathers", lambda gm, plan: gm)
    _, backward = traced(model=Net(blocks=1))
    assert not calls(backward, GATHER)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: _with_param(torch.tensor(1.0)), "'scale': has no dimensions"),
        (lambda: _with_param(torch.zeros(4, 3).t()), "'scale': not contiguous"),
    ],
)
def test_unshardable_parameters_are_named(model: object, message: str) -> None:
    """The error names the parameter and the way out."""
    with fake_ranks(2), pytest.raises(EngineError, match=message):
        data_parallel(model(), build_mesh(), backend="aot_eager")  # type: ignore[operator]


def _with_param(value: torch.Tensor) -> nn.Module:
    module = Net()
    module.scale = nn.Parameter(value)
    return module


def test_sharding_twice_is_an_error() -> None:
    """A model that is sharded already is refused, by the name of a parameter."""
    with fake_ranks(2):
        model = Net()
        data_parallel(model, build_mesh(), backend="aot_eager")
        with pytest.raises(EngineError, match=r"'embed.weight' is a DTensor already"):
            data_parallel(model, build_mesh(), backend="aot_eager")


def test_the_uncompiled_form_refuses_what_only_a_graph_can_do() -> None:
    """Backend "eager" neither buckets nor reshards nor reorders; asked for it, it says which options to change."""
    settings = "plan param, reshard after forward never, no disabled passes, transport native"
    with fake_ranks(2), pytest.raises(ConfigError, match=settings):
        data_parallel(
            Net(), build_mesh(), backend="eager", transport=Transport.ORDERED, disabled_passes=["prefetch_gathers"]
        )
    with fake_ranks(2), pytest.raises(ConfigError, match="did you mean 'prefetch_gathers'"):
        data_parallel(Net(), build_mesh(), backend="aot_eager", disabled_passes=["prefetch_gather"])


def test_at_world_size_one_nothing_travels() -> None:
    """One rank has all rows: no collective in either graph, while the compute dtype still holds."""
    forward, backward = traced(world_size=1, policy=MixedPrecisionPolicy(torch.bfloat16), model=Net(blocks=1))
    assert not calls(forward, GATHER, REDUCE_SCATTER, ALL_TO_ALL, WAIT)
    assert not calls(backward, GATHER, REDUCE_SCATTER, ALL_TO_ALL, WAIT)
    assert {node.meta["val"].dtype for node in calls(forward, *MATMULS)} == {torch.bfloat16}


def generated_order(code: str) -> str:
    """Inductor's output code as a string, letters as in `order`; only the lines that run, in the order they run."""
    text, kind = "", {}
    for line in code[code.index("def call(") :].splitlines():
        if launched := re.search(r"(buf\d+) = torch\.ops\._c10d_functional\.(\w+)\.default\(", line):
            kind[launched[1]] = "A" if launched[2] == "all_gather_into_tensor" else "R"
            text += kind[launched[1]]
        elif waited := re.search(r"_c10d_functional\.wait_tensor\.default\((buf\d+)\)", line):
            text += "W" if kind[waited[1]] == "A" else "w"
        elif re.search(r"extern_kernels\.(add)?mm\(", line):
            text += "m"
    return text


@pytest.mark.inductor
def test_the_order_survives_to_the_code_that_inductor_generates() -> None:
    """Gathers are launched, and waited for, on the same side of each block's matmuls as in the graph.

    Between two matmuls Inductor may put a wait before a launch, where it fused what fills the message with what reads
    the other one.
    """
    model = Net()
    with fake_ranks(2):
        data_parallel(model, build_mesh(), backend="inductor", transport=Transport.ORDERED)
        _, (forward, backward) = run_and_get_code(lambda: model(TOKENS).sum().backward())
    text = generated_order(forward)
    assert text.replace("W", "") == "AAA" + (BLOCKS - 1) * "mmA" + "mmm"
    assert text.replace("A", "") == "W" + BLOCKS * "Wmm" + "Wm"
    text = generated_order(backward)
    places = {letter: [i for i, other in enumerate(text) if other == letter] for letter in "ARWw"}
    gathers, reductions = READ_BY_BACKWARD["block"], BUCKETS["block"]
    assert [len(places[letter]) for letter in "AWRw"] == [gathers, gathers, reductions, reductions]
    computes = [text.index("m", wait) for wait in places["W"]]
    assert all(launch < compute for launch, compute in zip(places["A"][1:], computes, strict=False))
    assert all("m" in text[start:stop] for start, stop in pairwise(places["W"]))
    assert all(launch < wait for launch, wait in zip(places["R"][1:], places["w"], strict=False))
