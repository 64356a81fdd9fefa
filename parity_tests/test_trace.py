"""Traces: one step as spans that name the right bucket, in every engine; files that viewers open; lanes that are drawn.

The oracle is the plan: which buckets there are, and in which order a step needs them.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from bench.lanes import draw, lanes_document
from bench.trace_files import load_spans, save_trace
from common.harness.instruments.collectives import phase_of_range
from common.harness.instruments.trace import COMPUTE, LAUNCH, LINK, OPERATORS, PHASE, WAIT, Span, Trace, trace_spans
from common.harness.launch import RankPool
from common.harness.link import LogEntry
from common.harness.link.meter import Wait
from common.job import JobConfig
from common.models import build_model
from common.plan import build_plan
from common.ranges import GATHER, REDUCE, read_bucket, read_graph
from common.torch_private import Operator, TensorArgument
from parity_tests.cli_calls import call, lend
from parity_tests.runs import TRACED_INDUCTOR, Runs

JOB = JobConfig(steps=1, seq=16, batch=4, backend="aot_eager", link="1ms,150MB/s")


def labels_of(job: JobConfig) -> list[str]:
    """The buckets of the plan, in the order of the model."""
    return build_plan(build_model(job.model, seed=0, device="meta")).labels


LABELS = labels_of(JOB)
EVERY_CASE = [
    ("eager", JOB),
    ("compiled", JOB),
    ("torch-fsdp2", JOB),
    pytest.param("compiled", TRACED_INDUCTOR, marks=pytest.mark.inductor),
]

TINY = ("--model", "parity_tests.engines.models:bigram", "--steps", "1", "--batch", "4", "--seq", "16")


def on_lane(trace: Trace, lane: str, kind: str | None = None) -> list[Span]:
    """The spans of a lane in order of time; lanes of links are those that begin so."""
    found = [span for span in trace.spans if span.lane.startswith(lane) and kind in (None, span.kind)]
    return sorted(
        found, key=lambda span: (span.start_s, span.end_s)
    )  # a wait that took no time is over before what follows


# Ranges and rules, on events that are made up


def test_ranges_of_ours_and_torchs_are_read_alike() -> None:
    """Event and bucket; torch joins the modules of a group by commas. Other names are nobody's."""
    assert read_bucket("fsdp::wait_gather (layers.0)") == ("wait_gather", "layers.0")
    assert read_bucket("FSDP::all_gather (norm, output)") == ("all_gather", "norm+output")
    assert read_bucket("FSDP::root_pre_forward") is None
    assert read_graph('fsdp::graph {"gather": ["a"], "reduce": []}') == {"gather": ["a"], "reduce": []}
    assert read_graph("fsdp::wait_gather (a)") is None


def event(name: str, start: int, end: int, *inside: str, address: int | None = None) -> Operator:
    """An event; times are in seconds."""
    tensor = TensorArgument((2,), 4, address)
    return Operator(name, start * 10**9, end * 10**9, inside, ((tensor,), (tensor,)) if address else ())


def test_compute_is_named_after_the_bucket_it_belongs_to() -> None:
    """Forward: whose gather was waited for last. Backward: whose reduction comes next. A wait goes by its buffer."""
    graph = 'fsdp::graph {"gather": ["a", "b"], "reduce": ["b", "a"]}'
    operators = [
        event("step phase: forward", 0, 20),
        event(graph, 0, 20),
        event("c10d::_allgather_base_", 1, 2, graph, address=7),
        event("c10d::_allgather_base_", 2, 3, graph, address=8),
        event("_c10d_functional::wait_tensor", 3, 5, graph, address=7),
        event("_c10d_functional::wait_tensor", 9, 10, graph, address=8),
        event("step phase: backward", 20, 40),
        event("c10d::_reduce_scatter_base_", 25, 26, graph, address=9),
        event("c10d::_reduce_scatter_base_", 31, 32, graph, address=7),
        event("_c10d_functional::wait_tensor", 33, 39, graph, address=9),
    ]
    found = [span for span in trace_spans(operators, [], [], ranks=2, offset_s=0.0) if span.lane == COMPUTE]
    assert [(span.kind, span.name, span.start_s, span.end_s) for span in sorted(found, key=lambda s: s.start_s)] == [
        (COMPUTE, "", 0, 1),
        (LAUNCH, "a", 1, 2),
        (LAUNCH, "b", 2, 3),
        (WAIT, "a", 3, 5),
        (COMPUTE, "a", 5, 9),
        (WAIT, "b", 9, 10),
        (COMPUTE, "b", 10, 20),
        (COMPUTE, "b", 20, 25),
        (LAUNCH, "b", 25, 26),
        (COMPUTE, "a", 26, 31),
        (LAUNCH, "a", 31, 32),
        (COMPUTE, "", 32, 33),
        (WAIT, "b", 33, 39),
        (COMPUTE, "", 39, 40),
    ]


