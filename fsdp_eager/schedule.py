"""When to launch and when to wait: prefetch order, lanes beside compute, and reductions in flight.

Counterpart: fsdp_compiled/schedule.py, where a pass moves nodes of a graph.
Source: torch 2.13 `_fsdp_param_group.py` (`FSDPCommContext`, `_backward_prefetch`); the FSDP paper (arXiv
2304.11277), sections 3.3.2 and 3.3.3. Differs: forward prefetch needs no list from the user, it follows the order
of the last iteration; overlap comes from work handles on every device, so there is some on a CPU too.
A user's prefetch lists go before that order; `max_gathers` is the rate limiter of the FSDP paper, section 3.4.

One bucket ahead, in time from left to right (G gather, R reduce; numbers are buckets):

    forward   compute   .   0     1     2            backward  compute  .   2       1       0
              link     G0  G1    G2                            link    G2  G1   R2 G0   R1      R0

A gather is launched before the compute it hides behind and waited for when its own bucket is needed. A reduction is
waited for when the next one is ready to be packed, so that one message at a time is held. With replicas it has a second
leg, over those, which is launched then and has until the one after the next.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeVar

import torch

from common.ranges import LAUNCH_GATHER, LAUNCH_REDUCE, WAIT_GATHER, WAIT_REDUCE, bucket_range
from fsdp_eager.bucket import FSDPParamGroup
from fsdp_eager.launch_order import check_launch, explain_failure
from fsdp_eager.param import ShardedState
from fsdp_eager.reduction import InFlight

T = TypeVar("T")

EventLog = Callable[[str, str], None]
"""Called with an event and the name of a group. Events are `launch_gather`, `wait_gather`, `discard_gather`, `free`,
`launch_reduce`, `wait_reduce` and `discard_reduce`; a group that does not communicate has none."""


class Lane:
    """A place beside compute for one kind of communication: a stream on a GPU, nothing at all on a CPU.

    On a CPU a work handle is enough: the backend's own threads move the data.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._stream: Any = None if device.type == "cpu" else self._module.Stream(device)

    @contextlib.contextmanager
    def launch(self, *inputs: torch.Tensor, after: torch.Event | None = None) -> Iterator[None]:
        """Run the body beside compute, after everything that compute was given so far, or after an event.

        Args:
            inputs: made by compute and read in the body; their memory is not reused before that is done.
            after: what to wait for.
        """
        if self._stream is None:
            yield
            return
        if after is None:
            self._stream.wait_stream(self._module.current_stream())
        else:
            self._stream.wait_event(after)
        for tensor in inputs:
            tensor.record_stream(self._stream)
        with self._module.stream(self._stream):
            yield

    def join(self) -> None:
        """Let what compute is given from now on run after everything that was launched here."""
        if self._stream is not None:
            self._module.current_stream().wait_stream(self._stream)


@dataclass
class ScheduleSwitches:
    """What users set for a whole model, each by a method of `FSDPModule`, on any module of it.

    Attributes:
        log: told of each event, if it is set.
        max_gathers: how many gathers may be in flight ahead of their use; None: as many as prefetch lists ask for.
        max_messages: how many messages of gradients may be held at once.
        after_optimizer: what the next gather waits for instead of all that compute was given.
        is_last_backward: the next backward is the last one before the optimizer, and finishes what is in flight.
    """

    log: EventLog | None = None
    max_gathers: int | None = None
    max_messages: int = 1
    after_optimizer: torch.Event | None = None
    is_last_backward: bool = True

    def take(self, other: ScheduleSwitches) -> None:
        """Take from `other` what was set there and not here."""
        for item in fields(self):
            if getattr(self, item.name) == item.default:
                setattr(self, item.name, getattr(other, item.name))


