"""Instruments tell the truth: known gradients, known collectives and known allocations come back exactly."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from common.engine import Engine
from common.errors import EngineError
from common.harness.instruments.collectives import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    count_collectives,
    phase,
    tally,
)
from common.harness.instruments.gradients import collect_gradients, digest, l2_norm
from common.harness.launch import RankContext, RankPool
from common.harness.records import CollectiveCount, load_record, save_record
from common.harness.train import train
from common.harness.workload import mean_loss
from common.job import JobConfig
from common.mesh import build_mesh
from common.torch_private import Operator, TensorArgument
from parity_tests.runs import Runs
from parity_tests.torch_private import functional_collectives as funcol

JOB = JobConfig(steps=3, seq=32, backend="eager")


def collect_from_shards(context: RankContext) -> tuple[dict[str, float], dict[str, str], dict[str, torch.Tensor]]:
    """Two sharded parameters, 7 rows and 2 rows, whose gradients are their own values."""
    model = nn.Module()
    mesh = build_mesh()
    for name, rows in (("odd", 7), ("short", 2)):
        whole = torch.arange(rows * 3, dtype=torch.float32).reshape(rows, 3)
        param = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        param.grad = param.detach().clone()
        model.register_parameter(name, param)
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    summary = collect_gradients(model, rank=context.rank, ranks=context.ranks, keep=True)
    return summary.norms, summary.digests, summary.kept


@pytest.mark.parametrize("ranks", [1, 3])
def test_sharded_gradients_come_back_whole(pool: RankPool, ranks: int) -> None:
    """Uneven and empty shards are put together in order, on rank 0 only; a parameter without gradient has no entry."""
    first, *others = pool.run(collect_from_shards, ranks=ranks)
    norms, digests, kept = first
    assert list(kept) == ["odd", "short"]
    for name, rows in (("odd", 7), ("short", 2)):
        expected = torch.arange(rows * 3, dtype=torch.float32).reshape(rows, 3)
        assert torch.equal(kept[name], expected) and type(kept[name]) is torch.Tensor
        assert digests[name] == digest(expected)
        assert norms[name] == pytest.approx(float(expected.double().square().sum().sqrt()), rel=1e-15)
    assert all(other == ({}, {}, {}) for other in others)


def give_gradient_on_rank_0(context: RankContext) -> nn.Module:
    model = nn.Linear(2, 2)
    if context.rank == 0:
        model.weight.grad = torch.ones(2, 2)
    return model


def give_own_gradient(context: RankContext) -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight.grad = torch.full((2, 2), float(context.rank // 2))
    return model


def give_own_gradient_replicated(context: RankContext) -> nn.Module:
    mesh = build_mesh()
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Replicate()])))
    model.weight.grad = DTensor.from_local(torch.full((2, 2), float(context.rank // 2)), mesh, [Replicate()])
    return model


def leave_partial_gradient(context: RankContext) -> nn.Module:
    mesh = build_mesh()
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])))
    model.weight.grad = DTensor.from_local(torch.ones(4, 2), mesh, [Partial("avg")])
    return model


COPIES = r"gradient of 'weight': rank 2 and rank 0 each hold a whole copy, and the copies differ"


def error_of(context: RankContext, build: Callable[[RankContext], nn.Module]) -> str:
    """What collecting the gradients of a broken model says; caught here, so that the pool lives on."""
    with pytest.raises(EngineError) as caught:
        collect_gradients(build(context), rank=context.rank, ranks=context.ranks)
    return str(caught.value)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (give_gradient_on_rank_0, r"gradient of 'weight': rank 0 has one, rank 1 has none"),
        (give_own_gradient, COPIES),
        (give_own_gradient_replicated, COPIES),
        (leave_partial_gradient, r"'weight' on rank \d: expected it placed like its parameter, .*Shard.*Partial"),
    ],
)
def test_a_broken_gradient_contract_is_an_error(
    pool: RankPool, build: Callable[[RankContext], nn.Module], message: str
) -> None:
    """A gradient on some ranks only, never averaged, or not reduced is an error on every rank, and hangs none."""
    for text in pool.run(error_of, build, ranks=3, timeout_s=60):
        assert re.search(message, text), text


def test_digest_sees_every_bit() -> None:
    """Equal digests mean equal bits, dtype and shape; the sign of zero and one ulp count, strides do not."""
    base = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert digest(base) == digest(base.clone()) == digest(base.t().contiguous().t())
    negative_zero = base.clone()
    negative_zero[0, 0] = -0.0
    one_ulp = base.clone()
    one_ulp[1, 2] = torch.nextafter(one_ulp[1, 2], torch.tensor(10.0))
    others = [base.reshape(3, 2), base.double(), base.view(torch.int32), negative_zero, one_ulp, base[:1]]
    assert len({digest(tensor) for tensor in (base, *others)}) == 1 + len(others)
    assert digest(torch.tensor(1.0)) != digest(torch.tensor([1.0])) and digest(torch.empty(0, 3))


def test_l2_norm_is_summed_in_float64() -> None:
    """A million small elements beside a large one are not lost, as they are in fp32."""
    values = torch.full((1_000_001,), 1e-4)
    values[0] = 1.0
    assert l2_norm(values) == pytest.approx(float(values.double().square().sum().sqrt()), rel=1e-12)
    assert l2_norm(torch.tensor([1.0, float("nan")])) != l2_norm(torch.tensor([1.0]))


def ask_every_way(context: RankContext) -> dict[str, list[CollectiveCount]]:
    """Each collective alone, in each way of asking for it; 12 elements per rank, fp32 unless named bf16."""
    ranks, group = context.ranks, dist.group.WORLD
    assert group is not None
    mesh = build_mesh()
    share, whole = torch.ones(12), torch.ones(12 * ranks)
    sharded = nn.Parameter(distribute_tensor(torch.ones(12 * ranks), mesh, [Shard(0)]))

    def gather_by_dtensor() -> torch.Tensor:
        return sharded.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])

    ways: dict[str, Callable[[], object]] = {
        "all_gather: list": lambda: dist.all_gather([torch.empty(12) for _ in range(ranks)], share),
        "all_gather: functional": lambda: funcol.wait_tensor(funcol.all_gather_tensor(share, 0, group)),
        "all_gather: functional coalesced bf16": lambda: [
            funcol.wait_tensor(out)
            for out in funcol.all_gather_into_tensor_coalesced([share[:8].bfloat16(), share[8:].bfloat16()], group)
        ],
        "all_gather: DTensor": gather_by_dtensor,
        "reduce_scatter: list": lambda: dist.reduce_scatter(torch.empty(12), list(whole.clone().chunk(ranks))),
        "reduce_scatter: functional": lambda: funcol.wait_tensor(funcol.reduce_scatter_tensor(whole, "sum", 0, group)),
        "reduce_scatter: functional bf16": lambda: funcol.wait_tensor(
            funcol.reduce_scatter_tensor(whole.bfloat16(), "sum", 0, group)
        ),
        "all_to_all: plain": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "all_to_all: async": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, async_op=True).wait(),
        "all_to_all: functional": lambda: funcol.wait_tensor(funcol.all_to_all_single(whole, None, None, group)),
        "all_reduce: plain": lambda: dist.all_reduce(whole.clone()),
        "all_reduce: functional": lambda: funcol.wait_tensor(funcol.all_reduce(whole, "sum", group)),
        "broadcast: plain": lambda: dist.broadcast(whole.clone(), 0),
        "barrier: plain": dist.barrier,
    }
    counts = {}
    for name, way in ways.items():
        with count_collectives() as meter, phase(FORWARD):
            way()
        counts[name] = meter.counts
    with count_collectives() as meter:
        with phase(FORWARD):
            loss = gather_by_dtensor().sum()
        with phase(BACKWARD):
            loss.backward()
        dist.all_reduce(share)  # in no phase
    counts["training step"] = meter.counts
    return counts


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_way_of_asking_is_counted_once_with_whole_bytes(pool: RankPool, ranks: int) -> None:
    """Lists, functional collectives, coalesced ones and DTensor give one kind each, with the whole buffer's bytes."""
    counts = pool.run(ask_every_way, ranks=ranks, timeout_s=120)[0]
    step = counts.pop("training step")
    for name, found in counts.items():
        kind = name.partition(":")[0]
        size = 0 if kind == "barrier" else 12 * ranks * (2 if "bf16" in name else 4)
        assert found == [CollectiveCount(FORWARD, kind, 1, size)], name
    gather, reduction = step
    assert gather == CollectiveCount(FORWARD, "all_gather", 1, 48 * ranks)
    assert reduction == CollectiveCount(BACKWARD, "reduce_scatter", 1, 48 * ranks)


