"""Link fake: one process stands for all ranks, and what it measures is what one of real ranks measures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.harness.launch import RankContext, RankPool
from common.harness.train import RankResult, run_ranks
from common.job import PASSES, JobConfig
from common.models import build_model
from parity_tests.cli_calls import call
from parity_tests.runs import LLAMA, Runs

JOB = JobConfig(steps=1, seq=16, batch=2, backend="aot_eager", transport="native", link="none")
MANY = 48
TINY = ("--model", "parity_tests.engines.models:bigram", "--batch", "4", "--seq", "16", "--steps", "1")


def alone(pool: RankPool, engine: str, **changes: object) -> RankResult:
    job = JobConfig(**JOB.to_dict() | {"link": "fake"} | changes)
    (result,) = run_ranks(pool, engine, job, timeout_s=120)
    assert result is not None
    return result


@pytest.mark.parametrize("engine", ["eager", "compiled", "torch-fsdp2"])
def test_one_process_measures_what_one_of_two_ranks_does(pool: RankPool, runs: Runs, engine: str) -> None:
    """The same collectives and the same bytes, at the start and at the peak, as rank 0 of two that do communicate."""
    result, (record, _) = alone(pool, engine, model=LLAMA), runs(engine, replace(JOB, model=LLAMA))
    assert result.collectives == record.collectives and result.collectives
    assert result.memory == record.memory[0]
    assert result.process_group == "fake" and not result.losses and not result.gradients


def test_one_process_stands_for_many(pool: RankPool) -> None:
    """48 ranks: collectives as the plan predicts, and at the start nothing but this rank's padded rows."""
    result = alone(pool, "eager", ranks=MANY, batch=MANY)
    assert result.collectives == result.predicted
    params = list(build_model(JOB.model, seed=0, device="meta").parameters())
    rows = [-(-param.shape[0] // MANY) * param[:1].numel() * param.element_size() for param in params]
    assert result.memory is not None and result.memory.start_bytes == sum(rows)


@pytest.mark.parametrize("reshard", ["always", "never"])
@pytest.mark.parametrize(("ranks", "transport"), [(2, "ordered"), (2, "native"), (3, "native"), (8, "native")])
def test_eager_peak_is_no_higher_than_torchs(pool: RankPool, ranks: int, transport: str, reshard: str) -> None:
    """Nor is it with uneven shards, at 3 ranks; ordered reductions hold W - 1 rows that come, so only 2 ranks are even.

    At one process for all ranks, where peaks are the same each time.
    """
    options = {"ranks": ranks, "batch": 2 * ranks, "transport": transport, "reshard_after_forward": reshard}
    ours, torchs = (alone(pool, engine, **options).memory for engine in ("eager", "torch-fsdp2"))
    assert ours is not None and torchs is not None and ours.start_bytes == torchs.start_bytes
    assert ours.peak_bytes <= torchs.peak_bytes


def test_nothing_is_judged_and_that_is_said(tmp_path: Path) -> None:
    """`bench` gives memory and collectives and no verdict of parity; `compare` and DDP have nothing to do with it."""
    ran = call(
        "bench", *TINY, "--engines", "eager", "--ranks", "4", "--link", "fake", "--turns", "1", "--out", str(tmp_path)
    )
    assert ran.code == 0 and "nothing is judged" in ran.out and "judged against" not in ran.out
    assert "agree" not in ran.out.split("Throughput")[0]
    shown = call("show", "latest", "--out", str(tmp_path), "--format", "json")
    (row,) = shown.json["tables"]["benchmark"]
    assert row["peak_bytes"] > 0 and row["compute_s"] > 0
    assert row["tokens_per_s"] is None and row["busy_s"] is None and row["efficiency"] is None
    for words, said in (
        (("compare", *TINY, "--link", "fake"), "nothing to judge"),
        (("bench", *TINY, "--engines", "ddp", "--link", "fake"), "leave ddp out"),
        (("bench", *TINY, "--engines", "eager", "--link", ""), "cannot read ''"),
        (
            (
                "bench",
                *TINY,
                "--engines=eager",
                "--reference=compiled",
                "--link=fake",
                f"--disabled-passes={PASSES[0]}",
            ),
            "an engine with passes",
        ),
    ):
        refused = call(*words)
        assert refused.code == 2 and said in refused.err


def test_group_is_gone_afterwards(pool: RankPool) -> None:
    """A rank that stood for many takes part in a group of real ones again."""
    alone(pool, "eager")
    assert pool.run(sum_over_ranks, ranks=2) == [1.0, 1.0]


def sum_over_ranks(context: RankContext) -> float:
    total = torch.tensor(float(context.rank))
    torch.distributed.all_reduce(total)
    return total.item()
