"""The entry point: `data_parallel` shards a model in place, and its forward becomes one traced graph.

Counterpart: fsdp_eager/api.py, `fully_shard` and `FSDPModule`.
Source: torchtitan `graph_trainer/simple_fsdp.py`, `data_parallel`. Differs: the bucket plan is an argument and
compiles with the model, so that a plan cannot be left without its passes.
Left out: hybrid sharding, plain replication, offload.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from common.errors import ConfigError
from common.gradient import Transport
from common.job import in_pass_order
from common.plan import BucketPlan, build_plan
from common.policy import MixedPrecisionPolicy
from common.shardable import check_mesh, check_shardable
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
    disabled_passes: Iterable[str] = (),
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
        disabled_passes: names of `common.job.PASSES` to leave out. The rest of the pipeline still marks and merges
            reads, reshards, and sends reductions by the transport. Without `bucket_gathers` or `bucket_reductions`
            each parameter travels alone that way, without `prefetch_gathers` a gather is launched where it is waited
            for, and without `delay_reduction_waits` a reduction is waited for where it is launched.

    Returns:
        `model`.

    Raises:
        ConfigError: the uncompiled form was asked for what only a graph can do, or a pass that is none.
        EngineError: a parameter that cannot be sharded, or a model that is sharded already.
    """
    mesh = check_mesh(mesh)
    check_shardable(model.named_parameters(), mesh.device_type)
    plan = plan or build_plan(model)
    policy = mp_policy or MixedPrecisionPolicy()
    pipeline = Pipeline(plan, mesh, transport, policy, in_pass_order(disabled_passes))
    if backend == "eager" and mesh.size() > 1:
        _check_uncompiled(pipeline, policy.reduction_dtype(next(model.parameters())))
    replication = Replication(mesh, policy)
    replicate_on_read(model, replication)
    _cast_at_buckets(model, plan, policy)
    if backend == "eager":
        model.register_forward_pre_hook(replication.forget)
        model.register_forward_hook(replication.forget, always_call=True)
        return model
    compile_model(model, pipeline, backend)
    return model


def _check_uncompiled(pipeline: Pipeline, reduce_dtype: torch.dtype) -> None:
    """Buckets, resharding and the ordered transport are graph rewrites; uncompiled they must not be asked for."""
    buckets = pipeline.plan.buckets
    required = {
        "plan param": all(len(bucket.params) == 1 for bucket in buckets),
        "reshard after forward never": not any(bucket.reshard_after_forward for bucket in buckets),
        "no disabled passes": not pipeline.disabled,
        "transport native": pipeline.decide(reduce_dtype).transport is Transport.NATIVE,
    }
    missing = [setting for setting, is_met in required.items() if not is_met]
    if missing:
        raise ConfigError(
            "compiled engine, backend eager: without a graph there is nothing to bucket, reshard or reorder; "
            f"set {', '.join(missing)}, or choose the backend aot_eager"
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
