"""What a fault is, as data: what it does, which check has to find it, which cause it must name; and on which job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from common.harness.selftest.plant import Plant
from common.job import JobConfig

_MODELS = "common.harness.selftest.models:"
_SMALL = JobConfig(model=_MODELS + "small", steps=2, seq=8, backend="aot_eager", link="none", lr=0.5, optimizer="sgd")
_JOBS: Mapping[str, JobConfig] = {
    "small": _SMALL,
    "three ranks": _SMALL,
    "tied": replace(_SMALL, model=_MODELS + "tied"),
    "frozen": replace(_SMALL, model=_MODELS + "frozen"),
    "predicted": replace(_SMALL, model="llama-debug", lr=0.1),
}
"""On the link that costs nothing: data moves in rank order there, and peaks of memory are the same every time."""
RANKS = range(2, 5)
"""World sizes that leave rows of every faulty parameter on the last rank."""


def job_of(key: str, ranks: int) -> JobConfig:
    """What is trained under the name `key` on `ranks` ranks; two cannot show an order, so "three ranks" has more."""
    world = max(ranks, 3) if key == "three ranks" else ranks
    return replace(_JOBS[key], ranks=world, batch=2 * world)


Plants = Mapping[str, tuple[Plant, ...]]


class Check(StrEnum):
    """Which part of the judge finds a fault."""

    CONTRACT = "contract"
    """The harness refuses what the engine hands it."""
    SHAPE = "shape"
    """A gradient is missing, is one too many, or is not finite."""
    GRADE = "grade"
    """Losses and gradients against a single process and against another engine."""
    COLLECTIVES = "collectives"
    """Messages against the plan's."""
    MEMORY = "memory"
    """Bytes between steps and at the peak, against the healthy engine's."""
    OVERLAP = "overlap"
    """What each message travels beside, against the healthy engine's."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that may be wrong with an engine.

    Attributes:
        name: what tables and options call it.
        about: what it does, in one line.
        caught_by: the check that has to find it.
        cause: a part of the text that has to be named as its likely cause; LAST stands for the last rank.
        plants: by engine, how it is put in.
        job: what is trained, see `job_of`.
    """

    name: str
    about: str
    caught_by: Check
    cause: str
    plants: Plants
    job: str = "small"


def everywhere(*plants: Plant) -> Plants:
    """The same plants for every engine that shards."""
    return {engine: plants for engine in ("eager", "compiled", "torch-fsdp2")}
