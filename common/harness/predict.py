"""What a plan says one step's collectives must be: closed formulas, which know no engine's code.

With G buckets, world size W, and a bucket's size S = W * sum over its parameters of ceil(d0 / W) * rest elements (each
parameter padded to the same number of rows on every rank):

    style      forward                 backward                                         reductions, in backward
    eager      G gathers               G gathers if weights are given back, else none   one per bucket that is trained
    compiled   G gathers               as eager, but only of what backward reads        one per bucket that is trained

A compiled engine that leaves out `bucket_gathers` or `bucket_reductions` (`JobConfig.disabled_passes`) sends that way
one message per parameter: forward gathers each, backward each that it reads. Each is padded alone in a bucket too, so
bytes do not change.

Gathers carry S in the compute dtype, reductions S (of trained parameters) in the reduction dtype. On one rank
nothing travels. Ordered reductions travel as all-to-all of what other ranks need, (W - 1) / W of S, see [Note: rank
order] in `common.gradient`.

[Note: what backward reads]
A traced backward gathers a weight again only if some operator of it takes the weight as an argument. The gradient of a
layer's input needs its weight matrix or scale; that of an embedding's table needs the indices alone; a bias is only
added, so its gradient needs nothing. One exception: `aten::native_layer_norm_backward` takes the bias it does not use,
so LayerNorm's bias is read wherever that operator is not decomposed; Inductor decomposes it. A parameter tied between
modules is read if one of them reads it.

None, no prediction, where no formula is known: a user's own model (`module:function`), which may run a module twice or
not at all; a module with parameters that is not in the table, frozen parameters
(what is gathered then depends on where gradients end), buckets of mixed dtypes, a user's own engine, DDP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from common.baselines.torch_fsdp2 import module_groups
from common.engine import SHORT_NAMES, import_path
from common.gradient import Transport, plan_reduction
from common.harness.instruments.collectives import BACKWARD, FORWARD
from common.harness.records import CollectiveCount
from common.job import JobConfig
from common.models.llama import RMSNorm
from common.plan import build_plan
from common.policy import DTYPES

_READ_BY_BACKWARD: Mapping[type[nn.Module], frozenset[str]] = {
    nn.Linear: frozenset({"weight"}),
    nn.Embedding: frozenset(),
    nn.LayerNorm: frozenset({"weight", "bias"}),
    nn.RMSNorm: frozenset({"weight"}),
    RMSNorm: frozenset({"weight"}),
}
"""See [Note: what backward reads]; exact types, since a subclass may compute something else."""


@dataclass(frozen=True)
class _Setting:
    """What all formulas need of a job: the model before it is sharded, and how it is sharded."""

    model: nn.Module
    job: JobConfig
    process_group: str

    def gathered_bytes(self, params: Iterable[str]) -> int:
        """Bytes of the whole of `params`, padded, in the dtype they are gathered in."""
        return sum(self._padded(name) * self.job.mp_policy.compute_dtype(self._param(name)).itemsize for name in params)

    def reduced_bytes(self, params: Iterable[str]) -> int:
        """Bytes of the whole gradients of `params`, padded, in the dtype they are reduced in."""
        return sum(
            self._padded(name) * self.job.mp_policy.reduction_dtype(self._param(name)).itemsize for name in params
        )

    def reduction_kind(self) -> str:
        """How a reduction of our own engines travels."""
        reduction = plan_reduction(
            world_size=self.job.ranks,
            reduce_dtype=DTYPES[self.job.reduce_dtype],
            backend=self.process_group,
            transport=Transport(self.job.transport),
        )
        return "all_to_all" if reduction.transport is Transport.ORDERED else "reduce_scatter"

    def _param(self, name: str) -> torch.Tensor:
        return self.model.get_parameter(name)

    def _padded(self, name: str) -> int:
        """Elements of one parameter [d0, rest] with d0 rounded up to a multiple of the ranks."""
        rows, rest = self._param(name).shape[0], self._param(name)[:1].numel()
        return self.job.ranks * -(-rows // self.job.ranks) * rest


def predict_collectives(
    engine: str, model: nn.Module, job: JobConfig, *, process_group: str = "gloo"
) -> list[CollectiveCount] | None:
    """The collectives that one step of `engine` should launch on one rank; None where no formula covers it.

    Args:
        engine: short name or import path.
        model: the plain model, before it is sharded.
        job: what is run.
        process_group: its backend.
    """
    path = import_path(engine)
    if path == SHORT_NAMES["single"]:
        return []
    formula = _FORMULAS.get(path)
    if formula is None or job.has_own_model or not is_covered(model):
        return None
    return [] if job.ranks == 1 else formula(_Setting(model, job, process_group))


def is_covered(model: nn.Module) -> bool:
    """Whether the model's gathers follow from its plan: one dtype, every parameter trained and sharded by rows."""
    params = list(model.parameters())
    return all(param.requires_grad and param.dim() for param in params) and len({param.dtype for param in params}) == 1


