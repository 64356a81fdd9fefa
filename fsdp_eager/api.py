"""Entry point: `fully_shard` makes modules share their parameters over ranks, in place.

Counterpart: fsdp_compiled/api.py, where the class swap puts a traced computation in front of each parameter.
Source: torch 2.13 `_fully_shard.py` and `_fsdp_init.py`, `fully_shard` and `FSDPModule`. Differs: `transport` says how
reductions travel; a parameter in two groups is an error when the second is made, not at the first forward; no scan of
all names for each call.
Left out: `reshard_after_forward` as None or a number, `shard_placement_fn`, `offload_policy`, `ignored_params`,
two-dimensional meshes, the meta device, and the methods of `FSDPModule` other than `unshard` and `reshard`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from common.errors import EngineError
from common.gradient import Transport
from common.policy import MixedPrecisionPolicy
from common.shardable import check_mesh
from fsdp_eager.bucket import FSDPParamGroup, GroupOptions
from fsdp_eager.param import Managed
from fsdp_eager.schedule import EventLog, Schedule
from fsdp_eager.state import FSDPState, GroupState, init_root, state_of

T = TypeVar("T", bound=nn.Module | Sequence[nn.Module])


class FSDPModule(nn.Module):
    """What a sharded module is an instance of, besides its own class."""

    fsdp_state: FSDPState

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance of the original class: a slice of a sharded `nn.Sequential` is a plain one."""
        original = next(base for base in cls.__bases__ if base is not FSDPModule)
        return original(*args, **kwargs)

    def __deepcopy__(self, memo: object) -> FSDPModule:
        """Refuse: a copy would share buffers, hooks and process group with the original."""
        raise EngineError(
            f"{type(self).__name__}: a sharded module cannot be copied; copy it before sharding, or use its state_dict"
        )

    def unshard(self) -> None:
        """Gather the parameters of this module's groups now; a forward or `reshard` gives them back."""
        schedule = self._schedule()
        for state in self.fsdp_state.groups:
            schedule.unshard(state.group)

    def reshard(self) -> None:
        """Hold shards and free the whole parameters of this module's groups."""
        schedule = self._schedule()
        for state in self.fsdp_state.groups:
            schedule.reshard(state.group)

    def log_schedule(self, log: EventLog | None) -> None:
        """Tell `log` of each launch, wait and free in the whole model from now on; None ends it."""
        root = self.fsdp_state.root or init_root(self.fsdp_state)
        root.schedule.log = log

    def _schedule(self) -> Schedule:
        """The model's schedule; before the first forward, when nobody knows what the model is, one of its own."""
        if self.fsdp_state.root is not None:
            return self.fsdp_state.root.schedule
        return Schedule([state.group for state in self.fsdp_state.groups], self.fsdp_state.device)


def fully_shard(
    module: T,
    *,
    mesh: DeviceMesh,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    transport: Transport = Transport.AUTO,
) -> T:
    """Shard, as one group, the parameters of `module` that no call on a module inside it has sharded.

    Apply it from the inside out, to the model itself last.

    Args:
        module: a module, or several whose parameters travel together; each is changed in place and returned.
        mesh: 1-D; each of its ranks holds a part of every parameter.
        reshard_after_forward: free the whole parameters between forward and backward.
        mp_policy: dtypes of compute, of reduction and of inputs and outputs.
        transport: how gradients travel, see common/gradient.py.

    Raises:
        EngineError: a module sharded before, one whose forward is never called, a parameter of a group outside,
            or a parameter that cannot be sharded.
    """
    given: Sequence[nn.Module] = [module] if isinstance(module, nn.Module) else module
    modules = list(dict.fromkeys(given))
    if not isinstance(reshard_after_forward, bool):
        raise EngineError(f"reshard_after_forward: expected a bool, found {reshard_after_forward!r}")
    for item in modules:
        title = f"fully_shard: {type(item).__name__}"
        if state_of(item) is not None:
            raise EngineError(f"{title} is sharded already; apply it to a module once")
        if not is_callable(item):
            raise EngineError(f"{title} has no forward, so no hook would run; apply it to each module inside")
    roots = [item for item in modules if sum(item in set(other.modules()) for other in modules) == 1]
    options = GroupOptions(
        mesh=check_mesh(mesh),
        mp_policy=mp_policy or MixedPrecisionPolicy(),
        reshard_after_forward=reshard_after_forward,
        transport=transport,
    )
    managed = _unmanaged(roots)
    if managed:
        shard_group(roots, managed, options, name="")
    for item in roots:  # also a module with nothing left to shard has hooks: it casts inputs, and may be the root
        attach(item, options)
    return module


def shard_group(modules: Iterable[nn.Module], managed: Sequence[Managed], options: GroupOptions, *, name: str) -> None:
    """Shard `managed` as one group that is whole from the first to the last of `modules` to run.

    Raises:
        EngineError: a parameter that another group manages, or one that cannot be sharded.
    """
    for item in managed:
        other = _managed_by(item.param)
        if other is not None:
            members = ", ".join(type(member.module).__name__ for member in other.members)
            raise EngineError(
                f"parameter {item.name} is already managed by the group of {members}; modules that share a parameter "
                "go into one call, fully_shard([a, b]), and calls go from the inside out"
            )
    state = GroupState(FSDPParamGroup(managed, options, name))
    forms = [form for param in state.group.params for form in (param.sharded_param, param.unsharded_param)]
    for form in [*forms, *(item.param for item in managed)]:
        vars(form)["fsdp_group"] = state
    for module in dict.fromkeys(modules):
        member = attach(module, options)
        member.groups.append(state)
        state.members.append(member)


def attach(module: nn.Module, options: GroupOptions) -> FSDPState:
    """Put hooks on `module` and swap its class, once; return its state."""
    state = state_of(module)
    if state is None:
        state = FSDPState(module, options.mp_policy, torch.device(options.mesh.device_type))
        vars(module)["fsdp_state"] = state
        module.__class__ = _sharded_class(type(module))  # type: ignore[arg-type]  # a Module class is hashable
    return state


def is_callable(module: nn.Module) -> bool:
    """Whether `module` has a forward, so that hooks on it run."""
    return type(module).forward is not nn.Module.forward


def _managed_by(param: nn.Parameter) -> GroupState | None:
    """The group that `param` is, or was, sharded in."""
    state = vars(param).get("fsdp_group")
    assert state is None or isinstance(state, GroupState)
    return state


def _unmanaged(roots: Sequence[nn.Module]) -> list[Managed]:
    """The parameters under `roots` that no inner call has sharded, in registration order."""
    inside = dict.fromkeys(module for root in roots for module in root.modules())
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in inside:
        for attribute, param in module.named_parameters(recurse=False, remove_duplicate=False):
            group = _managed_by(param)
            inner = group is not None and any(member.module in inside for member in group.members)
            if not (inner and isinstance(param, DTensor)):
                owners.setdefault(param, []).append((module, attribute))
    return [Managed(f"{type(held[0][0]).__name__}.{held[0][1]}", param, tuple(held)) for param, held in owners.items()]


@functools.cache
def _sharded_class(cls: Any) -> Any:
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
