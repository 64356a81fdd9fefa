"""What a user brings: a task of model, batches and loss; an engine; models of Hugging Face. None is known by name.

The examples are copied out of the repository and run from there, so that nothing of them is found by accident.
"""

from __future__ import annotations

import shutil
import sys
from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bench.commands
from bench.documents import describe_job
from bench.trial import find_changed
from common.engine import Engine, load_engine
from common.errors import ConfigError, EngineError
from common.harness.grades import referee_job
from common.harness.launch import RankContext, RankPool
from common.harness.train import prepare
from common.harness.workload import Workload, mean_loss
from common.job import DEFAULT_SEQ, JobConfig
from common.models import build_model, build_task
from common.plan import build_plan
from common.task import Task, call_model
from parity_tests.cli_calls import ROOT, Ran, call, lend, run_process
from parity_tests.runs import Runs

TASKS = "parity_tests.engines.tasks"
SMALL = ("--steps", "2", "--batch", "6", "--backend", "aot_eager")
F32, F64 = torch.float32, torch.float64


class Pair(NamedTuple):
    x: torch.Tensor
    mask: torch.Tensor | None


def shapes_of_batches(size: int) -> list[Any]:
    """Inputs, or targets, in every form they may have, for `size` samples."""
    x, ids = torch.arange(size * 6.0, dtype=F64).view(size, 2, 3), torch.arange(size)
    named = OrderedDict(x=x, ids=ids, flag=True)
    return [
        x,
        (x, ids),
        [ids, x],
        named,
        {"deep": [(x, {"ids": ids}), None, 2, "same"]},
        Pair(x, None),
        (ids[:, None],),
    ]


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return leaves(list(tree.values()))
    return [leaf for item in tree for leaf in leaves(item)] if isinstance(tree, (tuple, list)) else [tree]


# --- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", range(7))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_shares_are_the_rows_of_one_batch(form: int, ranks: int) -> None:
    """One below the other the ranks' shares are the batch, whatever holds the tensors; no rank keeps others' rows."""
    task = Task(
        nn.Linear(1, 1), lambda step, size: (shapes_of_batches(size)[form], shapes_of_batches(size)[form]), F.mse_loss
    )
    shares = [task.share(0, 12, seed=0, dtype=F32, rank=rank, ranks=ranks) for rank in range(ranks)]
    for side in (0, 1):
        parts = [leaves(share[side]) for share in shares]
        for i, whole in enumerate(leaves(shapes_of_batches(12)[form])):
            if not isinstance(whole, torch.Tensor):
                assert all(part[i] == whole for part in parts)
                continue
            expected = whole.float() if whole.is_floating_point() else whole
            assert torch.equal(torch.cat([part[i] for part in parts]), expected)
            assert all(part[i].dtype is expected.dtype for part in parts)
            assert all(part[i].untyped_storage().nbytes() == part[i].nbytes for part in parts)


def test_batches_draw_by_seed_and_step() -> None:
    """A function that draws gives the same batch each time, another for each step and seed; no side effect."""
    task = build_task(f"{TASKS}:linear", seed=0)
    assert isinstance(task, Task)
    before = torch.get_rng_state()
    first, again, step, seed = (
        task.share(step, 6, seed=seed, dtype=F32)[0] for step, seed in ((0, 0), (0, 0), (1, 0), (0, 1))
    )
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first, again) and not torch.equal(first, step) and not torch.equal(first, seed)


def test_models_are_called_with_what_the_inputs_are() -> None:
    """One tensor is one argument, a tuple or list are several, a dict names them."""

    def model(x: Any, y: Any = None) -> Any:
        return x, y

    x, y = torch.ones(1), torch.zeros(1)
    for inputs, expected in ((x, (x, None)), ((x,), (x, None)), ([x, y], (x, y)), ({"y": y, "x": x}, (x, y))):
        assert all(a is b for a, b in zip(call_model(model, inputs), expected, strict=True))


