"""Run a comparison: train one job on several engines, and judge whether they agree.

In phases:

1. run the engines in turn on the same ranks: the reference, the candidates, then the float64 referee and the peers if a
   grade needs them; each record is written when its run ends, so that a later failure does not take it along;
2. judge the pairs; where one fails that needed no referee, run these now, since they tell which weaker grade holds and
   what is likely to be wrong.

Under torchrun every rank goes through all of it and has the same comparison in the end; only rank 0 has a folder.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from bench.judge import PEERS, REFEREE, Pair, engine_of, judge, judged_pairs, judging_jobs, needs_referee
from bench.options import CompareOptions
from bench.progress import watch
from bench.store import Comparison
from bench.trace_files import save_trace
from common.harness.launch import Ranks
from common.harness.records import Run, save_record
from common.harness.train import RankResult, assemble, run_ranks
from common.job import JobConfig


def run_comparison(
    ranks: Ranks,
    options: CompareOptions,
    folder: Path | None,
    created: datetime,
    *,
    pairs: Sequence[Pair] | None = None,
    show: bool = True,
) -> tuple[Comparison, dict[str, Run]]:
    """Train the job of `options` on every engine and judge the pairs; `preflight.settle` has passed.

    Args:
        ranks: where.
        folder: gets the records; None where another process writes them.
        pairs: what to judge; None is `judged_pairs`.
        show: progress, on stderr.

    Returns:
        The comparison, and its runs with their gradients, by name.

    Raises:
        ConfigError: what only a rank finds out, such as a model that returns no logits.
        RankError: a rank raised, died or hung.
    """
    job = options.job
    if pairs is None:
        pairs = judged_pairs(job, options.reference, options.engines)
    jobs = {name: job for name in (options.reference, *options.engines)}
    if needs_referee(job, pairs, options.grade):
        jobs |= judging_jobs(job)
    show = show and ranks.is_main
    traced = options.engines if options.profile else ()
    runs = run_engines(ranks, jobs, folder, options.timeout_s, traced=traced, show=show)
    reports = judge(pairs, runs, options.grade)
    if REFEREE not in runs and not all(report.passed for report in reports):
        runs |= run_engines(ranks, judging_jobs(job), folder, options.timeout_s, show=show)
        reports = judge(pairs, runs, options.grade)
    comparison = Comparison(
        created=created.isoformat(timespec="seconds"),
        job=job,
        reference=options.reference,
        records={name: record for name, (record, _) in runs.items() if name not in PEERS},
        reports=tuple(reports),
    )
    return comparison, runs


def run_engines(
    ranks: Ranks,
    jobs: Mapping[str, JobConfig],
    folder: Path | None,
    timeout_s: float,
    *,
    traced: Container[str] = (),
    show: bool,
) -> dict[str, Run]:
    """Run each job, by the name of its engine, in turn; write what it leaves to `folder`, if there is one."""
    runs: dict[str, Run] = {}
    steps = next(iter(jobs.values())).steps
    with watch(list(jobs), steps, show=show) as watcher:
        for name, job in jobs.items():
            engine = engine_of(name)
            results = run_ranks(
                ranks, engine, job, profile=name in traced, on_progress=watcher.begin(name), timeout_s=timeout_s
            )
            runs[name] = assemble(engine, job, results)
            if folder is not None:
                save_run(folder, name, runs[name], results)
    return runs


def save_run(folder: Path, name: str, run: Run, results: Iterable[RankResult | None]) -> None:
    """Write one engine's record, and its traces if there are any."""
    save_record(folder, *run, name=name)
    for result in results:
        if result is not None and result.trace is not None:
            save_trace(folder, name, result.trace)
