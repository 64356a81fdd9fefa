"""Apply the eager engine to a model by its bucket plan.

Counterpart: fsdp_compiled/parallelize.py, the same function for the compiled engine.
Source: torchtitan `models/llama3/parallelize.py` for the shape. Differs: the plan says what to shard, for any model.
Left out: tensor and pipeline parallelism, activation checkpointing.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from common.blocks import compile_blocks
from common.errors import EngineError
from common.gradient import Transport
from common.job import JobConfig
from common.plan import build_plan
from common.shardable import check_mesh
from fsdp_eager.api import attach, check_managed, is_callable, owners_of, shard_group
from fsdp_eager.bucket import GroupOptions
from fsdp_eager.param import Managed
from fsdp_eager.state import init_root, state_of


def parallelize(model: nn.Module, mesh: DeviceMesh | None, job: JobConfig) -> nn.Module:
    """Shard `model` in place over `mesh`, one group for each bucket of the plan of `job`; return it.

    Raises:
        ConfigError, PlanError: the plan does not fit the model, or its blocks cannot be compiled.
        EngineError: a model sharded before, or a parameter that cannot be sharded.
    """
    mesh = check_mesh(mesh)
    for name, module in model.named_modules():
        if state_of(module) is not None:
            raise EngineError(f"parallelize: module {name or '(root)'} is sharded already; build a new model")
    plan = build_plan(model, job.plan, reshard_after_forward=job.reshard_after_forward == "always")
    compile_blocks(model, job, plan)
    owners = owners_of(model.modules())
    params = dict(model.named_parameters())
    managed = [
        [Managed(name, params[name], tuple(owners[params[name]])) for name in bucket.params] for bucket in plan.buckets
    ]
    check_managed(item for group in managed for item in group)
    for bucket, label, group in zip(plan.buckets, plan.labels, managed, strict=True):
        options = GroupOptions(
            mesh=mesh,
            mp_policy=job.mp_policy,
            reshard_after_forward=bucket.reshard_after_forward,
            prefetch=bucket.prefetch,
            transport=Transport(job.transport),
        )
        modules = [_hookable(model, name) for name in bucket.modules]
        shard_group(modules, group, options, name=label)
    init_root(attach(model, GroupOptions(mesh=mesh, mp_policy=job.mp_policy)))
    return model


def _hookable(model: nn.Module, name: str) -> nn.Module:
    """The module called `name`, or the nearest one around it that has a forward: a holder of parameters has none."""
    while not is_callable(module := model.get_submodule(name)):
        if not name:
            raise EngineError(f"parallelize: {type(model).__name__} has no forward, so no hook would run")
        name = name.rpartition(".")[0]
    return module
