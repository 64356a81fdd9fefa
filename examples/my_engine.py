"""An engine of one's own: plain data parallelism, each gradient averaged over ranks as soon as it is there.

    fsdp-parity compare --engines examples.my_engine,ddp --param-dtype bf16

`common/engine.py` says what an engine has to keep. Left out: plan, reshard, transport, backend.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from common.baselines import in_job_precision
from common.job import JobConfig
from common.policy import DTYPES


def parallelize(model: nn.Module, mesh: DeviceMesh, job: JobConfig) -> nn.Module:
    """Leave `model` whole on each rank, and put a hook on each of its parameters."""
    group = mesh.get_group()

    def average(param: nn.Parameter) -> None:
        assert param.grad is not None
        total = param.grad.to(DTYPES[job.reduce_dtype]) / group.size()
        dist.all_reduce(total, group=group)
        param.grad.copy_(total)

    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(average)
    return in_job_precision(model, job)
