"""A data-parallel engine written by hand, honest or with one fault planted in it, for tests of the judge.

Each rank holds the whole model, and averages a parameter's gradient as soon as it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from common.baselines import in_job_precision
from common.engine import Engine
from common.harness.launch import RankContext
from common.harness.train import RankResult, train
from common.job import JobConfig

TARGET = "layers.1.attention.wq.weight"
"""The parameter that faults of one parameter are planted in."""


@dataclass
class Averaging:
    """The gradient of one parameter on one rank, about to be averaged.

    Attributes:
        gradient: this rank's, changed in place.
        step: how many gradients of this parameter there were before.
        kept: what a fault wants to remember from step to step.
    """

    name: str
    gradient: torch.Tensor
    rank: int
    ranks: int
    step: int = 0
    kept: list[torch.Tensor] = field(default_factory=list)

    def sum(self) -> None:
        """Add up over ranks."""
        dist.all_reduce(self.gradient)

    def mean(self) -> None:
        """Average over ranks: what is right."""
        self.sum()
        self.gradient /= self.ranks


Fault = Callable[[Averaging], None]


def averages_in_bf16(it: Averaging) -> None:
    narrow = it.gradient.bfloat16()
    dist.all_reduce(narrow)
    it.gradient.copy_(narrow / it.ranks)


def divides_twice(it: Averaging) -> None:
    it.mean()
    it.gradient /= it.ranks


def drops_shard_of_last_rank(it: Averaging) -> None:
    it.mean()
    it.gradient[-(-len(it.gradient) // it.ranks) * (it.ranks - 1) :] = 0


def drops_last_row(it: Averaging) -> None:
    it.mean()
    it.gradient[-1] = 0


def rolls_by_one_row(it: Averaging) -> None:
    it.mean()
    it.gradient.copy_(it.gradient.roll(1, 0))


def leaves_out_last_rank(it: Averaging) -> None:
    if it.rank == it.ranks - 1:
        it.gradient.zero_()
    it.mean()


def hands_out_the_last_step(it: Averaging) -> None:
    it.mean()
    it.kept.append(it.gradient.clone())
    it.gradient.copy_(it.kept[max(it.step - 1, 0)])


def stops_after_step_0(it: Averaging) -> None:
    it.mean()
    if it.step:
        it.gradient.zero_()


EVERYWHERE: Mapping[str, Fault] = {
    "honest": Averaging.mean,
    "all sum": Averaging.sum,
    "all averaged in bf16": averages_in_bf16,
    "all leave out last rank": leaves_out_last_rank,
}
ON_TARGET: Mapping[str, Fault] = {
    "sum": Averaging.sum,
    "averaged in bf16": averages_in_bf16,
    "divided twice": divides_twice,
    "shard of last rank dropped": drops_shard_of_last_rank,
    "last row dropped": drops_last_row,
    "rolled by one row": rolls_by_one_row,
    "last rank left out": leaves_out_last_rank,
    "of the last step": hands_out_the_last_step,
    "zero after step 0": stops_after_step_0,
}


def run_planted(context: RankContext, fault: str, job: JobConfig) -> RankResult | None:
    """Train `job` with one fault, by its name in `EVERYWHERE` or `ON_TARGET`."""
    training = train(context, Engine(f"planted: {fault}", partial(_parallelize, fault), True), job)
    return training and training.result


def _parallelize(fault: str, model: nn.Module, mesh: DeviceMesh | None, job: JobConfig) -> nn.Module:
    assert mesh is not None
    for name, param in model.named_parameters():
        act = EVERYWHERE.get(fault) or (ON_TARGET[fault] if name == TARGET else Averaging.mean)
        it = Averaging(name, torch.empty(0), mesh.get_local_rank(), mesh.size())
        param.register_post_accumulate_grad_hook(partial(_average, act, it))
    return in_job_precision(model, job)


def _average(act: Fault, it: Averaging, param: torch.Tensor) -> None:
    assert param.grad is not None
    it.gradient = param.grad
    act(it)
    it.step += 1
