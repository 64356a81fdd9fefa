"""An engine that is wrong from its second step on: one gradient's rows come in reverse order, which changes no norm."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from common.job import JobConfig

TARGET = "layers.0.feed_forward.w1.weight"


def parallelize(model: nn.Module, mesh: DeviceMesh | None, job: JobConfig) -> nn.Module:
    steps = 0

    def average(param: nn.Parameter) -> None:
        assert param.grad is not None
        dist.all_reduce(param.grad)
        param.grad.div_(dist.get_world_size())

    def flip(param: nn.Parameter) -> None:
        nonlocal steps
        if steps:
            assert param.grad is not None
            param.grad.copy_(param.grad.flip(0))
        steps += 1

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(average)
    model.get_parameter(TARGET).register_post_accumulate_grad_hook(flip)
    return model
