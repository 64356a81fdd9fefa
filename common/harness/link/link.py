"""One link of one process group: operations queue in the order of issue and end when the time model says.

Operation k ends at max(latest rank's issue of k, end of k-1) + alpha + wire / beta. All ranks post when they issued it
in shared memory, on one clock, so each computes the same end. Nothing runs in the background: data is taken in by
whoever issues or waits next, and `finish` sleeps until the end. A helper thread would not do: Inductor's kernels hold
the interpreter's lock for as long as they run.

Data is copied in at issue, so an input may be reused at once; outputs are written no later than `finish`.

[Note: failure]
A link that failed stays so: every later operation raises the same error, and nothing is waited for when it ends. The
rank whose link failed first tells why through the store and raises its count of consumed operations beyond all others.
A rank that then misses it, now or after it has closed its memory, takes the reason from there. Ranks that disagree all
get the disagreement as their error, whichever of them saw it.

Left out: threads (one at a time may use a link), sub-groups within one operation.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import ConfigError, EngineError, ParityError, RankError, RankTimeout
from common.harness.link.board import SLOTS, Board, Slot
from common.harness.link.meter import KINDS, LogEntry, Meter, Operation, Wait
from common.harness.link.spec import LinkSpec
from common.harness.link.terms import NO_TERMS, in_words

_UNEVEN = ("all_to_all",)
_POLL_S = 0.02
"""How often a rank that waits looks whether its peers live. One that posts wakes it at once."""
_CONNECT_POLL_S = 0.001
_ABANDONED = 1 << 60


Receive = Callable[[list[Tensor]], None]
"""Called once, with every rank's payload of bytes [n]; writes the outputs."""


