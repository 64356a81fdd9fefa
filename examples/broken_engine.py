"""An engine with a fault, to see what is said of it: gradients are summed over ranks, where a mean is due.

    fsdp-parity compare --engines examples.broken_engine --backend aot_eager --steps 2 --explain

The README shows what that prints.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from common.job import JobConfig


def parallelize(model: nn.Module, mesh: DeviceMesh | None, job: JobConfig) -> nn.Module:
    """All-reduce each gradient as soon as it is there, and forget to divide it."""
    assert mesh is not None
    group = mesh.get_group()

    def add_up(param: nn.Parameter) -> None:
        assert param.grad is not None
        dist.all_reduce(param.grad, group=group)

    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(add_up)
    return model
