"""Runs random jobs on all engines and judges them: what a test does for a minute, this does for as long as it is told.

    python -m parity_tests.fuzz --minutes 30 --seed 7     # or: make fuzz ARGS="--minutes 30 --seed 7"

Each failure is shrunk and printed as the command that reproduces it; then the hunt goes on. Exit code 1 if there was
one.
"""

from __future__ import annotations

import argparse
import itertools
import secrets
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Flaky

from bench.comparison import run_comparison
from bench.options import CompareOptions, parse
from bench.preflight import settle
from common.errors import ConfigError, RankError
from common.harness.launch import RankPool
from parity_tests.strategies import LARGEST_RANKS, REFUSALS, commands, refusal

ROUND = 20
"""Examples that share a seed in the long form; each round begins with small jobs and ends at its first failure."""
BACKENDS = ("aot_eager", "aot_eager", "aot_eager", "inductor")
"""Of the long form: Inductor takes half a minute for a model."""


class Unequal(AssertionError):
    """Engines that do not agree."""


class Broken(AssertionError):
    """A job that raised, or was refused in a way that is not known."""


@dataclass
class Hunt:
    """Random jobs on one pool of ranks.

    Attributes:
        judged: how many ran on every engine and were judged, those of shrinking too.
        refused: how many were refused before a rank started, by reason.
        grades: how many pairs of runs reached each grade.
    """

    pool: RankPool
    judged: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    grades: Counter[str] = field(default_factory=Counter)

    def examples(self, number: int, seed: int, backends: Sequence[str] = ("aot_eager",)) -> None:
        """Judge `number` random jobs.

        Raises:
            Unequal, Broken: the smallest job found that fails.
        """

        @hypothesis.seed(seed)
        @settings(
            max_examples=number,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        @given(commands(backends=backends))
        def each(command: str) -> None:
            self.judge(command)

        each()

    def judge(self, command: str) -> None:
        """Do what the command does, on our ranks: refuse it, or run every engine and the referee and judge them.

        Raises:
            Unequal, Broken: it does not hold, or does not run.
        """
        try:
            options = parse(shlex.split(command)[1:])
            assert isinstance(options, CompareOptions)
            options = replace(options, job=settle(options.job, options.reference, options.engines, options.out))
        except ConfigError as error:
            reason = refusal(str(error))
            if reason is None:
                raise Broken(f"{command}\nis refused in a way that strategies.REFUSALS has not: {error}") from None
            self.refused[reason] += 1
            return
        try:
            comparison, _ = run_comparison(self.pool, options, None, datetime.now().astimezone(), show=False)
        except (ConfigError, RankError) as error:
            detail = error.detail if isinstance(error, RankError) else ""
            raise Broken(f"{command}\n{type(error).__name__}: {error}\n{detail}") from None
        if comparison.failures:
            raise Unequal("\n".join((command, *comparison.failures)))
        self.judged += 1
        self.grades.update(f"{report.reached}" for report in comparison.reports)

    def told(self) -> str:
        """What was done, in lines."""
        grades = ", ".join(f"{count} {grade}" for grade, count in sorted(self.grades.items()))
        lines = [f"{self.judged} jobs judged, and they hold; pairs of engines by the grade they reached: {grades}"]
        lines += [f"{self.refused[reason]} refused: {reason}" for reason in REFUSALS]
        return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Hunt for some minutes; the exit code says whether something was found."""
    parser = argparse.ArgumentParser(prog="python -m parity_tests.fuzz")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6), help="of what is drawn (default: random)")
    options = parser.parse_args(words)
    print(f"fuzz: --minutes {options.minutes:g} --seed {options.seed}", flush=True)
    end_s = time.monotonic() + 60 * options.minutes
    found = 0
    with RankPool(LARGEST_RANKS) as pool:
        hunt = Hunt(pool)
        for seed in itertools.count(options.seed):
            if time.monotonic() >= end_s:
                break
            try:
                hunt.examples(ROUND, seed, BACKENDS)
            except (Unequal, Broken, Flaky) as failure:
                found += 1
                print(f"\nfound with seed {seed}:\n{failure}\n", flush=True)
    print(f"{found} failures; {hunt.told()}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