def count_compiled(context: RankContext, backend: str) -> list[CollectiveCount]:
    """A weight gathered, used and reduced in a compiled graph."""
    sharded = nn.Parameter(distribute_tensor(torch.ones(4 * context.ranks, 4), build_mesh(), [Shard(0)]))

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight = sharded.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])
        return (x @ weight.t()).relu().sum()

    compiled = torch.compile(forward, backend=backend, fullgraph=True)
    compiled(torch.ones(2, 4)).backward()
    with count_collectives() as meter:
        with phase(FORWARD):
            loss = compiled(torch.ones(2, 4))
        with phase(BACKWARD):
            loss.backward()
    return meter.counts


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_collectives_of_compiled_graphs_are_counted(pool: RankPool, backend: str) -> None:
    """Graphs of AOTAutograd and of Inductor show the same two collectives as eager code."""
    assert pool.run(count_compiled, backend, ranks=2, timeout_s=300)[0] == [
        CollectiveCount(FORWARD, "all_gather", 1, 8 * 4 * 4),
        CollectiveCount(BACKWARD, "reduce_scatter", 1, 8 * 4 * 4),
    ]


def operator(name: str, start_ns: int, end_ns: int, *inside: str, shape: tuple[int, ...] = (8,)) -> Operator:
    """An event with one fp32 tensor in each of two arguments."""
    tensor = (TensorArgument(shape, 4, None),)
    return Operator(name, start_ns, end_ns, inside, (tensor, tensor))


