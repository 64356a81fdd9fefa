"""The baselines are what they say: the mean gradient of the whole batch, in the job's precision, by the job's plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from common.baselines import ComputesInPrecision, ddp, in_job_precision, single, torch_fsdp2
from common.baselines.torch_fsdp2 import module_groups
from common.data import batch, load_tokens
from common.errors import EngineError, PlanError
from common.harness.distance import relative_error
from common.harness.grades import unit_roundoff
from common.harness.predict import predict_collectives
from common.harness.records import CollectiveCount
from common.harness.workload import mean_loss
from common.job import PASSES, JobConfig
from common.models import build_model
from common.plan import Bucket, BucketPlan, build_plan
from common.policy import MixedPrecisionPolicy
from parity_tests.runs import Runs, counts

JOB = JobConfig(steps=2, seq=32, backend="eager")
EXACT = replace(JOB, dtype="fp64", param_dtype="fp64", reduce_dtype="fp64")


def plain_gradients(job: JobConfig) -> dict[str, torch.Tensor]:
    """Gradients of step 0 by autograd alone, in this process, on the whole batch in float64."""
    model = build_model(job.model, seed=job.seed, dtype=torch.float64)
    inputs, targets = batch(load_tokens(job.data), seed=job.seed, step=0, batch=job.batch, seq=job.seq)
    torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("model", ["llama-debug", "gpt-debug-tied"])
@pytest.mark.parametrize(("engine", "ranks"), [("single", 1), ("ddp", 2), ("ddp", 3), ("torch-fsdp2", 3)])
def test_a_baseline_gives_the_mean_gradient(runs: Runs, engine: str, ranks: int, model: str) -> None:
    """In float64 each parameter's gradient is that of plain autograd on the whole batch, to a thousand roundings."""
    job = replace(EXACT, model=model, ranks=ranks)
    record, gradients = runs(engine, job)
    expected = plain_gradients(job)
    assert list(gradients) == list(expected)
    for name, truth in expected.items():
        assert gradients[name].dtype is torch.float64
        assert relative_error(gradients[name], truth) < 1000 * torch.finfo(torch.float64).eps, name
    assert record.world_size == ranks


@pytest.mark.parametrize(("ranks", "plan"), [(2, "param"), (3, "block")])
def test_prefetch_changes_the_order_and_nothing_else(runs: Runs, ranks: int, plan: str) -> None:
    """torch's FSDP2 told what comes next has the bits, the counts and the bytes of torch's FSDP2 as it is."""
    job = replace(JOB, ranks=ranks, plan=plan)
    plain, told = (runs(engine, job)[0] for engine in ("torch-fsdp2", "torch-fsdp2-prefetch"))
    assert (told.losses, told.grad_digests) == (plain.losses, plain.grad_digests)
    assert told.collectives == plain.collectives
    assert told.predicted is not None
    assert sorted(told.collectives, key=str) == sorted(told.predicted, key=str)


# Precision


@pytest.mark.parametrize("model_name", ["llama-debug", "gpt-debug-tied"])
def test_bf16_compute_is_that_of_a_bf16_model(model_name: str) -> None:
    """Loss and gradients equal, bit for bit, those of a model cast to bf16; the masters stay fp32, tied, and named."""
    tokens, targets = batch(load_tokens(), seed=0, step=0, batch=4, seq=32)
    masters = build_model(model_name, seed=0)
    names = [name for name, _ in masters.named_parameters()]
    wrapper = single.parallelize(masters, None, replace(JOB, param_dtype="bf16"))
    loss = mean_loss(wrapper(tokens), targets)
    loss.backward()

    narrow = build_model(model_name, seed=0).to(torch.bfloat16)
    expected = mean_loss(narrow(tokens), targets)
    expected.backward()

    assert torch.equal(loss, expected)
    assert [name for name, _ in masters.named_parameters()] == names
    narrow_params = dict(narrow.named_parameters())
    for name, param in masters.named_parameters():
        assert param.dtype is torch.float32 and param.grad is not None and param.grad.dtype is torch.float32
        theirs = narrow_params[name].grad
        assert theirs is not None and torch.equal(param.grad, theirs.float()), name


def test_no_cast_no_wrapper() -> None:
    """Where the compute dtype is the parameters' own, the model itself is called."""
    model = build_model("llama-debug", seed=0)
    assert in_job_precision(model, JOB) is model
    assert isinstance(in_job_precision(model, replace(JOB, param_dtype="bf16")), ComputesInPrecision)


def test_a_policy_casts_inputs_and_outputs() -> None:
    """Floating-point inputs are cast unless the policy says not to, integers never, outputs where it says so."""
    seen: list[torch.dtype] = []

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            seen.extend([x.dtype, index.dtype, self.weight.dtype])
            return x * self.weight

    index = torch.zeros(2, dtype=torch.int64)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    assert ComputesInPrecision(Layer(), policy)(torch.ones(2), index=index).dtype is torch.float64
    assert seen == [torch.bfloat16, torch.int64, torch.bfloat16]
    seen.clear()
    ComputesInPrecision(Layer(), replace(policy, cast_forward_inputs=False))(torch.ones(2), index)
    assert seen == [torch.float32, torch.int64, torch.bfloat16]