def test_the_log_of_the_link_is_put_on_the_profilers_clock() -> None:
    """Each entry belongs to the launch it was issued in, in order of issue; waits go by group and index."""
    operators = [
        event("step phase: forward", 100, 110),
        event("c10d::_allgather_base_", 101, 102, "fsdp::launch_gather (a)", address=7),
        event("c10d::_allgather_base_", 102, 103, "fsdp::launch_gather (b)", address=8),
    ]
    log = [
        LogEntry("other", (0, 2), 0, "all_gather", 16, 8, 2.5, 2.5, 4.0),
        LogEntry("one", (0, 1), 5, "all_gather", 16, 8, 1.5, 1.5, 6.0),
    ]
    spans = trace_spans(operators, log, [Wait("one", 5, 3.0, 6.0)], ranks=2, offset_s=100.0)
    assert {span for span in spans if span.lane.startswith(LINK)} == {
        Span("link 0-1", GATHER, "a", 1.5, 6.0, 16),
        Span("link 0-2", GATHER, "b", 2.5, 4.0, 16),
    }
    assert [span for span in spans if span.kind == WAIT] == [Span(COMPUTE, WAIT, "a", 3.0, 6.0)]


# Traces of engines


@pytest.mark.parametrize(("engine", "job"), EVERY_CASE)
def test_gathers_and_reductions_on_the_link_name_the_buckets_of_the_plan(
    runs: Runs, engine: str, job: JobConfig
) -> None:
    """Gathers in order of use, forward and then backward, reductions in reverse; on each rank, each with its bytes.

    A traced backward does not gather an embedding, which it does not read.
    """
    labels = labels_of(job)
    backward = labels[::-1] if engine != "compiled" else labels[:0:-1]
    for trace in runs.traces(engine, job):
        assert [span.name for span in on_lane(trace, LINK, GATHER)] == [*labels, *backward]
        assert [span.name for span in on_lane(trace, LINK, REDUCE)] == labels[::-1]
        rows = 2 if engine == "torch-fsdp2" else 1  # an ordered reduction leaves a rank's own of the two where it is
        sizes = {span.name: span.bytes / rows * 2 for span in on_lane(trace, LINK, REDUCE)}
        assert sizes == {span.name: span.bytes for span in on_lane(trace, LINK, GATHER)}
        assert len({size for name, size in sizes.items() if name.startswith("layers.")}) == 1
        assert sizes["layers.0"] > sizes["tok_embeddings"]


@pytest.mark.parametrize(("engine", "job"), EVERY_CASE)
def test_compute_lane_is_without_overlap_and_covers_the_step(runs: Runs, engine: str, job: JobConfig) -> None:
    """What ranks do follows each other, and between the start and the end of a phase there is always something."""
    for trace in runs.traces(engine, job):
        spans = on_lane(trace, COMPUTE)
        for before, after in pairwise(spans):
            assert before.end_s <= after.start_s + 1e-9
        for phase in on_lane(trace, PHASE):
            inside = sum(span.end_s - span.start_s for span in spans if phase.start_s <= span.start_s < phase.end_s)
            assert inside == pytest.approx(phase.end_s - phase.start_s, abs=1e-6)
        assert {span.name for span in spans if span.kind == COMPUTE} >= set(labels_of(job))


