"""What a run has more of, or hides less of, than the healthy run of its engine: faults that change no number."""

from __future__ import annotations

from dataclasses import dataclass

from common.harness.instruments.overlap import Flight
from common.harness.records import RunRecord
from common.harness.selftest.faults import Check
from common.harness.selftest.run import Trial

_ABOUT = 0.25
"""How far from a size what is "about as much" may be."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a run.

    Attributes:
        check: which part of the judge found it.
        what: what is wrong, with numbers.
        cause: what that suggests, "" if nothing.
    """

    check: Check
    what: str
    cause: str = ""


def against_healthy(trial: Trial, healthy: Trial) -> list[Finding]:
    """More bytes, or messages that travel beside less compute, than in the `healthy` run of the same engine and job."""
    assert trial.run is not None and healthy.run is not None
    return [*_memory(trial.run[0], healthy.run[0]), *_overlap(trial.flights, healthy.flights)]


def _memory(ours: RunRecord, theirs: RunRecord) -> list[Finding]:
    start, peak = (
        max(getattr(rank, name) for rank in ours.memory) - max(getattr(rank, name) for rank in theirs.memory)
        for name in ("start_bytes", "peak_bytes")
    )
    if start > 0:
        return [
            Finding(
                Check.MEMORY,
                f"{start} bytes more are held between steps",
                f"kept between steps: {_like(start, theirs)}",
            )
        ]
    if peak > 0:
        return [
            Finding(
                Check.MEMORY,
                f"{peak} bytes more are held at the peak, none between steps",
                "weights or activations are held longer within the step",
            )
        ]
    return []


def _like(extra_bytes: int, healthy: RunRecord) -> str:
    """What is as large as `extra_bytes`."""
    gathered = sum(each.bytes for each in healthy.collectives if (each.phase, each.kind) == ("forward", "all_gather"))
    sizes = {
        "as much as all gathered weights": gathered,
        "as much as one rank's gradients": gathered // healthy.world_size,
    }
    return next(
        (what for what, size in sizes.items() if abs(extra_bytes - size) <= _ABOUT * size),
        "neither all gathered weights nor one rank's gradients",
    )


def _overlap(ours: tuple[Flight, ...], theirs: tuple[Flight, ...]) -> list[Finding]:
    def key(flight: Flight) -> tuple[str, str, str]:
        return flight.phase, flight.way, flight.bucket

    before = {key(flight): flight for flight in theirs}
    pairs = [(flight, before[key(flight)]) for flight in ours if key(flight) in before]
    worse = [(flight, other) for flight, other in pairs if flight.beside < other.beside]
    if not worse:
        return []
    flight, other = worse[0]
    late = sum(flight.before > other.before for flight, other in worse)
    return [
        Finding(
            Check.OVERLAP,
            f"{len(worse)} messages travel beside less compute, the first the {flight.way} of {flight.bucket} in "
            f"{flight.phase}: beside {flight.beside} products of matrices instead of {other.beside}",
            "launched later: a prefetch is lost" if late > len(worse) / 2 else "waited for earlier than needed",
        )
    ]
