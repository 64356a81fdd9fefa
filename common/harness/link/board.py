"""Shared memory of one rank on one link: what it has issued, how far it has read, and the data it sends.

Each rank writes its own board and reads its peers'; nobody waits for anybody to make one. Memory is anonymous files
(memfd) that peers open through /proc, so nothing ever has a name in /dev/shm and whatever way a process ends, nothing
stays behind.

[Note: publication]
A writer fills in data and slot, and then raises `posted`; a reader looks at `posted`, and then reads. On x86 stores are
seen in that order. Elsewhere they need fences, and `fence` has the interpreter make one: to release and take a lock
twice orders what comes before it against what comes after.

Left out: ranks on several machines or in several PID namespaces (refused by `Link`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import struct
import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SLOTS = 4096
"""Operations of one link that may be in flight."""

ALIGNMENT = 64
NAME = "fsdp-link"

_SLOT = struct.Struct("=dqqqiIqq8s")
_WORD_AT, _POSTED_AT, _CONSUMED_AT, _SLOTS_AT = 0, 64, 128, 4096
_FUTEX_NUMBER = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYBODY = 2**31 - 1


class Slot(NamedTuple):
    """One operation as a rank posts it.

    Attributes:
        issue_s: when, on the clock that all processes of a machine share.
        kind: index of the kind of operation.
        size: bytes of the full buffer, equal on all ranks unless shares are uneven.
        wire: bytes on the wire, by this rank's shares.
        file: descriptor of the file that holds the payload, in the rank's process; -1 for an empty payload.
        inode: of that file; see `Memory`.
        offset: of the payload in that file.
        length: of the payload, padding included.
        terms: what else the ranks must agree on; see `terms_of`.
    """

    issue_s: float
    kind: int
    size: int
    wire: int
    file: int
    inode: int
    offset: int
    length: int
    terms: bytes


class Timespec(ctypes.Structure):
    """What futex takes as a timeout."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def futex_number() -> int | None:
    """The number of the futex system call here, or None where it is not known."""
    uname = os.uname()
    return _FUTEX_NUMBER.get(uname.machine) if uname.sysname == "Linux" else None


class Memory:
    """An anonymous file, mapped: our own, or a peer's.

    A descriptor alone does not name it: once its owner has closed it, the same number may be another file's.

    Attributes:
        file: its descriptor in the process that made it.
        inode: the number that the kernel knows it by, as far as it fits into a slot.
        map: the mapping.
        data: the same as a tensor of bytes.
    """

    def __init__(self, size: int, *, pid: int | None = None, file: int = -1, inode: int = 0) -> None:
        """Make a file of `size` bytes, or map what process `pid` knows as `file`.

        Raises:
            FileNotFoundError, ProcessLookupError: the process has closed it, or is gone.
            PermissionError: it is not ours to read.
        """
        if pid is None:
            self._own = os.memfd_create(NAME)
            os.ftruncate(self._own, size)
            self.file, self.inode, self.map = self._own, _inode(self._own), mmap.mmap(self._own, size)
        else:
            self._own, self.file, self.inode = -1, file, inode
            found = os.open(f"/proc/{pid}/fd/{file}", os.O_PATH)  # whatever it is, a socket too
            try:
                if _inode(found) != inode:
                    raise FileNotFoundError(f"descriptor {file} of process {pid} is another file by now")
                opened = os.open(f"/proc/self/fd/{found}", os.O_RDWR)
                try:
                    self.map = mmap.mmap(opened, os.fstat(opened).st_size)
                finally:
                    os.close(opened)
            finally:
                os.close(found)
        self.data = torch.frombuffer(self.map, dtype=torch.uint8)

    def close(self) -> None:
        """Let go of it; the mapping goes with the last tensor over it, if one is still about."""
        if self._own >= 0:
            os.close(self._own)
        del self.data, self.map


class Arena:
    """A file whose bytes are handed out in order, round and round, and free again in the order they were taken."""

    def __init__(self, size: int) -> None:
        self.memory = Memory(size)
        self._size = size
        self._head = 0
        self._live: deque[tuple[int, int]] = deque()  # operation and offset, oldest first

    def take(self, size: int, operation: int, done: int) -> int | None:
        """An offset for `size` bytes, or None if there is no room; operations below `done` need theirs no more."""
        while self._live and self._live[0][0] < done:
            self._live.popleft()
        start = 0
        if self._live:
            tail = self._live[0][1]
            if self._head > tail:
                limit, start = self._size, self._head
                if self._head + size > self._size:
                    limit, start = tail, 0
            else:
                limit, start = tail, self._head
            if start + size > limit:
                return None
        elif size > self._size:
            return None
        self._head = start + size
        self._live.append((operation, start))
        return start


