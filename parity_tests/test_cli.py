"""The command line as its users meet it: verdicts and exit codes, wrong words, ranks that fail, torchrun, Ctrl-C."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

import bench.__main__
import bench.commands
import bench.preflight
from bench.__main__ import main
from bench.options import CompareOptions, parse
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


WRONG_WORDS: list[tuple[str, tuple[str, ...], str]] = [
    ("no command", (), "COMMAND"),
    ("unknown command", ("paint",), "'paint'"),
    ("unknown option", ("compare", "--colour", "red"), "--colour"),
    ("abbreviated option", ("compare", "--step", "2"), "--step"),
    ("option without value", ("compare", "--steps"), "--steps"),
    ("steps no number", ("compare", "--steps", "many"), "'many'"),
    ("steps 0", ("compare", "--steps", "0"), "steps"),
    ("ranks 0", ("compare", "--ranks", "0"), "ranks: expected a whole number of at least 1, found 0"),
    ("ranks below 0", ("compare", "--ranks", "-2"), "found -2"),
    ("ranks that do not divide the batch", ("compare", "--ranks", "5"), "--batch 15"),
    (
        "more ranks than memory",
        ("compare", "--model", f"{ENGINES}.models:bigram", "--ranks", "100000", "--batch", "100000", "--seq", "8"),
        "use fewer ranks",
    ),
    ("batch 0", ("compare", "--batch", "0"), "batch"),
    ("seq 1", ("compare", "--seq", "1"), "seq"),
    ("seq above the model's", ("compare", "--seq", "257"), "at most 256 tokens, found 257"),
    ("seed below 0", ("compare", "--seed", "-1"), "seed"),
    ("seed above torch's", ("compare", "--seed", str(2**63)), "seed"),
    ("lr 0", ("compare", "--lr", "0"), "lr: expected a positive number"),
    ("lr no number", ("compare", "--lr", "fast"), "'fast'"),
    ("lr infinite", ("compare", "--lr", "inf"), "'inf'"),
    ("timeout 0", ("compare", "--timeout", "0"), "--timeout"),
    ("timeout endless", ("compare", "--timeout", "1e30"), "'1e30'"),
    ("unknown dtype", ("compare", "--param-dtype", "int8"), "'int8'"),
    ("unknown reduce dtype", ("compare", "--reduce-dtype", "float"), "'float'"),
    ("unknown backend", ("compare", "--backend", "nvfuser"), "'nvfuser'"),
    ("unknown block backend", ("compare", "--block-backend", "nvfuser"), "'nvfuser'"),
    (
        "blocks of no engine",
        ("compare", "--block-backend", "aot_eager", "--engines", "compiled"),
        "add one, such as eager",
    ),
    (
        "model without blocks",
        ("compare", "--model", f"{ENGINES}.models:bigram", "--block-backend", "aot_eager"),
        "found none in Bigram",
    ),
    (
        "hooks inside a block",
        ("compare", "--plan", "param", "--block-backend", "aot_eager"),
        "inside the block 'layers.0'",
    ),
    (
        "named hooks inside a block",
        ("compare", "--plan", "layers.1.attention", "--block-backend", "aot_eager"),
        "'layers.1.attention' inside the block 'layers.1'",
    ),
    ("unknown pass", ("compare", "--disabled-passes", "prefetch_gather"), "did you mean 'prefetch_gathers'?"),
    ("no pass", ("compare", "--disabled-passes", ""), "--disabled-passes"),
    (
        "pass of no graph",
        ("compare", "--disabled-passes", "bucket_gathers", "--backend", "eager"),
        "choose the backend aot_eager",
    ),
    (
        "pass of no engine",
        ("compare", "--disabled-passes", "bucket_gathers", "--engines", "eager,ddp"),
        "add compiled to --engines",
    ),
    ("unknown transport", ("compare", "--transport", "pigeon"), "'pigeon'"),
    ("unknown reshard", ("compare", "--reshard-after-forward", "maybe"), "'maybe'"),
    ("unknown optimizer", ("compare", "--optimizer", "lion"), "'lion'"),
    ("unknown format", ("compare", "--format", "pdf"), "'pdf'"),
    ("unknown model", ("compare", "--model", "llama-debgu"), "did you mean 'llama-debug'?"),
    ("model of no module", ("compare", "--model", "nowhere:build"), "no module 'nowhere'"),
    ("model of no function", ("compare", "--model", f"{ENGINES}.models:bigrams"), "did you mean 'bigram'?"),
    ("model that fails", ("compare", "--model", f"{ENGINES}.models:fails"), "KeyError: 'no such"),
    ("model that is none", ("compare", "--model", "os:getcwd"), "found str"),
    ("model without its function", ("compare", "--model", "parity_tests.runs"), "parity_tests.runs:FUNCTION"),
    ("frozen model", ("compare", "--model", f"{ENGINES}.models:frozen"), "nothing to train"),
    ("scalar parameter", ("compare", "--model", f"{ENGINES}.models:with_scalar"), "'scale': has no dimensions"),
    (
        "complex parameter",
        ("compare", "--model", f"{ENGINES}.models:with_complex"),
        "'phase': expected a real dtype, found",
    ),
    ("weight changed", ("compare", "--model", f"{ENGINES}.models:that_shrinks"), "that they change 'head.weight'"),
    ("weight replaced", ("compare", "--model", f"{ENGINES}.models:that_replaces"), "that they change 'norm.weight'"),
    ("max_norm", ("compare", "--model", f"{ENGINES}.models:with_max_norm"), "that they change 'embed.weight'"),
    (
        "max_norm in bf16",
        ("compare", "--model", f"{ENGINES}.models:with_max_norm", "--param-dtype", "bf16"),
        "that they change 'embed.weight'",
    ),
    ("dropout", ("compare", "--model", f"{ENGINES}.models:with_dropout"), "module '1', a Dropout in training mode"),
    ("dropout inside", ("compare", "--model", f"{ENGINES}.models:with_dropout_inside"), "module '1', a GRU"),
    ("functional dropout", ("compare", "--model", f"{ENGINES}.models:with_functional_dropout"), "bernoulli_ (/"),
    ("attention dropout", ("compare", "--model", f"{ENGINES}.models:with_attention_dropout"), "engines/models.py:"),
    ("noise", ("compare", "--model", f"{ENGINES}.models:with_noise"), "module '1', a RReLU"),
    ("sync batch norm", ("compare", "--model", f"{ENGINES}.models:with_sync_batch_norm"), "how ranks share the batch"),
    ("batch norm", ("compare", "--model", f"{ENGINES}.models:with_batch_norm"), "how ranks share the batch"),
    ("model above the memory", ("compare", "--model", "llama3-405b"), "needs at least"),
    ("unknown engine", ("compare", "--engines", "eagre"), "known engines are eager"),
    ("engine that is none", ("compare", "--engines", "os"), "does not define parallelize"),
    ("engine that cannot be imported", ("compare", "--engines", f"{ENGINES}.broken"), "RuntimeError: half written"),
    ("engine that leaves", ("compare", "--engines", f"{ENGINES}.leaving"), "engines/leaving.py:3; keep what"),
    ("model that leaves", ("compare", "--model", f"{ENGINES}.models:that_leaves"), "engines/models.py:"),
    ("loss that leaves", ("compare", "--model", f"{ENGINES}.tasks:that_leaves"), "engines/tasks.py:"),
    ("engine twice", ("compare", "--engines", "eager,ddp,eager"), "'eager' twice"),
    ("engine without a name", ("compare", "--engines", "eager,,ddp"), "--engines"),
    ("no engine but the reference", ("compare", "--engines", "single"), "found no other"),
    ("unknown reference", ("compare", "--reference", "truth"), "'truth'"),
    ("plan that names no module", ("compare", "--plan", "blocks"), "'blocks' names no module"),
    ("plan with a plan in it", ("compare", "--plan", "param,norm"), "'param' is a whole plan"),
    ("plan with a gap", ("compare", "--plan", "norm,,output"), "found nothing"),
    ("data that is not there", ("compare", "--data", "nowhere.txt"), "found nothing there"),
    ("data that is no text", ("compare", "--data", sys.executable), "found other bytes"),
    ("data without a name", ("compare", "--data", ""), "empty name"),
    ("out in a file", ("compare", "--out", f"{__file__}/runs"), "is a file"),
    ("show nothing", ("show",), "RUN"),
    ("show what is not there", ("show", "nowhere"), "run nowhere"),
    ("show no latest", ("show", "latest", "--out", "nowhere"), "no finished run in nowhere"),
    ("explain no latest", ("explain", "latest", "--out", "nowhere"), "no run of compare in nowhere"),
    ("lanes of no latest", ("lanes", "latest", "--out", "nowhere"), "no run with --profile in nowhere"),
    ("grade that is none", ("compare", "--grade", "exact"), "'exact'"),
    ("list with a name", ("list", "models"), "models"),
]


@pytest.mark.parametrize(
    ("words", "expected"), [case[1:] for case in WRONG_WORDS], ids=[case[0] for case in WRONG_WORDS]
)
@pytest.mark.usefixtures("no_ranks")
def test_wrong_words_end_in_one_line(words: tuple[str, ...], expected: str) -> None:
    """Each wrong option or value is one clear line and exit code 2, and no rank is started."""
    assert_one_line(call(*words), 2, expected)


@pytest.mark.usefixtures("no_ranks")
def test_wrong_data_end_in_one_line(tmp_path: Path) -> None:
    """A text shorter than a batch, an empty one, a folder without text, and tokens that the model has not."""
    (tmp_path / "empty").mkdir()
    short, nothing, tokens = tmp_path / "short.txt", tmp_path / "nothing.txt", tmp_path / "tokens.bin"
    short.write_text("x" * 12 * 64)  # a batch of 12 times 64 tokens needs one more
    nothing.write_text("")
    tokens.write_bytes(b"\xff\x7f" * 1000)
    for path, expected in (
        (short, "at least 769 tokens"),
        (nothing, "empty file"),
        (tmp_path / "empty", "found none"),
        (tokens, "vocabulary of 256, found 32767"),
    ):
        assert_one_line(call("compare", "--data", str(path)), 2, expected, str(path))


@pytest.mark.usefixtures("no_ranks")
def test_folder_that_takes_no_files_ends_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No permission to write where the records should go is found before ranks start, also where that is not there."""
    real = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: path != tmp_path and real(path, mode)
    )  # root may write anywhere
    assert_one_line(call("compare", "--out", str(tmp_path / "new" / "runs")), 2, "cannot write", str(tmp_path))


