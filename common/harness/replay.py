"""Run one side of a comparison again, up to one step, and walk through that step; see `instruments.walk`.

What is walked is the engine without a compiler, since a compiled graph calls no module: `walkable` says which job that
is: where nothing compiles, the one that was judged; else one without what only a graph can do, buckets, resharding and
the ordered transport among it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.engine import compilers_of, load_engine
from common.gradient import Transport
from common.harness.instruments.walk import Walk
from common.harness.launch import OnProgress, RankContext, Ranks
from common.harness.link import emulate, parse_link
from common.harness.train import prepare
from common.job import JobConfig


@dataclass(frozen=True)
class Replayed:
    """One step, seen by all ranks that took part.

    Attributes:
        walks: by rank.
        losses: [rank], of the step.
        digests: of the step's gradients, by parameter, as in a record.
    """

    walks: tuple[Walk, ...]
    losses: tuple[float, ...]
    digests: dict[str, str]


def walkable(engine: str, job: JobConfig) -> JobConfig:
    """The job on which `engine` calls its modules: uncompiled, and packed as the compiled engine then has to be."""
    compilers = compilers_of(engine, job)
    if not compilers.all:
        return job
    job = replace(job, block_backend="eager")
    if compilers.model is None:
        return job
    native = Transport.NATIVE.value
    return replace(
        job, backend="eager", disabled_passes=(), plan="param", reshard_after_forward="never", transport=native
    )


def replay(
    ranks: Ranks,
    engine: str,
    job: JobConfig,
    step: int,
    *,
    on_progress: OnProgress | None = None,
    timeout_s: float = 600.0,
) -> Replayed:
    """Train `job` on `engine` up to `step`, and walk through that.

    Raises: as `train.run_job`.
    """
    load_engine(engine)
    results = ranks.run(
        walk_engine,
        engine,
        job,
        step,
        timeout_s,
        ranks=job.ranks,
        timeout_s=timeout_s,
        on_progress=on_progress,
    )
    return _together([each for each in results if each is not None])


def _together(results: Sequence[tuple[Walk, float, dict[str, str]]]) -> Replayed:
    walks, losses, digests = zip(*results, strict=True)
    return Replayed(walks, losses, digests[0])


def walk_engine(
    context: RankContext, engine_name: str, job: JobConfig, step: int, timeout_s: float
) -> tuple[Walk, float, dict[str, str]] | None:
    """On a rank: the walk through `step`, its loss and the digests of its gradients; None if it takes no part."""
    engine = load_engine(engine_name)
    if not engine.data_parallel and context.rank != 0:
        return None
    with emulate(parse_link(job.link), timeout_s=timeout_s):
        training = prepare(context, engine, job)
        for earlier in range(step):
            training.plain_step(earlier)
            context.progress("step", earlier + 1, step + 1)
        walk = training.walked_step(step)
    result = training.result
    return walk, result.losses[-1], result.gradients[-1].digests
