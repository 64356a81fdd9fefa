"""The entry point: `data_parallel` shards a model in place, and its forward becomes one traced graph.

Counterpart: fsdp_eager/api.py, `fully_shard` and `FSDPModule`.
Source: torchtitan `graph_trainer/simple_fsdp.py`, `data_parallel`. Differs: the bucket plan is an argument and
compiles with the model, so that a plan cannot be left without its passes.
Left out: hybrid sharding, plain replication, offload.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from common.errors import ConfigError, EngineError
from common.gradient import Transport
from common.plan import BucketPlan, build_plan
from common.policy import MixedPrecisionPolicy
from fsdp_compiled.graph import Pipeline, compile_model
from fsdp_compiled.param import Replication, SimpleFSDPModule, replicate_on_read

__all__ = ["SimpleFSDPModule", "data_parallel"]


def data_parallel(
    model: nn.Module,
    mesh: DeviceMesh | None,
    *,
    plan: BucketPlan | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    backend: str = "inductor",
    transport: Transport = Transport.AUTO,
) -> nn.Module:
    """Shard `model` in place over `mesh` and compile its forward and backward with the plan's collectives.

    Args:
        model: a plain module that traces as one graph.
        mesh: 1-D.
        plan: which parameters travel together; `block` if not given.
        mp_policy: dtypes of compute, reduction, inputs and outputs.
        backend: "inductor", "aot_eager", or "eager", which leaves the model uncompiled: each parameter then
            travels alone and stays gathered until backward, since buckets and resharding are graph rewrites.
        transport: how reductions travel, see `common.gradient`.

    Returns:
        `model`.

    Raises:
        ConfigError: the uncompiled form was asked for what only a graph can do.
        EngineError: a parameter that cannot be sharded, or a model that is sharded already.
    """
    if mesh is None or mesh.ndim != 1:
        raise EngineError(f"data_parallel: expected a 1-D mesh, found {mesh}; build it with common.mesh.build_mesh")
    _check_model(model)
    plan = plan or build_plan(model)
    policy = mp_policy or MixedPrecisionPolicy()
    if backend == "eager" and mesh.size() > 1:
        _check_uncompiled(plan, transport)
    replication = Replication(mesh, policy)
    replicate_on_read(model, replication)
    _cast_at_buckets(model, plan, policy)
    if backend == "eager":
        model.register_forward_pre_hook(replication.forget)
        model.register_forward_hook(replication.forget, always_call=True)
        return model
    compile_model(model, Pipeline(plan, mesh, transport), backend)
    return model


def _check_model(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise EngineError(f"parameter {name!r} is a DTensor already; shard a model once, and on one mesh dimension")
        if param.ndim == 0:
            raise EngineError(
                f"parameter {name!r} is a scalar, which has no rows to shard; make it 1-D with one element"
            )
        if not param.is_contiguous():
            raise EngineError(f"parameter {name!r} is not contiguous; call .contiguous() on it before sharding")


def _check_uncompiled(plan: BucketPlan, transport: Transport) -> None:
    """Buckets, resharding and the ordered transport are graph rewrites; uncompiled they must not be asked for."""
    asked = {
        "--plan param": all(len(bucket.params) == 1 for bucket in plan.buckets),
        "--reshard-after-forward never": not any(bucket.reshard_after_forward for bucket in plan.buckets),
        "--transport native": transport is Transport.NATIVE,
    }
    missing = [option for option, is_met in asked.items() if not is_met]
    if missing:
        raise ConfigError(
            "compiled engine, backend eager: without a graph there is nothing to bucket, reshard or reorder; "
            f"add {' '.join(missing)}, or choose the backend aot_eager"
        )


def _cast_at_buckets(model: nn.Module, plan: BucketPlan, policy: MixedPrecisionPolicy) -> None:
    """Cast inputs and outputs where the eager engine's hooks do: inside the traced forward, but for the root's own."""

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return policy.cast_inputs(args), policy.cast_inputs(kwargs)

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        return policy.cast_outputs(output)

    for name in dict.fromkeys(["", *(name for bucket in plan.buckets for name in bucket.modules)]):
        module = model.get_submodule(name)
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            module.register_forward_pre_hook(before, with_kwargs=True)
        if policy.output_dtype is not None:
            module.register_forward_hook(after)
