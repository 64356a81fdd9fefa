"""The pytest plugin: a fixture that compares engines on a model, inside the model's own test suite.

    def test_my_model_can_be_sharded(fsdp_parity):
        fsdp_parity(build=my_model, ranks=2, engines=("eager", "compiled"), grade="bitwise")

Every test run of a user with this package installed imports this file, so torch and all that needs it are imported
when the fixture is first used, not here. `bench.parity_fixture` is what it does then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from bench.parity_fixture import FsdpParity


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that go before what tests say."""
    group = parser.getgroup("fsdp-parity", "comparisons by the fixture fsdp_parity")
    group.addoption("--parity-ranks", type=int, metavar="N", help="on this many ranks, whatever tests say")
    group.addoption("--parity-backend", metavar="NAME", help="compiled by this backend, whatever tests say")


@pytest.fixture(scope="session")
def fsdp_parity(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FsdpParity]:
    """Compares engines on a model and fails where they disagree: `fsdp_parity(build=my_model)`."""
    from bench.parity_fixture import FsdpParity

    with FsdpParity(
        tmp_path_factory.mktemp("fsdp-parity"),
        ranks=pytestconfig.getoption("parity_ranks"),
        backend=pytestconfig.getoption("parity_backend"),
    ) as compare:
        yield compare
