"""An engine that is wrong: it sums gradients over ranks, where the contract asks for the mean."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from common.job import JobConfig


def parallelize(model: nn.Module, mesh: DeviceMesh | None, job: JobConfig) -> nn.Module:
    def add_up(param: nn.Parameter) -> None:
        assert param.grad is not None
        dist.all_reduce(param.grad)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(add_up)
    return model
