"""What one rank did in one step, as spans on lanes: compute, each link, phases, operators.

    phase      forward, backward, optimizer
    compute    launches of collectives, waits for them, and between these the compute of one bucket after the other
    link ...   how long each collective occupied a link: by the emulated one's log, or by what gloo's thread reports
    operators  every operator that the profiler saw, for a viewer to nest

Engines are known by what they tell every profiler, their ranges (`common/ranges.py`), and by the `c10d::` operators
that all of them end in: the innermost range round a launch names the bucket it serves, or a graph's range the order of
all.

[Note: whose compute]
No operator says for which bucket it computes, and a graph fuses across modules. What is between two collective calls is
therefore named by one rule for all engines: in forward after the bucket whose gather was waited for last, in backward
after the bucket whose reduction is launched next, since that is launched when its last gradient is there.

On a GPU the host's launches say nothing of when something ran: there a trace has no spans, and torch's own recordings
instead, see `gpu_trace`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from common.harness.instruments.collectives import (
    BACKWARD,
    FORWARD,
    is_collective,
    measure_collective,
    phase_of_range,
)
from common.harness.instruments.gpu_trace import record_with_torch
from common.harness.link import LogEntry, Meter, way_of
from common.harness.link.meter import Wait
from common.job import CPU, GPU
from common.ranges import GATHER, REDUCE, WAIT_GATHER, WAIT_REDUCE, read_bucket, read_graph
from common.torch_private import Operator, record_events

PHASE, COMPUTE, OPERATORS, LINK = "phase", "compute", "operators", "link"
"""Lanes; there may be several links, told apart by their ranks."""
LAUNCH, WAIT = "launch", "wait"
WAIT_TENSOR = "_c10d_functional::wait_tensor"
_GLOO = "gloo:"


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time, in seconds from the start of the step.

    Attributes:
        lane: where it is drawn.
        kind: on a link `GATHER`, `REDUCE` or `OTHER`; on the compute lane `COMPUTE`, `LAUNCH` or `WAIT`; else its lane.
        name: a bucket, "" if it is not known; or a phase, an operator.
        bytes: of a collective, the whole buffer.
    """

    lane: str
    kind: str
    name: str
    start_s: float
    end_s: float
    bytes: int = 0


@dataclass
class Trace:
    """One step of one rank; filled when its recording ends.

    Attributes:
        spans: on a CPU.
        files: on a GPU, what torch's own tools recorded, by suffix of the file.
    """

    rank: int
    spans: list[Span] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)


@contextmanager
def record_trace(rank: int, ranks: int, meter: Meter, device_type: str = CPU) -> Iterator[Trace]:
    """Record the block, one step with its phases marked, on this rank.

    Args:
        meter: of the emulated link under it; one that stays empty where there is none.
        device_type: where the step is computed.
    """
    trace = Trace(rank)
    if device_type == GPU:
        with record_with_torch() as trace.files:
            yield trace
        return
    meter.clear()
    # the profiler tells the time of day, the link's log the monotonic clock
    offset_s = time.time_ns() / 1e9 - time.monotonic()
    with record_events() as recording:
        yield trace
        log, waits = list(meter.log), list(meter.waits)
    trace.spans += trace_spans(recording.operators, log, waits, ranks=ranks, offset_s=offset_s)


@dataclass(frozen=True)
class Launch:
    """A collective as it was launched; `address` is that of the buffer it writes."""

    start_s: float
    end_s: float
    kind: str
    bucket: str
    bytes: int
    address: int | None


def trace_spans(
    operators: Iterable[Operator], log: Sequence[LogEntry], waits: Sequence[Wait], *, ranks: int, offset_s: float
) -> list[Span]:
    """The spans of one step.

    Args:
        operators: what the profiler saw, in order of time.
        log, waits: of the emulated link; empty without one.
        ranks: world size.
        offset_s: what the profiler's clock is ahead of the link's.
    """
    operators = list(operators)
    phases = [(name, each) for each in operators if (name := phase_of_range(each.name)) is not None]
    if not phases:
        return []
    zero_s = phases[0][1].start_ns / 1e9
    launches = launches_of(operators, ranks)
    spans = [Span(PHASE, PHASE, name, *_times(each)) for name, each in phases]
    calls = [Span(COMPUTE, LAUNCH, each.bucket, each.start_s, each.end_s, each.bytes) for each in launches]
    if log:
        links, ways = _emulated_links(log, launches, offset_s)
        calls += [
            Span(COMPUTE, WAIT, ways.get((each.group, each.index), ""), each.start_s + offset_s, each.end_s + offset_s)
            for each in waits
        ]
    else:
        links = _gloo_links(operators, launches)
        calls += _reported_waits(operators, launches)
    calls = _one_after_the_other(calls)
    spans += _compute(spans, calls, launches)
    spans += [*calls, *links]
    shown = [each for each in operators if _is_operator(each) and each.start_ns >= phases[0][1].start_ns]
    spans += [Span(OPERATORS, OPERATORS, each.name, *_times(each)) for each in shown]
    return [_shifted(span, zero_s) for span in spans]


