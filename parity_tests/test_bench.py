"""`fsdp-parity bench`: engines take turns, what a step spends on the link is known exactly, and bad figures are shown.

Nothing here asserts on a clock: times on the link follow from its model and the plan's bytes, ratios from made-up
turns.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.benchmark import FASTER, SAME, SLOWER, Spread, per_turn, verdict_of
from bench.options import BenchOptions, parse
from common.harness.link import LogEntry
from common.harness.records import RunRecord
from common.harness.stopwatch import TimedStep, TimedTurn, busy_s, edges_s
from parity_tests.cli_calls import Ran, call, children

ENGINES = "parity_tests.engines"
SMALL = ("--steps", "2", "--batch", "4", "--seq", "16", "--turns", "2", "--turn-steps", "2", "--backend", "aot_eager")
TINY = ("--model", f"{ENGINES}.models:bigram", *SMALL)
ALPHA_S, BETA = 2e-3, 50e6
LINK = ("--link", "2ms,50MB/s")


def entry(kind: str, start_s: float, end_s: float, group: str = "0") -> LogEntry:
    return LogEntry(group, (0, 1), 0, kind, 0, 0, start_s, start_s, end_s)


LOG = [
    entry("all_gather", 0.0, 1.0),
    entry("all_gather", 4.0, 4.5),
    entry("all_reduce", 4.0, 4.25, group="1"),
    entry("reduce_scatter", 5.0, 7.0),
    entry("reduce_scatter", 7.0, 7.125),
]


def test_busy_time_is_that_of_the_busiest_link() -> None:
    """Operations of one group follow each other and add up; another group's run beside them."""
    assert busy_s(LOG) == 1.0 + 0.5 + 2.0 + 0.125
    assert busy_s([]) == 0.0


def test_edges_are_the_first_gather_and_the_last_reduction() -> None:
    """Whatever comes between; without gathers, as in plain data parallelism, the last reduction alone."""
    assert edges_s(LOG) == 1.0 + 0.125
    assert edges_s([entry("all_reduce", 1.0, 1.5), entry("broadcast", 2.0, 9.0)]) == 0.5
    assert edges_s([entry("barrier", 0.0, 1.0)]) == 0.0


