"""Apply the compiled engine to a model by a job's plan; the engine contract's entry point.

Counterpart: fsdp_eager/parallelize.py, the same function for the eager engine.
Source: torchtitan `experiments/graph_trainer/llama3/parallelize.py` for the shape. Differs: works by the plan, on any
model. Left out: tensor and pipeline parallelism, activation checkpointing.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from common.gradient import Transport
from common.job import JobConfig
from common.plan import build_plan
from fsdp_compiled.api import data_parallel


def parallelize(model: nn.Module, mesh: DeviceMesh | None, job: JobConfig) -> nn.Module:
    """Shard `model` in place over `mesh`, compiled with one message for each bucket of the plan of `job`; return it.

    Raises:
        PlanError: the plan does not fit the model.
        ConfigError: the backend "eager" was asked for what only a graph can do.
        EngineError: a model sharded before, or a parameter that cannot be sharded.
    """
    plan = build_plan(model, job.plan, reshard_after_forward=job.reshard_after_forward == "always")
    return data_parallel(
        model,
        mesh,
        plan=plan,
        mp_policy=job.mp_policy,
        backend=job.backend,
        transport=Transport(job.transport),
        disabled_passes=job.disabled_passes,
    )