class Board:
    """What one rank shows the others; see [Note: publication].

    Args:
        peer: the owner's `address`; None makes a board of our own.
        arena_bytes: size of the first arena; one more is added whenever a payload finds no room.
    """

    def __init__(self, peer: tuple[int, int, int] | None = None, *, arena_bytes: int = 0) -> None:
        pid, file, inode = peer or (None, -1, 0)
        self._memory = Memory(_SLOTS_AT + SLOTS * _SLOT.size, pid=pid, file=file, inode=inode)
        self._pid = pid
        self._process = os.pidfd_open(pid) if pid is not None else -1
        view = memoryview(self._memory.map)
        self._posted = view[_POSTED_AT : _POSTED_AT + 8].cast("q")
        self._consumed = view[_CONSUMED_AT : _CONSUMED_AT + 8].cast("q")
        self._word = ctypes.c_int32.from_buffer(self._memory.map, _WORD_AT)
        self._arena_bytes = arena_bytes
        self._arenas: list[Arena] = []
        self._files: dict[tuple[int, int], Memory] = {}

    @property
    def address(self) -> tuple[int, int, int]:
        """What a peer needs to open this board: process, file descriptor and inode."""
        return os.getpid(), self._memory.file, self._memory.inode

    @property
    def posted(self) -> int:
        """How many operations the owner has issued."""
        return self._posted[0]

    @property
    def consumed(self) -> int:
        """How many operations the owner has taken in and will not read again."""
        return self._consumed[0]

    @property
    def is_alive(self) -> bool:
        """Whether the owner's process still runs; the kernel answers, also for one that was not reaped yet."""
        if self._process < 0:
            return True
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Let go of all memory, also if a traceback keeps this object; the board can't be used any more."""
        self._posted.release()
        self._consumed.release()
        del self._word
        for memory in (self._memory, *(arena.memory for arena in self._arenas), *self._files.values()):
            memory.close()
        if self._process >= 0:
            os.close(self._process)

    # --- the owner's side

    def place(self, payload: Sequence[Tensor], operation: int, done: int) -> tuple[int, int, int, int]:
        """Copy pieces of bytes into an arena, each at a multiple of 64.

        Returns:
            File, inode, offset and length for the slot.
        """
        size = sum(padded(piece.numel()) for piece in payload)
        if not size:
            return -1, 0, 0, 0
        arena, offset = self._room(size, operation, done)
        at = offset
        for piece in payload:
            arena.memory.data[at : at + piece.numel()].copy_(piece)
            at += padded(piece.numel())
        return arena.memory.file, arena.memory.inode, offset, size

    def _room(self, size: int, operation: int, done: int) -> tuple[Arena, int]:
        for arena in self._arenas:
            offset = arena.take(size, operation, done)
            if offset is not None:
                return arena, offset
        arena = Arena(max(self._arena_bytes, padded(size, mmap.PAGESIZE)))
        self._arenas.append(arena)
        offset = arena.take(size, operation, done)
        assert offset is not None
        return arena, offset

    def post(self, operation: int, slot: Slot) -> None:
        """Show an operation to the others and wake those that wait for it."""
        _SLOT.pack_into(self._memory.map, _SLOTS_AT + operation % SLOTS * _SLOT.size, *slot)
        fence()
        self._posted[0] = operation + 1
        self._wake()

    def consume(self, upto: int) -> None:
        """Say that operations below `upto` are not read any more."""
        fence()
        self._consumed[0] = upto
        self._wake()

    def _wake(self) -> None:
        self._word.value = (self._word.value + 1) & _EVERYBODY
        _futex(self._word, _FUTEX_WAKE, _EVERYBODY, None)

    # --- the reader's side

    def slot(self, operation: int) -> Slot:
        """What the owner posted as this operation."""
        fence()
        return Slot(*_SLOT.unpack_from(self._memory.map, _SLOTS_AT + operation % SLOTS * _SLOT.size))

    def payload(self, slot: Slot) -> Tensor:
        """The bytes [n] that the owner posted with an operation, in place."""
        if slot.file < 0:
            return self._memory.data[:0]
        return self._file(slot.file, slot.inode).data[slot.offset : slot.offset + slot.length]

    def _file(self, file: int, inode: int) -> Memory:
        for arena in self._arenas:
            if arena.memory.file == file:
                return arena.memory
        if (file, inode) not in self._files:
            self._files[file, inode] = Memory(0, pid=self._pid, file=file, inode=inode)
        return self._files[file, inode]

    @property
    def changes(self) -> int:
        """A number that is another one after every `post` and `consume` of the owner."""
        return self._word.value

    def await_change(self, seen: int, limit_s: float) -> None:
        """Sleep until `changes` is not `seen` any more, or time is up."""
        timeout = Timespec(int(limit_s), int(limit_s % 1 * 1e9))
        _futex(self._word, _FUTEX_WAIT, seen, ctypes.byref(timeout))


def _inode(file: int) -> int:
    return os.fstat(file).st_ino & 0xFFFFFFFF


def padded(size: int, to: int = ALIGNMENT) -> int:
    """`size` rounded up."""
    return -(-size // to) * to


def pieces_of(payload: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The pieces, of these many bytes, that `Board.place` wrote one after the other."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(payload[at : at + size])
        at += padded(size)
    return pieces


def fence() -> None:
    """Order memory accesses before against those after; see [Note: publication]."""
    lock = threading.Lock()
    with lock:
        pass
    with lock:
        pass


_libc = ctypes.CDLL(None, use_errno=True)


def _futex(word: ctypes.c_int32, call: int, value: int, timeout: object) -> None:
    number = futex_number()
    assert number is not None, "checked before a board is made"
    _libc.syscall(number, ctypes.byref(word), call, value, timeout, None, 0)  # lets go of the interpreter's lock
