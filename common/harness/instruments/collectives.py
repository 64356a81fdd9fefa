"""Collectives of one step, by phase and kind, with bytes: one count for every way of asking for the same thing.

The names differ by front end (`dist.all_gather_into_tensor`, functional collectives, DTensor, graphs of AOTAutograd and
of Inductor), but each asks the process group, and the process group dispatches one `c10d::` operator, which the
profiler sees. Counting only those, in one table, counts nothing twice.

Bytes are those of the whole buffer: the gathered output, the unreduced input; padding included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.profiler import record_function

from common.harness.records import CollectiveCount
from common.torch_private import Operator, record_events

FORWARD, BACKWARD, OPTIMIZER = PHASES = ("forward", "backward", "optimizer")
_RANGE = "step phase: "
_NAMESPACE = "c10d::"


@dataclass(frozen=True)
class _Form:
    """One `c10d::` operator: its kind, and which argument shows the whole buffer.

    Attributes:
        kind: what records call it.
        argument: position of the tensors to measure; None for an operation that carries no data.
        is_share: they are one rank's share, since the whole is a list of lists, which events do not show.
    """

    kind: str
    argument: int | None
    is_share: bool = False


_FORMS = {
    "_allgather_base_": _Form("all_gather", 0),
    "allgather_into_tensor_coalesced_": _Form("all_gather", 0),
    "allgather_": _Form("all_gather", 1, is_share=True),
    "allgather_coalesced_": _Form("all_gather", 1, is_share=True),
    "_reduce_scatter_base_": _Form("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": _Form("reduce_scatter", 1),
    "reduce_scatter_": _Form("reduce_scatter", 0, is_share=True),
    "alltoall_base_": _Form("all_to_all", 1),
    "alltoall_": _Form("all_to_all", 1),
    "allreduce_": _Form("all_reduce", 0),
    "allreduce_coalesced_": _Form("all_reduce", 0),
    "broadcast_": _Form("broadcast", 0),
    "reduce_": _Form("reduce", 0),
    "gather_": _Form("gather", 1, is_share=True),
    "scatter_": _Form("scatter", 0, is_share=True),
    "send": _Form("send", 0),
    "recv_": _Form("recv", 0),
    "recv_any_source_": _Form("recv", 0),
    "barrier": _Form("barrier", None),
    "monitored_barrier_": _Form("barrier", None),
}


@dataclass
class CollectiveMeter:
    """What `count_collectives` found; filled when its block ends."""

    counts: list[CollectiveCount] = field(default_factory=list)


def phase(name: str) -> AbstractContextManager[object]:
    """Mark a phase of the step, one of `PHASES`, so that events inside can be told apart."""
    assert name in PHASES, name
    return record_function(_RANGE + name)


@contextmanager
def count_collectives() -> Iterator[CollectiveMeter]:
    """Count the collectives that this rank launches inside the `phase` ranges of the block."""
    meter = CollectiveMeter()
    with record_events() as recording:
        yield meter
    meter.counts += tally(recording.operators, dist.get_world_size() if dist.is_initialized() else 1)


def tally(operators: Iterable[Operator], world_size: int) -> list[CollectiveCount]:
    """Sum up the collectives among `operators`, sorted by phase and kind.

    A collective belongs to the phase during which it was launched, on whichever thread (backward has one of its
    own on some devices).
    """
    operators = list(operators)
    ranges = [
        (operator.start_ns, operator.end_ns, name)
        for operator in operators
        if (name := phase_of_range(operator.name)) is not None
    ]
    totals: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for operator in filter(is_collective, operators):
        phases = [name for start, end, name in ranges if start <= operator.start_ns < end]
        if phases:
            kind, size = measure_collective(operator, world_size)
            total = totals[phases[-1], kind]
            total[0] += 1
            total[1] += size
    order = sorted(totals, key=lambda key: (PHASES.index(key[0]), key[1]))
    return [CollectiveCount(*key, *totals[key]) for key in order]


def phase_of_range(name: str) -> str | None:
    """The phase that a range of this name marks; None if it is another one's."""
    return name.removeprefix(_RANGE) if name.startswith(_RANGE) else None


def is_collective(operator: Operator) -> bool:
    """Whether an event launches a collective; what a kernel of a c10d operator calls in turn is its own affair."""
    return operator.name.startswith(_NAMESPACE) and not any(name.startswith(_NAMESPACE) for name in operator.inside)


def measure_collective(operator: Operator, world_size: int) -> tuple[str, int]:
    """Kind and whole-buffer bytes of one collective; one that is not in the table goes by its own name."""
    name = operator.name.removeprefix(_NAMESPACE)
    form = _FORMS.get(name, _Form(name, None))
    if form.argument is None:
        return form.kind, 0
    size = sum(tensor.bytes for tensor in operator.arguments[form.argument])
    return form.kind, size * world_size if form.is_share else size
