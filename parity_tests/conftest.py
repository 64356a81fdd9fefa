"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import bench.commands
from bench.store import Comparison, load_comparison
from common.harness.launch import RankPool
from parity_tests.cli_calls import FROZEN, children
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


@pytest.fixture(scope="session")
def frozen() -> Comparison:
    """A comparison as an earlier version stored it."""
    return load_comparison(FROZEN)


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a command that goes on to start ranks, and one that leaves a process."""

    def refuse(ranks: int) -> None:
        raise AssertionError(f"{ranks} ranks were about to start")

    monkeypatch.setattr(bench.commands, "open_ranks", refuse)
    before = children()
    yield
    assert children() <= before
