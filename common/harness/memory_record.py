"""What is recorded of one step's memory, in bytes on one rank.

    parameters        as they are kept between steps: shards, or whole where nothing is sharded
    optimizer_state   moments, step counts
    gradients         what `.grad` of the parameters holds
    gathered          whole parameters that came by a collective
    messages          what else collectives are given: packed gradients, casts of shards on their way
    other             activations, temporaries, gradients that are not reduced yet, buffers of the model, the batch

Every live block has one class, so that the classes of a moment add up to all that is live.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CLASSES = PARAMETERS, STATE, GRADIENTS, GATHERED, MESSAGES, OTHER = (
    "parameters",
    "optimizer_state",
    "gradients",
    "gathered",
    "messages",
    "other",
)
"""In the order in which they are drawn, from the ground up: what stays longest first."""
PREDICTED = PARAMETERS, STATE, GRADIENTS, GATHERED
START, PEAK = "start", "peak"
"""Moments besides the ends of phases, which are called as the phases."""


@dataclass(frozen=True)
class MemoryPoint:
    """Live bytes by class at one moment: `START`, the end of a phase, or `PEAK`."""

    at: str
    parameters: int
    optimizer_state: int
    gradients: int
    gathered: int
    messages: int
    other: int

    @classmethod
    def of(cls, at: str, live: Mapping[str, int]) -> MemoryPoint:
        """The point with these bytes by class; a class that is missing has none."""
        return cls(at, *(live.get(name, 0) for name in CLASSES))

    @property
    def total(self) -> int:
        """All that is live."""
        return sum(getattr(self, name) for name in CLASSES)


@dataclass(frozen=True)
class PredictedPoint:
    """What closed formulas say of one moment, see `common.harness.predict_memory`; None where there is none."""

    at: str
    parameters: int | None
    optimizer_state: int | None
    gradients: int | None
    gathered: int | None


@dataclass(frozen=True)
class StepMemory:
    """Bytes of live tensors on one rank during one step, by allocator events.

    Attributes:
        start_bytes: live when the step began: parameters, buffers, optimizer state, and whatever else the engine
            keeps from step to step.
        peak_bytes: the most that was live at once during forward, backward and optimizer step.
        reserved_bytes: of a GPU, the most that its caching allocator held, fragments and free blocks included.
        active_bytes: of a GPU, the most in blocks that were in use, or freed while a stream still had work on them.
        points: by class at the start, at the end of each phase, and at the peak; none of a GPU.
        predicted: at all of these but the peak; None where no formula covers engine and model.
    """

    start_bytes: int
    peak_bytes: int
    reserved_bytes: int | None = None
    active_bytes: int | None = None
    points: list[MemoryPoint] = field(default_factory=list)
    predicted: list[PredictedPoint] | None = None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> StepMemory:
        """What `dataclasses.asdict` made of it.

        Raises:
            ValueError: the start or the peak is not among the points.
        """
        points = [MemoryPoint(**point) for point in data["points"]]
        predicted = data["predicted"] and [PredictedPoint(**point) for point in data["predicted"]]
        if points and (points[0].at, points[-1].at) != (START, PEAK):
            raise ValueError(f"memory: expected points from {START} to {PEAK}, found {[point.at for point in points]}")
        return cls(**data | {"points": points, "predicted": predicted})


@dataclass(frozen=True)
class Timeline:
    """Live bytes over one step, thinned out, its peak kept.

    Times are of a step under the profiler: they show order, and are no measurement.

    Attributes:
        rank: whose; of the ranks, the one with the highest peak.
        ends_s: end of each phase, from the start of the step.
        times_s: when each sample was taken; it holds until the next.
        live: bytes by class, one number for each sample.
    """

    rank: int
    ends_s: dict[str, float]
    times_s: list[float]
    live: dict[str, list[int]]

    @property
    def totals(self) -> list[int]:
        """All that is live at each sample."""
        return [sum(sample) for sample in zip(*self.live.values(), strict=True)]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Timeline:
        """What `dataclasses.asdict` made of it.

        Raises:
            ValueError: classes that are none, samples that do not go together or are no bytes, times that go back.
        """
        found = cls(**data)
        times, ends, classes = [*found.times_s], [*found.ends_s.values()], [*found.live.values()]
        if list(found.live) != list(CLASSES) or not times or not ends or {len(times)} != {*map(len, classes)}:
            raise ValueError("timeline: expected as many samples of each class as times")
        if not all(isinstance(size, int) and size >= 0 for samples in classes for size in samples):
            raise ValueError("timeline: expected whole numbers of bytes")
        if times != sorted(times) or ends != sorted(ends):
            raise ValueError("timeline: expected times that rise")
        return found
