"""One engine on one job, healthy or with a fault: what `train` does, and a step more for the order of its messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.engine import load_engine
from common.errors import EngineError
from common.harness.instruments.overlap import Flight, measure_overlap
from common.harness.launch import RankContext, Ranks
from common.harness.link import emulate, parse_link
from common.harness.records import Run
from common.harness.selftest.catalogue import FAULTS
from common.harness.selftest.plant import Scene, planted
from common.harness.train import RankResult, assemble, prepare
from common.job import JobConfig


@dataclass
class Seen:
    """What one rank saw.

    Attributes:
        result: None on a rank that took no part.
        flights: the messages of one step.
        hits: how often the fault did something here.
        refusal: why the harness would not go on, if it did not.
    """

    result: RankResult | None = None
    flights: list[Flight] = field(default_factory=list)
    hits: int = 0
    refusal: str = ""


@dataclass(frozen=True)
class Trial:
    """What all ranks saw.

    Attributes:
        run: None if the harness refused to go on.
        flights: of rank 0.
        hits: of all ranks together.
        refusal: why it did.
    """

    run: Run | None
    flights: tuple[Flight, ...]
    hits: int
    refusal: str


def try_engine(
    ranks: Ranks, engine: str, job: JobConfig, fault: str | None = None, *, timeout_s: float = 300.0
) -> Trial:
    """Train `job` on `engine`, with the fault of that name if there is one.

    Raises: as `Ranks.run`.
    """
    seen = ranks.run(try_on_rank, engine, job, fault, timeout_s, ranks=job.ranks, timeout_s=timeout_s)
    refusal = next((each.refusal for each in seen if each.refusal), "")
    results: Sequence[RankResult | None] = [each.result for each in seen]
    return Trial(
        run=None if refusal else assemble(engine, job, results),
        flights=tuple(seen[0].flights),
        hits=sum(each.hits for each in seen),
        refusal=refusal,
    )


def try_on_rank(context: RankContext, engine_name: str, job: JobConfig, fault: str | None, timeout_s: float) -> Seen:
    """One rank's part of `try_engine`."""
    scene = Scene(context.rank, context.ranks)
    seen = Seen()
    plants = () if fault is None else FAULTS[fault].plants[engine_name]
    with planted(plants, scene):
        engine = load_engine(engine_name)
        if not engine.data_parallel and context.rank:
            return seen
        try:
            with emulate(parse_link(job.link), timeout_s=timeout_s):
                training = prepare(context, engine, job)
                training.run(context)
                if engine.data_parallel:
                    seen.flights = measure_overlap(lambda: training.plain_step(0), context.ranks)
                seen.result = training.result
        except EngineError as error:  # found on all ranks alike, or the others would wait
            seen.refusal = str(error)
    seen.hits = scene.hits
    return seen
