"""What of a step's memory a closed formula predicts: parameters, optimizer state, gradients, gathered parameters.

With world size W, a parameter of d0 rows of `rest` elements is cut into shards of c = ceil(d0 / W) rows; the last ranks
have fewer rows, or none. Elements on one rank, per parameter:

    engine          parameters     gradients      gathered
    single, ddp     d0 * rest      d0 * rest      0
    eager           c * rest       c * rest       W * c * rest, in lines
    torch-fsdp2     c * rest       c * rest       W * c * rest
    compiled        own rows       c * rest (*)   W * c * rest, of what backward reads

    (*) own rows where gradients are reduced in another dtype than they are kept in: each is cast by itself

In lines: of the parameters of a bucket, each but the last takes whole lines of 32 elements in the buffer in which they
are whole, so that the next begins aligned. On one rank that buffer is the one of the shards.

Parameters and gradients are in the dtype of the parameters, gathered ones in that of compute. Gathered parameters are
kept between forward and backward where weights are not given back, else nowhere between two phases; on one rank nothing
is gathered. SGD keeps no state; AdamW two moments of the rows that a rank has, without padding, and a step count of 4
bytes per parameter.

None, no prediction: a user's own model or engine, and models that no formula for collectives covers, see `predict`. And
of what a graph of Inductor keeps gathered, since it sorts weights out of a bucket in kernels of its own, which no
event shows ([Note: gathered blocks] in `instruments.memory_classes`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from common.engine import SHORT_NAMES, import_path
from common.harness.instruments.collectives import BACKWARD, FORWARD, OPTIMIZER
from common.harness.memory_record import START, PredictedPoint
from common.harness.predict import is_covered, read_params
from common.job import JobConfig
from common.plan import build_plan

_WHOLE = {SHORT_NAMES[name] for name in ("single", "ddp")}
_PADDED = {SHORT_NAMES[name] for name in ("eager", "torch-fsdp2", "torch-fsdp2-prefetch")}
_COMPILED = SHORT_NAMES["compiled"]
_EAGER = SHORT_NAMES["eager"]
_STEP_COUNT_BYTES = 4
_LINE = 32


def predict_memory(engine: str, model: nn.Module, job: JobConfig, *, rank: int) -> list[PredictedPoint] | None:
    """What `engine` should hold on `rank` at the start of a warm step and at the end of each phase.

    Args:
        engine: short name or import path.
        model: the plain model, before it is sharded.
        job: what is run.
        rank: this rank; engines that are not data parallel have one.
    """
    path = import_path(engine)
    if path not in (*_WHOLE, *_PADDED, _COMPILED) or job.has_own_model or not is_covered(model):
        return None
    params = dict(model.named_parameters())
    ranks, rank = (1, 0) if path in _WHOLE else (job.ranks, rank)
    own = sum(_numel(param, ranks, rank) * param.itemsize for param in params.values())
    padded = sum(_numel(param, ranks, 0) * param.itemsize for param in params.values())
    kept = own if path == _COMPILED else padded
    is_cast = path == _COMPILED and job.reduce_dtype != job.dtype
    gradients = own if is_cast else padded
    if path == _EAGER and ranks == 1:
        kept = _whole_numel(path, model, job, params) * next(iter(params.values())).itemsize
    state = 0 if job.optimizer == "sgd" else 2 * own + _STEP_COUNT_BYTES * len(params)
    gathered: int | None = 0
    if ranks > 1 and job.reshard_after_forward == "never":
        names = _gathered_for_backward(path, model, job)
        compute_dtype = job.mp_policy.compute_dtype(next(iter(params.values())))
        gathered = None if names is None else _whole_numel(path, model, job, names) * compute_dtype.itemsize
    return [
        PredictedPoint(START, kept, state, 0, 0),
        PredictedPoint(FORWARD, kept, state, 0, gathered),
        PredictedPoint(BACKWARD, kept, state, gradients, 0),
        PredictedPoint(OPTIMIZER, kept, state, gradients, 0),
    ]


def _gathered_for_backward(path: str, model: nn.Module, job: JobConfig) -> Iterable[str] | None:
    """The parameters that stay gathered if weights are not given back; None if that is not known."""
    if path != _COMPILED:
        return [name for name, _ in model.named_parameters()]
    return None if job.backend == "inductor" else read_params(model, decomposed=False)


def _whole_numel(path: str, model: nn.Module, job: JobConfig, names: Iterable[str]) -> int:
    """Elements of the buffers in which the parameters `names` are whole."""
    sizes = {name: job.ranks * _numel(model.get_parameter(name), job.ranks, 0) for name in names}
    total = sum(sizes.values())
    if path == _EAGER:
        for bucket in build_plan(model, job.plan).buckets:
            total += sum(-sizes[name] % _LINE for name in bucket.params[:-1])
    return total


def _numel(param: torch.Tensor, ranks: int, rank: int) -> int:
    """Elements of `param` on `rank`; rank 0 has as many as any, and others pad to that."""
    most = -(-param.shape[0] // ranks)
    return max(0, min(most, param.shape[0] - rank * most)) * param[:1].numel()
