"""Plain data parallelism with torch's `DistributedDataParallel`: whole weights on each rank, gradients all-reduced.

The gradient is the mean over ranks: DDP divides each rank's by the world size and sums.

Left out: plan, reshard and transport; DDP makes buckets of its own (25 MiB, in the order gradients become ready).
"""

# no `from __future__ import annotations`: DDP reads a hook's annotations and wants classes, not strings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from common.baselines import in_job_precision
from common.blocks import compile_blocks
from common.errors import EngineError
from common.job import JobConfig
from common.policy import DTYPES


def parallelize(model: nn.Module, mesh: DeviceMesh | None, job: JobConfig) -> nn.Module:
    """Return `model` inside DDP; the model keeps its parameters, whole.

    Raises:
        EngineError: no mesh.
        ConfigError: no blocks to compile.
    """
    if mesh is None:
        raise EngineError("ddp: expected a mesh of the ranks to average over, found None; pass build_mesh()")
    compile_blocks(model, job)
    group = mesh.get_group()
    parallel = DistributedDataParallel(in_job_precision(model, job), process_group=group)
    if job.reduce_dtype != job.dtype:
        parallel.register_comm_hook(group, _averaging_in(DTYPES[job.reduce_dtype]))
    return parallel


def _averaging_in(dtype: torch.dtype) -> Callable[..., torch.futures.Future[torch.Tensor]]:
    """A communication hook that averages a bucket over ranks in `dtype`."""

    def average(
        group: dist.ProcessGroup,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        buffer: torch.Tensor = bucket.buffer()  # 1D, in the parameters' dtype
        total = buffer.to(dtype).div_(group.size())
        work = dist.all_reduce(total, group=group, async_op=True)
        averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda _: buffer.copy_(total))
        return averaged

    return average
