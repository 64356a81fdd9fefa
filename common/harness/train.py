"""The train loop: one engine, one job, on every rank; and the record that comes of it.

One run, in phases:

1. build the model (the same values on every rank), predict the collectives, let the engine shard it;
2. train the job's steps, each in the order forward, backward, gradients collected, optimizer;
3. one more step under the collectives instrument, and one under the memory instrument: what is profiled is not judged;
   on request one more is traced;
4. in the parent, put the ranks' results together.

The loss is taken here, outside the engine, on each rank over its own sequences; `workload` says of what.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from common.device import Device, device_of
from common.engine import Engine, load_engine
from common.errors import EngineError
from common.harness.instruments.collectives import BACKWARD, FORWARD, OPTIMIZER, count_collectives, phase
from common.harness.instruments.gradients import GradientSummary, collect_gradients
from common.harness.instruments.memory import live_storages, live_tensors, measure_memory
from common.harness.instruments.memory_classes import held_by
from common.harness.instruments.trace import Trace, record_trace
from common.harness.instruments.updates import local_copies, update_norms
from common.harness.instruments.walk import (
    Phase,
    Place,
    Walk,
    What,
    in_order,
    record_batch,
    record_buffers,
    record_forward_and_backward,
    record_gradients,
    record_parameters,
)
from common.harness.launch import OnProgress, RankContext, Ranks
from common.harness.link import Meter, emulate, parse_link
from common.harness.memory_record import START, PredictedPoint, StepMemory, Timeline
from common.harness.predict import predict_collectives
from common.harness.predict_memory import predict_memory
from common.harness.records import CollectiveCount, Environment, Run, RunRecord
from common.harness.workload import InFloat64, Workload
from common.job import JobConfig
from common.mesh import backend_of
from common.models import build_task
from common.policy import DTYPES
from common.task import Batch, map_tensors
from common.torch_private import fake_group

Mark = Callable[[str], None]
"""Told the name of a moment when it has come."""


def _unmarked(_: str) -> None:
    """Take no note of it."""


@dataclass
class RankResult:
    """What one rank saw; `gradients`, `collectives` and `predicted` are filled on rank 0 only.

    Attributes:
        losses: [step], mean over this rank's sequences; like gradients empty where nothing can be judged.
        gradients: [step].
        update_norms: [step][parameter], see `RunRecord`.
        timeline: of the step that `memory` is about.
        first_step_s: time of the first step, compilation included.
        trace: one step, if it was asked for.
    """

    process_group: str
    losses: list[float] = field(default_factory=list)
    gradients: list[GradientSummary] = field(default_factory=list)
    update_norms: list[dict[str, float]] = field(default_factory=list)
    collectives: list[CollectiveCount] = field(default_factory=list)
    predicted: list[CollectiveCount] | None = None
    memory: StepMemory | None = None
    timeline: Timeline | None = None
    first_step_s: float = 0.0
    trace: Trace | None = None

    @property
    def kept(self) -> dict[str, torch.Tensor]:
        """The whole gradients of step 0."""
        return self.gradients[0].kept if self.gradients else {}


def run_job(
    ranks: Ranks, engine_name: str, job: JobConfig, *, on_progress: OnProgress | None = None, timeout_s: float = 600.0
) -> Run:
    """Run `job` on one engine; return its record and its whole gradients of step 0.

    Raises: as `run_ranks`.
    """
    return assemble(engine_name, job, run_ranks(ranks, engine_name, job, on_progress=on_progress, timeout_s=timeout_s))


def run_ranks(
    ranks: Ranks,
    engine_name: str,
    job: JobConfig,
    *,
    profile: bool = False,
    on_progress: OnProgress | None = None,
    timeout_s: float = 600.0,
) -> list[RankResult | None]:
    """Run `job` on one engine; return what each rank saw, None for one that took no part.

    Args:
        profile: trace a step, too.

    Raises:
        ConfigError: an unknown engine, model or plan, data that do not fit.
        RankError: a rank raised, died or hung.
    """
    load_engine(engine_name)  # a wrong name is told here, not by a rank
    return ranks.run(
        run_engine,
        engine_name,
        job,
        profile,
        timeout_s,
        ranks=job.processes,
        timeout_s=timeout_s,
        on_progress=on_progress,
    )


def assemble(engine_name: str, job: JobConfig, results: Sequence[RankResult | None]) -> Run:
    """Put the ranks' results together; None is a rank that took no part."""
    taking_part = [result for result in results if result is not None]
    main = taking_part[0]
    record = RunRecord(
        engine=engine_name,
        job=job.to_dict(),
        world_size=len(taking_part),
        environment=Environment.here(),
        losses=[list(losses) for losses in zip(*(result.losses for result in taking_part), strict=True)],
        grad_norms=[gradients.norm for gradients in main.gradients],
        grad_digests=[gradients.digests for gradients in main.gradients],
        param_norms=[gradients.norms for gradients in main.gradients],
        update_norms=main.update_norms,
        collectives=main.collectives,
        predicted=main.predicted,
        memory=[result.memory for result in taking_part if result.memory is not None],
        timeline=max(taking_part, key=lambda result: result.memory.peak_bytes if result.memory else 0).timeline,
        first_step_s=max(result.first_step_s for result in taking_part),
        process_group=main.process_group,
    )
    return record, main.kept