def test_spread_is_the_middle_half() -> None:
    """Median and quartiles, whatever the order; of one value, that value."""
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(3.0, 2.0, 4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


@pytest.mark.parametrize(
    ("low", "high", "verdict"), [(1.01, 1.2, FASTER), (0.8, 0.99, SLOWER), (0.9, 1.1, SAME), (1.0, 1.3, SAME)]
)
def test_no_verdict_inside_the_spread(low: float, high: float, verdict: str) -> None:
    """Where the middle half of the ratios has 1 in it, nobody is faster, whatever the median."""
    assert verdict_of(Spread((low + high) / 2, low, high)) == verdict


def turn(*ranks: tuple[float, float]) -> list[TimedTurn]:
    """One turn of one step each: per rank, seconds on the free link and on the other, of which a tenth is exposed."""
    return [
        TimedTurn((TimedStep(free, 0, 0, 0, 0),), (TimedStep(loaded, loaded / 10, 0, loaded / 5, loaded / 20),))
        for free, loaded in ranks
    ]


def test_figures_are_of_the_slowest_rank_and_the_median_turn() -> None:
    """A step ends when its slowest rank does; a turn that something disturbed does not decide."""
    turns = [turn((1, 2), (1, 3)), turn((1, 90), (1, 80)), turn((1, 4), (2, 1))]
    assert per_turn(turns, lambda step: step.step_s, max) == [3, 90, 4]
    assert per_turn(turns, lambda step: step.step_s, max, free=True) == [1, 1, 2]


@pytest.fixture(scope="module")
def benched(tmp_path_factory: pytest.TempPathFactory) -> Benched:
    """Three engines on a small Llama, in ranks that the command starts itself."""
    out = tmp_path_factory.mktemp("runs")
    before = children()
    engines = ("--engines", "eager,torch-fsdp2,torch-fsdp2-prefetch")
    words = ("bench", *SMALL, *LINK, *engines, "--sweep", "plan=block")
    ran = call(*words, "--out", str(out), "--format", "json")
    assert ran.code == 0, ran.err
    assert children() <= before
    (folder,) = out.iterdir()
    return Benched(ran, folder)


@dataclass(frozen=True)
class Benched:
    """One benchmark that went well, and its folder."""

    ran: Ran
    folder: Path

    def record(self, cell: int, engine: str) -> RunRecord:
        return RunRecord.from_dict(json.loads((self.folder / f"cell-{cell + 1}" / f"{engine}.json").read_text()))


def on_the_link_s(record: RunRecord) -> float:
    """What a step's collectives occupy the link for, by its formula: rings, W = 2."""
    shares = {"all_gather": 0.5, "reduce_scatter": 0.5, "all_to_all": 0.5, "all_reduce": 1.0}
    return sum(each.count * ALPHA_S + each.bytes * shares[each.kind] / BETA for each in record.collectives)


def test_bench_times_the_link_as_its_model_says(benched: Benched) -> None:
    """Each engine's busy time is alpha per collective and bytes over beta, counted by another instrument."""
    for number, cell in enumerate(benched.ran.json["cells"]):
        assert [row["engine"] for row in cell["rows"]] == ["eager", "torch-fsdp2", "torch-fsdp2-prefetch"]
        for row in cell["rows"]:
            assert row["busy_s"] == pytest.approx(on_the_link_s(benched.record(number, row["engine"])), rel=1e-6)
            assert 0 < row["edges_s"] <= row["busy_s"] * (1 + 1e-9)
            assert row["bound_s"] == pytest.approx(max(row["compute_s"] + row["edges_s"], row["busy_s"]))


def test_bench_sees_what_is_exposed(benched: Benched) -> None:
    """On a CPU torch waits for each gather unless it is told what comes next, and for each reduction even then."""
    eager, waiting, prefetching = benched.ran.json["cells"][0]["rows"]
    assert eager["exposed_s"] < prefetching["exposed_s"] < waiting["exposed_s"]
    assert all(row["exposed_s"] >= 0.9 * row["edges_s"] for row in (eager, waiting, prefetching))


def test_bench_rows_come_from_the_turns(benched: Benched) -> None:
    """The turns of all ranks are stored, and hold what the rows say."""
    cell = benched.ran.json["cells"][0]
    for row in cell["rows"]:
        taken = cell["turns"][row["engine"]]
        assert len(taken) == 2 and all(len(ranks) == 2 for ranks in taken)
        assert all(len(rank[lot]) == 2 for ranks in taken for rank in ranks for lot in ("free", "loaded"))
        assert not any(step["exposed_s"] for ranks in taken for rank in ranks for step in rank["free"])
        assert row["tokens_per_s"] == pytest.approx(4 * 16 / row["step_s"]["median"])
    assert cell["rows"][0]["speed"] is None and cell["rows"][1]["verdict"] in (FASTER, SLOWER, SAME)


@pytest.mark.parametrize("form", ["table", "json", "csv", "md", "html"])
def test_show_prints_a_benchmark(benched: Benched, form: str) -> None:
    """From its file, in every format, with a row per engine and cell."""
    shown = call("show", "latest", "--out", str(benched.folder.parent), "--format", form)
    assert (shown.code, shown.err) == (0, "")
    for word in ("torch-fsdp2", "eager", "block"):
        assert word in shown.out
    if form == "csv":
        assert shown.out.count("\nbenchmark,") == 3


def test_sweep_is_all_combinations() -> None:
    """Each value given once more is one more cell; the link and fields of the job, the last named fastest."""
    words = ("--sweep", "ranks=2", "--sweep", "link=none", "--sweep", "ranks=3", "--sweep", "link=1ms,2MB/s")
    options = parse(("bench", *words, "--plan", "model"))
    assert isinstance(options, BenchOptions) and options.swept == ("ranks", "link")
    found = [(cell.job.ranks, cell.link.name, cell.job.plan) for cell in options.cells]
    assert found == [(ranks, link, "model") for ranks in (2, 3) for link in ("none", "1ms,2MB/s")]


def test_engine_that_disagrees_has_no_figures(tmp_path: Path) -> None:
    """An engine that sums gradients is timed in vain: its row says why, the others' figures stand, exit code 1."""
    words = (*TINY, *LINK, "--engines", f"{ENGINES}.summing,ddp", "--out", str(tmp_path))
    ran = call("bench", *words, "--format", "json")
    assert ran.code == 1
    wrong, right = ran.json["cells"][0]["rows"]
    assert wrong["step_s"] is None and "reached none" in wrong["failures"][0]
    assert right["step_s"] is not None and right["speed"] is None  # the first that agrees is the base
    assert "BENCH: engines without figures do not agree" in call("show", "latest", "--out", str(tmp_path)).out


def test_rank_that_dies_in_its_turn_is_named(tmp_path: Path) -> None:
    """Exit code 3, the engine's rank is named, and no rank of any engine stays."""
    before = children()
    ran = call("bench", *TINY, *LINK, "--engines", f"ddp,{ENGINES}.dying_in_turn", "--out", str(tmp_path))
    assert ran.code == 3 and ran.out == ""
    assert "fsdp-parity: rank 1 ended with exit code 9" in ran.err
    assert children() <= before


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--link", "fast"), "cannot read 'fast'"),
        (("--turns", "0"), "'0'"),
        (("--turn-steps", "many"), "'many'"),
        (("--sweep", "colour=red"), "'colour=red'"),
        (("--sweep", "plan"), "NAME=VALUE"),
        (("--sweep", "ranks=two"), "'two'"),
        (("--sweep", "plan=nothing"), "'nothing' names no module"),
        (("--sweep", "ranks=5"), "--batch 15"),
    ],
    ids=str,
)
def test_wrong_words_of_bench_end_in_one_line(words: tuple[str, ...], expected: str) -> None:
    """Exit code 2, before any rank starts; every cell of a sweep is looked at first."""
    ran = call("bench", *words)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1), ran
    assert expected in ran.err


def test_bench_does_not_join_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engines need ranks of their own."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setitem(os.environ, name, value)
    ran = call("bench")
    assert ran.code == 2 and "without torchrun" in ran.err