def _predict_eager(setting: _Setting) -> list[CollectiveCount]:
    buckets = [bucket.params for bucket in build_plan(setting.model, setting.job.plan).buckets]
    return _counts(setting, buckets, buckets, buckets)


def _predict_torch_fsdp2(setting: _Setting) -> list[CollectiveCount]:
    groups = [group.params for group in module_groups(build_plan(setting.model, setting.job.plan))]
    return _counts(setting, groups, groups, groups, reduction="reduce_scatter")


def _predict_compiled(setting: _Setting) -> list[CollectiveCount] | None:
    read = read_params(setting.model, decomposed=setting.job.backend == "inductor")
    if read is None or setting.job.backend == "eager":  # not compiled: no graph, so no buckets
        return None
    buckets = [bucket.params for bucket in build_plan(setting.model, setting.job.plan).buckets]
    alone = [(name,) for params in buckets for name in params]
    gathered = alone if "bucket_gathers" in setting.job.disabled_passes else buckets
    reduced = alone if "bucket_reductions" in setting.job.disabled_passes else buckets
    again = [[name for name in params if name in read] for params in gathered]
    return _counts(setting, gathered, [params for params in again if params], reduced)


def _counts(
    setting: _Setting,
    forward: Iterable[Iterable[str]],
    backward: Iterable[Iterable[str]],
    reduced: Iterable[Iterable[str]],
    *,
    reduction: str | None = None,
) -> list[CollectiveCount]:
    """Counts for the messages gathered in forward, those gathered again if weights are given back, and reductions.

    Those travel as our own engines' do, if `reduction` does not say how.
    """
    reduction = reduction or setting.reduction_kind()
    ranks = setting.job.ranks
    reduced_bytes = [setting.reduced_bytes(params) for params in reduced]
    if reduction == "all_to_all":
        reduced_bytes = [size // ranks * (ranks - 1) for size in reduced_bytes]
    counts = [_count(FORWARD, "all_gather", [setting.gathered_bytes(params) for params in forward])]
    if setting.job.reshard_after_forward == "always":
        counts.append(_count(BACKWARD, "all_gather", [setting.gathered_bytes(params) for params in backward]))
    counts.append(_count(BACKWARD, reduction, reduced_bytes))
    return sorted((count for count in counts if count.count), key=lambda count: (count.phase == BACKWARD, count.kind))


def _count(phase: str, kind: str, sizes: list[int]) -> CollectiveCount:
    return CollectiveCount(phase, kind, len(sizes), sum(sizes))


def read_params(model: nn.Module, *, decomposed: bool) -> set[str] | None:
    """Names of the parameters that a traced backward reads; None for a model with unknown modules."""
    if not any(isinstance(module, nn.Embedding) for module in model.modules()):
        return None  # its first layer reads data: no gradient of its input, so perhaps its weight is not read
    first: dict[nn.Parameter, str] = {}
    read: set[str] = set()
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            canonical = first.setdefault(param, f"{prefix}.{name}".lstrip("."))
            if type(module) not in _READ_BY_BACKWARD:
                return None
            unused = {"bias"} if decomposed else set()
            if name in _READ_BY_BACKWARD[type(module)] - unused:
                read.add(canonical)
    return read


_FORMULAS: Mapping[str, Callable[[_Setting], list[CollectiveCount] | None]] = {
    SHORT_NAMES["eager"]: _predict_eager,
    SHORT_NAMES["compiled"]: _predict_compiled,
    SHORT_NAMES["torch-fsdp2"]: _predict_torch_fsdp2,
    SHORT_NAMES["torch-fsdp2-prefetch"]: _predict_torch_fsdp2,
}
