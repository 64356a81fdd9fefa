"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.harness.launch import RankPool
from parity_tests.runs import Runs


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Up to 4 ranks for the whole session; a test that fails inside them costs the next one a restart."""
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def runs(pool: RankPool) -> Runs:
    """Each job is run once per engine in the session."""
    return Runs(pool)
