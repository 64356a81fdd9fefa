"""What the hooks of one model share: where each group is in the step, and what begins and ends one.

Counterpart: none; a traced graph is one step.
Source: torch 2.13 `_fsdp_state.py` (`FSDPStateContext`, `_root_post_backward_final_callback`). Differs: a step that
raised is cleaned up when the next one begins. The phases are those of state.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fsdp_eager.bucket import FSDPParamGroup
from fsdp_eager.early_optimizers import check_optimizers
from fsdp_eager.schedule import Schedule
from fsdp_eager.torch_private import call_after_backward

if TYPE_CHECKING:
    from fsdp_eager.state import FSDPState


class TrainingState(Enum):
    """Where a group is in the step."""

    IDLE = auto()
    """Before forward, between forward and backward, and after phase 8."""
    FORWARD = auto()
    """From phase 1 at its first module to phase 4 at its last."""
    PRE_BACKWARD = auto()
    """From phase 5 to phase 7."""
    POST_BACKWARD = auto()
    """From phase 7 to phase 8."""


class GroupState:
    """One group's way through a step. Its forward lasts from its first module to its last.

    Attributes:
        group: the parameters.
        members: the states of the modules that need them.
        training: where it is.
        graph: what lives as long as the graph that leads backward to it; None if no output of this forward does.
    """

    def __init__(self, group: FSDPParamGroup) -> None:
        self.group = group
        self.members: list[FSDPState] = []
        self.training = TrainingState.IDLE
        self.graph: weakref.ref[Any] | None = None
        self._waiting: set[FSDPState] = set()  # members that this forward has not come out of
        self._open = 0  # calls of members that are running; more than one if a member calls another, or itself

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copy of a parameter, or one that is saved, is in no group."""
        return type(None), ()

    def enter(self) -> bool:
        """Note the call of a member; say whether it begins a new forward."""
        new = self.training is not TrainingState.FORWARD
        if new:
            self.training = TrainingState.FORWARD
            self.graph = None
            self._waiting = set(self.members)
            self._open = 0
        self._open += 1
        return new

    def leave(self, member: FSDPState) -> bool:
        """Note the end of a call of `member`; say whether forward has now been through all of them."""
        self._waiting.discard(member)
        self._open -= 1
        return not self._waiting and not self._open


class FSDPRoot:
    """What the hooks of one model share.

    Attributes:
        schedule: what is launched when.
        module_state: of the root.
        forward_root: the outermost module whose forward is running.
        check_optimizers: whether the next forward looks for optimizers that would never train.
    """

    def __init__(self, state: FSDPState, groups: Sequence[GroupState], device: torch.device) -> None:
        self.schedule = Schedule([item.group for item in groups], device, state.switches)
        self.module_state = state
        self.forward_root: FSDPState | None = None
        self.check_optimizers = True
        self._groups = tuple(groups)
        self._end: weakref.ref[Callable[[], None]] | None = None  # what ends the backward that runs; gone if it raised

    def begin_forward(self, state: FSDPState) -> None:
        """Note that the forward of a module begins; it is the outermost if no other is running."""
        if state is self.module_state and self.forward_root is not state and self.forward_root is not None:
            self.abandon_step()  # a module inside was called alone and interrupted; it does not call the whole model
        if self.forward_root is None:
            if self._end is not None:
                self.abandon_step()
            if self.check_optimizers:
                self.check_optimizers = False
                check_optimizers([param for item in self._groups for param in item.group.params])
            self.forward_root = state
            self.schedule.begin_forward(whole_model=state is self.module_state)

    def complete(self, state: GroupState, *, keep: bool) -> None:
        """Phase 4: forward has done with a group; `keep` its parameters for the backward that is running."""
        state.training = TrainingState.IDLE
        if keep:
            return
        if state.graph is not None:
            self.schedule.complete(state.group, state.graph)
        if state.group.switches.reshard_after_forward:
            self.schedule.reshard(state.group, after_forward=True)

    def end_forward(self) -> None:
        """End the outermost forward: complete groups of which not every module ran, give back what no one awaits."""
        for state in self._groups:
            if state.training is TrainingState.FORWARD:
                self.complete(state, keep=False)
        self.schedule.end_forward()
        awaited = self.schedule.awaiting_backward()
        for state in self._groups:
            if state.group not in awaited:
                self.schedule.reshard(state.group)
        self.forward_root = None

    def begin_backward(self) -> None:
        """Make sure that phase 8 comes, once in each backward."""
        if self._end is not None and self._end() is None:
            self.abandon_step()  # the backward before raised, and autograd dropped its callbacks
        if self._end is None:
            end = partial(self._end_backward)
            self._end = weakref.ref(end)
            call_after_backward(end)

    @torch.no_grad()
    def post_backward(self, states: Sequence[GroupState]) -> None:
        """Phase 7, for groups whose gradients are complete, last one first."""
        for state in reversed(states):
            state.training = TrainingState.POST_BACKWARD
            if state.group.switches.reshard_after_backward:
                self.schedule.reshard(state.group)
            if state.group.reducer.switches.reduce:
                self.schedule.reduce(state.group)
            else:
                state.group.reducer.accumulate()

    @torch.no_grad()
    def _end_backward(self) -> None:
        """Phase 8."""
        self.post_backward([state for state in self._groups if state.training is not TrainingState.POST_BACKWARD])
        if self.schedule.switches.is_last_backward:
            self.schedule.end_backward()
        else:
            self.schedule.discard_unused()
        for state in self._groups:
            state.training = TrainingState.IDLE
        self._end = None

    @torch.no_grad()
    def abandon_step(self) -> None:
        """Clean up after a forward or backward that raised: gradients on their way are lost, memory is given back."""
        self.forward_root = None
        self.schedule.drop_reductions()
        for state in self._groups:
            state.group.reducer.drop()
            self.schedule.reshard(state.group)
            state.training = TrainingState.IDLE
        self.schedule.end_backward()
        self._end = None
