"""The bucket plan groups each parameter once, in registration order, and refuses what it cannot keep."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from common.blocks import check_blocks
from common.errors import ConfigError, PlanError
from common.job import JobConfig
from common.models import build_model
from common.plan import BucketPlan, build_plan, repeated_blocks


class Block(nn.Module):
    """A composite module with a list of its own inside, as a block with experts has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2)
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))


class Toy(nn.Module):
    """A module with whatever children and parameters it is given, in that order."""

    def __init__(self, **members: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, member in members.items():
            setattr(self, name, member)


def vector() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


def modules(plan: BucketPlan) -> list[tuple[str, ...]]:
    return [bucket.modules for bucket in plan.buckets]


def hugging_face_like() -> nn.Module:
    """`model.model.layers`, a head beside it, and a tied embedding."""
    inner = Toy(
        embed_tokens=nn.Embedding(4, 2),
        rotary=nn.Identity(),
        layers=nn.ModuleList(Block() for _ in range(2)),
        norm=nn.LayerNorm(2),
    )
    return Toy(model=inner, lm_head=nn.Linear(2, 4, bias=False))


def test_block_plan_of_llama_is_ends_and_blocks() -> None:
    """The embedding, each block, and norm with output are one bucket each, as torchtitan groups them."""
    plan = build_plan(build_model("llama-debug", seed=0, device="meta"))
    assert modules(plan) == [("tok_embeddings",), ("layers.0",), ("layers.1",), ("layers.2",), ("norm", "output")]


def test_repeated_blocks_are_those_that_have_a_bucket_each() -> None:
    """Each once, by its first name, also where a block has two places, and none of the modules between them."""
    assert repeated_blocks(build_model("gpt-debug", seed=0, device="meta")) == ["h.0", "h.1", "h.2"]
    assert repeated_blocks(hugging_face_like()) == ["model.layers.0", "model.layers.1"]
    block = Block()
    shared = Toy(layers=nn.ModuleList([block, Block()]), again=nn.ModuleList([block]))
    assert repeated_blocks(shared) == ["layers.0", "layers.1"]
    assert repeated_blocks(nn.Linear(2, 2)) == []


def test_only_whole_blocks_with_a_forward_can_be_compiled_apart() -> None:
    """A hook on a block is outside of what is compiled, one inside is refused, and so is a block that is never run."""
    job = JobConfig(block_backend="aot_eager")
    model = build_model("llama-debug", seed=0, device="meta")
    assert check_blocks(model, job, build_plan(model, "layers.0+norm")) == ["layers.0", "layers.1", "layers.2"]
    with pytest.raises(PlanError, match=r"inside the block 'layers\.0'"):
        check_blocks(model, job, build_plan(model, "param"))
    holders = Toy(layers=nn.ModuleList(nn.ModuleDict({"a": nn.Linear(2, 2)}) for _ in range(2)))
    for each in (Toy(layers=nn.ModuleList([Toy(a=nn.Linear(2, 2))])), holders, nn.Linear(2, 2)):
        with pytest.raises(ConfigError, match="found none in"):
            check_blocks(each, job)


def test_block_plan_merges_the_ends_of_a_tied_gpt() -> None:
    """A tied head puts both ends of the model into one bucket, whose parameter has its first name only."""
    plan = build_plan(build_model("gpt-debug-tied", seed=0, device="meta"))
    assert modules(plan) == [("wte", "wpe", "ln_f", "lm_head"), ("h.0",), ("h.1",), ("h.2",)]
    assert plan.buckets[0].params == ("wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias")


def test_block_plan_opens_nested_models() -> None:
    """With blocks at `model.layers`, `model` is opened, and its norm shares a bucket with the head outside."""
    assert modules(build_plan(hugging_face_like())) == [
        ("model.embed_tokens",),
        ("model.layers.0",),
        ("model.layers.1",),
        ("model.norm", "lm_head"),
    ]


def test_block_plan_takes_lists_inside_a_block_as_part_of_it() -> None:
    """A block's own ModuleList makes no buckets: only the outermost list does."""
    plan = build_plan(hugging_face_like())
    assert plan.buckets[1].params == tuple(f"model.layers.0.{name}" for name, _ in Block().named_parameters())


def test_block_plan_walks_through_lists_of_lists() -> None:
    """Containers are never called, so a list of lists gives the innermost children."""
    stages = nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(2))
    assert modules(build_plan(Toy(stages=stages))) == [
        ("stages.0.0",),
        ("stages.0.1",),
        ("stages.1.0",),
        ("stages.1.1",),
    ]


