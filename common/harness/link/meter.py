"""What a link records: every operation with its times, and what a rank spent on waiting and moving data."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.ranges import GATHER, REDUCE

OTHER = "other"
KINDS = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
    "all_to_all",
    "gather",
    "scatter",
    "reduce",
    "barrier",
)


def way_of(kind: str) -> str:
    """Which way an operation of a sharded model goes: `GATHER`, `REDUCE`, or `OTHER` for what is not of its step."""
    if kind == "all_gather":
        return GATHER
    return REDUCE if kind in ("reduce_scatter", "all_reduce", "all_to_all", "reduce") else OTHER


@dataclass(frozen=True)
class LogEntry:
    """One operation, as this rank saw it; times are on the machine's monotonic clock.

    Attributes:
        group: name of the process group.
        ranks: its global ranks.
        index: its number on this link, from 0.
        kind: one of `KINDS`.
        bytes: of the full buffer: what an all-gather yields, what a reduction takes.
        wire_bytes: what each rank sends on a ring.
        issue_s: when this rank issued it.
        start_s: when the link began it: all ranks had issued it, and the one before had ended.
        end_s: when it was complete.
    """

    group: str
    ranks: tuple[int, ...]
    index: int
    kind: str
    bytes: int
    wire_bytes: int
    issue_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Wait:
    """One call that waited for an operation, by its group and index, from call to return."""

    group: str
    index: int
    start_s: float
    end_s: float


@dataclass
class Meter:
    """What all links of a rank have seen.

    Attributes:
        log: operations that every rank has issued, in the order in which they were taken in.
        waits: in the order in which they ended.
        exposed_s: slept in waits for the end of an operation: communication that compute did not hide.
        stalled_s: spent in waits until the last rank had issued the operation.
        moving_s: spent on copies and sums, which a real network and GPU would do beside compute.
    """

    log: list[LogEntry] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    exposed_s: float = 0.0
    stalled_s: float = 0.0
    moving_s: float = 0.0

    def clear(self) -> None:
        """Start again from nothing."""
        self.log, self.waits = [], []
        self.exposed_s = self.stalled_s = self.moving_s = 0.0


@dataclass
class Operation:
    """One collective in flight.

    Attributes:
        index: its number on its link.
        terms: see `terms_of`.
        end_s: when it is complete; None until all ranks have issued it.
    """

    index: int
    kind: str
    size: int
    terms: bytes
    issue_s: float
    end_s: float | None = None
