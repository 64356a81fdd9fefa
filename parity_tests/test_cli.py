"""The command line as its users meet it: verdicts and exit codes, wrong words, ranks that fail, torchrun, Ctrl-C."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import bench.__main__
import bench.commands
import bench.preflight
from bench.__main__ import main
from bench.options import parse
from bench.progress import watch
from bench.store import find_run, is_benchmark, is_comparison
from bench.trace_files import is_traced
from common.engine import SHORT_NAMES, load_engine
from common.gradient import Transport
from common.harness.grades import Grade
from common.harness.rank import Progress
from common.harness.records import load_record
from common.job import BACKENDS, PASSES, JobConfig
from common.models import describe_fields, describe_models
from common.policy import DTYPES
from parity_tests.cli_calls import ROOT, Ran, assert_one_line, call, children, environment, marked, run_process

ENGINES = "parity_tests.engines"
SMALL = ("--steps", "2", "--batch", "4", "--seq", "16", "--backend", "aot_eager")
TINY = ("--model", f"{ENGINES}.models:bigram", *SMALL)


def test_options_reach_the_job() -> None:
    """Each option of `compare` that has a field in the job sets it, and nothing else does."""
    options: dict[str, Any] = {
        "model": "gpt-debug",
        "ranks": 3,
        "steps": 7,
        "batch": 9,
        "seq": 33,
        "plan": "model",
        "reshard_after_forward": "never",
        "param_dtype": "bf16",
        "reduce_dtype": "bf16",
        "backend": "aot_eager",
        "block_backend": "inductor",
        "disabled_passes": ("bucket_gathers", "delay_reduction_waits"),
        "transport": "native",
        "optimizer": "adamw",
        "lr": 0.25,
        "data": "some.txt",
        "seed": 11,
        "device": "cuda",
        "link": "nccl",
    }
    words = []
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", ",".join(value) if isinstance(value, tuple) else str(value)]
    parsed = parse(("compare", *words))
    default = parse(("compare",))
    assert parsed.job == JobConfig(**options)  # type: ignore[union-attr]
    assert default.job == JobConfig()  # type: ignore[union-attr]
    assert {field.name for field in dataclasses.fields(JobConfig)} - set(options) == {"dtype"}
    assert all(value != getattr(JobConfig(), name) for name, value in options.items())


def test_grade_is_asked_for_by_name() -> None:
    """Each by its name; by default none, which leaves it to the pair."""
    found = [parse(("compare", "--grade", str(grade))).grade for grade in Grade]  # type: ignore[union-attr]
    assert found == list(Grade) and parse(("compare",)).grade is None  # type: ignore[union-attr]


def test_latest_is_the_newest_that_a_command_can_read(tmp_path: Path) -> None:
    """A benchmark that ended later is passed over where a comparison is wanted, as is a run that was not traced."""
    for age, name in enumerate(("traced/report", "compared/report", "benched/bench")):
        file = tmp_path / f"{name}.json"
        file.parent.mkdir()
        file.write_text("{}")
        os.utime(file, (1000 + age, 1000 + age))
    (tmp_path / "traced" / "eager-rank0.trace.json").write_text("{}")
    fitting = [find_run("latest", tmp_path, fits=fits).name for fits in (is_benchmark, is_comparison, is_traced)]
    assert find_run("latest", tmp_path).name == "benched" and fitting == ["benched", "compared", "traced"]


def test_disabled_passes_survive_json_in_one_order() -> None:
    """Whatever order they were given in, and however often, a job has each once; read back from JSON it is the same."""
    job = JobConfig(disabled_passes=("prefetch_gathers", "bucket_gathers", "prefetch_gathers"))
    assert job.disabled_passes == ("bucket_gathers", "prefetch_gathers")
    read = JobConfig.from_dict(json.loads(json.dumps(job.to_dict())))
    assert read == job and hash(read) == hash(job) and read.to_dict() == job.to_dict()


@pytest.mark.usefixtures("no_ranks")
def test_list_names_everything_that_options_take() -> None:
    """Engines, models with their sizes, plans, backends, transports and dtypes, for people and for machines."""
    found = call("list", "--format", "json").json["tables"]
    assert [row["name"] for row in found["engines"]] == list(SHORT_NAMES)
    assert {row["name"]: row["params"] for row in found["models"]} == {i.name: i.params for i in describe_models()}
    assert {row["name"] for row in found["fields"]} == set(describe_fields())
    assert [row["name"] for row in found["plans"]] == ["param", "block", "model", "A,B+C"]
    assert [row["name"] for row in found["backends"]] == list(BACKENDS)
    assert [row["name"] for row in found["passes"]] == list(PASSES)
    assert [row["name"] for row in found["transports"]] == [transport.value for transport in Transport]
    assert [row["name"] for row in found["dtypes"]] == list(DTYPES)
    shown = call("list")
    assert shown.code == 0 and shown.err == ""
    for row in (row for table in found.values() for row in table):
        assert row["name"] in shown.out
    assert "8,030,261,248" in shown.out


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` is no error."""
    with pytest.raises(SystemExit) as ended:
        main(("compare", "--help"))
    assert ended.value.code == 0
    out = capsys.readouterr().out
    for option in ("--model", "--engines", "--reference", "--timeout", "--format", "--out", "--data", "exit codes: 0"):
        assert option in out


