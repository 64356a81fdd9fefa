"""Entry point: `fully_shard` makes modules share their parameters over ranks, in place.

Counterpart: fsdp_compiled/api.py, where the class swap puts a traced computation in front of each parameter.
Source: torch 2.13 `_fully_shard.py` and `_fsdp_init.py`, `fully_shard`. Differs: `transport` says how
reductions travel; a parameter in two groups is an error when the second is made, not at the first forward; parameters
of several dtypes are that many groups; a dimension other than the first may be cut unevenly; no scan of all names for
each call. What a sharded module can be told is in module.py.
Left out: `dp_mesh_dims`, meshes of single parameters (`ShardPlacementResult`), parameters that are DTensors already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from common.errors import EngineError
from common.gradient import Transport
from common.mesh import build_mesh
from common.plan import CONTAINERS
from common.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from common.shardable import check_mesh, check_shardable
from fsdp_eager.bucket import FSDPParamGroup, GroupOptions
from fsdp_eager.module import FSDPModule
from fsdp_eager.param import Managed
from fsdp_eager.root import GroupState
from fsdp_eager.state import FSDPState, state_of

T = TypeVar("T", bound=nn.Module | Sequence[nn.Module])


def fully_shard(
    module: T,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Collection[nn.Parameter] = (),
    transport: Transport = Transport.AUTO,
) -> T:
    """Shard, as one group, the parameters of `module` that no call on a module inside it has sharded.

    Apply it from the inside out, to the model itself last.

    Args:
        module: a module, or several whose parameters travel together; each is changed in place and returned.
        mesh: 1-D; each of its ranks holds a part of every parameter. 2-D: hybrid sharding, each row of it holds the
            whole model. None: all ranks.
        reshard_after_forward: free the whole parameters between forward and backward; a number: keep one part of so
            many, and gather over that many ranks in backward; None: True, but False for the root.
        shard_placement_fn: says for a parameter which dimension is cut; None: the first.
        mp_policy: dtypes of compute, of reduction and of inputs and outputs.
        offload_policy: where shards live.
        ignored_params: left as they are, neither sharded nor reduced nor moved.
        transport: how gradients travel, see common/gradient.py.

    Raises:
        EngineError: a module sharded before, one whose forward is never called, a parameter of a group outside,
            or a parameter that cannot be sharded.
    """
    given: Sequence[nn.Module] = [module] if isinstance(module, nn.Module) else module
    modules = list(dict.fromkeys(given))
    for item in modules:
        title = f"fully_shard: {type(item).__name__}"
        if state_of(item) is not None:
            raise EngineError(f"{title} is sharded already; apply it to a module once")
        if isinstance(item, CONTAINERS) and not is_callable(item):
            raise EngineError(f"{title} has no forward, so no hook would run; apply it to each module inside")
    roots = [item for item in modules if sum(item in set(other.modules()) for other in modules) == 1]
    mesh = check_mesh(_world_mesh() if mesh is None else mesh, max_dims=2)
    options = GroupOptions(
        mesh=mesh,
        mp_policy=mp_policy or MixedPrecisionPolicy(),
        offload_policy=_check_offload(offload_policy or OffloadPolicy()),
        reshard_after_forward=_check_reshard(reshard_after_forward, mesh.size(mesh.ndim - 1)),
        transport=transport,
    )
    ignored = set(ignored_params)
    by_dtype: dict[torch.dtype, list[Managed]] = {}
    for name, param, owners in _unmanaged(roots):
        if param not in ignored:
            managed = Managed(name, param, tuple(owners), _dim_to_cut(name, param, shard_placement_fn))
            by_dtype.setdefault(param.dtype, []).append(managed)
    check_managed(item for same_dtype in by_dtype.values() for item in same_dtype)
    for same_dtype in by_dtype.values():
        shard_group(roots, same_dtype, options, name="")
    for item in roots:  # also a module with nothing left to shard has hooks: it casts inputs, and may be the root
        attach(item, options)
        _move_buffers(item, options.device)
    return module


def check_managed(managed: Iterable[Managed]) -> None:
    """Refuse what `shard_group` could not shard, before it has changed anything.

    Raises:
        EngineError: a parameter that another group manages, or one that cannot be sharded, see `common.shardable`.
    """
    for item in managed:
        other = _managed_by(item.param)
        if other is not None:
            members = ", ".join(type(member.module).__name__ for member in other.members)
            raise EngineError(
                f"parameter {item.name} is already managed by the group of {members}; modules that share a parameter "
                "go into one call, fully_shard([a, b]), and calls go from the inside out"
            )
        check_shardable([(item.name, item.param)], None)


def shard_group(modules: Iterable[nn.Module], managed: Sequence[Managed], options: GroupOptions, *, name: str) -> None:
    """Shard `managed`, which was checked, as one group that is whole from the first to the last of `modules` to run."""
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
        state = FSDPState(module, options.mp_policy, options.device)
        vars(module)["fsdp_state"] = state
        module.__class__ = _sharded_class(type(module))  # type: ignore[arg-type]  # a Module class is hashable
    return state


def is_callable(module: nn.Module) -> bool:
    """Whether `module` has a forward, so that hooks on it run."""
    return type(module).forward is not nn.Module.forward


def _world_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        raise EngineError("mesh: expected one, or a process group; call torch.distributed.init_process_group first")
    accelerator = torch.accelerator.current_accelerator()
    return build_mesh("cpu" if accelerator is None else accelerator.type)


def _check_reshard(value: bool | int | None, ranks: int) -> bool | int | None:
    """What `reshard_after_forward` means on so many ranks: the two ends of its range are bools."""
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int) or value < 1 or ranks % value:
        raise EngineError(f"reshard_after_forward: expected a bool or a divisor of the {ranks} ranks, found {value!r}")
    return {1: False, ranks: True}.get(value, value)


def _check_offload(policy: OffloadPolicy) -> OffloadPolicy:
    if isinstance(policy, CPUOffloadPolicy) and policy.pin_memory and not torch.accelerator.is_available():
        raise EngineError("CPUOffloadPolicy: pin_memory needs a GPU, and there is none; set pin_memory=False")
    return policy


def _dim_to_cut(name: str, param: nn.Parameter, placement_of: Callable[[nn.Parameter], Shard | None] | None) -> int:
    """The dimension that the user wants cut, counted from the front."""
    placement = None if placement_of is None else placement_of(param)
    if placement is None:
        return 0
    if type(placement) is not Shard or not -param.ndim <= placement.dim < param.ndim:
        raise EngineError(
            f"parameter {name!r}: expected Shard of one of its {param.ndim} dimensions or None from "
            f"shard_placement_fn, found {placement!r}"
        )
    return placement.dim % param.ndim


def _move_buffers(root: nn.Module, device: torch.device) -> None:
    """Bring the buffers inside `root` to where it computes, but for those that are on the meta device."""
    for module in root.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device and not buffer.is_meta:
                setattr(module, name, buffer.to(device))


def _managed_by(param: nn.Parameter) -> GroupState | None:
    """The group that `param` is, or was, sharded in."""
    state = vars(param).get("fsdp_group")
    assert state is None or isinstance(state, GroupState)
    return state


def owners_of(modules: Iterable[nn.Module]) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Every (module, attribute) among `modules` that holds a parameter, in registration order."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in modules:
        for attribute, param in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(param, []).append((module, attribute))
    return owners


def _unmanaged(roots: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter, list[tuple[nn.Module, str]]]]:
    """The parameters inside `roots`, but not inside a module that was sharded: a name for messages, itself, owners."""
    inside = {module for root in roots for module in root.modules()}
    for param, owners in owners_of(dict.fromkeys(_open_modules(roots))).items():
        group = _managed_by(param)
        inner = group is not None and any(member.module in inside for member in group.members)
        if not (inner and isinstance(param, DTensor)):
            yield f"{type(owners[0][0]).__name__}.{owners[0][1]}", param, owners


def _open_modules(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """These and all inside them, but for those that were sharded: what a call on those left out stays out."""
    for module in modules:
        yield module
        yield from _open_modules(child for child in module.children() if state_of(child) is None)


@functools.cache
def _sharded_class(cls: Any) -> Any:
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
