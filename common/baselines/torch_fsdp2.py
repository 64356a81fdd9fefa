"""torch's own FSDP2, one `fully_shard` call per bucket of the same plan: the peer the eager engine must equal.

`fully_shard` groups by module, so buckets that share a module become one group. That only concerns the plan `param`:
there it is one call per module that owns parameters, a Linear's weight and bias travelling together.

Left out: transport (always the backend's native collectives), prefetch settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from common.blocks import compile_blocks
from common.errors import PlanError
from common.job import JobConfig
from common.plan import BucketPlan, build_plan
from common.shardable import check_mesh


@dataclass(frozen=True)
class ModuleGroup:
    """What one `fully_shard` call takes: modules by name ("" is the root), and the parameters it will hold."""

    modules: tuple[str, ...]
    params: tuple[str, ...]


def parallelize(model: nn.Module, mesh: DeviceMesh | None, job: JobConfig) -> nn.Module:
    """Shard `model` in place over `mesh` with `fully_shard`; see `shard_groups`."""
    shard_groups(model, mesh, job)
    return model


def shard_groups(model: nn.Module, mesh: DeviceMesh | None, job: JobConfig) -> list[ModuleGroup]:
    """Shard `model` in place with one `fully_shard` call per group, children before parents, the root last.

    Returns:
        The groups, in registration order of their first parameter.

    Raises:
        EngineError: no mesh, or one of several dimensions.
        PlanError: groups that `fully_shard` cannot nest.
        ConfigError, PlanError: blocks that cannot be compiled.
    """
    mesh = check_mesh(mesh)
    ours = job.mp_policy
    policy = MixedPrecisionPolicy(
        param_dtype=ours.param_dtype,
        reduce_dtype=ours.reduce_dtype,
        output_dtype=ours.output_dtype,
        cast_forward_inputs=ours.cast_forward_inputs,
    )
    reshard = job.reshard_after_forward == "always"
    plan = build_plan(model, job.plan, reshard_after_forward=reshard)
    compile_blocks(model, job, plan)
    groups = module_groups(plan)
    for group in _bottom_up(group for group in groups if "" not in group.modules):
        modules = [model.get_submodule(name) for name in group.modules]
        fully_shard(modules, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    # the root takes what is left, or nothing; said explicitly, since torch would let the root keep its weights
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return groups


def module_groups(plan: BucketPlan) -> list[ModuleGroup]:
    """The plan's buckets, those that share a module merged into one."""
    groups: list[ModuleGroup] = []
    for bucket in plan.buckets:
        modules, params = dict.fromkeys(bucket.modules), dict.fromkeys(bucket.params)
        apart = []
        for group in groups:
            if modules.keys() & set(group.modules):
                modules = dict.fromkeys((*group.modules, *modules))
                params = dict.fromkeys((*group.params, *params))
            else:
                apart.append(group)
        groups = [*apart, ModuleGroup(tuple(modules), tuple(params))]
    return groups


def _bottom_up(groups: Iterable[ModuleGroup]) -> Iterator[ModuleGroup]:
    """Groups in an order in which no group comes before one that lies inside its modules."""
    waiting = list(groups)
    while waiting:
        free = [group for group in waiting if not any(_contains(group, other) for other in waiting)]
        if not free:
            raise PlanError(
                "torch-fsdp2: some groups lie inside each other's modules "
                f"({', '.join('+'.join(group.modules) for group in waiting)}); name the modules of one of them together"
            )
        yield from free
        waiting = [group for group in waiting if group not in free]


def _contains(outer: ModuleGroup, inner: ModuleGroup) -> bool:
    """Whether a module of `inner` is a descendant of one of `outer`."""
    return any(name.startswith(f"{module}.") for module in outer.modules for name in inner.modules)