class Link:
    """The emulated link of one group, as one rank sees it.

    Args:
        group, ranks: its name and global ranks.
        rank: our place among them.
        store: the group's store, through which boards are found.
        spec: the costs.
        meter: where to record.
        timeout_s: how long to wait for a rank.
        arena_bytes: shared memory to begin with.
    """

    def __init__(
        self,
        *,
        group: str,
        ranks: Sequence[int],
        rank: int,
        store: Any,
        spec: LinkSpec,
        meter: Meter,
        timeout_s: float,
        arena_bytes: int,
    ) -> None:
        self._group, self._ranks, self._rank = group, tuple(ranks), rank
        self._spec, self._meter, self._timeout_s = spec, meter, timeout_s
        self._store = store
        self._boards: list[Board | None] = [None] * len(ranks)
        self._boards[rank] = Board(arena_bytes=arena_bytes)
        # A group may get a link more than once; every rank counts for itself, and the n-th of each belong together.
        self._generation = store.add(f"fsdp-link/count/{rank}", 1)
        store.set(self._key(rank), f"{' '.join(map(str, self._own.address))} {_machine()}")
        self._next = 0
        self._free_s = 0.0
        self._pending: deque[tuple[Operation, Receive]] = deque()
        self._failure: ParityError | None = None

    @property
    def rank(self) -> int:
        """Our place among the ranks."""
        return self._rank

    @property
    def failure(self) -> ParityError | None:
        """What broke it, if it is broken; see [Note: failure]."""
        return self._failure

    @property
    def size(self) -> int:
        """How many ranks it joins."""
        return len(self._ranks)

    def issue(
        self,
        kind: str,
        *,
        size: int,
        wire: int,
        payload: Sequence[Tensor],
        receive: Receive,
        terms: bytes = NO_TERMS,
    ) -> Operation:
        """Begin an operation: copy in what this rank sends, and tell the others.

        Args:
            kind, size, wire: as in the log.
            payload: pieces of bytes that this rank sends.
            receive: see `Receive`.
            terms: what ranks must agree on beside kind and size, by `terms_of`.

        Raises: as `finish`.
        """
        self._raise_failure()
        index, begin_s = self._next, time.monotonic()
        while index - self._consumed() >= SLOTS:
            self._await(index - SLOTS, self._timeout_s, kind, lambda board: board.consumed)
        place = self._own.place(payload, index, self._consumed())
        operation = Operation(index, kind, size, terms, time.monotonic())
        self._next += 1
        self._meter.moving_s += operation.issue_s - begin_s
        self._pending.append((operation, receive))
        self._own.post(index, Slot(operation.issue_s, KINDS.index(kind), size, wire, *place, terms))
        self._take_in()
        return operation

    def finish(self, operation: Operation, timeout_s: float | None = None) -> None:
        """Wait until the operation is complete: all ranks have issued it, data is here, its time on the link is over.

        Raises:
            RankError: a rank is gone.
            RankTimeout: a rank did not issue the operation in time.
            EngineError: a rank issued another operation instead, or has found that ranks disagreed before.
        """
        called_s = time.monotonic()
        if operation.end_s is None:
            self._raise_failure()
            self._await(operation.index, timeout_s or self._timeout_s, operation.kind, lambda board: board.posted)
            self._take_in()
        assert operation.end_s is not None
        begin_s = now_s = time.monotonic()
        while now_s < operation.end_s:
            time.sleep(operation.end_s - now_s)
            now_s = time.monotonic()
        self._meter.exposed_s += now_s - begin_s
        self._meter.waits.append(Wait(self._group, operation.index, called_s, now_s))

    def settle(self) -> None:
        """Take in every operation of ours, also those that nobody waited for."""
        if self._pending and self._failure is None:
            last, _ = self._pending[-1]
            self._await(last.index, self._timeout_s, last.kind, lambda board: board.posted)
            self._take_in()

    def await_peers(self) -> None:
        """Wait until every rank has taken in what this one has sent."""
        if self._next and self._failure is None:
            self._await(self._next - 1, self._timeout_s, "the end of the link", lambda board: board.consumed)

    def close(self, failure: ParityError | None = None) -> None:
        """Let go of all shared memory; peers that still wait for this rank learn that it is gone, and of `failure`."""
        if failure is not None:
            self._fail(failure)
        self._failure = self._failure or EngineError(f"link: group {self._group!r} was used after its link's end")
        self._own.consume(_ABANDONED)
        for board in filter(None, self._boards):
            board.close()
        self._boards.clear()
        self._pending.clear()

    @property
    def _own(self) -> Board:
        board = self._boards[self._rank]
        assert board is not None
        return board

    # --- taking in

    def _take_in(self) -> None:
        """Complete, in order, every pending operation that all ranks have issued."""
        if not self._pending or not self._connect():
            return
        boards = [board for board in self._boards if board]
        posted = min(board.posted for board in boards)
        while self._pending and self._pending[0][0].index < posted:
            operation, receive = self._pending.popleft()
            slots = [board.slot(operation.index) for board in boards]
            self._check_match(operation, slots)
            begin_s = time.monotonic()
            payloads = [self._payload(place, slot) for place, slot in enumerate(slots)]
            try:
                with torch.no_grad():
                    receive(payloads)
            except ParityError as error:
                raise self._fail(error) from None
            self._own.consume(operation.index + 1)
            self._meter.moving_s += time.monotonic() - begin_s
            self._schedule(operation, slots)

    def _payload(self, place: int, slot: Slot) -> Tensor:
        board = self._boards[place]
        assert board is not None
        try:
            return board.payload(slot)
        except (FileNotFoundError, ProcessLookupError) as error:
            raise self._fail(self._gone(place, KINDS[slot.kind])) from error

    def _schedule(self, operation: Operation, slots: list[Slot]) -> None:
        """The time model."""
        wire = max(slot.wire for slot in slots)
        start_s = max(self._free_s, *(slot.issue_s for slot in slots))
        end_s = start_s + self._spec.cost_s(wire, self.size)
        self._free_s = operation.end_s = end_s
        self._meter.log.append(
            LogEntry(
                group=self._group,
                ranks=self._ranks,
                index=operation.index,
                kind=operation.kind,
                bytes=operation.size,
                wire_bytes=wire,
                issue_s=operation.issue_s,
                start_s=start_s,
                end_s=end_s,
            )
        )

    def _check_match(self, operation: Operation, slots: list[Slot]) -> None:
        for place, slot in enumerate(slots):
            kind, size = KINDS[slot.kind], operation.size if operation.kind in _UNEVEN else slot.size
            if (kind, size, slot.terms) != (operation.kind, operation.size, operation.terms):
                first, second = sorted((self._rank, place))  # whichever rank sees it says the same
                raise self._fail(
                    EngineError(
                        f"operation {operation.index} {self._where()}: rank {self._ranks[first]} issued "
                        f"{self._in_words(slots[first])}, rank {self._ranks[second]} {self._in_words(slots[second])}; "
                        "all ranks must issue the same collectives in the same order"
                    )
                )

    def _in_words(self, slot: Slot) -> str:
        return in_words(KINDS[slot.kind], slot.size, slot.terms, self._ranks)

    # --- the others

    def _consumed(self) -> int:
        """Operations below this need no memory any more."""
        return min(board.consumed if board else 0 for board in self._boards)

    def _await(self, index: int, timeout_s: float, what: str, count: Callable[[Board], int]) -> None:
        """Wait until the count of every rank has passed `index`."""
        begin_s = time.monotonic()
        while late := [place for place, board in enumerate(self._boards) if board is None or count(board) <= index]:
            self._take_in()
            before_s = time.monotonic()
            self._sleep_for(late[0], index, what, count)
            after_s = time.monotonic()
            self._meter.stalled_s += after_s - before_s
            if after_s - begin_s > timeout_s:
                names = ", ".join(str(self._ranks[place]) for place in late)
                raise self._fail(
                    RankTimeout(
                        f"{what}, operation {index} {self._where()}: rank {names} did not join within {timeout_s:g} s; "
                        "raise the timeout if this is only slow",
                        rank=self._ranks[late[0]],
                    )
                )

    def _sleep_for(self, place: int, index: int, what: str, count: Callable[[Board], int]) -> None:
        """Sleep until a rank has done something, or a moment if it does nothing."""
        board = self._boards[place]
        if board is None:
            if not self._connect():
                time.sleep(_CONNECT_POLL_S)
            return
        seen = board.changes
        if count(board) <= index:
            if not board.is_alive or board.consumed == _ABANDONED:
                raise self._fail(self._gone(place, f"{what}, operation {index}"))
            board.await_change(seen, _POLL_S)

    def _connect(self) -> bool:
        """Open the boards of ranks that have one by now; say whether all are open."""
        for place, board in enumerate(self._boards):
            if board is None and self._store.check([self._key(place)]):
                pid, file, inode, machine = self._store.get(self._key(place)).decode().split(" ", 3)
                try:
                    if machine != _machine():
                        raise PermissionError("they run on different machines or in different containers")
                    self._boards[place] = Board((int(pid), int(file), int(inode)))
                except (FileNotFoundError, ProcessLookupError) as error:
                    raise self._fail(self._gone(place, "the first operation")) from error
                except PermissionError as error:
                    pair = f"ranks {self._ranks[self._rank]} and {self._ranks[place]}"
                    message = f"link: {pair} cannot share memory ({error}); use --link gloo"
                    raise self._fail(ConfigError(message)) from error
        return all(board is not None for board in self._boards)

    def _gone(self, place: int, what: str) -> ParityError:
        """The error for a rank that is missed; see [Note: failure]."""
        rank, told = self._ranks[place], ""
        with suppress(dist.DistError):  # the store may be gone with it
            if self._store.check([self._failure_key(place)]):
                told = self._store.get(self._failure_key(place)).decode()
        kind, _, text = told.partition(": ")
        if kind == EngineError.__name__:
            return EngineError(text)
        why = told or "it failed, or left its link after an error"
        return RankError(f"{what} {self._where()}: rank {rank} is gone: {why}", rank=rank)

    def _fail(self, error: ParityError) -> ParityError:
        """Remember and tell what broke the link, if it is the first that did; see [Note: failure]."""
        if self._failure is None:
            self._failure = error
            with suppress(dist.DistError):  # without a store the others learn only that this rank is gone
                self._store.set(self._failure_key(self._rank), f"{type(error).__name__}: {error}")
            self._own.consume(_ABANDONED)
        return error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _where(self) -> str:
        return f"on group {self._group!r} (ranks {', '.join(map(str, self._ranks))})"

    def _key(self, place: int) -> str:
        return f"fsdp-link/{self._generation}/{place}"

    def _failure_key(self, place: int) -> str:
        return f"{self._key(place)}/failure"


def _machine() -> str:
    """What processes that can open each other's files have in common."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
