"""`fsdp-parity bench`: engines take turns, what a step spends on the link is known exactly, and bad figures are shown.

Times on the link follow from its model and the plan's bytes, ratios from made-up turns; of what is measured only the
time slept in the link is looked at, which engines that wait for everything cannot make small.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from bench.benchmark import FASTER, SAME, SLOWER, BenchRow, Spread, bench_rows, computed_by, per_turn, verdict_of
from bench.benchmark_files import Benchmark, Cell, load_benchmark, save_benchmark
from bench.benchmark_tables import benchmark_table, cost_view, throughput_view
from bench.documents import describe_job
from bench.options import BenchOptions, parse
from common.harness.grades import Grade
from common.harness.launch import RankPool
from common.harness.link import LogEntry
from common.harness.memory_record import StepMemory
from common.harness.records import CollectiveCount, Environment, RunRecord
from common.harness.report import ParityReport
from common.harness.stopwatch import TimedStep, TimedTurn, busy_s, edges_s, in_turns
from common.job import JobConfig
from parity_tests.cli_calls import Ran, call, children, lend

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


def test_turns_go_back_and_forth() -> None:
    """Each engine once per turn, every other turn in the opposite order."""
    assert "".join(in_turns("abc", 3)) == "abccbaabc"


def test_spread_is_the_middle_half() -> None:
    """Median and quartiles, whatever the order; of one value, that value."""
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(3.0, 2.0, 4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.1, 1.2, 1.3, 1.1, 1.2, 1.3, 1.1], FASTER),
        ([0.9, 0.8, 0.7, 0.9, 0.8, 0.7, 0.9], SLOWER),
        ([1.1, 1.2, 1.3, 1.1, 1.2, 1.3, 0.99], SAME),  # 6 of 7: chance gives that, one way or the other, in 1 case of 8
        ([1.5] * 5, SAME),  # 5 of 5: 1 case of 16
        ([1.5] * 6, FASTER),  # 6 of 6: 1 case of 32
        ([1.0] * 7, SAME),
    ],
)
def test_verdict_needs_more_than_chance(ratios: list[float], verdict: str) -> None:
    """Engines that are equally fast are told apart in at most 1 case of 20, by the binomial distribution."""
    assert verdict_of(ratios) == verdict


def turn(*ranks: tuple[float, float]) -> list[TimedTurn]:
    """One turn of one step each: per rank, seconds on the free link and on the other, of which a tenth is exposed."""
    return [
        TimedTurn(
            (TimedStep(free, 0, 0, 0, 0, 0),),
            (TimedStep(loaded, loaded / 10, loaded / 40, loaded / 50, loaded / 5, loaded / 20),),
        )
        for free, loaded in ranks
    ]


def test_figures_are_of_the_slowest_rank_and_the_median_turn() -> None:
    """A step ends when its slowest rank does; a turn that something disturbed does not decide."""
    turns = [turn((1, 2), (1, 3)), turn((1, 90), (1, 80)), turn((1, 4), (2, 1))]
    assert per_turn(turns, lambda step: step.step_s, max) == [3, 90, 4]
    assert per_turn(turns, lambda step: step.step_s, max, free=True) == [1, 1, 2]


def record(peak: int) -> RunRecord:
    """A run of two ranks with 3 + 4 collectives and the first step in 9 s."""
    counts = [CollectiveCount("forward", "all_gather", 3, 1), CollectiveCount("backward", "all_reduce", 4, 1)]
    memory = [StepMemory(1, peak), StepMemory(1, peak - 1)]
    environment = Environment("", "", "", "", "")
    return RunRecord("any", {}, 2, environment, [], [], [], [], collectives=counts, memory=memory, first_step_s=9.0)


def report(*, passed: bool = True) -> ParityReport:
    reached = Grade.BITWISE if passed else None
    return ParityReport("single", "any", Grade.BITWISE, reached, None, passed, (), (), None, (), (), ())


def test_rows_are_what_the_turns_say() -> None:
    """Each figure by hand: two engines, two turns of one step, two ranks; a third engine disagrees."""
    job = JobConfig(batch=8, seq=16, backend="inductor")
    turns = {
        "eager": [turn((1, 2), (1, 3)), turn((2, 5), (2, 4))],
        "compiled": [turn((1, 2), (1, 2)), turn((1, 2), (1, 2))],
        "ddp": [turn((1, 1), (1, 1))] * 2,
    }
    records = {"eager": record(70), "compiled": record(60), "ddp": record(50)}
    reports = {"eager": report(), "compiled": report(), "ddp": report(passed=False)}
    eager, compiled, ddp = bench_rows(job, records, reports, turns)
    assert eager.step_s is not None and eager.step_s.median == 4  # 3 and 5
    assert (eager.tokens_per_s, eager.compute_s, eager.peak_bytes) == (8 * 16 / 4, 1.5, 70)
    assert (eager.collectives, eager.first_step_s, eager.backend) == (7, 9.0, "eager")
    assert eager.busy_s == pytest.approx((0.6 + 1.0) / 2) and eager.edges_s == pytest.approx((0.15 + 0.25) / 2)
    assert eager.exposed_s == pytest.approx((0.25 + 0.45) / 2)  # the mean of ranks
    assert eager.stalled_s == pytest.approx((0.0625 + 0.1125) / 2)
    assert eager.moving_s == pytest.approx((0.05 + 0.09) / 2)
    assert eager.hidden == pytest.approx(1 - 0.35 / 0.8) and eager.efficiency == pytest.approx((1.5 + 0.2) / 4)
    assert eager.speed is None and eager.verdict is None
    assert compiled.speed is not None and compiled.speed.median == (3 / 2 + 5 / 2) / 2
    assert (compiled.backend, compiled.verdict) == ("inductor", SAME)  # two turns say nothing
    assert ddp.step_s is None and "reached none" in ddp.failures[0]
    on_gloo = bench_rows(job, records, reports, turns, has_model=False)[0]
    assert on_gloo.busy_s is on_gloo.exposed_s is on_gloo.efficiency is None and on_gloo.step_s == eager.step_s
    reports["eager"] = report(passed=False)
    assert [row.speed for row in bench_rows(job, records, reports, turns)] == [None] * 3  # nothing to compare with


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
    shares = {"all_gather": 0.5, "reduce_scatter": 0.5, "all_to_all": 1.0, "all_reduce": 1.0}
    return sum(each.count * ALPHA_S + each.bytes * shares[each.kind] / BETA for each in record.collectives)


def test_bench_times_the_link_as_its_model_says(benched: Benched) -> None:
    """Each engine's busy time is alpha per collective and bytes over beta, counted by another instrument."""
    for number, cell in enumerate(benched.ran.json["cells"]):
        assert [row["engine"] for row in cell["rows"]] == ["eager", "torch-fsdp2", "torch-fsdp2-prefetch"]
        for row in cell["rows"]:
            # an end and a start are seconds since the machine's start: below 1e8 s a double is exact to 2e-8 s
            expected = on_the_link_s(benched.record(number, row["engine"]))
            assert row["busy_s"] == pytest.approx(expected, abs=2 * 2e-8 * row["collectives"])
            assert row["bound_s"] == pytest.approx(max(row["compute_s"] + row["edges_s"], row["busy_s"]))


