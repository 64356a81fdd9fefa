"""Bytes by class: which block is what, and what models hold between the phases of a step, by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from common.engine import Engine, load_engine
from common.harness.instruments.lifetimes import Block, Sighting
from common.harness.instruments.memory import MAX_SAMPLES, measure_memory
from common.harness.instruments.memory_classes import classify, held_by
from common.harness.launch import RankContext, RankPool
from common.harness.memory_record import (
    CLASSES,
    GATHERED,
    GRADIENTS,
    MESSAGES,
    OTHER,
    PARAMETERS,
    STATE,
    StepMemory,
    Timeline,
)
from common.harness.train import train
from common.job import JobConfig
from common.models import build_model
from common.plan import build_plan
from common.torch_private import Operator, TensorArgument
from parity_tests.runs import Runs
from parity_tests.test_parity import JOBS

SMALL = JobConfig(steps=1, seq=16, batch=6, ranks=3, link="none", optimizer="adamw")
MOMENTS = ("start", "forward", "backward", "optimizer", "peak")


# Which block is what


def ran(name: str, start_ns: int, *arguments: Iterable[int], expanded: bool = False) -> Operator:
    """An event with, for each argument, fp32 tensors of 8 elements at these addresses; the last may repeat a row."""
    tensors = [tuple(TensorArgument((8,), 4, address) for address in argument) for argument in arguments]
    if expanded:
        tensors[-1] = tuple(replace(tensor, is_expanded=True) for tensor in tensors[-1])
    return Operator(name, start_ns, start_ns + 1, (), tuple(tensors))


def classes(operators: list[Operator], *held: dict[int, str], blocks: Iterable[Block] = ()) -> list[str]:
    """Of blocks at the addresses 1 to 5, or of those given, held at times 0, 100, ..."""
    sightings = [Sighting(100 * number, each) for number, each in enumerate(held)]
    return classify(list(blocks) or [Block(address, 32) for address in range(1, 6)], operators, sightings)


def test_what_an_all_gather_writes_is_gathered() -> None:
    """In both of its forms that name the output; its inputs are messages; copies pass it on, from one to the next."""
    flat = [
        ran("c10d::_allgather_base_", 1, [1], [2]),
        ran("aten::copy_", 2, [3], [1]),
        ran("aten::copy_", 3, [4], [3]),
    ]
    assert classes(flat) == [GATHERED, MESSAGES, GATHERED, GATHERED, OTHER]
    several = [ran("c10d::allgather_into_tensor_coalesced_", 1, [1, 2], [3, 4])]
    assert classes(several) == [GATHERED, GATHERED, MESSAGES, MESSAGES, OTHER]
    in_place = [ran("c10d::_allgather_base_", 1, [1], [1])]
    assert classes(in_place)[0] == GATHERED


def test_what_is_no_gather_is_not_gathered() -> None:
    """A bias repeated into a result, a copy made before the gather or of something else, another operator."""
    gather = ran("c10d::_allgather_base_", 5, [1], [2])
    assert classes([gather, ran("aten::copy_", 6, [3], [1], expanded=True)])[2] == OTHER
    assert classes([ran("aten::copy_", 1, [3], [1]), gather])[2] == OTHER
    assert classes([gather, ran("aten::copy_", 6, [3], [4])])[2] == OTHER
    assert classes([gather, ran("aten::mm", 6, [3], [1])])[2] == OTHER


def test_a_list_of_outputs_is_not_seen() -> None:
    """An all-gather into a list of tensors shows no output: its input is a message, the rest is other."""
    assert classes([ran("c10d::allgather_", 1, [], [2])]) == [OTHER, MESSAGES, OTHER, OTHER, OTHER]


def test_buffers_of_other_collectives_are_messages() -> None:
    """What a reduction reads and writes, unless it was gathered before; what runs inside a collective is its own."""
    reduce = ran("c10d::_reduce_scatter_base_", 2, [2], [3])
    inside = replace(ran("c10d::send", 3, [4]), inside=("c10d::_reduce_scatter_base_",))
    assert classes([reduce, inside]) == [OTHER, MESSAGES, MESSAGES, OTHER, OTHER]
    reused = [ran("c10d::_allgather_base_", 1, [3], [1]), reduce]
    assert classes(reused)[2] == GATHERED
    assert classes([reduce, ran("c10d::_allgather_base_", 4, [2], [1])])[1] == GATHERED


def test_what_the_program_holds_comes_first() -> None:
    """A `.grad` that a reduction wrote, a shard that is sent, state; of parameters those at the start alone."""
    operators = [ran("c10d::_allgather_base_", 10, [4], [1]), ran("c10d::_reduce_scatter_base_", 20, [2], [5])]
    start = {1: PARAMETERS, 3: STATE}
    later = {4: PARAMETERS, 3: STATE, 2: GRADIENTS}
    assert classes(operators, start, later) == [PARAMETERS, GRADIENTS, STATE, GATHERED, MESSAGES]


def test_an_address_is_a_block_only_while_the_block_is_there() -> None:
    """Three blocks at one address, one after the other: the gathered one is the one that was there."""
    blocks = [Block(1, 32, 0, 10), Block(1, 32, 10, 20), Block(1, 32, 20)]
    assert classes([ran("c10d::_allgather_base_", 15, [1], [9])], blocks=blocks) == [OTHER, GATHERED, OTHER]
    assert classes([], {1: PARAMETERS}, blocks=blocks) == [PARAMETERS, OTHER, OTHER]


def test_held_storages_are_those_of_parameters_gradients_and_state() -> None:
    """By address, each once; a view stands for its whole storage; nothing is held in an empty one."""
    model = nn.Module()
    whole = torch.ones(4, 2)
    model.register_parameter("part", nn.Parameter(whole[:1]))
    model.register_parameter("empty", nn.Parameter(torch.empty(0, 2)))
    optimizer = torch.optim.AdamW(model.parameters())
    model.part.sum().backward()
    optimizer.step()
    state = optimizer.state[model.part]
    assert held_by(model, optimizer) == {
        whole.data_ptr(): PARAMETERS,
        model.part.grad.data_ptr(): GRADIENTS,
        **{state[name].data_ptr(): STATE for name in ("exp_avg", "exp_avg_sq", "step")},
    }


# The timeline


def test_timeline_keeps_the_peak() -> None:
    """Of some thousand changes at most 300 samples are left, the highest among them, in order, within the marks."""
    with measure_memory({}, rank=3) as meter:
        before = torch.empty(1000)
        meter.mark("start")
        held = [torch.empty(100 + number) for number in range(1000)]
        top = torch.empty(10**6)
        del top
        meter.mark("forward")
        del held, before
        meter.mark("optimizer")
    memory, line = meter.memory, meter.timeline
    assert memory is not None and line is not None and line.rank == 3
    assert 200 < len(line.times_s) <= MAX_SAMPLES and max(line.totals) == memory.peak_bytes
    assert memory.peak_bytes == 4 * (1000 + sum(range(100, 1100)) + 10**6)
    assert line.totals[0] == 4000 and list(line.ends_s) == ["forward", "optimizer"]
    assert line.times_s == sorted(line.times_s) and line.times_s[0] == 0
    assert line.times_s[-1] <= line.ends_s["optimizer"]
    assert [point.total for point in memory.points] == [4000, 4 * (1000 + sum(range(100, 1100))), 0, memory.peak_bytes]


@pytest.mark.parametrize(
    "broken",
    [
        {"times_s": [0.0]},
        {"times_s": [1.0, 0.0]},
        {"ends_s": {}},
        {"live": {"parameters": [1, 2]}},
        {"live": {name: [] for name in CLASSES}},
        {"live": {name: [1, "much"] for name in CLASSES}},
    ],
)
def test_a_timeline_that_does_not_fit_together_is_refused(broken: dict[str, object]) -> None:
    """Samples without times, times that go back, no phases, classes that are missing, words for bytes."""
    whole = {"rank": 0, "ends_s": {"forward": 1.0}, "times_s": [0.0, 0.5], "live": {name: [1, 2] for name in CLASSES}}
    assert Timeline.from_dict(whole).totals == [6, 12]
    with pytest.raises(ValueError, match="timeline"):
        Timeline.from_dict(whole | broken)


# What models hold, by hand


def rows(model: str, ranks: int, rank: int) -> list[tuple[int, int]]:
    """For each parameter the elements that a rank has, by `torch.chunk`, and those of the largest chunk."""
    found = []
    for param in build_model(model, seed=0, device="meta").parameters():
        chunks = [chunk.numel() for chunk in param.chunk(ranks)]
        found.append(((*chunks, *[0] * ranks)[rank], chunks[0]))
    return found


def gaps(model: str, ranks: int) -> int:
    """Elements between whole parameters in the eager engine's buffers, where each begins at a multiple of 32."""
    plain = build_model(model, seed=0, device="meta")
    total = 0
    for bucket in build_plan(plain, "block").buckets:
        end = 0
        for name in bucket.params:
            begin = (end + 31) // 32 * 32
            total, end = total + begin - end, begin + ranks * plain.get_parameter(name).chunk(ranks)[0].numel()
    return total


