"""The judge can fail, and says why: every planted fault is caught by the right check, with the right cause."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

import bench.commands
import bench.judge
from bench.selftest import ENGINES, SelfTest
from common.harness.compare import compare_runs
from common.harness.launch import RankPool
from common.harness.records import CollectiveCount, RunRecord
from common.harness.report import ParityReport
from common.harness.selftest.catalogue import CATALOGUE, FAULTS
from common.harness.selftest.faults import Check
from common.harness.selftest.plant import Plant, Scene, find, planted
from parity_tests.cli_calls import call

CASES = [(fault.name, engine) for fault in CATALOGUE for engine in fault.plants]
HEALTHY = sorted({(engine, fault.job) for fault in CATALOGUE for engine in fault.plants})


def _marked(cases: list[tuple[str, str]], at: int) -> list[Any]:
    """The cases; those of the compiled engine, each of which is traced, are for the long form."""
    return [pytest.param(*case, marks=pytest.mark.long if case[at] == "compiled" else ()) for case in cases]


@pytest.fixture(scope="module")
def selftest(pool: RankPool) -> SelfTest:
    """Healthy runs are shared by all that is planted."""
    return SelfTest(pool, 2, timeout_s=300)


@pytest.mark.parametrize(("engine", "job"), _marked(HEALTHY, 0))
def test_selftest_passes_the_healthy(selftest: SelfTest, engine: str, job: str) -> None:
    """Without a fault nothing is found: what is found below is the fault."""
    verdict = selftest.judge_healthy(engine, job)
    assert verdict.holds, verdict.why


@pytest.mark.parametrize(("fault", "engine"), _marked(CASES, 1))
def test_selftest_catches_the_fault(selftest: SelfTest, fault: str, engine: str) -> None:
    """The check that is meant for the fault finds it and names its cause; the plant was reached."""
    verdict = selftest.judge_fault(FAULTS[fault], engine)
    assert verdict.holds, verdict.why


def test_selftest_has_many_kinds() -> None:
    """At least 40 kinds in each of the two engines, each check among them, and no name twice."""
    for engine in ("eager", "compiled"):
        assert sum(engine in fault.plants for fault in CATALOGUE) >= 40
    assert {fault.caught_by for fault in CATALOGUE} == set(Check)
    assert len(FAULTS) == len(CATALOGUE)
    assert {engine for _, engine in CASES} == set(ENGINES)


# A judge that is blind


def _passes(*runs: object, **options: object) -> ParityReport:
    report = compare_runs(*runs, **options)  # type: ignore[arg-type]
    return replace(report, passed=True, reasons=(), causes=())


def _without_a_cause(*runs: object, **options: object) -> ParityReport:
    return replace(compare_runs(*runs, **options), causes=("a cause of another fault",))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("judge", "said"),
    [(_passes, "expected grade to catch it, found nothing"), (_without_a_cause, "expected a cause with 'summed over")],
)
def test_selftest_fails_a_blind_judge(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch, judge: object, said: str
) -> None:
    """A judge that passes everything, or names another cause, ends the command with 1 and a line on the fault."""
    monkeypatch.setattr(bench.commands, "open_ranks", lambda ranks: nullcontext(pool))
    monkeypatch.setattr(bench.judge, "compare_runs", judge)
    ran = call("selftest", "--faults", "sum-for-mean", "--engines", "eager", "--format", "json")
    assert ran.code == 1
    (row,) = ran.json["tables"]["faults"]
    assert (row["fault"], row["engine"], row["caught"]) == ("sum-for-mean", "eager", False)
    assert said in row["why"]


def test_selftest_fails_a_judge_blind_to_messages(selftest: SelfTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without predictions a message too many is not caught, and the self-test says so."""

    def unpredicted(engine: str, record: RunRecord) -> list[tuple[str, str]]:
        assert any(isinstance(each, CollectiveCount) for each in record.collectives)
        return []

    monkeypatch.setattr(bench.judge, "collective_failures", unpredicted)
    verdict = selftest.judge_fault(FAULTS["gathered-again"], "eager")
    assert not verdict.holds
    assert "expected collectives to catch it" in verdict.why


def test_selftest_holds_on_the_command_line(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a judge that sees, the command ends with 0 and tells what caught the fault, and why."""
    monkeypatch.setattr(bench.commands, "open_ranks", lambda ranks: nullcontext(pool))
    ran = call("selftest", "--faults", "sum-for-mean", "--engines", "eager")
    assert ran.code == 0, ran
    assert "THE JUDGE HOLDS: 1 of 1 planted faults" in ran.out
    assert "summed over ranks" in ran.out


def test_selftest_counts_what_was_not_planted(selftest: SelfTest) -> None:
    """A fault in a parameter that the model lacks is never reached, which is no pass."""
    verdict = selftest.judge_fault(replace(FAULTS["shard-rolled"], job="predicted"), "eager")
    assert not verdict.holds
    assert "not planted" in verdict.why


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--faults", "sum-for-meen"), "did you mean 'sum-for-mean'?"),
        (("--engines", "single"), "engines: 'single' is none"),
        (("--engines", "eager,eager"), "expected each name once"),
        (("--ranks", "9"), "runs on 2 to 4, found 9"),
        (("--faults", "arguments-leaked", "--engines", "eager"), "can be planted in compiled"),
    ],
)
def test_selftest_refuses_wrong_words(words: tuple[str, ...], said: str) -> None:
    """What cannot be planted is refused in one line before ranks start."""
    ran = call("selftest", *words)
    assert ran.code == 2
    assert said in ran.err and ran.err.count("\n") == 1


# Plants


@pytest.mark.parametrize("place", ["common.harness.workload:mean_loss", "torch.optim:SGD.zero_grad"])
def test_plants_are_taken_out(place: str) -> None:
    """A function, its own or inherited, is what it was after a run that raised, and was another one during it."""
    owner, name = find(place)
    before, was_own = getattr(owner, name), name in vars(owner)
    scene = Scene(0, 2)
    plant = Plant(place, lambda scene, original: lambda *args, **options: scene.hit())
    with pytest.raises(ZeroDivisionError), planted((plant,), scene):
        assert getattr(owner, name) is not before
        getattr(owner, name)(torch.zeros(1), torch.zeros(1))
        raise ZeroDivisionError
    assert getattr(owner, name) is before
    assert (name in vars(owner)) is was_own
    assert scene.hits == 1


def test_plants_of_a_name_that_is_gone_raise() -> None:
    """A place that the code no longer has is an error, never a fault that passes."""
    plant = Plant("common.harness.train:no_such_function", lambda scene, original: original)
    with pytest.raises(AttributeError, match="no_such_function"), planted((plant,), Scene(0, 2)):
        pass