def test_bench_sees_what_is_exposed(benched: Benched) -> None:
    """On a CPU torch waits for each gather unless it is told what comes next, and for each reduction even then."""
    eager, waiting, prefetching = benched.ran.json["cells"][0]["rows"]
    assert max(eager["exposed_s"], prefetching["exposed_s"]) < waiting["exposed_s"]


def test_bench_keeps_every_timed_step(benched: Benched) -> None:
    """The turns of all ranks are stored. On the free link no step waits; on the other none is shorter than the link was
    busy in it, or than what its rank waited.
    """
    taken = json.loads((benched.folder / "cell-1" / "turns.json").read_text())
    assert list(taken) == ["eager", "torch-fsdp2", "torch-fsdp2-prefetch"]
    for turns in taken.values():
        assert len(turns) == 2 and all(len(ranks) == 2 for ranks in turns)
        assert all(len(rank[lot]) == 2 for ranks in turns for rank in ranks for lot in ("free", "loaded"))
        assert not any(step["exposed_s"] for ranks in turns for rank in ranks for step in rank["free"])
        for step in (step for ranks in turns for rank in ranks for step in rank["loaded"]):
            assert step["step_s"] >= step["busy_s"] >= step["edges_s"] > 0
            assert step["step_s"] >= step["exposed_s"] + step["stalled_s"]


