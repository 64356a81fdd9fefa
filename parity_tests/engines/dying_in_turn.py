"""An engine that trains well and dies when it is timed: rank 1 ends in the first step of its first turn."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from common.baselines import ddp
from common.job import JobConfig


def parallelize(model: nn.Module, mesh: DeviceMesh | None, job: JobConfig) -> nn.Module:
    calls = 0
    judged = job.steps + 2  # and those under instruments

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls > judged and dist.get_rank() == 1:
            os._exit(9)

    model.register_forward_pre_hook(count)
    return ddp.parallelize(model, mesh, job)
