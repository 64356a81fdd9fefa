"""Which class of bytes a block is (`common.harness.memory_record`), from what the program holds and what events show.

A block has one class for its whole life, the first of these that ever fits:

1. it is the storage of a parameter at the start of the step, of optimizer state, or of a `.grad` at the start or at
   the end of a phase. The local tensor of a DTensor counts; a view counts its whole storage, padding included;
2. it is gathered, see below;
3. a collective was given it: a message;
4. it is something else.

[Note: gathered blocks]
A block holds whole parameters if an all-gather writes it, or if a copy (`aten::copy_`, in which all copying operators
of torch end on a CPU) fills a part of it from a block that does. So gathered messages count, and the buffers that they
are sorted into, for as long as they live: storages that an engine frees and refills, and copies that autograd saves.
A copy that repeats a row is none: that is a bias on its way into a result.

What it cannot see: outputs of an all-gather into a list of tensors, which events do not show; what a fused kernel of
Inductor writes, which is no operator, so that a weight sorted out of a gathered bucket by one counts as other (its
bucket does not); a casting or transposing kernel that is no copy. Where Inductor's code takes over a gathered block for
another result of the same size, the block stays gathered. On one rank nothing is gathered: casts are other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from common.harness.instruments.collectives import is_collective, measure_collective
from common.harness.instruments.lifetimes import Block, Sighting
from common.harness.memory_record import GATHERED, GRADIENTS, MESSAGES, OTHER, PARAMETERS, STATE
from common.torch_private import Operator, TensorArgument

_COPY = "aten::copy_"
_ALL_GATHER = "all_gather"


def held_by(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """The class of each storage that model and optimizer hold now, by address; what is empty has none."""
    held: dict[int, str] = {}
    params = list(model.parameters())
    state = [value for values in optimizer.state.values() for value in values.values()]
    for name, things in ((PARAMETERS, params), (STATE, state), (GRADIENTS, [param.grad for param in params])):
        for tensor in things:
            if isinstance(tensor, torch.Tensor):
                held.setdefault(_address(tensor), name)
    held.pop(0, None)
    return held


def _address(tensor: torch.Tensor) -> int:
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


def classify(blocks: Sequence[Block], operators: Iterable[Operator], sightings: Sequence[Sighting]) -> list[str]:
    """The class of each block.

    Args:
        blocks: of one step, those that are older included.
        operators: what ran, in order of time.
        sightings: what was held at the start, then at the end of each phase.
    """
    places = _Places(blocks)
    classes: dict[Block, str] = {}
    for name in (PARAMETERS, STATE, GRADIENTS):
        # later a model may hold whole parameters in the place of its shards
        for sighting in sightings[:1] if name == PARAMETERS else sightings:
            for address, found in sighting.held.items():
                if found == name and (block := places.at(address, sighting.time_ns)):
                    classes.setdefault(block, name)
    for operator in operators:
        if is_collective(operator):
            kind, _ = measure_collective(operator, 1)
            written = operator.arguments[:1] if kind == _ALL_GATHER else ()
            for block in places.of(written, operator.start_ns):
                if classes.get(block, MESSAGES) == MESSAGES:
                    classes[block] = GATHERED
            for block in places.of(operator.arguments, operator.start_ns):
                classes.setdefault(block, MESSAGES)
        elif operator.name == _COPY and not any(tensor.is_expanded for tensor in operator.arguments[1]):
            source = next(places.of(operator.arguments[1:2], operator.start_ns), None)
            if source is not None and classes.get(source) == GATHERED:
                for block in places.of(operator.arguments[:1], operator.start_ns):
                    classes.setdefault(block, GATHERED)
    return [classes.get(block, OTHER) for block in blocks]


class _Places:
    """Finds the block that was at an address at some moment."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._blocks: dict[int, list[Block]] = defaultdict(list)
        for block in blocks:
            self._blocks[block.address].append(block)

    def at(self, address: int, time_ns: int) -> Block | None:
        return next((block for block in self._blocks.get(address, ()) if block.lives_at(time_ns)), None)

    def of(self, arguments: Iterable[Iterable[TensorArgument]], time_ns: int) -> Iterator[Block]:
        """The blocks of an operator's arguments; what is no block of the program's has none."""
        for argument in arguments:
            for tensor in argument:
                if tensor.address and (block := self.at(tensor.address, time_ns)):
                    yield block
