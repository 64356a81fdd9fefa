"""What a job trains: a model, its share of each step's batch, and the loss; on tokens, or as the user's task says.

[Note: float64 all through]
The referee has parameters and inputs in float64, and yet a model's own code may name a narrower dtype: norms and a
softmax that are computed "in float32" are common. `InFloat64` lets such casts give float64, else the referee would err
as much as those it judges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from common.data import batch, check_tokens, load_tokens
from common.errors import ConfigError
from common.job import DEFAULT_SEQ, JobConfig
from common.models import check_seq, model_limits
from common.policy import DTYPES
from common.task import Batch, Task, call_model, check_loss, same_batch
from common.torch_private import TorchDispatchMode


class Share(Protocol):
    """Inputs and targets of one step: the whole batch, or one rank's share."""

    def __call__(self, *, step: int, rank: int = 0, ranks: int = 1) -> Batch: ...


class Loss(Protocol):
    """The mean loss of what a model returned, against the targets."""

    def __call__(self, output: Any, targets: Any, /) -> torch.Tensor: ...


@dataclass(frozen=True)
class Workload:
    """What a job trains.

    Attributes:
        job: the job, its `seq` settled.
        model: as it was built.
        share: its batches.
        loss: its loss.
    """

    job: JobConfig
    model: nn.Module
    share: Share
    loss: Loss

    @classmethod
    def of(cls, built: nn.Module | Task, job: JobConfig) -> Workload:
        """What `job` trains, once its model or task is built.

        Raises:
            ConfigError: text that does not fit the model; options that a task has no use for, batches that are none or
                that change from call to call.
        """
        return cls._of_task(built, job) if isinstance(built, Task) else cls._on_tokens(built, job)

    @classmethod
    def _on_tokens(cls, model: nn.Module, job: JobConfig) -> Workload:
        seq = job.seq or DEFAULT_SEQ
        limits = model_limits(model)
        check_seq(seq, limits.max_seq_len)
        tokens = load_tokens(job.data)
        check_tokens(tokens, limits.vocab_size, seq, job.batch, path=job.data)
        share = partial(batch, tokens, seed=job.seed, batch=job.batch, seq=seq)
        return cls(replace(job, seq=seq), model, share, mean_loss)

    @classmethod
    def _of_task(cls, task: Task, job: JobConfig) -> Workload:
        for name, value in (("seq", job.seq), ("data", job.data)):
            if value is not None:
                raise ConfigError(
                    f"{name}: model {job.model!r} is a task with batches of its own, which do not depend on it; "
                    f"leave --{name} out"
                )
        share = partial(task.share, size=job.batch, seed=job.seed, dtype=DTYPES[job.dtype])
        if not same_batch(share(step=0), share(step=0)):
            raise ConfigError(
                f"model {job.model!r}: its batch function gave two different batches for step 0; let it depend on step "
                "and size alone, and draw with torch's generator, which is set before each call"
            )
        compute_dtype = DTYPES[job.param_dtype]
        return cls(
            job, task.model, share, lambda output, targets: check_loss(task.loss(output, targets), compute_dtype)
        )

    def loss_of(self, module: Callable[..., Any], inputs: Any, targets: Any) -> torch.Tensor:
        """The mean loss of a batch; `module` is the model, or what an engine put round it."""
        return self.loss(call_model(module, inputs), targets)

    def check_mean(self, losses: list[float]) -> None:
        """See that a loss of the whole batch is the mean of its shares' losses, as it has to be where ranks share it.

        Rounding moves it by a few epsilon, a sum over samples by half of it or more; the root of epsilon is between.

        Args:
            losses: of the whole batch, then of each share.

        Raises:
            ConfigError: it is not.
        """
        whole, *shares = losses
        mean = math.fsum(shares) / len(shares)
        tolerance = math.sqrt(torch.finfo(DTYPES[self.job.param_dtype]).eps) * max(map(abs, losses))
        if abs(whole - mean) > tolerance:  # not so if one is not finite, which is judged later
            raise ConfigError(
                f"model {self.job.model!r}: expected a loss that is the mean over samples, found {whole:.6g} for the "
                f"batch of step 0 and a mean of {mean:.6g} over its {len(shares)} shares; average over samples of "
                "equal weight, and let none depend on others (see common/task.py)"
            )


def mean_loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of logits [batch, seq, vocab] against token ids [batch, seq], in fp32 or wider.

    Args:
        output: the logits, or a dict or dataclass that holds them as `logits`.

    Raises:
        ConfigError: the model returned something else, or logits for other tokens.
    """
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor) or logits.shape[:-1] != targets.shape:
        found = list(logits.shape) if isinstance(logits, torch.Tensor) else f"a {type(output).__name__}"
        raise ConfigError(
            f"model: expected it to return logits {[*targets.shape, 'vocab']}, found {found}; wrap it in a module "
            "whose forward takes token ids [batch, seq] and returns logits, alone or as `logits`, or return a task"
        )
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten())


class InFloat64(TorchDispatchMode):
    """A context in which what is asked for in a narrower floating dtype is made in float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype = (kwargs or {}).get("dtype")
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **(kwargs or {}))
