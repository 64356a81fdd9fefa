"""One process, the whole batch: what sharding must not change; in float64, the referee.

Left out: `reduce_dtype`, plan, reshard, transport and backend, since nothing is sharded, sent or compiled.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from common.baselines import in_job_precision
from common.job import JobConfig

DATA_PARALLEL = False


def parallelize(model: nn.Module, mesh: DeviceMesh | None, job: JobConfig) -> nn.Module:
    """Leave `model` whole; `mesh` is not used. With a `param_dtype` of its own it computes on casts of the weights."""
    return in_job_precision(model, job)