def held(memory: StepMemory, at: str) -> tuple[int, int, int, int]:
    """Parameters, optimizer state, gradients and gathered parameters at one moment."""
    (point,) = (point for point in memory.points if point.at == at)
    return point.parameters, point.optimizer_state, point.gradients, point.gathered


@pytest.mark.parametrize("model", ["llama-debug", "gpt-debug-tied"])
@pytest.mark.parametrize("engine", ["single", "ddp", "eager", "torch-fsdp2"])
def test_engines_hold_what_they_promise(runs: Runs, engine: str, model: str) -> None:
    """Three ranks, the last with fewer rows: whole or padded parameters and gradients, moments of own rows alone.

    With bf16 in compute and weights kept between forward and backward, gathered ones are there then, two bytes each.
    """
    job = replace(SMALL, model=model, param_dtype="bf16", reshard_after_forward="never")
    sharded = engine in ("eager", "torch-fsdp2")
    for rank, memory in enumerate(runs(engine, job)[0].memory):
        sizes = rows(model, 3 if sharded else 1, rank if sharded else 0)
        own, padded = (sum(each) for each in zip(*sizes, strict=True))
        kept, state = 4 * padded, 8 * own + 4 * len(sizes)
        gathered = 2 * (3 * padded + (gaps(model, 3) if engine == "eager" else 0)) if sharded else 0
        assert held(memory, "start") == (kept, state, 0, 0)
        assert held(memory, "forward") == (kept, state, 0, gathered)
        assert held(memory, "backward") == held(memory, "optimizer") == (kept, state, kept, 0)
        check_sums(memory)
        if sharded:
            assert memory.points[2].other == 2 * (2 * 16 * 8) + 4  # inputs and targets of two sequences, and the loss