def run_engine(
    context: RankContext, engine_name: str, job: JobConfig, profile: bool = False, timeout_s: float = 600.0
) -> RankResult | None:
    """Train `job` on the engine called `engine_name`, on this rank; None on a rank that the engine does not use.

    Raises:
        ConfigError: an unknown engine, model or plan, data that do not fit the model.
        EngineError: the engine broke the contract of `common.engine`.
    """
    with as_rank_of(context, job) as own:
        training = train(own, load_engine(engine_name), job, profile=profile, timeout_s=timeout_s)
    return None if training is None else training.result


def train(
    context: RankContext, engine: Engine, job: JobConfig, *, profile: bool = False, timeout_s: float = 600.0
) -> Training | None:
    """Train `job` on `engine`, on this rank; see `run_engine`."""
    if not engine.data_parallel and context.rank != 0:
        return None
    with emulate(parse_link(job.link), timeout_s=timeout_s) as meter:
        training = prepare(context, engine, job)
        training.run(context)
        if profile:
            training.traced_step(meter)
    return training


@contextmanager
def as_rank_of(context: RankContext, job: JobConfig) -> Iterator[RankContext]:
    """The context to train `job` in: another one where this process has to stand for all of its ranks."""
    if job.is_judged:
        yield context
        return
    dist.destroy_process_group()
    with fake_group(job.ranks):
        yield replace(context, rank=0, ranks=job.ranks)


@dataclass
class Training:
    """One job in progress on one rank.

    Attributes:
        workload: what is trained.
        module: what is called, the model or the engine's wrapper round it.
        device: where the model is.
        rank, ranks: this rank's share of the batch.
        others: what this process held before there was this training; other engines may live beside it.
        predicted_memory: see `StepMemory.predicted`.
    """

    job: JobConfig
    workload: Workload
    module: nn.Module
    optimizer: torch.optim.Optimizer
    device: Device
    rank: int
    ranks: int
    result: RankResult
    others: list[torch.Tensor]
    predicted_memory: list[PredictedPoint] | None

    @property
    def model(self) -> nn.Module:
        """The model itself: parameters and gradients."""
        return self.workload.model

    @property
    def is_referee(self) -> bool:
        """Whether this is the run in float64 on one process that others are judged by."""
        return self.job.dtype == "fp64" and self.ranks == 1

    def run(self, context: RankContext) -> None:
        """The whole run: the judged steps, then the instrumented ones."""
        context.progress("step", 0, self.job.steps)
        for step in range(self.job.steps):
            start_s = time.perf_counter()
            if self.job.is_judged:
                self.judged_step(step)
            else:
                self.plain_step(step)
            if step == 0:
                self.result.first_step_s = time.perf_counter() - start_s
            context.progress("step", step + 1, self.job.steps)
        self.instrumented_steps()
        context.progress("instruments", 1, 1)

    def judged_step(self, step: int) -> None:
        """One step whose loss and gradients are recorded; the gradients of step 0 are kept whole."""
        self.result.losses.append(self._loss_and_backward(step).item())
        self.result.gradients.append(collect_gradients(self.model, rank=self.rank, ranks=self.ranks, keep=step == 0))
        before = local_copies(self.model)
        self._update()
        self.result.update_norms.append(update_norms(self.model, before))

    def instrumented_steps(self) -> None:
        """Two more steps, at the earliest the third and fourth: one counts collectives, one measures memory."""
        for step in range(self.job.steps, 2):  # in its second DDP packs its buckets anew
            self.plain_step(step)
        with count_collectives() as collectives:
            self.plain_step(self.job.steps)
        if self.rank == 0:
            self.result.collectives = collectives.counts
        start = live_storages(ignore=(*self.others, *self.result.kept.values()), device_type=self.device.type)
        held = partial(held_by, self.model, self.optimizer)
        with measure_memory(start, held=held, rank=self.rank, device_type=self.device.type) as meter:
            self.plain_step(self.job.steps + 1, meter.mark)
        assert meter.memory is not None
        self.result.memory = replace(meter.memory, predicted=self.predicted_memory)
        self.result.timeline = meter.timeline

    def traced_step(self, meter: Meter) -> None:
        """One more step, traced; `meter` is that of the link it runs on."""
        with record_trace(self.rank, self.ranks, meter, self.device.type) as self.result.trace:
            self.plain_step(0)

    def walked_step(self, step: int) -> Walk:
        """One step of which everything is recorded that its modules make; whole parameters on rank 0 only."""
        walk: Walk = {}
        keep = self.rank == 0
        record_parameters(self.model, walk, Phase.WEIGHTS, keep=keep)
        record_buffers(self.model, walk)
        record_batch(self._batch(step, self.rank, self.ranks), walk)
        with record_forward_and_backward(self.model, walk):
            loss = self._loss_and_backward(step)
        walk[Place(Phase.LOSS, What.LOSS, "")] = loss.cpu()
        record_gradients(self.model, walk, keep=keep)
        self.result.losses.append(loss.item())
        self.result.gradients.append(collect_gradients(self.model, rank=self.rank, ranks=self.ranks))
        self._update()
        record_parameters(self.model, walk, Phase.UPDATE, keep=keep)
        return in_order(walk)

    def plain_step(self, step: int, mark: Mark = _unmarked) -> None:
        """One step of which nothing is recorded; `mark` is told of its start and of the end of each phase."""
        mark(START)
        self._loss_and_backward(step, mark)
        self._update(mark)

    def _loss_and_backward(self, step: int, mark: Mark = _unmarked) -> torch.Tensor:
        inputs, targets = self._batch(step, self.rank, self.ranks)
        with self._arithmetic():
            with phase(FORWARD):
                loss = self.workload.loss_of(self.module, inputs, targets)
            mark(FORWARD)
            with phase(BACKWARD):
                loss.backward()
            mark(BACKWARD)
        return loss.detach()

    def _batch(self, step: int, rank: int, ranks: int) -> Batch:
        """Inputs and targets of `rank`, on the device."""
        found: Batch = map_tensors(
            self.workload.share(step=step, rank=rank, ranks=ranks), lambda tensor, _: self.device.send(tensor)
        )
        return found

    def _arithmetic(self) -> AbstractContextManager[object]:
        """Where forward and backward run; see [Note: float64 all through]."""
        return InFloat64() if self.is_referee else nullcontext()  # type: ignore[no-untyped-call]

    def check_mean(self) -> None:
        """See that others, who share the batch out, train the same; see `Workload.check_mean`."""
        shares = [(0, 1), *((rank, self.job.ranks) for rank in range(self.job.ranks))]
        with torch.no_grad(), self._arithmetic():
            losses = [self.workload.loss_of(self.module, *self._batch(0, *share)).item() for share in shares]
        self.workload.check_mean(losses)

    def _update(self, mark: Mark = _unmarked) -> None:
        with phase(OPTIMIZER):
            self.optimizer.step()
        mark(OPTIMIZER)
        self.optimizer.zero_grad(set_to_none=True)