@pytest.mark.parametrize("container", [nn.ModuleDict, nn.Sequential])
def test_block_plan_finds_blocks_in_dicts_and_sequentials(container: type[nn.Module]) -> None:
    """Two or more composite modules of one class in a ModuleDict (torchtitan) or Sequential are blocks."""
    blocks = {"0": Block(), "1": Block()}
    layers = nn.ModuleDict(blocks) if container is nn.ModuleDict else nn.Sequential(*blocks.values())
    model = Toy(embed=nn.Embedding(4, 2), layers=layers, head=nn.Linear(2, 4))
    assert modules(build_plan(model)) == [("embed",), ("layers.0",), ("layers.1",), ("head",)]


def test_block_plan_takes_a_mixed_dict_as_a_namespace() -> None:
    """nanoGPT's `transformer` dict holds ends and a list: the ends are runs, not blocks."""
    parts = {"wte": nn.Embedding(4, 2), "wpe": nn.Embedding(4, 2), "h": nn.ModuleList([Block()]), "ln": nn.LayerNorm(2)}
    model = Toy(transformer=nn.ModuleDict(parts), head=nn.Linear(2, 4))
    assert modules(build_plan(model)) == [
        ("transformer.wte", "transformer.wpe"),
        ("transformer.h.0",),
        ("transformer.ln", "head"),
    ]


