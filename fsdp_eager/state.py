"""What drives the engine: hooks around the forward of each module, and through them one training step.

Counterpart: fsdp_compiled/graph.py, where a compiler pipeline stands in the place of hooks.
Source: torch 2.13 `_fsdp_state.py`, class `FSDPState`, and `_fsdp_param_group.py` (`pre_forward` ... `post_backward`).
Differs: a module may stand in several groups (plan `param`) and a group on several modules (tied weights); a forward
that ends without gradients gives everything back, whatever the plan says, since no backward would; a step that
raised is cleaned up by itself. Left out: backward without reduction, and FSDP2's other `set_*` switches.

One training step, as the groups of one module see it:

    forward
      1  unshard     gather the whole parameters (unless phase 2 of another group did), let the module hold them
      2  prefetch    launch the gather of the group that forward needs next
      3  compute     the module's own forward, between taps on its inputs and outputs
      4  reshard     hold shards again and free the whole parameters, unless the plan keeps them
    backward
      5  unshard     as 1, and launch the gather of the group that backward needs next, as 2
      6  compute     autograd; gradients gather in `.grad` of the whole parameters
      7  reduce      when the gradients of the module's inputs are there: reshard, finish the reduction of the group
                     before, and launch this one's
    end
      8  finish      once autograd is done: 7 for groups that no input gradient led to, wait for the last reduction,
                     drop what was gathered in vain; each `.grad` now holds this rank's rows of the mean gradient

A forward that runs inside a backward is a recomputation (activation checkpointing). Where phase 5 has been, it finds
whole parameters and leaves everything as it is; else it does phases 1 and 3, and the parameters stay until 7 or 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from common.errors import EngineError
from common.policy import MixedPrecisionPolicy
from fsdp_eager.autograd import tap_inputs, tap_outputs
from fsdp_eager.bucket import FSDPParamGroup
from fsdp_eager.schedule import Schedule
from fsdp_eager.torch_private import call_after_backward, in_backward


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
        tapped: whether an output of the current forward leads backward to it.
    """

    def __init__(self, group: FSDPParamGroup) -> None:
        self.group = group
        self.members: list[FSDPState] = []
        self.training = TrainingState.IDLE
        self.tapped = False
        self._waiting: set[FSDPState] = set()  # members that this forward has not come out of
        self._open = 0  # calls of members that are running; more than one if a member calls another, or itself

    def enter(self) -> bool:
        """Note the call of a member; say whether it begins a new forward."""
        new = self.training is not TrainingState.FORWARD
        if new:
            self.training = TrainingState.FORWARD
            self.tapped = False
            self._waiting = set(self.members)
            self._open = 0
        self._open += 1
        return new

    def leave(self, member: FSDPState) -> bool:
        """Note the end of a call of `member`; say whether forward has now been through all of them."""
        self._waiting.discard(member)
        self._open -= 1
        return not self._waiting and not self._open


class FSDPState:
    """The hooks of one module.

    Attributes:
        module: the module.
        device: where its parameters are.
        groups: what it needs, in the order in which it was sharded.
        root: what it shares with the other modules of the model; None until the first forward.
    """

    def __init__(self, module: nn.Module, mp_policy: MixedPrecisionPolicy, device: torch.device) -> None:
        self.module = module
        self.device = device
        self.groups: list[GroupState] = []
        self.root: FSDPRoot | None = None
        self._mp_policy = mp_policy
        # Disabled for dynamo here, once; a compiled block breaks its graph at the hook instead of tracing it.
        before = torch.compiler.disable(self._pre_forward)
        after = torch.compiler.disable(self._post_forward)
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True, always_call=True)
        module.register_state_dict_pre_hook(self._reshard_for_state_dict)
        module.register_load_state_dict_pre_hook(self._reshard_for_state_dict)

    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        root = self.root or init_root(self)
        recomputing = in_backward()
        if not recomputing:
            root.begin_forward(self)
        args, kwargs = self._mp_policy.cast_inputs((args, kwargs))
        entered = []
        for state in self.groups:
            following = None
            if state.training is not TrainingState.PRE_BACKWARD and state.enter():
                entered.append(state)
                following = None if recomputing else root.schedule.enter(state.group)
            root.schedule.unshard(state.group)  # phase 1
            root.schedule.prefetch(following)  # phase 2
        if entered and torch.is_grad_enabled():
            args, kwargs = tap_inputs(args, kwargs, lambda: root.post_backward(entered))
        return args, kwargs

    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        root = self.root
        if root is None:
            return output  # the hook before forward raised
        recomputing = in_backward()
        leaving = [state for state in self.groups if state.training is not TrainingState.PRE_BACKWARD]
        if torch.is_grad_enabled() and (leaving or not self.groups):
            tapped, opaque = tap_outputs(output, (args, kwargs), self._pre_backward)
            if opaque is not None and not tapped:
                self._refuse_opaque(opaque)
            for state in leaving:
                state.tapped |= tapped
        for state in leaving:
            if state.training is TrainingState.FORWARD and state.leave(self):
                root.complete(state, keep=recomputing)  # phase 4
        if not recomputing and root.forward_root is self:
            root.end_forward()
        return self._mp_policy.cast_outputs(output)

    def _pre_backward(self) -> None:
        """Phase 5, for the groups of this module, last one first."""
        assert self.root is not None
        self.root.begin_backward()
        for state in reversed(self.groups):
            self.root.schedule.unshard(state.group)
            if state.training is not TrainingState.PRE_BACKWARD:
                state.training = TrainingState.PRE_BACKWARD
                self.root.schedule.prefetch(self.root.schedule.enter_backward(state.group))

    def _refuse_opaque(self, opaque: type) -> None:
        if any(param.sharded_param.requires_grad for state in self.groups for param in state.group.params):
            raise EngineError(
                f"module {type(self.module).__name__}: its output holds a {opaque.__name__}, in which no tensor can be "
                "found, so its backward could not be prepared; return tensors, tuples, lists, dicts or dataclasses"
            )

    def _reshard_for_state_dict(self, *_: Any) -> None:
        """State dicts hold shards, also between forward and backward."""
        for state in self.groups:
            state.group.reshard()