@dataclass(frozen=True)
class Compared:
    """One comparison that went well: what it printed as JSON, and its folder."""

    words: tuple[str, ...]
    ran: Ran
    folder: Path


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """All engines on a small job, in ranks that the command starts itself."""
    out = tmp_path_factory.mktemp("runs")
    words = ("compare", *SMALL, "--out", str(out))
    before = children()
    ran = call(*words, "--format", "json")
    assert ran.code == 0, ran.err
    assert children() <= before
    (folder,) = out.iterdir()
    return Compared(words, ran, folder)


def test_compare_holds_for_all_engines(compared: Compared) -> None:
    """Eager, compiled, torch's FSDP and DDP agree with one process; compiled and torch's FSDP equal eager bitwise."""
    document = compared.ran.json
    pairs = {(each["candidate"], each["reference"]): each for each in document["comparisons"]}
    assert document["holds"] and document["failures"] == []
    assert all(each["passed"] for each in pairs.values())
    assert next(iter(pairs)) == ("compiled", "eager")
    assert {engine for engine, against in pairs if against == "single"} == {"eager", "compiled", "torch-fsdp2", "ddp"}
    for pair in (("compiled", "eager"), ("eager", "torch-fsdp2"), ("compiled", "torch-fsdp2")):
        assert pairs[pair]["asked"] == pairs[pair]["reached"] == "bitwise"
    checked = [row for row in document["tables"]["collectives"] if row["engine"] != "ddp"]
    assert checked and all(row["ok"] is True for row in checked)


def test_compare_writes_records_that_can_be_read(compared: Compared) -> None:
    """Each run has a record and its gradients, which are those that the report's losses and norms come from."""
    document = compared.ran.json
    assert document["engines"] == ["single", "eager", "compiled", "torch-fsdp2", "ddp", "float64"]
    for name in document["engines"]:
        record, gradients = load_record(compared.folder, name)
        assert json.loads(json.dumps(record.to_dict())) == document["records"][name]
        norm = sum(float(gradient.double().square().sum()) for gradient in gradients.values()) ** 0.5
        assert norm == pytest.approx(record.grad_norms[0], rel=1e-12)
    assert load_record(compared.folder, "float64")[0].job["dtype"] == "fp64"
    assert compared.ran.err.splitlines()[-1] == f"records: {compared.folder}"