class Schedule:
    """The order of the groups of one model, and what is in flight.

    Attributes:
        switches: may change at any time.
    """

    def __init__(self, groups: Sequence[FSDPParamGroup], device: torch.device, switches: ScheduleSwitches) -> None:
        """Expect `groups` in this order until a forward has shown another."""
        self.switches = switches
        self._groups = tuple(groups)
        self._gather_lane = Lane(device)
        self._reduce_lane = Lane(device)
        self._expected = list(groups)
        self._entered: list[FSDPParamGroup] = []  # this forward so far
        self._cursor = 0  # how far along the expected order it is
        self._whole_model = True
        # forward uses that wait for their backward, oldest first, and what lives as long as their graph
        self._completed: list[tuple[FSDPParamGroup, weakref.ref[Any]]] = []
        self._scattering: deque[tuple[FSDPParamGroup, InFlight]] = deque()  # over the ranks that share a model
        self._replicating: deque[tuple[FSDPParamGroup, InFlight]] = deque()  # over replicas, or done with that

    # Gathers

    def unshard(self, group: FSDPParamGroup, *, refresh: bool = False) -> None:
        """Make the parameters of `group` whole now, by the gather in flight if there is one.

        Args:
            group: what is needed.
            refresh: gather again what is whole or on its way, if the shards were written to since.
        """
        if refresh and group.is_stale:
            self.discard(group)
            self.reshard(group)
        if group.state is ShardedState.UNSHARDED:
            return
        self.launch(group)
        self._wait(WAIT_GATHER, group, group.wait_gather)
        self._tell(WAIT_GATHER, group)

    def launch(self, group: FSDPParamGroup) -> None:
        """Launch the gather of `group`, if it is sharded."""
        if group.state is ShardedState.SHARDED:
            group.settle()
        elif group.state is not ShardedState.SHARDED_POST_FORWARD:
            return
        self._check(LAUNCH_GATHER, group)
        event, self.switches.after_optimizer = self.switches.after_optimizer, None
        with self._gather_lane.launch(after=event), self._range(LAUNCH_GATHER, group):
            group.launch_gather()
        self._tell(LAUNCH_GATHER, group)

    def prefetch(self, groups: Iterable[FSDPParamGroup]) -> None:
        """Launch the gathers of `groups` ahead of their use, as far as they want that and the limit lets them."""
        limit = self.switches.max_gathers
        for group in groups:
            if limit is not None and sum(item.state is ShardedState.GATHERING for item in self._groups) >= limit:
                return
            if group.options.prefetch:
                self.launch(group)

    def reshard(self, group: FSDPParamGroup, *, after_forward: bool = False) -> None:
        """Give back the whole parameters of `group`, if they are there."""
        was_whole = group.state is ShardedState.UNSHARDED
        group.reshard(after_forward=after_forward)
        if was_whole:
            self._tell("free", group)

    def discard_unused(self) -> None:
        """Drop gathers that were launched for a use that did not come."""
        for group in self._groups:
            self.discard(group)

    def discard(self, group: FSDPParamGroup) -> None:
        """Drop the gather of `group` that is in flight, if there is one."""
        if group.state is ShardedState.GATHERING:
            self._wait(WAIT_GATHER, group, group.discard_gather)
            self._tell("discard_gather", group)

    # Order

    def begin_forward(self, *, whole_model: bool) -> None:
        """Forget the forward before this one; expect nothing of one that runs a part of the model only."""
        self._completed = [use for use in self._completed if use[1]() is not None]
        self._entered = []
        self._cursor = 0 if whole_model else len(self._expected)
        self._whole_model = whole_model

    def enter(self, group: FSDPParamGroup) -> FSDPParamGroup | None:
        """Note that forward has come to `group`.

        Returns:
            The group that is expected next; None if this one was not expected here, or is the last.
        """
        self._entered.append(group)
        try:
            self._cursor = self._expected.index(group, self._cursor) + 1
        except ValueError:
            return None
        return self._expected[self._cursor] if self._cursor < len(self._expected) else None

    def complete(self, group: FSDPParamGroup, graph: weakref.ref[Any]) -> None:
        """Note that forward has done with `group`, and backward will come back to it while `graph` lives."""
        self._completed.append((group, graph))

    def end_forward(self) -> None:
        """Expect the same order next time, if the whole model ran."""
        if self._whole_model:
            self._expected = self._entered
        self.discard_unused()

    def awaiting_backward(self) -> set[FSDPParamGroup]:
        """The groups with a forward use that backward has not come back to yet."""
        return {group for group, _ in self._completed}

    def enter_backward(self, group: FSDPParamGroup) -> FSDPParamGroup | None:
        """Note that backward has come to the last use of `group`.

        Returns:
            The group that forward completed before it, which backward should need next.
        """
        for i in reversed(range(len(self._completed))):
            if self._completed[i][0] is group:
                del self._completed[i:]
                return self._completed[-1][0] if self._completed else None
        return None

    # Reductions

    def reduce(self, group: FSDPParamGroup) -> None:
        """Launch the reduction of the gradients that are there, once there is room for its message."""
        gradients = group.reducer.take()
        if not gradients:
            return
        self._make_room(self.switches.max_messages - 1)
        params = [param for param, _ in gradients]
        self._check(LAUNCH_REDUCE, group)
        message = group.reducer.pack(gradients)
        with self._reduce_lane.launch(*message.parts()), self._range(LAUNCH_REDUCE, group):
            self._scattering.append((group, group.reducer.launch(params, message)))
        self._tell(LAUNCH_REDUCE, group)

    def finish_reductions(self) -> None:
        """Wait for the reductions in flight and set their gradients."""
        self._make_room(0)
        self._accept()

    def drop_reductions(self) -> None:
        """Wait for the reductions in flight and forget them: their step was given up, gradients may be cleared."""
        for group, flight in (*self._scattering, *self._replicating):
            self._wait(WAIT_REDUCE, group, flight.pending.wait)
            self._tell("discard_reduce", group)
        self._scattering.clear()
        self._replicating.clear()

    def end_backward(self) -> None:
        """Finish what is in flight, and let the optimizer run after it."""
        self.finish_reductions()
        self.discard_unused()
        self._completed.clear()
        self._reduce_lane.join()

    def _make_room(self, messages: int) -> None:
        """Take reductions to their next leg, oldest first, until no more than so many messages are held."""
        while len(self._scattering) > messages:
            self._accept()
            group, flight = self._scattering.popleft()
            with self._reduce_lane.launch():
                over_replicas = self._wait(WAIT_REDUCE, group, partial(group.reducer.advance, flight))
            self._replicating.append((group, flight))
            if not over_replicas:
                self._accept()

    def _accept(self) -> None:
        """Set the gradients that are on their last leg."""
        while self._replicating:
            group, flight = self._replicating.popleft()
            accept = partial(group.reducer.accept, flight)
            with self._reduce_lane.launch():
                self._wait(WAIT_REDUCE, group, accept) if flight.pending.work is not None else accept()
            self._tell(WAIT_REDUCE, group)

    def _check(self, event: str, group: FSDPParamGroup) -> None:
        if group.communicates:
            check_launch(f"{event} of {group.name}", group.options.mesh)

    def _wait(self, event: str, group: FSDPParamGroup, wait: Callable[[], T]) -> T:
        """Run `wait` in a range; if it fails, say what for."""
        try:
            with self._range(event, group):
                return wait()
        except RuntimeError as error:
            explain_failure(error, f"{event} of {group.name}")
            raise

    def _range(self, event: str, group: FSDPParamGroup) -> AbstractContextManager[object]:
        """A range in whatever profile is recorded; none if nothing travels."""
        return bucket_range(event, group.name) if group.communicates else nullcontext()

    def _tell(self, event: str, group: FSDPParamGroup) -> None:
        if self.switches.log is not None and group.communicates:
            self.switches.log(event, group.name)
