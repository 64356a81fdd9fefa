"""The known-good ways to train the same job, which the two engines are measured against; each is an engine itself.

single                  one process, the whole batch: no sharding, no communication; also the float64 referee
ddp                     torch's DistributedDataParallel
torch_fsdp2             torch's fully_shard, grouped by the same bucket plan
torch_fsdp2_prefetch    the same, told which group to gather ahead of which
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.func import functional_call

from common.job import JobConfig
from common.policy import MixedPrecisionPolicy


class ComputesInPrecision(nn.Module):
    """Runs a model on casts of its parameters, which stay the masters that the optimizer updates.

    A cast is part of the graph, so gradients come back to the masters, in the masters' dtype; a tied parameter is cast
    once, so its gradients add up in the compute dtype, as they do in a sharded model.

    Args:
        model: keeps its own parameter names; it is this wrapper that is called.
        policy: `param_dtype`, `output_dtype` and `cast_forward_inputs` at the root of the model.
    """

    def __init__(self, model: nn.Module, policy: MixedPrecisionPolicy) -> None:
        super().__init__()
        self.model = model
        self.policy = policy

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns, computed with cast parameters and inputs."""
        cast = {name: param.to(self.policy.compute_dtype(param)) for name, param in self.model.named_parameters()}
        args, kwargs = self.policy.cast_inputs((args, kwargs))
        return self.policy.cast_outputs(functional_call(self.model, cast, args, kwargs))


def in_job_precision(model: nn.Module, job: JobConfig) -> nn.Module:
    """`model`, or a wrapper that computes in the job's `param_dtype` where that is not the parameters' own."""
    return model if job.mp_policy.param_dtype is None else ComputesInPrecision(model, job.mp_policy)
