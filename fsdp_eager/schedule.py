"""When to launch and when to wait: prefetch order, lanes beside compute, and reductions in flight.

Counterpart: fsdp_compiled/schedule.py, where a pass moves nodes of a graph.
Source: torch 2.13 `_fsdp_param_group.py` (`FSDPCommContext`, `_backward_prefetch`); the FSDP paper (arXiv
2304.11277), sections 3.3.2 and 3.3.3. Differs: forward prefetch needs no list from the user, it follows the order
of the last iteration; overlap comes from work handles on every device, so there is some on a CPU too.
Left out: explicit prefetch lists, a limit on gathers in flight (there is never more than one ahead), separate process
groups for gathers and reductions.

One bucket ahead, in time from left to right (G gather, R reduce; numbers are buckets):

    forward   compute   .   0     1     2            backward  compute  .   2       1       0
              link     G0  G1    G2                            link    G2  G1   R2 G0   R1      R0

A gather is launched before the compute it hides behind and waited for when its own bucket is needed. A reduction is
waited for when the next one is ready to be packed, so that one message at a time is held.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fsdp_eager.bucket import FSDPParamGroup
from fsdp_eager.collectives import PendingReduction
from fsdp_eager.param import FSDPParam, ShardedState

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
    def launch(self, *inputs: torch.Tensor) -> Iterator[None]:
        """Run the body beside compute, after everything that compute was given so far.

        Args:
            inputs: made by compute and read in the body; their memory is not reused before that is done.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(self._module.current_stream())
        for tensor in inputs:
            tensor.record_stream(self._stream)
        with self._module.stream(self._stream):
            yield

    def join(self) -> None:
        """Let what compute is given from now on run after everything that was launched here."""
        if self._stream is not None:
            self._module.current_stream().wait_stream(self._stream)


class Schedule:
    """The order of the groups of one model, and what is in flight.

    Attributes:
        log: told of each event, if it is set.
    """

    def __init__(self, groups: Sequence[FSDPParamGroup], device: torch.device) -> None:
        """Expect `groups` in this order until a forward has shown another."""
        self.log: EventLog | None = None
        self._groups = tuple(groups)
        self._gather_lane = Lane(device)
        self._reduce_lane = Lane(device)
        self._expected = list(groups)
        self._entered: list[FSDPParamGroup] = []  # this forward so far
        self._cursor = 0  # how far along the expected order it is
        self._whole_model = True
        self._completed: list[FSDPParamGroup] = []  # forward uses that wait for their backward, oldest first
        self._reducing: tuple[FSDPParamGroup, list[FSDPParam], PendingReduction] | None = None

    # Gathers

    def unshard(self, group: FSDPParamGroup) -> None:
        """Make the parameters of `group` whole now, by the gather in flight if there is one."""
        self._launch(group)
        if group.state is ShardedState.GATHERING:
            group.wait_gather()
            self._tell("wait_gather", group)

    def prefetch(self, group: FSDPParamGroup | None) -> None:
        """Launch the gather of `group` ahead of its use, if it has one and wants to."""
        if group is not None and group.options.prefetch:
            self._launch(group)

    def reshard(self, group: FSDPParamGroup) -> None:
        """Give back the whole parameters of `group`, if they are there."""
        if group.state is ShardedState.UNSHARDED:
            group.reshard()
            self._tell("free", group)

    def discard_unused(self) -> None:
        """Drop gathers that were launched for a use that did not come."""
        for group in self._groups:
            if group.state is ShardedState.GATHERING:
                group.discard_gather()
                self._tell("discard_gather", group)

    # Order

    def begin_forward(self, *, whole_model: bool) -> None:
        """Forget the forward before this one; expect nothing of one that runs a part of the model only."""
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

    def complete(self, group: FSDPParamGroup) -> None:
        """Note that forward has done with `group`, and backward will come back to it."""
        self._completed.append(group)

    def end_forward(self) -> None:
        """Expect the same order next time, if the whole model ran."""
        if self._whole_model:
            self._expected = self._entered
        self.discard_unused()

    def awaiting_backward(self) -> set[FSDPParamGroup]:
        """The groups with a forward use that backward has not come back to yet."""
        return set(self._completed)

    def enter_backward(self, group: FSDPParamGroup) -> FSDPParamGroup | None:
        """Note that backward has come to the last use of `group`.

        Returns:
            The group that forward completed before it, which backward should need next.
        """
        for i in reversed(range(len(self._completed))):
            if self._completed[i] is group:
                del self._completed[i:]
                return self._completed[-1] if self._completed else None
        return None

    # Reductions

    def reduce(self, group: FSDPParamGroup) -> None:
        """Launch the reduction of the gradients that are there, once the reduction before it is done."""
        gradients = group.take_gradients()
        if not gradients:
            return
        self.finish_reduction()
        params = [param for param, _ in gradients]
        packed = group.pack(gradients)
        with self._reduce_lane.launch(packed):
            self._reducing = group, params, group.launch_reduction(packed)
        self._tell("launch_reduce", group)

    def finish_reduction(self) -> None:
        """Wait for the reduction in flight and set its gradients."""
        if self._reducing is not None:
            group, params, pending = self._reducing
            self._reducing = None
            with self._reduce_lane.launch():
                group.finish_reduction(params, pending)
            self._tell("wait_reduce", group)

    def drop_reduction(self) -> None:
        """Wait for the reduction in flight and forget it: its step was given up, and gradients may be cleared."""
        if self._reducing is not None:
            group, _, pending = self._reducing
            self._reducing = None
            group.wait_reduction(pending)
            self._tell("discard_reduce", group)

    def end_backward(self) -> None:
        """Finish what is in flight, and let the optimizer run after it."""
        self.finish_reduction()
        self.discard_unused()
        self._completed.clear()
        self._reduce_lane.join()

    def _launch(self, group: FSDPParamGroup) -> None:
        if group.state is ShardedState.SHARDED:
            with self._gather_lane.launch():
                group.launch_gather()
            self._tell("launch_gather", group)

    def _tell(self, event: str, group: FSDPParamGroup) -> None:
        if self.log is not None and group.communicates:
            self.log(event, group.name)