def test_block_plan_takes_modules_of_a_dict_as_blocks_only_if_they_repeat() -> None:
    """One module in a dict, or modules of several classes, are no repeated blocks: they join the run around them."""
    one, other = Toy(lin=nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    for children in ({"a": one}, {"a": one, "b": other}):
        plan = build_plan(Toy(stem=nn.Linear(2, 2), parts=nn.ModuleDict(children)))
        assert modules(plan) == [("stem", *(f"parts.{name}" for name in children))]


def test_block_plan_keeps_a_stack_of_plain_layers_whole() -> None:
    """A Sequential of linears is one module to a hook: it has no repeated blocks."""
    model = Toy(stem=nn.Linear(2, 2), mlp=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert modules(build_plan(model)) == [("stem", "mlp")]


def test_block_plan_gives_a_module_in_two_places_one_name() -> None:
    """A block that both halves of a model share is in one bucket, under its first name, as one module to hook."""
    shared = Block()
    model = Toy(
        encoder=Toy(layers=nn.ModuleList([shared, Block()])), decoder=Toy(layers=nn.ModuleList([Block(), shared]))
    )
    plan = build_plan(model)
    assert modules(plan) == [("encoder.layers.0",), ("encoder.layers.1",), ("decoder.layers.0",)]
    assert [name for bucket in plan.buckets for name in bucket.params] == [name for name, _ in model.named_parameters()]


def test_block_plan_of_one_layer_used_many_times_is_one_bucket() -> None:
    """The same block three times in a list (ALBERT) is one bucket."""
    block = Block()
    assert modules(build_plan(Toy(layers=nn.ModuleList([block, block, block])))) == [("layers.0",)]


def test_block_plan_adds_the_module_that_shares_an_inner_weight() -> None:
    """Blocks that share one inner linear with each other are merged, and a user outside them joins the bucket."""
    first, second, outside = Block(), Block(), nn.Linear(2, 2)
    weight = first.get_parameter("experts.0.weight")
    second.get_submodule("experts.0").register_parameter("weight", weight)
    outside.weight = weight
    plan = build_plan(Toy(layers=nn.ModuleList([first, second, Block()]), outside=outside))
    assert modules(plan) == [("layers.0", "layers.1", "outside"), ("layers.2",)]
    assert plan.buckets[0].params[-1] == "outside.bias"


def test_block_plan_merges_chains_of_shared_weights() -> None:
    """a-b and c-d share, then b-c do: one bucket, whatever the order in which the links are met."""
    a, b, c, d = (nn.Linear(2, 2) for _ in range(4))
    b.weight, d.weight, c.bias = a.weight, c.weight, b.bias
    plan = build_plan(Toy(layers=nn.ModuleList([a, c, d, b])))
    assert modules(plan) == [("layers.0", "layers.1", "layers.2", "layers.3")]


def test_leftover_parameters_go_to_the_root() -> None:
    """A parameter directly on the root, or on a module that the plan opens, is in the root's bucket."""
    inner = Toy(cls_token=vector(), layers=nn.ModuleList([Block()]))
    plan = build_plan(Toy(inner=inner, head=nn.Linear(2, 2), scale=vector()))
    assert modules(plan) == [("",), ("inner.layers.0",), ("head",)]
    assert plan.buckets[0].params == ("scale", "inner.cls_token")
    assert plan.buckets[0].name == "(root)"


def test_root_parameter_tied_to_a_module_needs_both() -> None:
    """A weight held by the root and by a child is in the child's bucket, which the root needs as well."""
    head = nn.Linear(2, 2)
    plan = build_plan(Toy(weight=head.get_parameter("weight"), layers=nn.ModuleList([Block()]), head=head))
    assert modules(plan) == [("", "head"), ("layers.0",)]
    assert plan.buckets[0].params == ("weight", "head.bias")


@pytest.mark.parametrize("spec", ["block", "param"])
def test_parameter_list_belongs_to_the_module_around_it(spec: str) -> None:
    """A ParameterList is never called, so no bucket may wait for its hook."""
    scales = nn.ParameterList([vector(), vector()])
    plan = build_plan(Toy(layers=nn.ModuleList([Toy(scales=scales)]), gains=nn.ParameterDict({"a": vector()})), spec)
    assert {name for bucket in plan.buckets for name in bucket.modules} == {"layers.0", ""}


def test_param_plan_is_one_bucket_per_parameter() -> None:
    """`param` makes a bucket of each parameter, needed by the modules that hold it."""
    model = build_model("gpt-debug-tied", seed=0, device="meta")
    plan = build_plan(model, "param")
    assert [bucket.params for bucket in plan.buckets] == [(name,) for name, _ in model.named_parameters()]
    assert plan.buckets[0].modules == ("wte", "lm_head")
    assert plan.buckets[2].modules == ("h.0.ln_1",)


def test_model_plan_is_one_bucket_at_the_root() -> None:
    """`model` gathers everything at once, where the root runs."""
    model = hugging_face_like()
    (bucket,) = build_plan(model, "model").buckets
    assert bucket.modules == ("",)
    assert bucket.params == tuple(name for name, _ in model.named_parameters())


def test_named_plan_groups_as_written_and_orders_by_registration() -> None:
    """`a,b+c` is a bucket per comma; order of writing changes neither bucket order nor order inside."""
    model = build_model("llama-debug", seed=0, device="meta")
    plan = build_plan(model, " output + norm , layers.1, layers.0+tok_embeddings")
    assert modules(plan) == [("tok_embeddings", "layers.0"), ("layers.1",), ("",), ("norm", "output")]
    assert plan.buckets[2].params == tuple(n for n, _ in model.named_parameters() if n.startswith("layers.2."))


def test_named_plan_tells_block_1_from_block_10() -> None:
    """A name that only begins like another does not overlap with it, nor does its parameter belong to the other."""
    plan = build_plan(Toy(layers=nn.ModuleList(nn.Linear(2, 2) for _ in range(11))), "layers.1,layers.10")
    assert modules(plan) == [("",), ("layers.1",), ("layers.10",)]
    assert plan.buckets[1].params == ("layers.1.weight", "layers.1.bias")


def test_named_plan_keeps_tied_ends_together() -> None:
    """Naming only the head of a tied model takes the embedding, which holds the same weight, into its bucket."""
    plan = build_plan(build_model("gpt-debug-tied", seed=0, device="meta"), "lm_head")
    assert modules(plan)[0] == ("wte", "lm_head")
    assert plan.buckets[0].params == ("wte.weight",)


def test_named_plan_takes_the_second_name_of_a_shared_module() -> None:
    """A module is found by any of its names and called by its first."""
    shared = nn.Linear(2, 2)
    model = Toy(a=Toy(lin=shared), b=Toy(lin=shared, own=nn.Linear(2, 2)))
    assert modules(build_plan(model, "b.lin,b.own")) == [("a.lin",), ("b.own",)]
    with pytest.raises(PlanError, match=r"'b\.lin' overlaps with 'a\.lin'"):
        build_plan(model, "a.lin,b.lin")


def test_frozen_parameters_keep_their_place_and_stay_frozen() -> None:
    """Freezing changes neither the plan nor the flag: a frozen weight is gathered with its neighbours."""
    model = hugging_face_like()
    before = build_plan(model)
    model.get_parameter("model.layers.0.norm.weight").requires_grad_(False)
    assert build_plan(model) == before
    assert not model.get_parameter("model.layers.0.norm.weight").requires_grad


def test_options_reach_every_bucket() -> None:
    """Resharding and prefetch are said once and hold for each bucket; both are on by default."""
    model = hugging_face_like()
    assert all(b.reshard_after_forward and b.prefetch for b in build_plan(model).buckets)
    for spec in ("param", "block", "model", "lm_head"):
        plan = build_plan(model, spec, reshard_after_forward=False, prefetch=False)
        assert not any(b.reshard_after_forward or b.prefetch for b in plan.buckets)


def test_bucket_of_names_the_bucket_of_each_parameter() -> None:
    """`bucket_of` is the inverse of the buckets' lists."""
    plan = build_plan(hugging_face_like())
    assert all(name in plan.buckets[i].params for name, i in plan.bucket_of().items())
    assert len(plan.bucket_of()) == sum(len(bucket.params) for bucket in plan.buckets)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("blok", r"'blok' names no module of Toy .*did you mean 'block'\?"),
        ("model.layer.0", r"did you mean 'model\.layers\.0'\?"),
        ("transformer.of.another.kind.lm_head", r"did you mean 'lm_head'\?"),
        ("zzz", r"its modules are model, model\.embed_tokens"),
        ("lm_head.weight", r"it is a parameter; name its module 'lm_head'"),
        ("model.rotary", r"'model\.rotary' has no parameters"),
        ("model.layers", r"is a ModuleList, which is never called.*model\.layers\.0, model\.layers\.1"),
        ("lm_head,", r"expected a name on each side"),
        ("lm_head++model.norm", r"expected a name on each side"),
        ("", r"expected a name on each side"),
        ("lm_head,lm_head", r"'lm_head' overlaps with 'lm_head'"),
        ("model,model.norm", r"'model\.norm' overlaps with 'model'"),
        ("model.norm+model", r"'model' overlaps with 'model\.norm'"),
    ],
)
def test_named_plan_refuses_what_it_cannot_keep(spec: str, message: str) -> None:
    """Each wrong spec is a PlanError (exit code 2) of one line that says what to write instead."""
    with pytest.raises(PlanError, match=message) as error:
        build_plan(hugging_face_like(), spec)
    assert "\n" not in str(error.value)
    assert isinstance(error.value, ConfigError) and error.value.exit_code == 2


