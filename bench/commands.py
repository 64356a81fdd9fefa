"""The three commands, from options to exit code.

`compare`, in phases:

1. check all that can be checked before a rank starts (`preflight`);
2. run the engines in turn on the same ranks: the reference, the candidates, then the float64 referee if a grade needs
   it; each record is written when its run ends, so that a later failure does not take it along;
3. judge (`judge`), write the report (`store`), print (`documents`, `render`).

Under torchrun every rank goes through all of it and comes to the same exit code; only rank 0 writes and prints.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from bench.documents import comparison_document
from bench.judge import REFEREE, judge, judged_pairs, needs_referee
from bench.listing import list_document
from bench.options import CompareOptions, ListOptions, ShowOptions, parse
from bench.preflight import check
from bench.progress import watch
from bench.render import emit
from bench.store import Comparison, find_run, load_comparison, make_run_folder, save_comparison
from common.errors import ConfigError, ParityError, RankError
from common.harness.compare import referee_job
from common.harness.launch import Ranks, launched_by_torchrun, open_ranks
from common.harness.records import Run, save_record
from common.harness.train import run_job
from common.job import JobConfig

HOLDS, FAILS = 0, 1


def run(words: Sequence[str]) -> int:
    """Carry out the command that `words` name; return the exit code."""
    try:
        options = parse(words)
        if isinstance(options, ListOptions):
            return list_names(options)
        return show(options) if isinstance(options, ShowOptions) else compare(options)
    except ParityError as error:
        _tell(error)
        return error.exit_code


def compare(options: CompareOptions) -> int:
    """Train the job on every engine and judge whether they agree."""
    check(options)
    job = options.job
    pairs = judged_pairs(job, options.reference, options.engines)
    jobs = {name: job for name in (options.reference, *options.engines)}
    if needs_referee(job, pairs):
        jobs[REFEREE] = referee_job(job)
    created = datetime.now().astimezone()
    with open_ranks(job.ranks) as ranks:
        folder = make_run_folder(options.out, job, created) if ranks.is_main else None
        runs = _run_all(ranks, jobs, folder, options.timeout_s)
    comparison = Comparison(
        created=created.isoformat(timespec="seconds"),
        job=job,
        reference=options.reference,
        records={name: record for name, (record, _) in runs.items()},
        reports=tuple(judge(pairs, runs)),
    )
    if folder is not None:
        save_comparison(folder, comparison)
        emit(comparison_document(comparison), options.format)
        print(f"records: {folder}", file=sys.stderr)
    return HOLDS if comparison.holds else FAILS


def show(options: ShowOptions) -> int:
    """Print what `compare` printed, from its files; the exit code is that of the verdict."""
    comparison = load_comparison(find_run(options.run, options.out))
    emit(comparison_document(comparison), options.format)
    return HOLDS if comparison.holds else FAILS


def list_names(options: ListOptions) -> int:
    """Print what options can be given."""
    emit(list_document(), options.format)
    return HOLDS


def _run_all(ranks: Ranks, jobs: Mapping[str, JobConfig], folder: Path | None, timeout_s: float) -> dict[str, Run]:
    """Run each job in turn; write its record to `folder`, if this process is the one to write."""
    runs: dict[str, Run] = {}
    steps = next(iter(jobs.values())).steps
    with watch(list(jobs), steps, show=ranks.is_main) as watcher:
        for name, job in jobs.items():
            engine = "single" if name == REFEREE else name
            runs[name] = run_job(ranks, engine, job, on_progress=watcher.begin(name), timeout_s=timeout_s)
            if folder is not None:
                save_record(folder, *runs[name], name=name)
    return runs


def _tell(error: ParityError) -> None:
    """Say on one line what is wrong, and below it, of a rank that failed, how it came to that.

    torchrun's ranks find a wrong configuration all alike, so one of each machine speaks; what happened to a rank only
    that rank knows.
    """
    is_alike = isinstance(error, ConfigError) and launched_by_torchrun()
    if is_alike and os.environ.get("LOCAL_RANK", "0") != "0":
        return
    print(f"fsdp-parity: {' '.join(str(error).split())}", file=sys.stderr)
    if isinstance(error, RankError) and error.detail:
        print(error.detail.rstrip(), file=sys.stderr)