@pytest.mark.parametrize("form", ["table", "json", "csv", "md", "html"])
def test_show_prints_a_benchmark(benched: Benched, form: str) -> None:
    """From its file, in every format, with a row per engine and cell; as JSON, what `bench` printed."""
    shown = call("show", "latest", "--out", str(benched.folder.parent), "--format", form)
    assert (shown.code, shown.err) == (0, "")
    for word in ("torch-fsdp2", "eager", "block"):
        assert word in shown.out
    if form == "json":
        assert shown.out == benched.ran.out
    if form == "csv":
        assert shown.out.count("\nbenchmark,") == 3


def test_sweep_is_all_combinations() -> None:
    """Each value given once more is one more cell; the link and fields of the job, the last named fastest."""
    words = ("--sweep", "ranks=2", "--sweep", "link=none", "--sweep", "ranks=3", "--sweep", "link=1ms,2MB/s")
    options = parse(("bench", *words, "--plan", "model"))
    assert isinstance(options, BenchOptions) and options.swept == ("ranks", "link")
    found = [(cell.job.ranks, cell.link.name, cell.job.plan) for cell in options.cells]
    assert found == [(ranks, link, "model") for ranks in (2, 3) for link in ("none", "1ms,2MB/s")]
    options = parse(("bench", "--sweep", "block-backend=eager", "--sweep", "block-backend=inductor"))
    assert isinstance(options, BenchOptions)
    assert [cell.job.block_backend for cell in options.cells] == ["eager", "inductor"]


@pytest.mark.parametrize(
    ("engine", "backend"),
    [
        ("compiled", "aot_eager"),
        ("fsdp_compiled.parallelize", "aot_eager"),
        ("eager", "inductor per block"),
        ("torch-fsdp2-prefetch", "inductor per block"),
        ("ddp", "inductor per block"),
        ("single", "eager"),
    ],
)
def test_backend_column_says_what_computed(engine: str, backend: str) -> None:
    """The compiled engine's backend is that of the whole model, that of engines with hooks one of each block."""
    job = JobConfig(backend="aot_eager", block_backend="inductor")
    assert computed_by(engine, job) == backend
    without = "aot_eager" if "compiled" in engine else "eager"
    assert computed_by(engine, replace(job, block_backend="eager")) == without
    assert "backend aot_eager, blocks of other engines inductor" in describe_job(job)


def test_backend_column_claims_nothing_of_a_users_own_engine() -> None:
    """It may follow the job's backends or not; where the job has none there is nothing to follow."""
    job = JobConfig(backend="eager", block_backend="eager")
    found = [computed_by("my.engine", replace(job, **{name: "inductor"})) for name in ("backend", "block_backend")]
    assert found == ["unknown", "unknown"] and computed_by("my.engine", job) == "eager"


def test_swept_passes_are_a_column() -> None:
    """Sets of passes are swept as options are written, in any order; tables say which cell left out which."""
    words = [f"--sweep=disabled-passes={value}" for value in ("none", "prefetch_gathers,bucket_gathers")]
    options = parse(("bench", "--backend", "aot_eager", *words))
    assert isinstance(options, BenchOptions)
    jobs = [cell.job for cell in options.cells]
    assert [job.disabled_passes for job in jobs] == [(), ("bucket_gathers", "prefetch_gathers")]
    cells = tuple(Cell(job, "none", "", (BenchRow("compiled", "aot_eager"),)) for job in jobs)
    benchmark = Benchmark("", "single", options.swept, "", cells)
    assert list(throughput_view(benchmark)["disabled passes"]) == ["none", "bucket_gathers,prefetch_gathers"]
    assert list(benchmark_table(benchmark)["disabled_passes"]) == ["none", "bucket_gathers,prefetch_gathers"]
    described = [describe_job(job) for job in jobs]
    assert "without" not in described[0]
    assert described[1].endswith("backend aot_eager, without bucket_gathers and prefetch_gathers")