@pytest.mark.usefixtures("no_ranks")
def test_missing_compiler_ends_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Inductor without a C++ compiler or Python's headers says what to install, and how to do without."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert_one_line(call("compare"), 2, "C++ compiler", "'no-such-compiler'", "CXX=", "--backend aot_eager")
    words = ("compare", "--engines", "ddp", "--block-backend", "inductor")
    assert_one_line(call(*words), 2, "block_backend inductor", "--block-backend aot_eager")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX")
    assert_one_line(call("compare"), 2, "'g++'", "apt install g++", "--backend aot_eager")
    monkeypatch.undo()


@pytest.mark.usefixtures("no_ranks")
def test_missing_python_headers_end_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A Python without its C headers is told before Inductor fails on it."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert_one_line(call("compare"), 2, "Python.h", str(tmp_path), "python3-dev")


@pytest.mark.parametrize(
    "words",
    [
        ("models:that_drops_nothing",),
        ("models:that_looks_at_numbers",),
        ("models:that_asks",),
        ("tasks:in_bf16_only", "--param-dtype", "bf16"),
    ],
)
def test_models_that_are_right_pass(words: tuple[str, ...], tmp_path: Path) -> None:
    """Dropout of zero or out of training, noise from a generator of its own, a forward that needs real numbers.

    So does one that asks for its process group, and one that works in the dtype of the job alone.
    """
    options = parse(("compare", "--out", str(tmp_path), "--model", f"{ENGINES}.{words[0]}", *words[1:]))
    assert isinstance(options, CompareOptions)
    bench.preflight.settle(options.job, options.reference, options.engines, options.out)


