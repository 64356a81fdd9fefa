"""The first peer: one process from weights that were rounded once more, see the package."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from common.harness.peers import rounded_once_more
from common.job import JobConfig

DATA_PARALLEL = False


def parallelize(model: nn.Module, mesh: DeviceMesh | None, job: JobConfig) -> nn.Module:
    """Round the weights of `model` once more; `mesh` is not used."""
    return rounded_once_more(model, job, 1)