@pytest.mark.parametrize(("engine", "job"), EVERY_CASE)
def test_a_wait_ends_when_its_operation_does(runs: Runs, engine: str, job: JobConfig) -> None:
    """Each operation of a bucket is waited for once, in order, and no wait ends before the link is through with it."""
    for trace in runs.traces(engine, job):
        for bucket in labels_of(job):
            carried = [span.end_s for span in on_lane(trace, LINK) if span.name == bucket]
            waits = [span.end_s for span in on_lane(trace, COMPUTE, WAIT) if span.name == bucket]
            assert len(waits) == len(carried) >= 2
            assert all(wait_s >= end_s - 1e-6 for wait_s, end_s in zip(waits, carried, strict=True))


@pytest.mark.parametrize(("engine", "ahead"), [("eager", True), ("compiled", True), ("torch-fsdp2", False)])
def test_the_lanes_show_who_gathers_ahead(runs: Runs, engine: str, ahead: bool) -> None:
    """In forward layers.1 is launched before the compute of layers.0; torch's own, as it comes, begins after it."""
    trace = runs.traces(engine, JOB)[0]
    forward = on_lane(trace, PHASE)[0]
    launch = next(span for span in on_lane(trace, COMPUTE, LAUNCH) if span.name == "layers.1")
    computed = [span for span in on_lane(trace, COMPUTE, COMPUTE) if span.name == "layers.0"]
    longest = max((span for span in computed if span.start_s < forward.end_s), key=lambda s: s.end_s - s.start_s)
    assert (launch.end_s <= longest.start_s + 1e-9) is ahead


def test_on_gloo_the_link_is_what_its_thread_reports(runs: Runs) -> None:
    """Without an emulated link names are the same; times are gloo's."""
    (trace, _) = runs.traces("eager", JobConfig(**JOB.to_dict() | {"link": "gloo"}))
    assert [span.name for span in on_lane(trace, LINK, REDUCE)] == LABELS[::-1]
    waits = [span.name for span in on_lane(trace, COMPUTE, WAIT)]
    assert [waits.count(label) for label in LABELS[1:]] == [3] * (len(LABELS) - 1)


# Files and drawings


def test_trace_file_is_what_viewers_read_and_comes_back(runs: Runs, tmp_path: Path) -> None:
    """Complete events in microseconds, a process per rank, a named thread per lane; all but operators is read again."""
    trace = runs.traces("eager", JOB)[1]
    save_trace(tmp_path, "eager", trace)
    events = json.loads((tmp_path / "eager-rank1.trace.json").read_text())["traceEvents"]
    named = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    complete = [each for each in events if each["ph"] == "X"]
    assert len(complete) == len(trace.spans) and {each["pid"] for each in events} == {1}
    assert {named[each["tid"]] for each in complete} == {PHASE, COMPUTE, "link 0-1", OPERATORS}
    assert "aten::mm" in {each["name"] for each in complete} and "gather layers.0" in {
        each["name"] for each in complete
    }
    assert not any(phase_of_range(each["name"]) for each in complete) and min(each["ts"] for each in complete) >= 0
    read = load_spans(tmp_path / "eager-rank1.trace.json")
    kept = [span for span in trace.spans if span.lane != OPERATORS]
    assert [(s.lane, s.kind, s.name, s.bytes) for s in read] == [(s.lane, s.kind, s.name, s.bytes) for s in kept]
    assert [s.start_s for s in read] == pytest.approx([s.start_s for s in kept])
    assert [s.end_s for s in read] == pytest.approx([s.end_s for s in kept])


def test_a_cell_shows_what_took_most_of_it() -> None:
    """By time, not by number; idle where nothing took most; what is longer than the width is cut."""
    spans = [(Span(COMPUTE, COMPUTE, "", 0.0, 1.6), "a"), (Span(COMPUTE, WAIT, "", 1.6, 3.1), ".")]
    assert draw(spans, 1.0, 5, "·") == "aa.··"
    assert draw([(Span(COMPUTE, COMPUTE, "", 0.0, 9.0), "a")], 1.0, 5, " ") == "aaaaa"
    assert draw([(Span(COMPUTE, COMPUTE, "", 0.0, 0.4), "a")], 1.0, 2, "·") == "··"


