"""Giving the memory back: the storage of a group's whole parameters, freed and refilled.

Counterpart: fsdp_compiled/reshard.py, where the compiler is told to gather again instead of keeping.
Source: torch 2.13 `_fsdp_param.py` (`alloc_storage`, `free_storage`, [Note: FSDP and autograd]). Differs: one storage
for each group instead of one for each parameter, and an alias made with `.data` instead of a guard on version counters.
Left out: a pool that groups of one size share.

[Note: a piece for backward]
`reshard_after_forward=n` keeps 1/n of the whole parameters between forward and backward, so that backward gathers over
n neighbours. Each of the n ranks has the same whole buffer, so the piece is cut out of that, without regard to where a
parameter begins, and gathered back into its place: nothing is sorted, and no parameter has a second sharded form.
Modules hold their shards in between, as after any reshard; a change made to those is seen by the next forward.

[Note: one storage, refilled]
Autograd saves whole parameters, or views of them, for backward. Resharding takes their memory away under its hands:
the *storage* shrinks to zero bytes while the tensors, and what autograd saved, go on pointing at it. Before backward
needs them the same storage grows again and is refilled with the same values. So the tensors are made once and live as
long as the group; a new tensor for each gather would leave autograd with the old, empty one.
Autograd also counts writes: a saved tensor that was written to since is an error. The refill is no change of value,
so it goes through `writable`, an alias that `.data` gave a version counter of its own.
"""

from __future__ import annotations

import torch


class WholeBuffer:
    """Memory for the whole parameters of one group, there on demand; see [Note: one storage, refilled].

    It begins allocated, since torch makes no view of freed storage: make the views, then free it.

    Attributes:
        whole: 1D, what parameters are views of.
        writable: 1D, the same memory, to write to.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.whole = torch.empty(numel, dtype=dtype, device=device)
        self.writable = self.whole.data
        self._bytes = numel * self.whole.element_size()

    @property
    def allocated_bytes(self) -> int:
        """What the buffer holds now."""
        return self.whole.untyped_storage().nbytes()

    def alloc(self) -> None:
        """Get the memory; what it holds is undefined."""
        storage = self.whole.untyped_storage()
        if storage.nbytes() != self._bytes:
            storage.resize_(self._bytes)

    def free(self) -> None:
        """Give the memory back."""
        self.whole.untyped_storage().resize_(0)

    def piece(self, index: int, count: int) -> torch.Tensor:
        """A copy of one of `count` equal parts; see [Note: a piece for backward]."""
        return self.writable.view(count, -1)[index].clone()


class SharedBuffer(WholeBuffer):
    """The whole parameters where they are the shard: one rank, no cast. Nothing to allocate, fill or free."""

    def __init__(self, shard: torch.Tensor) -> None:
        self.whole = shard.data  # a version counter of its own: an optimizer's write is not one to saved tensors
        self.writable = self.whole

    def alloc(self) -> None:
        """Nothing to do: the memory is the shard's."""

    def free(self) -> None:
        """Nothing to do: the memory is the shard's."""