class FSDPRoot:
    """What the hooks of one model share.

    Attributes:
        schedule: what is launched when.
        forward_root: the outermost module whose forward is running.
    """

    def __init__(self, state: FSDPState, groups: Sequence[GroupState], device: torch.device) -> None:
        self.schedule = Schedule([item.group for item in groups], device)
        self.forward_root: FSDPState | None = None
        self._state = state
        self._groups = tuple(groups)
        self._in_backward = False

    def begin_forward(self, state: FSDPState) -> None:
        """Note that the forward of a module begins; it is the outermost if no other is running."""
        if self.forward_root is None:
            if self._in_backward:
                self._abandon_step()
            self.forward_root = state
            self.schedule.begin_forward(whole_model=state is self._state)

    def complete(self, state: GroupState, *, keep: bool) -> None:
        """Phase 4: forward has done with a group; `keep` its parameters for the backward that is running."""
        state.training = TrainingState.IDLE
        if keep:
            return
        if state.tapped:
            self.schedule.complete(state.group)
        if state.group.options.reshard_after_forward:
            self.schedule.reshard(state.group)

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
        if not self._in_backward:
            self._in_backward = True
            call_after_backward(self._end_backward)

    def post_backward(self, states: Sequence[GroupState]) -> None:
        """Phase 7, for groups whose gradients are complete, last one first."""
        for state in reversed(states):
            state.training = TrainingState.POST_BACKWARD
            self.schedule.reshard(state.group)
            self.schedule.reduce(state.group)

    def _end_backward(self) -> None:
        """Phase 8."""
        self.post_backward([state for state in self._groups if state.training is not TrainingState.POST_BACKWARD])
        self.schedule.end_backward()
        for state in self._groups:
            state.training = TrainingState.IDLE
        self._in_backward = False

    def _abandon_step(self) -> None:
        """Clean up after a backward that raised: its gradients are lost, its memory is given back."""
        self.schedule.drop_reduction()
        for state in self._groups:
            state.group.take_gradients()
        self._end_backward()


def init_root(state: FSDPState) -> FSDPRoot:
    """Make the module of `state`, whose forward is the first one to run, the root of all sharded modules inside it.

    Raises:
        EngineError: a module inside ran its forward before, or a group reaches out of this module.
    """
    groups: dict[GroupState, None] = {}
    states: dict[FSDPState, str] = {}
    title = type(state.module).__name__
    for name, module in state.module.named_modules():
        inner = state_of(module)
        if inner is None:
            continue
        if inner.root is not None:
            raise EngineError(
                f"{title}: its module {name!r} ran forward before the whole model did and so became a root of its "
                "own; call the outermost sharded module first"
            )
        states[inner] = name or "(root)"
        groups.update(dict.fromkeys(inner.groups))
    for item in groups:
        outside = [member for member in item.members if member not in states]
        if outside:
            raise EngineError(
                f"{title}: shares a group with {type(outside[0].module).__name__}, which is no part of it; "
                "apply fully_shard to a module that holds both, and call that"
            )
    for item in groups:
        if not item.group.name:
            item.group.name = "+".join(states[member] for member in item.members)
    root = FSDPRoot(state, list(groups), state.device)
    for inner in states:
        inner.root = root
    return root


def state_of(module: nn.Module) -> FSDPState | None:
    """The hooks of `module`, if it is sharded."""
    state = vars(module).get("fsdp_state")
    assert state is None or isinstance(state, FSDPState)
    return state