def launches_of(operators: Sequence[Operator], ranks: int) -> list[Launch]:
    """The collectives among `operators` [in order of time], in order of launch, each with its bucket."""
    found = []
    graphs: dict[str, dict[str, Iterator[str]]] = {}
    for operator in operators:
        buckets = read_graph(operator.name)
        if buckets is not None:  # a new call of a graph, whose collectives come next
            graphs[operator.name] = {kind: iter(names) for kind, names in buckets.items()}
        if is_collective(operator):
            kind, size = measure_collective(operator, ranks)
            bucket = _bucket(operator.inside, way_of(kind), graphs)
            written = operator.arguments[0] if operator.arguments else ()
            address = written[0].address if written else None
            found.append(Launch(*_times(operator), kind, bucket, size, address))
    return found


def _bucket(inside: Sequence[str], way: str, graphs: dict[str, dict[str, Iterator[str]]]) -> str:
    """The bucket that a collective in these ranges serves, "" if none of them tells."""
    for name in reversed(inside):
        if read := read_bucket(name):
            return read[1]
        if name in graphs:
            return next(graphs[name].get(way, iter(())), "")
    return ""


def _emulated_links(
    log: Sequence[LogEntry], launches: Sequence[Launch], offset_s: float
) -> tuple[list[Span], dict[tuple[str, int], str]]:
    """Spans of all links, and the bucket of each operation by group and index: one was issued in each launch.

    Where that is not so, since the link leaves an operator alone, no operation has a name.
    """
    served = [launch.bucket for launch in launches] if len(launches) == len(log) else [""] * len(log)
    spans, buckets = [], {}
    for entry, bucket in zip(sorted(log, key=lambda entry: entry.issue_s), served, strict=True):
        buckets[entry.group, entry.index] = bucket
        lane = f"{LINK} {'-'.join(map(str, entry.ranks))}"
        if len({other.group for other in log if other.ranks == entry.ranks}) > 1:
            lane += f" {entry.group}"
        start_s, end_s = entry.start_s + offset_s, entry.end_s + offset_s
        spans.append(Span(lane, way_of(entry.kind), bucket, start_s, end_s, entry.bytes))
    return spans, buckets


def _gloo_links(operators: Sequence[Operator], launches: Sequence[Launch]) -> list[Span]:
    """What gloo's thread was busy with: one collective after the other, in order of launch."""
    carried = [launch for launch in launches if launch.kind != "barrier"]
    busy = [each for each in operators if each.name.startswith(_GLOO)]
    if len(busy) != len(carried):
        return []
    return [
        Span(LINK, way_of(launch.kind), launch.bucket, *_times(each), launch.bytes)
        for each, launch in zip(busy, carried, strict=True)
    ]


def _reported_waits(operators: Iterable[Operator], launches: Sequence[Launch]) -> list[Span]:
    """Waits as engines and graphs report them; a graph's is told by the buffer that it waits for."""
    spans = []
    for operator in operators:
        read = read_bucket(operator.name)
        if read is not None and read[0] in (WAIT_GATHER, WAIT_REDUCE):
            spans.append(Span(COMPUTE, WAIT, read[1], *_times(operator)))
        elif operator.name == WAIT_TENSOR:
            start_s, end_s = _times(operator)
            read_buffer = operator.arguments[0] if operator.arguments else ()
            address = read_buffer[0].address if read_buffer else None
            before = [each for each in launches if each.address == address and each.start_s < start_s]
            spans.append(Span(COMPUTE, WAIT, before[-1].bucket if before else "", start_s, end_s))
    return spans


def _one_after_the_other(calls: Iterable[Span]) -> list[Span]:
    """Calls in order of time; launches and waits go by two clocks, which agree to some ten microseconds only."""
    found: list[Span] = []
    for call in sorted(calls, key=lambda call: call.start_s):
        start_s = max(call.start_s, found[-1].end_s) if found else call.start_s
        found.append(Span(call.lane, call.kind, call.name, start_s, max(start_s, call.end_s), call.bytes))
    return found


def _compute(phases: Sequence[Span], calls: Sequence[Span], launches: Sequence[Launch]) -> list[Span]:
    """What is between collective calls; see [Note: whose compute]."""
    gathered = {each.bucket for each in launches if way_of(each.kind) == GATHER}
    spans = []
    for phase in phases:
        inside = [call for call in calls if phase.start_s <= call.start_s < phase.end_s]
        reductions = [each for each in launches if way_of(each.kind) == REDUCE and each.start_s < phase.end_s]
        at_s, bucket = phase.start_s, ""
        for start_s, end_s, call in [*((call.start_s, call.end_s, call) for call in inside), (phase.end_s, 0.0, None)]:
            if phase.name == BACKWARD:
                bucket = next((each.bucket for each in reductions if each.start_s >= at_s), "")
            if start_s > at_s:
                spans.append(Span(COMPUTE, COMPUTE, bucket, at_s, start_s))
            if call is not None and phase.name == FORWARD and call.kind == WAIT and call.name in gathered:
                bucket = call.name
            at_s = max(at_s, end_s)
    return spans


def _is_operator(operator: Operator) -> bool:
    return phase_of_range(operator.name) is None and not operator.name.startswith(_GLOO)


def _times(operator: Operator) -> tuple[float, float]:
    return operator.start_ns / 1e9, operator.end_ns / 1e9


def _shifted(span: Span, zero_s: float) -> Span:
    return Span(span.lane, span.kind, span.name, span.start_s - zero_s, span.end_s - zero_s, span.bytes)
