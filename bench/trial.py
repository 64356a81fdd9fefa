"""Try a user's model before any rank starts: one forward and loss on the CPU, as rank 0 will run them.

The model is built as ranks build it, computes in the job's `param_dtype`, and is given rank 0's rows of step 0 within a
process group of the job's size that moves nothing. So what it raises it would raise on a rank.

[Note: weights that change in forward]
A forward may change a weight in place: an embedding with `max_norm`, a norm that is divided out. In an engine that
shards it changes a gathered copy, which is dropped or, in a graph, may never be written. None of that fails, and
training differs; so it is refused. Found is what changed bits on this batch.

Left out: errors on a job for GPUs, since the CPU may lack what the model calls.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from common.harness.workload import Workload
from common.job import CPU, JobConfig
from common.models import build_task
from common.policy import DTYPES
from common.torch_private import fake_group


def find_changed(job: JobConfig) -> str | None:
    """The first parameter that the forward or loss of the job's model changes; or None.

    Raises: what they raise.
    """
    workload = Workload.of(build_task(job.model, seed=job.seed, dtype=DTYPES[job.dtype]), job)
    model, policy = workload.model, job.mp_policy
    for param in model.parameters():
        param.data = param.data.to(policy.compute_dtype(param))
    before = {name: (param, param.detach().clone()) for name, param in model.named_parameters()}

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = policy.cast_inputs((args, kwargs))
        return model(*args, **kwargs)

    with _group(job.ranks), torch.random.fork_rng(devices=[]):
        try:
            workload.loss_of(call, *workload.share(step=0, ranks=job.ranks))
        except Exception:
            if job.device == CPU:
                raise
    after = dict(model.named_parameters())
    return next((name for name, (param, bits) in before.items() if not _is_same(after.get(name), param, bits)), None)


def _group(ranks: int) -> AbstractContextManager[None]:
    """The process group that a forward may ask for its size, unless this process has one."""
    return nullcontext() if dist.is_initialized() else fake_group(ranks)


def _is_same(found: nn.Parameter | None, param: nn.Parameter, before: torch.Tensor) -> bool:
    """Whether `found` is `param`, and has the bits that it had before."""
    return found is param and torch.equal(_bits(param.detach()), _bits(before))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)
