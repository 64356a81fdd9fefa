"""Bytes of live tensors during one step, from allocator events: the same for every kind of engine, and
exact, but for peaks on gloo ([Note: unreported frees] in `lifetimes`).

Blocks and what events do not tell of them: `lifetimes`. Which class of bytes a block is: `memory_classes`.

Frees of blocks older than the recording are not all reported: start a step with no gradients left of the last one, and
give what is live then, `live_storages`. That is found among Python's objects, so it includes what an engine keeps from
step to step, but not what only C++ holds (the buckets of DistributedDataParallel). Engines that live side by side in
one process work one at a time, so what was there before an engine was prepared is left out of its bytes.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch.profiler import record_function

from common.harness.instruments.lifetimes import Block, Sighting, changes, lifetimes
from common.harness.instruments.memory_classes import classify
from common.harness.memory_record import CLASSES, OTHER, PEAK, MemoryPoint, StepMemory, Timeline
from common.job import CPU, GPU
from common.torch_private import Operator, record_events

MAX_SAMPLES = 300
"""A timeline has no more."""
_RANGE = "step memory: "

Held = Callable[[], Mapping[int, str]]
"""Says of storages that have a class, by address, which; see `memory_classes.held_by`."""


@dataclass
class MemoryMeter:
    """What `measure_memory` found; `memory` and, on a CPU, `timeline` are set when its block ends."""

    held: Held
    memory: StepMemory | None = None
    timeline: Timeline | None = None
    marks: dict[str, Mapping[int, str]] = field(default_factory=dict)

    def mark(self, at: str) -> None:
        """Note what is live now, under the name `at`."""
        with record_function(_RANGE + at):
            self.marks[at] = self.held()


@contextmanager
def measure_memory(
    start: Mapping[int, int], *, held: Held = dict, rank: int = 0, device_type: str = CPU
) -> Iterator[MemoryMeter]:
    """Measure the memory of the block on this rank, above what is live when it begins.

    Args:
        start: see `live_storages`.
        held: asked at each mark.
        rank: this rank.
        device_type: where; a GPU's caching allocator keeps its own count, whose growth is taken.
    """
    meter = MemoryMeter(held)
    if device_type == GPU:
        with _growth_on_gpu(meter, sum(start.values())):
            yield meter
        return
    with record_events(memory=True) as recording:
        yield meter
    sightings = _sightings(recording.operators, meter.marks)
    allocations = [event for event in recording.allocations if event.device_type == device_type]
    kept = Sighting(
        max((operator.end_ns for operator in recording.operators), default=0),
        {tensor.untyped_storage().data_ptr(): OTHER for tensor in _tensors(device_type)},
    )
    blocks = lifetimes(allocations, recording.operators, older=start, sightings=[*sightings.values(), kept])
    classes = classify(blocks, recording.operators, list(sightings.values()))
    samples = _samples(blocks, classes)
    peak = max(samples, key=lambda sample: sample.total)
    points = [MemoryPoint.of(at, _last(samples, sighting.time_ns).live) for at, sighting in sightings.items()]
    meter.memory = StepMemory(
        sum(start.values()), peak.total, points=[*points, MemoryPoint.of(PEAK, peak.live)] if points else []
    )
    if sightings:
        meter.timeline = _timeline(rank, samples, {at: sighting.time_ns for at, sighting in sightings.items()})


@contextmanager
def _growth_on_gpu(meter: MemoryMeter, start_bytes: int) -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield
    torch.cuda.synchronize()
    growth = torch.cuda.max_memory_allocated() - before
    meter.memory = StepMemory(
        start_bytes,
        start_bytes + growth,
        reserved_bytes=torch.cuda.max_memory_reserved(),
        active_bytes=torch.cuda.memory_stats()["active_bytes.all.peak"],
    )


def live_storages(*, ignore: Iterable[torch.Tensor] = (), device_type: str = CPU) -> dict[int, int]:
    """Bytes of the storages of `live_tensors` by address.

    Args:
        ignore: tensors that do not belong to the step, such as recorded gradients, or another engine's.
        device_type: where to look.
    """
    storages = {}
    for tensor in live_tensors(device_type=device_type):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    for tensor in ignore:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return storages


def live_tensors(*, device_type: str = CPU) -> list[torch.Tensor]:
    """All floating-point tensors that this process holds.

    Integer tensors are the data and the book-keeping of meshes, which is no engine's doing.
    """
    gc.collect()
    return _tensors(device_type)


def _tensors(device_type: str) -> list[torch.Tensor]:
    return [
        thing
        for thing in gc.get_objects()
        # exact types: a DTensor's own tensor is found by itself, and the compiler's fake tensors have no memory
        if type(thing) in (torch.Tensor, torch.nn.Parameter)
        and thing.device.type == device_type
        and thing.is_floating_point()
    ]


@dataclass(frozen=True)
class _Sample:
    """What was live from a moment on, by class."""

    time_ns: int
    live: Mapping[str, int]
    total: int


def _samples(blocks: Sequence[Block], classes: Sequence[str]) -> list[_Sample]:
    """One for each change, the first with nothing live."""
    live: Counter[str] = Counter()
    samples = [_Sample(0, {}, 0)]
    for time_ns, place, change in changes(blocks):
        live[classes[place]] += change
        samples.append(_Sample(time_ns, dict(live), samples[-1].total + change))
    return samples


def _sightings(operators: Iterable[Operator], marks: Mapping[str, Mapping[int, str]]) -> dict[str, Sighting]:
    """The marks, in the order in which they were made, each with its time."""
    times = {operator.name: operator.start_ns for operator in operators if operator.name.startswith(_RANGE)}
    return {at: Sighting(times[_RANGE + at], held) for at, held in marks.items()}


def _last(samples: Sequence[_Sample], time_ns: int) -> _Sample:
    """The sample that holds at a moment."""
    return samples[bisect_right(samples, time_ns, key=lambda sample: sample.time_ns) - 1]


def _timeline(rank: int, samples: Sequence[_Sample], marks: Mapping[str, int]) -> Timeline:
    """The sample of the first mark, and those up to the last, of each few the one with the most live."""
    start_ns, *ends_ns = marks.values()
    first = replace(_last(samples, start_ns), time_ns=start_ns)
    later = [sample for sample in samples if start_ns < sample.time_ns <= ends_ns[-1]]
    few = -(-len(later) // (MAX_SAMPLES - 1)) or 1
    highest = [max(later[i : i + few], key=lambda sample: sample.total) for i in range(0, len(later), few)]
    kept = [first, *highest]
    _, *names = marks
    return Timeline(
        rank,
        ends_s={name: (end_ns - start_ns) / 1e9 for name, end_ns in zip(names, ends_ns, strict=True)},
        times_s=[(sample.time_ns - start_ns) / 1e9 for sample in kept],
        live={name: [sample.live.get(name, 0) for sample in kept] for name in CLASSES},
    )
