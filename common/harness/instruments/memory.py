"""Peak bytes of live tensors during one step, from allocator events: exact, and the same for every kind of engine.

Not counted: what a collective backend allocates for itself (staging copies of gloo, say). It belongs to the
transport, and its threads take and free it at moments of their own.

[Note: unreported frees]
The allocator reports to the profiler only on threads that carry the profiler's state. A buffer that a collective
reads is also held by the backend's thread until the operation ends, and when that thread lets go last, no event says
so. The block would look live for ever. It did live until about the end of the last event that used it, the backend's
own included, since the program waited for that: so a block that took part in a collective and was never reported
freed is taken as freed there, or when its address is handed out anew, if that is earlier. Blocks that took part in no
collective are left live. Where the program held such a block beyond that event, and the backend's thread beyond the
program, the peak comes out too low; on a busy machine that happens now and then.

Frees of blocks older than the recording are not all reported: start a step with no gradients left of the last one, and
add what is live then, `start_bytes`. That is found among Python's objects, so it includes what an engine keeps from
step to step, but not what only C++ holds (the buckets of DistributedDataParallel). Engines that live side by side in
one process work one at a time, so what was there before an engine was prepared is left out of its bytes.

Source: torch 2.13 `c10/core/CPUAllocator.cpp` (`ProfiledCPUMemoryReporter`) for what is reported and what is not.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from common.harness.records import MemoryPeak
from common.job import CPU, GPU
from common.torch_private import Allocation, Operator, record_events

_COLLECTIVE = "c10d::"
_BACKEND = ("c10d::", "gloo:", "nccl:")


@dataclass
class MemoryMeter:
    """What `measure_memory` found; `peak` is set when its block ends."""

    start_bytes: int
    peak: MemoryPeak | None = None


@contextmanager
def measure_memory(start_bytes: int, *, device_type: str = CPU) -> Iterator[MemoryMeter]:
    """Measure the peak of the block on this rank, above the `start_bytes` that are live when it begins.

    Args:
        start_bytes: see `live_bytes`.
        device_type: where; a GPU's caching allocator keeps its own count, whose growth is taken.
    """
    meter = MemoryMeter(start_bytes)
    if device_type == GPU:
        with _growth_on_gpu(meter):
            yield meter
        return
    with record_events(memory=True) as recording:
        yield meter
    allocations = [event for event in recording.allocations if event.device_type == device_type]
    meter.peak = MemoryPeak(start_bytes, start_bytes + peak_bytes(allocations, recording.operators))


@contextmanager
def _growth_on_gpu(meter: MemoryMeter) -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield
    torch.cuda.synchronize()
    growth = torch.cuda.max_memory_allocated() - before
    meter.peak = MemoryPeak(
        meter.start_bytes, meter.start_bytes + growth, reserved_bytes=torch.cuda.max_memory_reserved()
    )


def live_bytes(*, ignore: Iterable[torch.Tensor] = (), device_type: str = "cpu") -> int:
    """Bytes of the storages of `live_tensors`, shared ones once.

    Args:
        ignore: tensors that do not belong to the step, such as recorded gradients, or another engine's.
        device_type: where to look.
    """
    storages = {}
    for tensor in live_tensors(device_type=device_type):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    for tensor in ignore:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def live_tensors(*, device_type: str = "cpu") -> list[torch.Tensor]:
    """All floating-point tensors that this process holds.

    Integer tensors are the data and the book-keeping of meshes, which is no engine's doing.
    """
    gc.collect()
    return [
        thing
        for thing in gc.get_objects()
        # exact types: a DTensor's own tensor is found by itself, and the compiler's fake tensors have no memory
        if type(thing) in (torch.Tensor, torch.nn.Parameter)
        and thing.device.type == device_type
        and thing.is_floating_point()
    ]


def peak_bytes(allocations: Iterable[Allocation], operators: Iterable[Operator]) -> int:
    """The most that was live at once, of the blocks taken in `allocations` [in order of time]."""
    changes: list[tuple[int, int, int]] = []
    for order, block in enumerate(_lifetimes(allocations, _uses(operators))):
        changes.append((block.start_ns, order, block.bytes))
        if block.end_ns is not None:
            changes.append((block.end_ns, order, -block.bytes))
    live = peak = 0
    for _, _, change in sorted(changes):
        live += change
        peak = max(peak, live)
    return peak


@dataclass
class _Block:
    """One block from its allocation to its end; None while it lives on."""

    start_ns: int
    bytes: int
    end_ns: int | None = None


@dataclass(frozen=True)
class _Use:
    """An event that was given a storage."""

    start_ns: int
    end_ns: int
    is_collective: bool


def _uses(operators: Iterable[Operator]) -> dict[int, list[_Use]]:
    """By address of the storage: the events that used it."""
    uses: dict[int, list[_Use]] = defaultdict(list)
    for operator in operators:
        use = _Use(operator.start_ns, operator.end_ns, operator.name.startswith(_COLLECTIVE))
        for argument in operator.arguments:
            for tensor in argument:
                if tensor.address is not None:
                    uses[tensor.address].append(use)
    return uses


def _lifetimes(allocations: Iterable[Allocation], uses: dict[int, list[_Use]]) -> list[_Block]:
    """Pair allocations with frees by address; see [Note: unreported frees] for those without one."""
    blocks: list[_Block] = []
    live: dict[int, _Block] = {}
    for event in allocations:
        held = live.pop(event.address, None)
        if event.bytes < 0:
            if held is not None:  # else it is older than the recording, or the backend's
                held.end_ns = event.time_ns
            continue
        if held is not None:  # freed unseen: its address is handed out anew
            held.end_ns = min(_last_use(held, uses[event.address], event.time_ns) or event.time_ns, event.time_ns)
        if not any(name.startswith(_BACKEND) for name in event.inside):
            live[event.address] = _Block(event.time_ns, event.bytes)
            blocks.append(live[event.address])
    for address, block in live.items():
        block.end_ns = _last_use(block, uses[address], None)
    return blocks


def _last_use(block: _Block, uses: list[_Use], before_ns: int | None) -> int | None:
    """When the last event that used `block` ended; None if no collective did."""
    its_own = [
        use for use in uses if use.start_ns >= block.start_ns and (before_ns is None or use.start_ns < before_ns)
    ]
    if not any(use.is_collective for use in its_own):
        return None
    return max(use.end_ns for use in its_own)