@pytest.mark.parametrize("name", ["llama-2-never", "one-llama-3-bf16", "one-gpt-tied-2-bf16-never"])
def test_compiled_engine_holds_what_it_promises(runs: Runs, name: str) -> None:
    """Own rows without padding, padded gradients; kept weights are those that backward reads, so no bias, no table."""
    job = JOBS[name]
    model = build_model(job.model, seed=0, device="meta")
    matrices = [
        param
        for module in model.modules()
        for key, param in module.named_parameters(recurse=False)
        if not isinstance(module, nn.Embedding) and (key == "weight" or isinstance(module, nn.LayerNorm))
    ]
    wide = 4 if job.param_dtype == "fp32" else 2
    read = sum(job.ranks * param.chunk(job.ranks)[0].numel() * wide for param in dict.fromkeys(matrices))
    for rank, memory in enumerate(runs("compiled", job)[0].memory):
        own, padded = (4 * sum(each) for each in zip(*rows(job.model, job.ranks, rank), strict=True))
        assert held(memory, "start") == (own, 0, 0, 0)
        assert held(memory, "forward") == (own, 0, 0, read if job.reshard_after_forward == "never" else 0)
        assert held(memory, "backward") == held(memory, "optimizer") == (own, 0, padded, 0)
        check_sums(memory)


def check_sums(memory: StepMemory) -> None:
    """Every byte has a class, at each moment once; the step ends with what it began with, and gradients."""
    points = {point.at: point for point in memory.points}
    assert tuple(points) == MOMENTS
    assert points["start"].total == memory.start_bytes and points["peak"].total == memory.peak_bytes
    assert max(point.total for point in memory.points) == memory.peak_bytes
    assert points["optimizer"].total == memory.start_bytes + points["optimizer"].gradients
    assert points["optimizer"].messages == points["start"].messages


def keep_a_gather(model: nn.Module, mesh: DeviceMesh | None, job: JobConfig) -> nn.Module:
    """The eager engine, but each forward gathers four elements of every rank and never lets go of them."""
    kept: list[torch.Tensor] = []

    def leak(*_: object) -> None:
        kept.append(torch.empty(4 * job.ranks))
        torch.distributed.all_gather_into_tensor(kept[-1], torch.ones(4))

    model.register_forward_pre_hook(leak)
    return load_engine("eager").parallelize(model, mesh, job)


def train_leaking(context: RankContext) -> StepMemory | None:
    job = JobConfig(steps=1, seq=16, batch=2, link="none")
    training = train(context, Engine("leaking", keep_a_gather, True), job)
    return training and training.result.memory


def test_a_leaked_gathered_weight_is_seen(pool: RankPool) -> None:
    """What one step leaks is gathered at the end of it, beside what earlier steps did, which nobody can tell."""
    for memory in pool.run(train_leaking, ranks=2, timeout_s=60):
        assert memory is not None
        assert [held(memory, at)[3] for at in MOMENTS[:4]] == [0, 32, 32, 32]