def test_named_plan_refuses_a_parameter_list() -> None:
    """A ParameterList has no children to name: the module around it is the way out."""
    model = Toy(block=Toy(scales=nn.ParameterList([vector()])))
    with pytest.raises(PlanError, match=r"ParameterList, which is never called.*a module around it"):
        build_plan(model, "block.scales")


@pytest.mark.parametrize("spec", ["param", "block", "model", "0"])
def test_plan_refuses_a_model_without_parameters(spec: str) -> None:
    """There is nothing to shard in a model without parameters, and every plan says so."""
    with pytest.raises(PlanError, match="has no parameters to shard"):
        build_plan(nn.Sequential(nn.ReLU()), spec)


@st.composite
def trees(draw: st.DrawFn, depth: int = 3) -> nn.Module:
    """A random module tree: containers, leaves, own parameters, and weights or modules used twice."""
    made: list[nn.Module] = []

    def build(level: int) -> nn.Module:
        kind = draw(st.sampled_from(["linear", "toy", "list", "dict", "seq", "empty", "again", "tied", "params"]))
        if kind == "again" and made:
            return draw(st.sampled_from(made))
        if kind == "empty":
            return nn.ReLU()
        if kind == "params":
            return nn.ParameterList([vector()])
        if level == 0 or kind in ("linear", "tied", "again"):
            leaf = nn.Linear(2, 2)
            leaves = [module for module in made if isinstance(module, nn.Linear)]
            if kind == "tied" and leaves:
                leaf.weight = draw(st.sampled_from(leaves)).weight
            made.append(leaf)
            return leaf
        children = [build(level - 1) for _ in range(draw(st.integers(1, 3)))]
        module: nn.Module
        if kind == "list":
            module = nn.ModuleList(children)
        elif kind == "dict":
            module = nn.ModuleDict({f"k{i}": child for i, child in enumerate(children)})
        elif kind == "seq":
            module = nn.Sequential(*children)
        else:
            module = Toy(**{f"c{i}": child for i, child in enumerate(children)})
            if draw(st.booleans()):
                module.register_parameter("own", vector())
        made.append(module)
        return module

    children = {f"m{i}": build(depth) for i in range(draw(st.integers(1, 4)))}
    return Toy(own=vector(), **children)


