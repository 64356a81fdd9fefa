"""Whether the two cells of a benchmark rank its engines alike: `python scripts/compare_rankings.py FOLDER`.

Called by `netns_check.sh`, whose cells are a wire and the emulated link. Of each pair of engines it says which is
faster in each cell, by the test that `bench` uses for its own verdicts ([Note: when a verdict is given] in
`bench/benchmark.py`), on turns taken side by side. A pair within spread in either cell is a tie and says nothing.

Exit codes: 0 no pair is ranked the other way round, and at least one was told apart in both cells; 1 one is; 2 none was
told apart in both.
"""

from __future__ import annotations

import json
import statistics
import sys
from itertools import combinations
from pathlib import Path

from bench.benchmark import FASTER, SAME, SLOWER, per_turn, verdict_of
from bench.benchmark_files import load_benchmark
from common.harness.stopwatch import TimedStep, TimedTurn

SIGNS = {FASTER: "<", SLOWER: ">", SAME: "~"}
"""Between step times: the shorter one is the faster."""


def main(folder: Path) -> int:
    links = [cell.link for cell in load_benchmark(folder).cells]
    assert len(links) == 2, f"expected two cells, found {links}"
    first, second = (step_times(folder / f"cell-{number}") for number in (1, 2))
    for link, times in zip(links, (first, second), strict=True):
        medians = sorted((statistics.median(turns), engine) for engine, turns in times.items())
        print(f"{link}: " + ", ".join(f"{engine} {step_s * 1e3:.0f} ms" for step_s, engine in medians))
    told_apart = reversed_pairs = 0
    for pair in combinations(first, 2):
        verdicts = [verdict(times, *pair) for times in (first, second)]
        ratios = [statistics.median(ratios_of(times, *pair)) for times in (first, second)]
        is_tie = SAME in verdicts
        told_apart += not is_tie
        reversed_pairs += not is_tie and verdicts[0] != verdicts[1]
        word = "tie" if is_tie else "same" if verdicts[0] == verdicts[1] else "REVERSED"
        signs = " | ".join(f"{SIGNS[said]} ({ratio:.2f})" for said, ratio in zip(verdicts, ratios, strict=True))
        print(f"  {word:<8} {pair[0]} to {pair[1]}: {signs}")
    print(f"{told_apart} pairs told apart on both links, {reversed_pairs} of them ranked the other way round")
    return 2 if not told_apart else 1 if reversed_pairs else 0


def step_times(cell: Path) -> dict[str, list[float]]:
    """Seconds of a step by engine [turn], as in the row of the engine."""
    turns = json.loads((cell / "turns.json").read_text())
    return {
        engine: per_turn([[_turn(rank) for rank in ranks] for ranks in taken], lambda step: step.step_s, max)
        for engine, taken in turns.items()
    }


def verdict(times: dict[str, list[float]], one: str, other: str) -> str:
    """Whether `one` is faster or slower than `other`."""
    return verdict_of([1 / ratio for ratio in ratios_of(times, one, other)])


def ratios_of(times: dict[str, list[float]], one: str, other: str) -> list[float]:
    """Step of `one` over that of `other`, turn by turn."""
    return [a / b for a, b in zip(times[one], times[other], strict=True)]


def _turn(data: dict[str, list[dict[str, float]]]) -> TimedTurn:
    return TimedTurn(*(tuple(TimedStep(**step) for step in data[lot]) for lot in ("free", "loaded")))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
