"""Engines that train well and fail when they are timed: `ddp`, until rank 1 acts in the first step of a turn."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from common.baselines import ddp
from common.job import JobConfig


def parallelize_and_fail(
    model: nn.Module, mesh: DeviceMesh | None, job: JobConfig, act: Callable[[], None]
) -> nn.Module:
    calls = 0
    judged = max(job.steps, 2) + 2  # and those under instruments, which come after two at least

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls > judged and dist.get_rank() == 1:
            act()

    model.register_forward_pre_hook(count)
    return ddp.parallelize(model, mesh, job)
