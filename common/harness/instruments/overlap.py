"""How much compute each message of a step travels beside, counted in operators, so that no clock decides.

A message is in flight from its launch to the wait for it. What the program asks for in between it can hide behind, on
whatever device; a message with nothing in between is exposed. Counted are products of matrices, which every backend
leaves as operators of their own and which take most of a step.

Waits are known by what engines tell every profiler: the ranges of hooks (`common/ranges.py`), and `wait_tensor` of a
graph, which names the buffer it waits for. Left out: engines that tell neither, such as torch's `fully_shard`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.harness.instruments.collectives import phase_of_range
from common.harness.instruments.trace import WAIT_TENSOR, Launch, launches_of
from common.harness.link import way_of
from common.ranges import GATHER, REDUCE, WAIT_GATHER, WAIT_REDUCE, read_bucket
from common.torch_private import Operator, record_events

_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}


@dataclass(frozen=True)
class Flight:
    """One message of a step.

    Attributes:
        phase: during which it was launched.
        way: `GATHER` or `REDUCE` of `common.ranges`.
        bucket: whose; "" if it is not known.
        before: products of matrices in the step before its launch.
        beside: products of matrices between launch and wait.
        ahead: messages that were launched after it and before its wait.
    """

    phase: str
    way: str
    bucket: str
    before: int
    beside: int
    ahead: int


def measure_overlap(step: Callable[[], None], ranks: int) -> list[Flight]:
    """The messages of one `step`, in order of launch; those whose wait is not known are left out."""
    with record_events() as recording:
        step()
    return flights_of(recording.operators, ranks)


def flights_of(operators: Sequence[Operator], ranks: int) -> list[Flight]:
    """The messages among `operators` [in order of time]."""
    phases = [(name, each) for each in operators if (name := phase_of_range(each.name)) is not None]
    products = [each.start_ns / 1e9 for each in operators if each.name in _PRODUCTS]
    launches = launches_of(operators, ranks)
    waits = _waits(operators, launches)
    flights = []
    for number, launch in enumerate(launches):
        inside = [name for name, each in phases if each.start_ns / 1e9 <= launch.start_s < each.end_ns / 1e9]
        if inside and number in waits:
            flights.append(
                Flight(
                    phase=inside[-1],
                    way=way_of(launch.kind),
                    bucket=launch.bucket,
                    before=sum(at_s < launch.start_s for at_s in products),
                    beside=sum(launch.end_s <= at_s < waits[number] for at_s in products),
                    ahead=sum(launch.start_s < other.start_s < waits[number] for other in launches),
                )
            )
    return flights


def _waits(operators: Sequence[Operator], launches: Sequence[Launch]) -> dict[int, float]:
    """When each launch, by its number, was first waited for; without those of which nothing tells."""
    ways = {WAIT_GATHER: GATHER, WAIT_REDUCE: REDUCE}
    found: dict[int, float] = {}
    for operator in operators:
        start_s = operator.start_ns / 1e9
        open_ones = [i for i, each in enumerate(launches) if each.start_s < start_s and i not in found]
        read = read_bucket(operator.name)
        if read is not None and read[0] in ways:
            way, bucket = ways[read[0]], read[1]
            mine = [i for i in open_ones if (way_of(launches[i].kind), launches[i].bucket) == (way, bucket)][:1]
        elif operator.name == WAIT_TENSOR and operator.arguments and operator.arguments[0]:
            address = operator.arguments[0][0].address
            mine = [i for i in open_ones if launches[i].address == address][-1:]
        else:
            continue
        found.update(dict.fromkeys(mine, start_s))
    return found
