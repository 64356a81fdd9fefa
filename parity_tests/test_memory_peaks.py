"""Peaks of live bytes: hand-made allocations, backward passes, what is not reported, gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from common.harness.instruments.lifetimes import Sighting, changes, lifetimes
from common.harness.instruments.memory import live_storages, measure_memory
from common.harness.launch import RankContext, RankPool
from common.torch_private import Allocation, Operator, TensorArgument

# Memory

KIB = 1024


def block(kib: int) -> torch.Tensor:
    """An fp32 tensor of `kib` KiB."""
    return torch.empty(kib * KIB // 4)


def peak_kib(step: Callable[[], object]) -> float:
    """The peak of `step` in KiB, by the instrument."""
    with measure_memory({}) as meter:
        step()
    assert meter.memory is not None
    return meter.memory.peak_bytes / KIB


def test_peak_of_hand_made_allocations() -> None:
    """Blocks alive at once add up, freed ones do not, and a resized storage counts with its new size."""

    def overlap() -> None:
        first = block(100)
        second = block(50)
        del first
        third = block(80)  # 130 now, 150 before
        del second, third
        block(149)

    def resize() -> None:
        tensor = block(10)
        tensor.untyped_storage().resize_(0)
        other = block(5)
        tensor.untyped_storage().resize_(40 * KIB)
        del other, tensor

    def views() -> list[torch.Tensor]:
        base = block(10)
        return [base[:5], base.view(2, -1), base.detach()]

    assert peak_kib(overlap) == 150
    assert peak_kib(resize) == 45
    assert peak_kib(views) == 10
    assert peak_kib(lambda: None) == 0


@pytest.mark.parametrize(("keep", "expected_kib"), [(True, 400), (False, 300)])
def test_peak_of_a_backward_pass(keep: bool, expected_kib: int) -> None:
    """Saved activations count until backward frees them, gradients from when they are made; two scalars besides.

    y = exp(x) and z = exp(y) save their results, 100 KiB each. Backward makes the gradient of y beside y and z, and
    that of x beside y and the gradient of y; z is gone by then unless the caller keeps it.
    """
    x = torch.ones(100 * KIB // 4, requires_grad=True)

    def step() -> None:
        z = x.exp().exp()
        loss = z.sum()
        if not keep:
            del z
        loss.backward()
        x.grad = None

    assert peak_kib(step) * KIB == expected_kib * KIB + 2 * 4  # the loss and its gradient


def test_start_bytes_are_added() -> None:
    """What was live before the step is part of its peak."""
    with measure_memory({0xA: 3 * KIB, 0xB: 4 * KIB}) as meter:
        block(3)
    assert meter.memory is not None
    assert (meter.memory.start_bytes, meter.memory.peak_bytes) == (7 * KIB, 10 * KIB)


def allocation(time_ns: int, address: int, size: int, *inside: str) -> Allocation:
    """An allocator event."""
    return Allocation(time_ns, address, size, "cpu", inside)


def used(name: str, start_ns: int, end_ns: int, address: int) -> Operator:
    """An event that was given the storage at `address`."""
    return Operator(name, start_ns, end_ns, (), ((TensorArgument((1,), 1, address),),))


def peak_bytes(allocations: Sequence[Allocation], operators: Sequence[Operator], **known: Any) -> int:
    """The most that is live at once."""
    sizes = accumulate(change for _, _, change in changes(lifetimes(allocations, operators, **known)))
    return max(sizes, default=0)


def test_unreported_frees_are_found() -> None:
    """A collective's buffer that nobody freed ends with its last use; the same block without a collective lives on."""
    events = [allocation(0, 0xA, 100), allocation(50, 0xB, 10), allocation(60, 0xB, -10)]
    launch, transfer = used("c10d::_allgather_base_", 10, 12, 0xA), used("gloo:all_gather", 11, 40, 0xA)
    assert peak_bytes(events, [launch, transfer]) == 100
    assert peak_bytes(events, [launch, used("gloo:all_gather", 11, 55, 0xA)]) == 110
    assert peak_bytes(events, [used("aten::add", 10, 12, 0xA)]) == 110