def test_rows_of_a_benchmark_tell_the_grade(tmp_path: Path) -> None:
    """Asked, reached and margin, for machines and in one column for people; read again they are what was written."""
    graded = [("reduction-order", "bitwise", math.inf), ("compiler", None, 0.25), ("bitwise", "bitwise", None)]
    rows = [BenchRow(f"e{i}", "eager", (), *grade) for i, grade in enumerate(graded)]
    unjudged = BenchRow("e3", "eager")
    benchmark = Benchmark("", "single", (), "", (Cell(JobConfig(), "none", "", (*rows, unjudged)),))
    save_benchmark(tmp_path, benchmark)
    assert load_benchmark(tmp_path) == benchmark
    table = benchmark_table(benchmark)
    assert list(zip(table["asked"], table["reached"], table["margin"], strict=True)) == [*graded, (None, None, None)]
    assert list(table["against"]) == ["single"] * 3 + [None]
    assert list(cost_view(benchmark)["asked / reached"]) == [
        *("reduction-order / bitwise inf", "compiler / none 0.25x", "bitwise / bitwise", "-")
    ]


def test_engine_that_disagrees_has_no_figures(pool: RankPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An engine that sums gradients is timed in vain: its row says why, the others' figures stand, exit code 1."""
    lend(pool, monkeypatch)
    words = (*TINY, "--link", "gloo", "--engines", f"ddp,{ENGINES}.summing", "--out", str(tmp_path))
    ran = call("bench", *words, "--format", "json")
    assert ran.code == 1
    assert "reached none" in call("show", "latest", "--out", str(tmp_path), "--format", "csv").out
    right, wrong = ran.json["cells"][0]["rows"]
    assert wrong["step_s"] is None and "reached none" in wrong["failures"][0]
    assert right["step_s"] is not None and right["busy_s"] is None  # gloo has no time model
    assert (right["asked"], wrong["asked"], wrong["reached"]) == ("reduction-order", "reduction-order", None)
    assert right["margin"] > 1 > wrong["margin"]
    assert "BENCH: engines without figures do not agree" in call("show", "latest", "--out", str(tmp_path)).out


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ("dying_in_turn", "rank 1 ended with exit code 9"),
        (
            "hanging_in_turn",
            rf"engine '{ENGINES}.hanging_in_turn', turn 1: rank 1 at .*hanging_in_turn.py:\d+\) .*within 8 s",
        ),
    ],
)
def test_rank_that_fails_in_its_turn_is_named(
    engine: str, expected: str, pool: RankPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Exit code 3, the engine's rank is named, and the line where it hangs; no rank of any engine stays."""
    lend(pool, monkeypatch)
    before = children()
    words = ("--engines", f"{ENGINES}.{engine}", "--timeout", "8", "--out", str(tmp_path))
    ran = call("bench", *TINY, *LINK, *words)
    assert ran.code == 3 and ran.out == ""
    assert re.search(f"fsdp-parity: {expected}", ran.err), ran.err
    assert children() <= before | set(pool.pids)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--link", "fast"), "cannot read 'fast'"),
        (("--turns", "0"), "'0'"),
        (("--turns", "1" * 30), "from 1 to 999999"),
        (("--link", "20s,inf", "--timeout", "15"), "longer than the 15 s"),
        (("--link", "nodes:" + "9" * 5000), "cannot read"),
        (("--link", "1ms,1e400MB/s"), "cannot read"),
        (("--sweep", "plan=block", "--sweep", "plan=block"), "plan=block twice"),
        (
            ("--sweep", "disabled-passes=bucket_gathers", "--sweep", "disabled-passes=bucket_gathers,bucket_gathers"),
            "bucket_gathers twice",
        ),
        (("--sweep", "disabled-passes=sink_waits"), "found 'sink_waits'"),
        (("--turn-steps", "many"), "'many'"),
        (("--sweep", "colour=red"), "'colour=red'"),
        (("--plan", "block", "--sweep", "plan=param"), "sweep: --plan is swept"),
        (("--disabled-passes=none", "--sweep", "disabled-passes=bucket_gathers"), "sweep: --disabled-passes is swept"),
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


def test_sweep_over_ranks_is_refused_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many there are is torchrun's to say; exit code 2, before any of them meets another."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setitem(os.environ, name, value)
    ran = call("bench", "--sweep", "plan=model", "--sweep", "ranks=2")
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert "sweep: torchrun started 2 ranks" in ran.err