def prepare(context: RankContext, engine: Engine, job: JobConfig) -> Training:
    """Build model, data and optimizer on this rank, and let the engine shard the model."""
    context.progress("build", 0, 1)
    device = device_of(job.device)
    others = live_tensors(device_type=device.type)
    rank, ranks = (context.rank, context.ranks) if engine.data_parallel else (0, 1)
    built = build_task(job.model, seed=job.seed, dtype=DTYPES[job.dtype])
    workload = Workload.of(built, job)
    model = workload.model.to(device.claim(context.rank))
    mesh = device.mesh() if engine.data_parallel else None
    result = RankResult(process_group=backend_of(mesh.get_group(), device.type) if mesh else dist.get_backend())
    if rank == 0:
        result.predicted = predict_collectives(engine.name, model, job, process_group=result.process_group)
    predicted_memory = predict_memory(engine.name, model, job, rank=rank)
    names = [name for name, _ in model.named_parameters()]
    module = engine.parallelize(model, mesh, job)
    _check_callable(engine, module)
    _check_names(engine, names, [name for name, _ in model.named_parameters()])
    optimizer = _build_optimizer(model, job)
    training = Training(job, workload, module, optimizer, device, rank, ranks, result, others, predicted_memory)
    if job.has_own_model and not engine.data_parallel:
        training.check_mean()
    return training


def _check_callable(engine: Engine, module: object) -> None:
    if not callable(module):
        raise EngineError(
            f"engine {engine.name!r}: expected parallelize(model, mesh, job) to return what the training loop calls, "
            f"found {module!r}; return the model, or a wrapper round it"
        )


def _check_names(engine: Engine, before: list[str], after: list[str]) -> None:
    if before == after:
        return
    changed = [f"{old} -> {new}" for old, new in zip(before, after, strict=False) if old != new]
    raise EngineError(
        f"engine {engine.name!r}: expected the {len(before)} parameter names of the plain model, in order, found "
        f"{len(after)}, the first that differ: {', '.join(changed[:3]) or 'only their number'}; keep the names of the "
        "model and return a wrapper if one is needed"
    )


def _build_optimizer(model: nn.Module, job: JobConfig) -> torch.optim.Optimizer:
    if job.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=job.lr)
    return torch.optim.AdamW(model.parameters(), lr=job.lr)
