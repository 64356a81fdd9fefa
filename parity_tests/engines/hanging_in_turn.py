"""An engine that trains well and hangs when it is timed: rank 1 sleeps in the first step of its first turn."""

from __future__ import annotations

import time

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
            time.sleep(1000)

    model.register_forward_pre_hook(count)
    return ddp.parallelize(model, mesh, job)