def test_compare_says_which_run_is_on_its_way(compared: Compared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal there is a line per run on stderr, and nothing that ranks or the profiler print."""
    lines = compared.ran.err.splitlines()
    names = ("single", "eager", "compiled", "torch-fsdp2", "ddp", "float64", "rounded-1", "rounded-2")
    expected = [f"[{i}/8] {name}: 2 steps" for i, name in enumerate(names, 1)]
    assert lines[:-1] == ([] if os.environ.get("CI") else expected)


@pytest.mark.parametrize("form", ["table", "json", "csv", "md", "html"])
def test_show_prints_what_compare_printed(compared: Compared, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the files alone, without gradients, by path, by name and as the latest; with the verdict's exit code."""
    out = str(compared.folder.parent)
    shown = call("show", str(compared.folder), "--format", form)
    assert shown.code == 0 and shown.err == ""
    assert call("show", compared.folder.name, "--out", out, "--format", form) == shown
    assert call("show", "latest", "--out", out, "--format", form) == shown
    if form == "json":
        assert shown.out == compared.ran.out


def test_engine_of_ones_own_lies_in_the_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installed command does not look there by itself."""
    (tmp_path / "engine_of_mine.py").write_text("def parallelize(model, mesh, job): return model\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert load_engine("engine_of_mine").name == "engine_of_mine"


def test_wrong_engine_fails_parity(pool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An engine that sums where it should average: exit code 1, the verdict first, with the likely cause."""
    monkeypatch.setattr(bench.commands, "open_ranks", lambda ranks: nullcontext(pool))
    ran = call("compare", *TINY, "--engines", f"{ENGINES}.summing", "--out", str(tmp_path))
    assert ran.code == 1
    first, why, *_ = ran.out.splitlines()
    assert first == "PARITY DOES NOT HOLD: 0 of 1 comparisons pass"
    assert why.startswith(f"{ENGINES}.summing against single: asked reduction-order, reached none")
    assert "summed over ranks, not averaged" in why
    assert call("show", "latest", "--out", str(tmp_path)) == Ran(1, ran.out, "")


def test_model_that_cannot_be_built_on_meta_is_compared(
    pool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A user's function that computes with real numbers while it builds is no error; another reference is taken."""
    monkeypatch.setattr(bench.commands, "open_ranks", lambda ranks: nullcontext(pool))
    model = ("--model", f"{ENGINES}.models:computes_while_building", *SMALL)
    ran = call("compare", *model, "--engines", "eager", "--reference", "torch-fsdp2", "--out", str(tmp_path))
    assert ran.code == 0, ran
    assert not list(tmp_path.glob("*/float64.json"))  # bitwise needs no referee


@pytest.mark.parametrize(("model", "found"), [("labelled", "found a dict"), ("pooled", "found [6, 256]")])
def test_model_that_returns_no_logits_ends_in_one_line(
    model: str, found: str, pool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a model returns is known when it runs; it is still the user's to mend, and said in one line."""
    monkeypatch.setattr(bench.commands, "open_ranks", lambda ranks: nullcontext(pool))
    words = ("compare", "--model", f"{ENGINES}.models:{model}", "--engines", "ddp", "--reference", "torch-fsdp2")
    ran = call(*words, "--out", str(tmp_path))
    assert ran.code == 2 and ran.out == ""
    *_, last = ran.err.splitlines()  # above it is the progress
    assert last.startswith("fsdp-parity: model: expected it to return logits [6, 64, 'vocab']") and found in last


@pytest.mark.parametrize(
    ("engine", "timeout_s", "expected"),
    [
        ("raising", 60, "rank 1: ValueError: this engine cannot shard"),
        ("killed", 60, "rank 1 was killed by SIGKILL"),
        ("hanging", 6, "rank 1 at spin (parity_tests/faulty.py:"),
    ],
)
def test_failing_rank_is_named(engine: str, timeout_s: int, expected: str, tmp_path: Path) -> None:
    """A rank that raises, is killed or hangs: exit code 3 within the timeout, the rank named first, no process left."""
    before = children()
    words = ("--engines", f"{ENGINES}.{engine}", "--timeout", str(timeout_s), "--out", str(tmp_path))
    ran = call("compare", *TINY, *words)
    assert ran.code == 3 and ran.out == ""
    lines = [line for line in ran.err.splitlines() if line.startswith("fsdp-parity: ")]
    assert len(lines) == 1 and lines[0].startswith(f"fsdp-parity: {expected}"), ran.err
    assert children() <= before
    assert [path.name for path in tmp_path.glob("*/*.json")] == ["single.json"]  # what was done is kept


def test_process_ends_with_the_exit_code() -> None:
    """`python -m bench` is the command, and a wrong word shows no traceback there either."""
    assert_one_line(run_process(sys.executable, "-m", "bench", "compare", "--model", "gpt5"), 2, "'gpt5'")


@pytest.mark.parametrize("form", ["table", "json"])
def test_reader_that_leaves_early_changes_no_verdict(form: str) -> None:
    """As `| head -1` does: the exit code stays that of the verdict, and nothing is said of a broken pipe."""
    reading, writing = os.pipe()
    os.close(reading)
    command = (sys.executable, "-m", "bench", "show", str(ROOT / "parity_tests" / "frozen"), "--format", form)
    try:
        done = subprocess.run(
            command, stdout=writing, stderr=subprocess.PIPE, text=True, env=environment(), cwd=ROOT, check=False
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_torchrun_gives_the_same_result(compared: Compared, tmp_path: Path) -> None:
    """Joined ranks come to the same losses, gradients and verdict, print once and write once; ranks are counted."""
    words = (*SMALL, "--engines", "eager", "--out", str(tmp_path), "--format", "json")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ran = run_process(*launcher, "-m", "bench", "compare", *words)
    assert ran.code == 0, ran.err
    found, expected = ran.json, compared.ran.json
    assert found["holds"] and found["job"] == expected["job"]
    assert found["engines"] == ["single", "eager", "float64"]
    for name in found["engines"]:
        for what in ("losses", "grad_norms", "grad_digests", "collectives", "world_size"):
            assert found["records"][name][what] == expected["records"][name][what], (name, what)
    assert [path.name for path in tmp_path.iterdir()] == [Path(ran.err.split("records: ")[1].split("\n")[0]).name]


def test_torchrun_shows_a_wrong_word_once(tmp_path: Path) -> None:
    """Started as a program, too: all ranks end in exit code 2, one of them says why."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python")
    ran = run_process(*launcher, sys.executable, "-m", "bench", "compare", "--ranks", "3")
    assert ran.err.count("fsdp-parity: ") == 1 and "torchrun started 2, --ranks asks for 3" in ran.err, ran.err
    assert ran.out == "" and "exitcode  : 2" in ran.err and "Traceback" not in ran.err.split("fsdp-parity: ")[0]


@pytest.mark.parametrize(
    ("sent", "code", "said"),
    [(signal.SIGINT, 130, "fsdp-parity: interrupted\n"), (signal.SIGTERM, 143, "fsdp-parity: ended by SIGTERM\n")],
    ids=["SIGINT", "SIGTERM"],
)
def test_interrupt_ends_everything(sent: signal.Signals, code: int, said: str, tmp_path: Path) -> None:
    """Ctrl-C, or the end of a CI job, while ranks work: its exit code, no traceback, no process and no folder left."""
    folders = set(Path(tempfile.gettempdir()).glob("ranks-*"))
    mark = f"interrupt-{tmp_path}"
    words = (*TINY, "--engines", f"{ENGINES}.hanging", "--out", str(tmp_path))
    command = (sys.executable, "-u", "-m", "bench", "compare", *words)
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(PARITY_MARK=mark),
        cwd=ROOT,
        # a shell ignores SIGINT in what it starts in the background, and whoever is started there inherits that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        while (line := process.stderr.readline()) and "hanging" not in line:
            pass
        assert len(marked(mark)) == 3  # it and two ranks
        process.send_signal(sent)
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()  # else leaving the block would wait for ever
    assert (process.returncode, out, err) == (code, "", said)
    assert marked(mark) == set()
    assert set(Path(tempfile.gettempdir()).glob("ranks-*")) <= folders


def test_progress_is_silent_in_ci_and_a_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing in CI, a bar per run on a terminal, never anything on stdout."""

    def work() -> str:
        with watch(["eager", "ddp"], 3, show=True) as watcher:
            for name in ("eager", "ddp"):
                tell = watcher.begin(name)
                for event in (Progress("build", 0, 1), Progress("step", 3, 3), Progress("instruments", 1, 1)):
                    tell(0, event)
                    tell(1, Progress("step", 1, 3))
        shown = capsys.readouterr()
        assert shown.out == ""
        return shown.err

    monkeypatch.setenv("CI", "true")
    assert work() == ""
    monkeypatch.delenv("CI")
    assert work() == "[1/2] eager: 3 steps\n[2/2] ddp: 3 steps\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    bars = work()
    assert "eager" in bars and "ddp" in bars and "4/4" in bars
