"""What drives the engine: hooks around the forward of each module, and through them one training step.

Counterpart: fsdp_compiled/graph.py, where a compiler pipeline stands in the place of hooks.
Source: torch 2.13 `_fsdp_state.py`, class `FSDPState`, and `_fsdp_param_group.py` (`pre_forward` ... `post_backward`).
Differs: a module may stand in several groups (plan `param`) and a group on several modules (tied weights); a forward
that ends without gradients gives everything back, whatever the plan says, since no backward would.

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

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from common.errors import EngineError
from common.policy import MixedPrecisionPolicy
from fsdp_eager.autograd import map_tensors, tap_inputs, tap_outputs
from fsdp_eager.bucket import FSDPParamGroup
from fsdp_eager.root import FSDPRoot, GroupState, TrainingState
from fsdp_eager.schedule import ScheduleSwitches
from fsdp_eager.torch_private import in_backward, standalone


class FSDPState:
    """The hooks of one module.

    Attributes:
        module: the module.
        device: where its parameters are.
        groups: what it needs, in the order in which it was sharded.
        root: what it shares with the other modules of the model; None until the first forward.
        switches: what holds for the whole model, whichever of its modules was told.
        forward_prefetch: whose gathers to launch when this module's forward begins; None: what came next last time.
        backward_prefetch: the same for backward; None: what comes next.
    """

    def __init__(self, module: nn.Module, mp_policy: MixedPrecisionPolicy, device: torch.device) -> None:
        self.module = module
        self.device = device
        self.groups: list[GroupState] = []
        self.root: FSDPRoot | None = None
        self.switches = ScheduleSwitches()
        self.forward_prefetch: list[FSDPState] | None = None
        self.backward_prefetch: list[FSDPState] | None = None
        self._mp_policy = mp_policy
        # Disabled for dynamo here, once; a compiled block breaks its graph at the hook instead of tracing it.
        before = torch.compiler.disable(self._pre_forward)
        after = torch.compiler.disable(self._post_forward)
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True, always_call=True)
        module.register_state_dict_pre_hook(self._reshard_for_state_dict)
        module.register_state_dict_post_hook(_set_apart)
        module.register_load_state_dict_pre_hook(self._reshard_for_state_dict)
        module.register_load_state_dict_post_hook(self._take_over_loaded)

    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        root = self.root or init_root(self)
        recomputing = in_backward()
        if not recomputing:
            root.begin_forward(self)
        args, kwargs = self._mp_policy.cast_inputs((args, kwargs), map_tensors)
        entered = []
        following = []
        for state in self.groups:
            new = state.training is not TrainingState.PRE_BACKWARD and state.enter()
            if new:
                entered.append(state)
                if not recomputing and (after := root.schedule.enter(state.group)) is not None:
                    following.append(after)
            root.schedule.unshard(state.group, refresh=new and not recomputing)  # phase 1
            if self.forward_prefetch is None:  # phase 2
                root.schedule.prefetch(following)
                following = []
        if self.forward_prefetch is not None and entered and not recomputing:
            root.schedule.prefetch(_groups(self.forward_prefetch))
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
            callback = partial(self._pre_backward, [state.group.generation for state in self.groups])
            tapped, opaque = tap_outputs(output, (args, kwargs), callback)
            if opaque is not None and not tapped:
                self._refuse_opaque(opaque)
            if tapped:
                for state in leaving:
                    state.graph = weakref.ref(callback)
        for state in leaving:
            if state.training is TrainingState.FORWARD and state.leave(self):
                root.complete(state, keep=recomputing)  # phase 4
        if not recomputing and root.forward_root is self:
            root.end_forward()
        return self._mp_policy.cast_outputs(output, map_tensors)

    def _pre_backward(self, generations: list[int]) -> None:
        """Phase 5, for the groups of this module, last one first.

        Args:
            generations: of the buffers that forward computed with.

        Raises:
            EngineError: they are gone; or a backward through this one may follow.
        """
        assert self.root is not None
        if torch.is_grad_enabled():  # autograd's own sign of create_graph
            raise EngineError(
                f"module {type(self.module).__name__}: expected a backward without create_graph, found it set; the "
                "graph of gradients reads parameters that are given back, and nothing reduces what it ends in; take "
                "gradients of gradients in a model that is not sharded"
            )
        if generations != [state.group.generation for state in self.groups]:
            raise EngineError(
                f"module {type(self.module).__name__}: its parameters were converted or moved between forward and "
                "backward, which computes with those of forward; convert before forward or after backward"
            )
        schedule = self.root.schedule
        self.root.begin_backward()
        for state in reversed(self.groups):
            if state.group.switches.unshard_in_backward:
                schedule.unshard(state.group)
            if state.training is not TrainingState.PRE_BACKWARD:
                state.training = TrainingState.PRE_BACKWARD
                after = schedule.enter_backward(state.group)
                following = [after] if self.backward_prefetch is None else _groups(self.backward_prefetch)
                schedule.prefetch([group for group in following if group and group.switches.unshard_in_backward])

    def _refuse_opaque(self, opaque: type) -> None:
        if any(param.sharded_param.requires_grad for state in self.groups for param in state.group.params):
            raise EngineError(
                f"module {type(self.module).__name__}: its output holds a {opaque.__name__}, in which no tensor can be "
                "found, so its backward could not be prepared; return tensors, tuples, lists, dicts or dataclasses"
            )

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a method of the module between the hooks, as its forward is."""
        output = None
        try:
            args, kwargs = self._pre_forward(self.module, args, kwargs)
            output = forward(*args, **kwargs)
        finally:
            output = self._post_forward(self.module, args, kwargs, output)
        return output

    def _take_over_loaded(self, *_: Any) -> None:
        """What `load_state_dict(assign=True)` registered are the shards from here on, so optimizers may be built."""
        loaded = [param.take_over() for state in self.groups for param in state.group.params]
        if any(loaded) and self.root is not None:
            self.root.check_optimizers = True

    def _reshard_for_state_dict(self, *_: Any) -> None:
        """State dicts hold shards, also between forward and backward."""
        for state in self.groups:
            state.group.reshard()


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
        state.switches.take(inner.switches)
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
        if item.group.switches.reshard_after_forward is None:
            item.group.switches.reshard_after_forward = state not in item.members
    root = FSDPRoot(state, list(groups), state.device)
    for inner in states:
        inner.root, inner.switches = root, state.switches
    return root


def _set_apart(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: object) -> None:
    """Let each shard in a state dict be saved and copied without the others of its group."""
    for name, value in state_dict.items():
        if name.startswith(prefix) and isinstance(value, DTensor) and not isinstance(value, nn.Parameter):
            state_dict[name] = standalone(value)


def _groups(states: Sequence[FSDPState]) -> list[FSDPParamGroup]:
    return [item.group for state in states for item in state.groups]


def state_of(module: nn.Module) -> FSDPState | None:
    """The hooks of `module`, if it is sharded."""
    state = vars(module).get("fsdp_state")
    assert state is None or isinstance(state, FSDPState)
    return state