def test_a_collective_belongs_to_the_phase_that_launched_it() -> None:
    """By the time of its launch, on whichever thread; one inside another counts once; an unknown one is shown."""
    events = [
        operator("step phase: forward", 0, 10),
        operator("step phase: backward", 10, 20),
        operator("step phase: optimizer", 20, 30),
        operator("c10d::allreduce_", 9, 15, "step phase: forward"),
        operator("c10d::allreduce_", 12, 40),  # another thread: inside nothing
        operator("c10d::send", 13, 14, "c10d::allreduce_"),
        operator("c10d::new_collective_", 25, 26),
        operator("gloo:all_reduce", 25, 26),
        operator("c10d::allreduce_", 31, 32),
    ]
    assert tally(events, 2) == [
        CollectiveCount(FORWARD, "all_reduce", 1, 32),
        CollectiveCount(BACKWARD, "all_reduce", 1, 32),
        CollectiveCount(OPTIMIZER, "new_collective_", 1, 0),
    ]


def rename(model: nn.Module, mesh: object, job: JobConfig) -> nn.Module:
    """An engine that moves a parameter into a wrapper."""
    model.inner = nn.Module()
    model.inner.register_parameter("weight", model.norm.get_parameter("weight"))
    del model.norm.weight
    return model


def train_renamed(context: RankContext) -> str:
    with pytest.raises(EngineError) as caught:
        train(context, Engine("renaming", rename, True), JOB)
    return str(caught.value)


def test_changed_parameter_names_are_an_error(pool: RankPool) -> None:
    """An engine that renames a parameter is stopped before training, and both names are told."""
    (message,) = pool.run(train_renamed, ranks=1)
    assert "engine 'renaming'" in message and "norm.weight -> output.weight" in message


@pytest.mark.parametrize("engine", ["single", "torch-fsdp2"])
def test_a_job_run_twice_is_the_same(pool: RankPool, runs: Runs, engine: str) -> None:
    """Losses, every gradient's bits, collectives and memory peaks repeat exactly."""
    again, _ = Runs(pool)(engine, JOB)
    first, _ = runs(engine, JOB)
    assert replace(again, first_step_s=0, environment=first.environment) == replace(first, first_step_s=0)


def test_a_record_holds_what_the_job_did(runs: Runs) -> None:
    """Losses per step and rank, norms that are those of the parameters, one peak per rank, step-0 gradients."""
    record, gradients = runs("torch-fsdp2", JOB)
    assert [len(ranks) for ranks in record.losses] == [2] * JOB.steps
    assert record.world_size == len(record.memory) == 2
    for norm, norms in zip(record.grad_norms, record.param_norms, strict=True):
        assert norm == pytest.approx(sum(each**2 for each in norms.values()) ** 0.5, rel=1e-12)
    assert record.grad_digests[0] == {name: digest(gradient) for name, gradient in gradients.items()}
    assert len(set(record.grad_norms)) == JOB.steps and record.first_step_s > 0
    assert all(0 < rank.start_bytes < rank.peak_bytes for rank in record.memory)


def test_one_process_takes_the_whole_batch(runs: Runs) -> None:
    """An engine that is not data parallel has one loss per step: the mean of what the ranks of another see."""
    single, parallel = runs("single", JOB)[0], runs("ddp", JOB)[0]
    assert single.world_size == 1 and [len(losses) for losses in single.losses] == [1] * JOB.steps
    assert single.mean_losses[0] == pytest.approx(parallel.mean_losses[0], rel=1e-6)
    assert parallel.losses[0][0] != parallel.losses[0][1]


def test_records_survive_the_disk(runs: Runs, tmp_path: object) -> None:
    """What is read back is what was written, gradients bit for bit."""
    record, gradients = runs("ddp", JOB)
    save_record(tmp_path, record, gradients)  # type: ignore[arg-type]
    loaded, tensors = load_record(tmp_path, "ddp")  # type: ignore[arg-type]
    assert loaded == record
    assert {name: digest(tensor) for name, tensor in tensors.items()} == record.grad_digests[0]


def test_loss_is_taken_in_fp32_or_wider() -> None:
    """bf16 logits give the fp32 loss of the same numbers, float64 logits a float64 loss."""
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 1, 2], [3, 4, 0]])
    expected = -logits.bfloat16().double().log_softmax(-1).gather(-1, targets[..., None]).mean()
    assert mean_loss(logits.bfloat16(), targets).dtype is torch.float32
    assert mean_loss(logits.bfloat16(), targets).item() == pytest.approx(expected.item(), rel=1e-6)
    assert mean_loss(logits.double(), targets).dtype is torch.float64


def test_collectives_are_those_of_a_warm_step(runs: Runs) -> None:
    """DDP packs its buckets anew in its second step and broadcasts how; after one judged step that is past."""
    record, _ = runs("ddp", JobConfig(steps=1, seq=16, batch=4))
    assert [(each.phase, each.kind) for each in record.collectives] == [(BACKWARD, "all_reduce")]