def test_ddp_reduces_in_the_dtype_asked(runs: Runs) -> None:
    """With a bf16 reduction half the bytes travel, and every gradient comes back as bf16 numbers in fp32."""
    wide = runs("ddp", JOB)
    narrow = runs("ddp", replace(JOB, reduce_dtype="bf16"))
    sizes = [sum(count.bytes for count in run[0].collectives) for run in (wide, narrow)]
    assert sizes[0] == 2 * sizes[1] == 4 * sum(gradient.numel() for gradient in wide[1].values())
    for name, gradient in narrow[1].items():
        assert gradient.dtype is torch.float32 and torch.equal(gradient, gradient.bfloat16().float())
        # two casts and a sum, each within a unit roundoff of terms that may be larger than their sum
        assert relative_error(gradient, wide[1][name]) < 4 * unit_roundoff(torch.bfloat16)


@pytest.mark.parametrize("engine", [ddp, torch_fsdp2])
def test_a_parallel_baseline_needs_a_mesh(engine: object) -> None:
    """Without ranks to average over it is an EngineError that says what to pass."""
    with pytest.raises(EngineError, match="build_mesh"):
        engine.parallelize(nn.Linear(2, 2), None, JOB)  # type: ignore[attr-defined]


# Grouping of torch's fully_shard


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({}, 5),
        ({"plan": "model"}, 1),
        ({"plan": "layers.0,layers.1+layers.2"}, 3),
        ({"plan": "param"}, 30),
        ({"model": "gpt-debug", "plan": "param"}, 3 * 6 + 4),
        ({"model": "gpt-debug-tied", "plan": "param"}, 3 * 6 + 3),
        ({"reshard_after_forward": "never"}, 5),
        ({"ranks": 3, "param_dtype": "bf16"}, 5),
    ],
    ids=str,
)
def test_torch_fsdp2_follows_the_plan(runs: Runs, options: dict[str, object], groups: int) -> None:
    """One gather and one reduction per group, the root's too; under `param` a weight and its bias are one group."""
    job = JobConfig.from_dict(JOB.to_dict() | options)
    run = runs("torch-fsdp2", job)
    expected = {("forward", "all_gather"): groups, ("backward", "reduce_scatter"): groups}
    if job.reshard_after_forward == "always":
        expected[("backward", "all_gather")] = groups
    assert counts(run) == expected
    assert run[0].predicted == run[0].collectives


def bucket_plan(*modules: Sequence[str]) -> BucketPlan:
    """One bucket per list of modules, with one parameter each."""
    return BucketPlan(tuple(Bucket(tuple(names), (f"p{i}",)) for i, names in enumerate(modules)))


def test_buckets_that_share_a_module_become_one_group() -> None:
    """Also over a third one: a-b, c, b-c are one group; what shares nothing stays apart."""
    groups = module_groups(bucket_plan(["a", "b"], ["c"], ["d"], ["b", "c"]))
    assert [(set(group.modules), set(group.params)) for group in groups] == [
        ({"d"}, {"p2"}),
        ({"a", "b", "c"}, {"p0", "p1", "p3"}),
    ]


def test_groups_are_sharded_bottom_up() -> None:
    """A parent comes after every group inside it; groups inside each other are a PlanError."""
    order = torch_fsdp2._bottom_up(
        module_groups(bucket_plan(["h.0"], ["h.0.attn", "wte"], ["h.0.attn.c", "x"], ["h.01"]))
    )
    names = [group.modules[0] for group in order]
    assert names.index("h.0.attn.c") < names.index("h.0.attn") < names.index("h.0")
    with pytest.raises(PlanError, match="inside each other"):
        list(torch_fsdp2._bottom_up(module_groups(bucket_plan(["a", "b.c"], ["b", "a.c"]))))


# Predictions