def test_a_bare_tuple_and_the_dataclass_are_the_same_task() -> None:
    """Both have the model that `build_model` gives, drawn at the seed and cast."""
    for name in ("linear", "as_dataclass"):
        task = build_task(f"{TASKS}:{name}", seed=3, dtype=F64)
        assert isinstance(task, Task)
        torch.manual_seed(3)
        assert torch.equal(task.model.weight, nn.Linear(8, 1).weight.double())  # type: ignore[arg-type]
        assert torch.equal(build_model(f"{TASKS}:{name}", seed=3, dtype=F64).weight, task.model.weight)  # type: ignore[arg-type]


def test_logits_may_have_a_name() -> None:
    """A dict or a dataclass that holds `logits` counts as them, as models of other libraries return it."""

    @dataclass
    class Output:
        logits: torch.Tensor

    logits, targets = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    for output in (logits, {"logits": logits}, Output(logits)):
        assert torch.equal(mean_loss(output, targets), expected)


def test_length_of_sequences_belongs_to_tokens() -> None:
    """A job on tokens has one from the start, or once its module is built; a task never has, and its text says so."""
    assert JobConfig().seq == DEFAULT_SEQ and "12 x 64 tokens" in describe_job(JobConfig())
    users = JobConfig(model="parity_tests.engines.models:bigram")
    assert users.seq is None and Workload.of(build_task(users.model, seed=0), users).job.seq == DEFAULT_SEQ
    job = JobConfig(model=f"{TASKS}:linear")
    settled = Workload.of(build_task(job.model, seed=0), job).job
    assert settled == job and settled.seq is None
    assert "10 steps of 12 samples of its own, sgd" in describe_job(job)


# --- what is wrong ---------------------------------------------------------------------------------------------------

WRONG = [
    ("of_two", (), "or a task of three (model, batch, loss), found a tuple of 2"),
    ("of_a_function", (), "expected an nn.Module as its model, found function"),
    ("of_a_number", (), "expected a function batch(step, size), found int"),
    ("of_a_word", (), "expected a function loss(output, targets), found str"),
    ("without_targets", (), "to return (inputs, targets), found a tensor [6, 8]"),
    ("of_another_size", (), "expected 6 samples in dimension 0 of inputs, found shape [5, 8]"),
    ("of_one_number", (), "expected 6 samples in dimension 0 of targets['y'][0], found shape []"),
    ("without_tensors", (), "expected inputs that the model can be called with"),
    ("of_a_set", (), "expected tensors in tuples, lists or dicts as inputs, found set"),
    ("that_goes_on", (), "two different batches for step 0"),
    ("that_fails", (), "its batch function raised IndexError: list index out of range ("),
    (
        "of_unknown_keys",
        (),
        "its forward or loss raised TypeError: Linear.forward() got an unexpected keyword argument",
    ),
    ("with_a_loss_that_fails", (), "its forward or loss raised AttributeError: 'Tensor' object has no attribute"),
    (
        "in_bf16_only",
        (),
        "its forward or loss raised TypeError: found torch.float32, torch.float32 and torch.float32 (",
    ),
    ("that_drops", (), "its forward or loss calls aten.bernoulli_ ("),
    ("linear", ("--seq", "64"), "seq: model 'parity_tests.engines.tasks:linear' is a task"),
    ("linear", ("--data", __file__), "leave --data out"),
    ("linear", ("--plan", "blocks"), "'blocks' names no module"),
    ("linear", ("--block-backend", "aot_eager"), "found none in Linear"),
]


