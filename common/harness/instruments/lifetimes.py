"""Blocks of memory from allocator events: when each was taken, and when it was given back.

Not counted: what a collective backend allocates for itself (staging copies of gloo, say). It belongs to the
transport, and its threads take and free it at moments of their own.

[Note: unreported frees]
The allocator reports to the profiler only on threads that carry the profiler's state. A buffer that a collective
reads is also held by the backend's thread until the operation ends, and when that thread lets go last, no event says
so. The block would look live for ever. It did live until about the end of the last event that used it, the backend's
own included, since the program waited for that: so a block that took part in a collective and was never reported
freed is taken as freed there, or when its address is handed out anew, if that is earlier. Blocks that took part in no
collective are left live. Where the program held such a block beyond that event, and the backend's thread beyond the
program, the peak comes out too low; on a busy machine that happens now and then. What the program still held at the
end of a phase, and of the step, is known, see `memory`, and counts as a use: so a block that is leaked stays live.

Source: torch 2.13 `c10/core/CPUAllocator.cpp` (`ProfiledCPUMemoryReporter`) for what is reported and what is not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from common.torch_private import Allocation, Operator

_COLLECTIVE = "c10d::"
_BACKEND = ("c10d::", "gloo:", "nccl:")


@dataclass(eq=False)
class Block:
    """One block from its allocation to its end; None while it lives on. One older than the recording starts at 0."""

    address: int
    bytes: int
    start_ns: int = 0
    end_ns: int | None = None

    def lives_at(self, time_ns: int) -> bool:
        """Whether it was there at that moment."""
        return self.start_ns <= time_ns and (self.end_ns is None or time_ns < self.end_ns)


@dataclass(frozen=True)
class Sighting:
    """What the program held at one moment: by address of a storage, the class of bytes that it is."""

    time_ns: int
    held: Mapping[int, str]


@dataclass(frozen=True)
class _Use:
    """An event that was given a storage."""

    start_ns: int
    end_ns: int
    is_collective: bool


def lifetimes(
    allocations: Iterable[Allocation],
    operators: Iterable[Operator],
    *,
    older: Mapping[int, int] | None = None,
    sightings: Iterable[Sighting] = (),
) -> list[Block]:
    """Pair allocations with frees by address; see [Note: unreported frees] for those without one.

    Args:
        allocations: in order of time.
        operators: what ran meanwhile.
        older: blocks that were there before, bytes by address.
        sightings: what is known of blocks besides.
    """
    blocks = [Block(address, size) for address, size in (older or {}).items()]
    live = {block.address: block for block in blocks}
    old = set(blocks)
    uses = _uses(operators, sightings)
    for event in allocations:
        held = live.pop(event.address, None)
        if event.bytes < 0:
            if held is not None:  # else it is older and nobody's, or the backend's
                held.end_ns = event.time_ns
            continue
        if held is not None:  # freed unseen: its address is handed out anew
            held.end_ns = min(_last_use(held, uses[event.address], event.time_ns) or event.time_ns, event.time_ns)
        if not any(name.startswith(_BACKEND) for name in event.inside):
            live[event.address] = Block(event.address, event.bytes, event.time_ns)
            blocks.append(live[event.address])
    for address, block in live.items():
        if block not in old:
            block.end_ns = _last_use(block, uses[address], None)
    return blocks


def changes(blocks: Sequence[Block]) -> Iterator[tuple[int, int, int]]:
    """Each time at which a block came or went, its place in `blocks`, and by how many bytes; in order of time."""
    found: list[tuple[int, int, int]] = []
    for place, block in enumerate(blocks):
        found.append((block.start_ns, place, block.bytes))
        if block.end_ns is not None:
            found.append((block.end_ns, place, -block.bytes))
    yield from sorted(found)


def _uses(operators: Iterable[Operator], sightings: Iterable[Sighting]) -> dict[int, list[_Use]]:
    """By address of the storage: the events that used it."""
    uses: dict[int, list[_Use]] = defaultdict(list)
    for operator in operators:
        use = _Use(operator.start_ns, operator.end_ns, operator.name.startswith(_COLLECTIVE))
        for argument in operator.arguments:
            for tensor in argument:
                if tensor.address is not None:
                    uses[tensor.address].append(use)
    for sighting in sightings:
        # up to just behind it: what was held then was live then
        use = _Use(sighting.time_ns, sighting.time_ns + 1, False)
        for address in sighting.held:
            uses[address].append(use)
    return uses


def _last_use(block: Block, uses: list[_Use], before_ns: int | None) -> int | None:
    """When the last event that used `block` ended; None if no collective did."""
    its_own = [
        use for use in uses if use.start_ns >= block.start_ns and (before_ns is None or use.start_ns < before_ns)
    ]
    if not any(use.is_collective for use in its_own):
        return None
    return max(use.end_ns for use in its_own)
