"""What ends in one line: wrong words, values, files and surroundings of the command line."""

from __future__ import annotations

import os
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import bench.__main__
import bench.commands
import bench.preflight
from bench.options import CompareOptions, parse
from parity_tests.cli_calls import assert_one_line, call
from parity_tests.test_cli import ENGINES

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