@pytest.mark.parametrize(("name", "words", "expected"), WRONG, ids=[" ".join((w[0], *w[1][:1])) for w in WRONG])
def test_wrong_tasks_end_in_one_line(
    name: str, words: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever is wrong with a task or unused by it is one clear line and exit code 2, before a rank is started."""
    monkeypatch.setattr(bench.commands, "open_ranks", lambda ranks: pytest.fail("ranks were about to start"))
    ran = call("compare", "--model", f"{TASKS}:{name}", *SMALL, *words, "--out", str(tmp_path))
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1) and expected in ran.err, ran


def returned(context: RankContext, found: object) -> str:
    """What an engine whose `parallelize` returns `found` is told; on a rank."""
    engine = Engine("mine", lambda model, mesh, job: found, data_parallel=False)  # type: ignore[arg-type,return-value]
    try:
        prepare(context, engine, JobConfig(model=f"{TASKS}:linear", batch=6, steps=1))
    except EngineError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("found", [3, None])
def test_engine_that_returns_nothing_to_call_is_told_the_contract(found: object, pool: RankPool) -> None:
    """A number, or a forgotten `return`: one line with the engine's name, what it has to return and what it did."""
    (said,) = pool.run(returned, found, ranks=1, timeout_s=60)
    assert said.startswith("engine 'mine': expected parallelize(model, mesh, job) to return") and "\n" not in said
    assert f"found {found}; return the model" in said


def test_what_a_cpu_lacks_is_no_error_of_a_job_for_gpus() -> None:
    """The trial runs on the CPU: there what raises may be right on a GPU, and what changes is wrong on both."""
    for name, changed in (("tasks:in_bf16_only", None), ("models:with_max_norm", "embed.weight")):
        assert find_changed(JobConfig(model=f"parity_tests.engines.{name}", device="cuda", link="nccl")) == changed


def refusals(context: RankContext, names: list[str]) -> dict[str, str]:
    """What training each task on one process says; on a rank."""
    said = {}
    for name in names:
        job = JobConfig(model=f"{TASKS}:{name}", batch=6, steps=1)
        try:
            training = prepare(context, load_engine("single"), job)
            training.plain_step(0)
            said[name] = ""
        except ConfigError as error:
            said[name] = str(error)
    return said


def test_wrong_losses_are_refused_when_they_are_known(pool: RankPool) -> None:
    """A loss is known when it is taken: a sum over samples, several numbers, none with a gradient, one cast down."""
    expected = {
        "linear": "",
        "with_a_sum": "expected a loss that is the mean over samples",
        "with_losses": "a tensor of no dimensions, the mean over samples, found a tensor [6, 1]",
        "with_a_float": "found float",
        "without_gradient": "no trained parameter had a part in",
        "cast_down": "expected a loss in torch.float32 or wider, found torch.bfloat16",
    }
    (said,) = pool.run(refusals, list(expected), ranks=1, timeout_s=120)
    for name, text in expected.items():
        assert text in said[name] and bool(text) == bool(said[name]), said[name]
        assert "\n" not in said[name]


# --- trained ---------------------------------------------------------------------------------------------------------


def test_referee_computes_in_float64_whatever_the_model_says(runs: Runs) -> None:
    """A norm and a softmax "in float32" do not narrow the referee: loss and gradients are those of float64 by hand."""
    job = referee_job(JobConfig(model=f"{TASKS}:narrowing", batch=6, steps=1, ranks=2))
    record, kept = runs("single", job)
    task = build_task(job.model, seed=job.seed, dtype=F64)
    assert isinstance(task, Task)
    inner = task.model.inner
    x, y = task.share(0, 6, seed=job.seed, dtype=F64)
    scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.1)
    loss = F.mse_loss(F.linear(torch.softmax(scaled, -1), inner.weight, inner.bias), y)
    loss.backward()
    assert record.losses[0][0] == pytest.approx(loss.item(), rel=1e-14)
    for name, param in task.model.named_parameters():
        assert torch.allclose(kept[name], param.grad, rtol=1e-13, atol=0)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder outside the repository that holds the examples, and is the working directory."""
    for name in ("my_model", "my_engine"):
        shutil.copy(ROOT / "examples" / f"{name}.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    for name in ("my_model", "my_engine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def compare(pool: RankPool, monkeypatch: pytest.MonkeyPatch, *words: str) -> Ran:
    monkeypatch.setattr(bench.commands, "open_ranks", lambda ranks: nullcontext(pool))
    return call("compare", *words, "--format", "json", "--out", "runs")


def reached(ran: Ran) -> dict[tuple[str, str], str]:
    assert ran.code == 0, ran
    return {(row["engine"], row["against"]): row["reached"] for row in ran.json["tables"]["verdict"]}


def test_examples_run_from_elsewhere(pool: RankPool, monkeypatch: pytest.MonkeyPatch, elsewhere: Path) -> None:
    """Model and engine of one's own: sharded engines have equal bits, the example's own order of sums."""
    words = ("--model", "my_model:build", *SMALL, "--profile")
    grades = reached(compare(pool, monkeypatch, *words, "--engines", "eager,compiled,torch-fsdp2,my_engine"))
    pairs = {("compiled", "eager"), ("eager", "torch-fsdp2"), ("compiled", "torch-fsdp2")}
    assert {grades[pair] for pair in pairs} == {"bitwise"}
    assert grades["my_engine", "single"] in ("bitwise", "reduction-order")
    assert len(list(elsewhere.glob("runs/*/my_engine*trace*"))) == 2  # ranks


def test_inputs_are_cast_by_the_policy(pool: RankPool, monkeypatch: pytest.MonkeyPatch, elsewhere: Path) -> None:
    """Inputs are float32, three ranks compute in bf16 and reduce in it: engines agree, the example's among them."""
    words = ("--model", f"{TASKS}:linear", *SMALL, "--ranks", "3", "--param-dtype", "bf16", "--reduce-dtype", "bf16")
    grades = reached(compare(pool, monkeypatch, *words, "--engines", "eager,compiled,my_engine"))
    assert grades["compiled", "eager"] == "bitwise"


