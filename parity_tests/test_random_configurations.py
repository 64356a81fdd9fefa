"""Random jobs agree on every engine; `make fuzz` tries them for as long as it is told.

The oracles are the single process and its float64 run, by the judge that the command line has.
"""

from __future__ import annotations

import pytest

from bench.options import parse
from common.errors import ConfigError
from common.harness.launch import RankPool
from parity_tests.fuzz import Hunt
from parity_tests.strategies import UNKNOWN_OPTIONS, refusal

EXAMPLES = 5
SEED = 0


def test_random_jobs_agree_on_every_engine(pool: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    """Odd sizes, ties, frozen parts, plans, dtypes, ranks: every job that is not refused holds.

    What is refused is so before a rank starts, for a reason that is known, and is the lesser part.
    """
    hunt = Hunt(pool)
    hunt.examples(EXAMPLES, SEED)
    with capsys.disabled():
        print(f"\n{hunt.told()}")
    assert hunt.judged + hunt.refused.total() >= EXAMPLES
    assert hunt.judged > hunt.refused.total()


@pytest.mark.parametrize("option", UNKNOWN_OPTIONS)
def test_an_option_that_is_not_there_yet_is_refused(option: str) -> None:
    """When the command line learns it, this fails: draw it in `strategies.commands` from then on."""
    with pytest.raises(ConfigError, match="unrecognized arguments") as error:
        parse(("compare", option, UNKNOWN_OPTIONS[option]))
    assert refusal(str(error.value)) is not None