class Tiny(nn.Module):
    """3 rows and more, so that padding shows: on 2 ranks 5 x 4 is 6 x 4."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.lin = nn.Linear(4, 5)
        if tied:
            self.lin.weight = self.emb.weight


GATHER_ALL = 6 * 4 + 4 + 4 + 6 * 4 + 6  # emb, norm weight and bias, lin weight and bias, padded


@pytest.mark.parametrize(
    ("engine", "options", "backward", "backward_elements"),
    [
        ("eager", {}, 5, GATHER_ALL),
        ("compiled", {}, 3, 4 + 4 + 6 * 4),  # norm weight and bias, lin weight
        ("compiled", {"backend": "inductor"}, 2, 4 + 6 * 4),  # the decomposed norm reads no bias
        ("compiled", {"plan": "model"}, 1, 4 + 4 + 6 * 4),
        ("compiled", {"plan": "emb,norm,lin"}, 2, 4 + 4 + 6 * 4),
        ("torch-fsdp2", {}, 3, GATHER_ALL),
        ("compiled", {"plan": "emb,norm,lin", "disabled_passes": ["bucket_gathers"]}, 3, 4 + 4 + 6 * 4),
        ("compiled", {"plan": "model", "disabled_passes": ["bucket_reductions"]}, 1, 4 + 4 + 6 * 4),
        ("compiled", {"plan": "model", "disabled_passes": PASSES}, 3, 4 + 4 + 6 * 4),
        ("compiled", {"plan": "model", "disabled_passes": list(PASSES[2:])}, 1, 4 + 4 + 6 * 4),
        ("eager", {"disabled_passes": PASSES}, 5, GATHER_ALL),
    ],
    ids=str,
)
def test_predictions_worked_out_by_hand(
    engine: str, options: dict[str, object], backward: int, backward_elements: int
) -> None:
    """Counts and padded bytes of a small model on two ranks, in bf16 gathers and fp32 reductions."""
    base = JOB.to_dict() | {"plan": "param", "backend": "aot_eager", "param_dtype": "bf16"}
    job = JobConfig.from_dict(base | options)
    groups = {"param": 3 if engine == "torch-fsdp2" else 5, "model": 1, "emb,norm,lin": 3}[job.plan]
    kind, sent = ("reduce_scatter", 4) if engine == "torch-fsdp2" else ("all_to_all", 2)  # one of two rows stays
    gathers, reductions = (
        5 if engine == "compiled" and name in job.disabled_passes else groups
        for name in ("bucket_gathers", "bucket_reductions")
    )
    expected = [
        CollectiveCount("forward", "all_gather", gathers, GATHER_ALL * 2),
        CollectiveCount("backward", "all_gather", backward, backward_elements * 2),
        CollectiveCount("backward", kind, reductions, GATHER_ALL * sent),
    ]
    assert sorted(predict_collectives(engine, Tiny(), job) or [], key=str) == sorted(expected, key=str)
    kept = replace(job, reshard_after_forward="never")
    without = [count for count in expected if (count.phase, count.kind) != ("backward", "all_gather")]
    assert sorted(predict_collectives(engine, Tiny(), kept) or [], key=str) == sorted(without, key=str)


def test_predictions_of_a_tied_weight_and_of_native_reductions() -> None:
    """A tied weight travels once and is read by the linear it is tied to; native reductions are reduce-scatters."""
    job = replace(JOB, plan="param", backend="aot_eager", transport="native")
    found = predict_collectives("compiled", Tiny(tied=True), job)
    assert found is not None
    by_kind = {(count.phase, count.kind): (count.count, count.bytes) for count in found}
    assert by_kind == {
        ("forward", "all_gather"): (4, 4 * (6 * 4 + 4 + 4 + 6)),
        ("backward", "all_gather"): (3, 4 * (6 * 4 + 4 + 4)),
        ("backward", "reduce_scatter"): (4, 4 * (6 * 4 + 4 + 4 + 6)),
    }


def test_nothing_is_predicted_where_nothing_is_known() -> None:
    """No formula for DDP, a user's engine, frozen or mixed parameters, unknown modules; and none needed on one rank."""
    job = replace(JOB, backend="aot_eager")
    frozen, mixed, unknown = Tiny(), Tiny(), Tiny()
    frozen.norm.weight.requires_grad_(False)
    mixed.norm.to(torch.bfloat16)
    unknown.conv = nn.Conv1d(2, 2, 1)
    assert predict_collectives("ddp", Tiny(), job) is None
    assert predict_collectives("my.engine", Tiny(), job) is None
    for engine in ("eager", "compiled", "torch-fsdp2"):
        assert predict_collectives(engine, frozen, job) is None
        assert predict_collectives(engine, mixed, job) is None
        assert predict_collectives(engine, Tiny(), replace(job, ranks=1)) == []
    assert predict_collectives("compiled", unknown, job) is None
    assert predict_collectives("eager", unknown, job) is not None
    assert predict_collectives("compiled", Tiny(), replace(job, backend="eager")) is None
    assert predict_collectives("single", Tiny(), job) == []


@pytest.mark.parametrize("plan", ["block", "model"])
def test_block_plans_of_our_models_are_whole(plan: str) -> None:
    """Every parameter of the model is in the predicted forward gather, padded: none is forgotten or counted twice."""
    job = replace(JOB, ranks=3, plan=plan)
    model = build_model("gpt-debug-tied", seed=0)
    found = predict_collectives("eager", model, job)
    assert found is not None
    elements = sum(3 * ((len(param) + 2) // 3) * param[0].numel() for param in model.parameters())
    assert found[0] == CollectiveCount("forward", "all_gather", len(build_plan(model, plan).buckets), 4 * elements)