def test_the_readme_shows_what_the_broken_example_prints(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its command, and each line below it that is the same on every machine."""
    _, shown = (ROOT / "README.md").read_text().split("$ fsdp-parity ")
    command, *lines = shown.split("\n```")[0].splitlines()
    lend(pool, monkeypatch)
    ran = call(*command.split(), "--out", str(tmp_path))
    same = [line for line in lines if line != "..." and not line.startswith("furthest")]
    assert ran.code == 1 and len(same) == 5
    assert [line for line in same if line not in ran.out.splitlines()] == []


def test_ranks_of_torchrun_find_what_lies_in_the_working_directory(elsewhere: Path) -> None:
    """Processes that torchrun starts, each by itself, import the user's model and engine from where they run."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    words = ("--model", "my_model:build", "--steps", "1", "--batch", "2", "--engines", "my_engine")
    ran = run_process(*launcher, "-m", "bench", "compare", *words, cwd=elsewhere)
    assert ran.code == 0 and "PARITY HOLDS" in ran.out, ran


def test_tasks_are_timed_where_one_process_stands_for_all(tmp_path: Path) -> None:
    """`bench` on link fake: this rank's rows of a batch made while it is timed, from data that meta does not have."""
    words = ("--model", f"{TASKS}:with_data", "--engines", "eager", "--ranks", "3", "--batch", "6", "--steps", "1")
    turns = ("--turns", "1", "--turn-steps", "1", "--link", "fake")
    ran = call("bench", *words, *turns, "--out", str(tmp_path), "--format", "json")
    assert ran.code == 0, ran
    (row,) = ran.json["tables"]["benchmark"]
    assert row["compute_s"] > 0 and row["collectives"] == 3 and row["tokens_per_s"] is None


# --- Hugging Face ----------------------------------------------------------------------------------------------------

needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="NOT RUN: needs transformers; pip install -c constraints.txt -e .[hf]"
)


@needs_transformers
def test_blocks_of_hugging_face_are_found() -> None:
    """Plan block: a bucket for each layer of both models; GPT-2's head shares the embedding, so it is in its bucket."""
    llama, gpt2 = (build_plan(build_model(f"examples.hf:{name}", seed=0, device="meta")) for name in ("llama", "gpt2"))
    assert [bucket.name for bucket in llama.buckets] == [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "model.norm+lm_head",
    ]
    ends, *layers = [bucket.name for bucket in gpt2.buckets]
    assert {"transformer.wte", "lm_head"} <= set(ends.split("+")) and layers == ["transformer.h.0", "transformer.h.1"]


@needs_transformers
@pytest.mark.parametrize("name", ["llama", "gpt2", "llama_task"])
def test_hugging_face_is_compared(name: str, pool: RankPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Built from a config and otherwise unchanged: text in and `logits` out, or keywords in and a loss out."""
    monkeypatch.chdir(tmp_path)
    seq = () if name == "llama_task" else ("--seq", "16")
    words = ("--model", f"examples.hf:{name}", *SMALL, *seq)
    grades = reached(compare(pool, monkeypatch, *words, "--engines", "eager,compiled,torch-fsdp2,ddp"))
    pairs = {("compiled", "eager"), ("eager", "torch-fsdp2"), ("compiled", "torch-fsdp2")}
    assert {grades[pair] for pair in pairs} == {"bitwise"}
