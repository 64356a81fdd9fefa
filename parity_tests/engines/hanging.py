"""An engine that never returns on rank 1 while the other ranks wait for it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from common.job import JobConfig
from parity_tests.faulty import spin


def parallelize(model: nn.Module, mesh: DeviceMesh | None, job: JobConfig) -> nn.Module:
    if dist.get_rank() == 1:
        spin()
    dist.all_reduce(torch.ones(1))
    return model