def test_lanes_put_engines_on_one_scale() -> None:
    """An engine that takes half as long gets half the cells; buckets have one letter in all engines."""

    def step(length_s: float) -> list[Span]:
        return [
            Span(PHASE, PHASE, "forward", 0.0, length_s),
            Span(COMPUTE, LAUNCH, "x", 0.0, 0.0),
            Span(COMPUTE, COMPUTE, "x", 0.0, length_s),
            Span("link 0-1", GATHER, "x", 0.0, length_s / 2, 8),
        ]

    document = lanes_document({"slow": step(2.0), "fast": step(1.0)}, rank=0, width=8)
    view = document.sections[0].view
    assert view is not None
    assert view.to_numpy().tolist() == [
        ["slow", "phase", "ffffffff"],
        ["", "compute", "aaaaaaaa"],
        ["", "gather", "aaaa····"],
        ["fast", "phase", "ffff"],
        ["", "compute", "aaaa"],
        ["", "gather", "aa··"],
    ]


def test_bench_profiles_each_cell(pool: RankPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A sweep has a trace per cell, engine and rank, recorded on the link that was timed; `lanes` takes a cell."""
    lend(pool, monkeypatch)
    words = ("bench", *TINY, "--engines", "eager", "--turns", "1", "--turn-steps", "1", "--profile")
    ran = call(*words, "--sweep", "link=none", "--sweep", "link=fake", "--out", str(tmp_path), "--format", "json")
    assert ran.code == 0
    (folder,) = tmp_path.iterdir()
    names = [sorted(path.name for path in (folder / f"cell-{cell}").glob("*.trace.json")) for cell in (1, 2)]
    assert names == [["eager-rank0.trace.json", "eager-rank1.trace.json"], ["eager-rank0.trace.json"]]
    assert [row["link"] for row in ran.json["tables"]["benchmark"]] == ["none", "fake"]
    carried = [
        {row["lane"] for row in call("lanes", str(folder), *cell, "--format", "json").json["tables"]["lanes"]}
        for cell in ((), ("--cell", "2"))
    ]
    assert carried == [{PHASE, COMPUTE, "link 0-1"}, {PHASE, COMPUTE}]
    refused = call("lanes", str(folder), "--cell", "3")
    assert refused.code == 2 and "from 1 to 2, found 3" in refused.err


def test_compare_profiles_and_lanes_draws(pool: RankPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`compare --profile` leaves a trace per candidate and rank, `lanes` and the page draw them; what lacks is said."""
    lend(pool, monkeypatch)
    words = ("compare", *TINY, "--engines", "eager,ddp", "--link", "none", "--profile", "--out", str(tmp_path))
    ran = call(*words, "--format", "json")
    assert ran.code == 0 and ran.json["job"]["link"] == "none"
    (folder,) = tmp_path.iterdir()
    names = sorted(path.name for path in folder.glob("*.trace.json"))
    assert names == [f"{engine}-rank{rank}.trace.json" for engine in ("ddp", "eager") for rank in (0, 1)]
    drawn = call("lanes", "latest", "--out", str(tmp_path), "--rank", "1", "--format", "json")
    assert drawn.code == 0 and {row["engine"] for row in drawn.json["tables"]["lanes"]} == {"eager", "ddp"}
    assert "gather" in call("lanes", str(folder), "--engines", "eager").out
    page = call("show", str(folder), "--format", "html").out
    assert page.count("<svg") == 2 and ">Memory over one step<" in page and ">One step of rank 0<" in page
    for wrong, said in (
        (("--engines", "single"), "no trace of 'single'"),
        (("--rank", "2"), "those of rank 0, 1 are there"),
        (("--cell", "1"), "a comparison has no cells"),
    ):
        refused = call("lanes", str(folder), *wrong)
        assert refused.code == 2 and said in refused.err
    for path in folder.glob("*.trace.json"):
        path.write_text('{"traceEvents": []}')
    broken = call("lanes", str(folder))
    assert broken.code == 2 and "no phase" in broken.err
    for path in folder.glob("*.trace.json"):
        path.unlink()
    assert "--profile" in call("lanes", str(folder)).err