def holders(model: nn.Module, param: nn.Parameter) -> Iterator[str]:
    """Names under which a called module holds `param`, found by looking at every module."""
    uncalled = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    for name, module in model.named_modules(remove_duplicate=False):
        if any(own is param for own in module.parameters(recurse=False)):
            while isinstance(model.get_submodule(name), uncalled):
                name = name.rpartition(".")[0]
            yield name


@settings(max_examples=150, deadline=None)
@given(model=trees(), spec=st.sampled_from(["param", "block", "model"]))
def test_plan_of_any_tree_covers_each_parameter_once(model: nn.Module, spec: str) -> None:
    """In any module tree: each parameter once, in registration order, and gathered before every module that holds it.

    The last means that the bucket's modules include the holder or a module around it, by object, not by name.
    """
    plan = build_plan(model, spec)
    registration = [name for name, _ in model.named_parameters()]
    assert sorted(name for bucket in plan.buckets for name in bucket.params) == sorted(registration)
    firsts = [registration.index(bucket.params[0]) for bucket in plan.buckets]
    assert firsts == sorted(firsts)
    names = [name for name, _ in model.named_modules()]
    for bucket in plan.buckets:
        assert list(bucket.params) == sorted(bucket.params, key=registration.index)
        assert list(bucket.modules) == sorted(set(bucket.modules), key=names.index)
        needing = [model.get_submodule(name) for name in bucket.modules]
        assert not any(isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList)) for module in needing)
        for param in (model.get_parameter(name) for name in bucket.params):
            for holder in holders(model, param):
                path = holder.split(".")
                around = [model.get_submodule(".".join(path[:i])) for i in range(len(path) + 1)]
                assert any(module in around for module in needing), (bucket, holder)