def test_what_was_seen_held_is_live() -> None:
    """A collective's buffer that the program held at time 52 was not given back at 40; one it did not hold was."""
    events = [allocation(0, 0xA, 100), allocation(50, 0xB, 10), allocation(60, 0xB, -10)]
    launch = used("c10d::_allgather_base_", 10, 40, 0xA)
    assert peak_bytes(events, [launch], sightings=[Sighting(52, {0xA: "gradients"})]) == 110
    assert peak_bytes(events, [launch], sightings=[Sighting(52, {0xB: "gradients"})]) == 100


def test_older_blocks_live_until_they_are_freed_or_their_address_is_used_again() -> None:
    """Also if a collective read them; what is freed that nobody knew of is nobody's."""
    older, gather = {0xA: 100, 0xB: 30}, [used("c10d::_allgather_base_", 1, 2, 0xA)]
    late = [allocation(10, 0xC, 5)]
    assert peak_bytes(late, gather, older=older) == 135
    assert peak_bytes([allocation(3, 0xB, -30), allocation(4, 0xD, -9), *late], gather, older=older) == 130
    (first, second, third) = lifetimes([allocation(3, 0xA, 7)], [], older=older)
    assert (first.end_ns, second.end_ns, third.bytes) == (3, None, 7)


def test_an_address_handed_out_again_ends_its_block() -> None:
    """An unreported free cannot be later than the next allocation at its address."""
    events = [allocation(0, 0xA, 100), allocation(50, 0xA, 60), allocation(60, 0xA, -60)]
    assert peak_bytes(events, []) == 100
    assert peak_bytes(events, [used("c10d::send", 10, 70, 0xA)]) == 100


def test_buffers_of_the_backend_are_left_out() -> None:
    """What a backend stages inside a collective, or on its own thread, is no tensor of the program."""
    events = [
        allocation(0, 0xA, 100),
        allocation(1, 0xB, 1000, "c10d::allgather_", "aten::empty"),
        allocation(2, 0xB, -1000, "c10d::allgather_"),
        allocation(3, 0xC, 1000, "gloo:all_gather"),
        allocation(4, 0xD, 10, "_c10d_functional::all_gather_into_tensor"),
        allocation(5, 0xE, -1000),  # older than the recording
    ]
    assert peak_bytes(events, []) == 110


def measure_async_collectives(context: RankContext) -> list[float]:
    """The peak, in KiB, of five steps that each exchange 3 blocks of 64 KiB per rank with work handles.

    All that is live at the peak is there before the launch: how long after it the backend holds what it was given is
    the backend's affair.
    """

    def step() -> None:
        for _ in range(3):
            sent, received, busy = block(64 * context.ranks), block(64 * context.ranks), block(40)
            work = dist.all_to_all_single(received, sent, async_op=True)
            del sent  # from here on the backend alone holds it
            work.wait()
            del work, received, busy
        block(10 * context.ranks)

    step()
    return [peak_kib(step) for _ in range(5)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_peak_with_gloo_is_exact_and_the_same_every_time(pool: RankPool, ranks: int) -> None:
    """Buffers that gloo's threads free unseen do not pile up: in five repeats, on all ranks, sent + received + 40."""
    for peaks in pool.run(measure_async_collectives, ranks=ranks, timeout_s=60):
        assert peaks == [2 * 64 * ranks + 40] * 5


def test_live_storages_counts_each_once() -> None:
    """Parameters, optimizer state and what an engine keeps count once each; views, integers and ignored ones do not."""
    before = sum(live_storages().values())
    model = nn.Linear(256, 4, bias=False)  # 4 KiB
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()  # two moments, and a step count of 4 bytes
    optimizer.zero_grad()
    kept, view, data, ignored = block(3), model.weight.detach()[:2], torch.zeros(99, dtype=torch.int64), block(5)
    assert sum(live_storages(ignore=[ignored]).values()) - before == (4 + 8 + 3) * KIB + 4
    assert kept is not view is not data