def test_compiler_is_asked_for_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another backend, or a comparison without the compiled engine, passes all checks without a compiler."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    no_hooks = ("--plan", "param", "--engines", "ddp", "--block-backend", "aot_eager")
    for words in (("--backend", "aot_eager"), ("--engines", "eager,ddp"), no_hooks):
        options = parse(("compare", "--out", str(tmp_path), *words))
        assert isinstance(options, CompareOptions)
        bench.preflight.settle(options.job, options.reference, options.engines, options.out)


@pytest.mark.parametrize(
    ("package", "found", "expected"),
    [("torch", "2.10.1+cpu", "needs torch 2.11 or newer, found 2.10.1+cpu"), ("rich", None, "needs the package rich")],
)
@pytest.mark.usefixtures("no_ranks")
def test_old_or_missing_packages_end_in_one_line(
    monkeypatch: pytest.MonkeyPatch, package: str, found: str | None, expected: str
) -> None:
    """A torch that is too old, or a package that is not there, is named with the way out."""

    def pretend(name: str) -> str:
        if name != package:
            return version(name)
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(bench.__main__, "version", pretend)
    assert_one_line(call("list"), 2, expected, "pip install")


@pytest.mark.usefixtures("no_ranks")
def test_old_python_ends_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python that is too old is named."""
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    assert_one_line(call("list"), 2, "needs Python 3.11 or newer")


def test_fault_of_the_program_is_not_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected error ends in exit code 3 with its traceback: 1 would say that parity does not hold."""
    monkeypatch.setattr(bench.commands, "list_document", lambda: 1 / 0)
    ran = call("list")
    assert ran.code == 3 and "ZeroDivisionError" in ran.err


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
