"""The commands, from options to exit code.

`compare`, in phases:

1. check all that can be checked before a rank starts (`preflight`);
2. run the engines and judge them (`comparison`);
3. write the report (`store`);
4. on request, run the compiled engine stage by stage (`stages`), and replay the first pair that fails (`explain`);
5. print (`documents`, `render`).

`bench`, cell by cell: the reference first, then the engines alive side by side, each trained and then timed in turns
(`turns`); what was trained is judged as above. The table is written anew after each cell.

Under torchrun every rank goes through all of it and comes to the same exit code; only rank 0 writes and prints.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from bench.baseline import Held, check_same_job
from bench.baseline_files import check_savable, load_baseline, save_baseline
from bench.benchmark import TurnsByRank, bench_rows
from bench.benchmark_files import Benchmark, Cell, load_benchmark, save_benchmark, save_turns
from bench.benchmark_tables import benchmark_document
from bench.comparison import run_comparison, run_engines, save_run
from bench.documents import Section
from bench.explain import Explanation
from bench.explain import explain as explain_pair
from bench.explanation_tables import explanation_document, full_document
from bench.judge import PEERS, REFEREE, judge, judging_jobs, needs_referee
from bench.lanes import lanes_document, lanes_section
from bench.listing import list_document
from bench.options import (
    BenchCell,
    BenchOptions,
    CompareOptions,
    ExplainOptions,
    LanesOptions,
    ListOptions,
    SelfTestOptions,
    ShowOptions,
    parse,
)
from bench.preflight import settle
from bench.progress import watch
from bench.render import emit
from bench.selftest import SelfTest, run_all
from bench.selftest_tables import selftest_document
from bench.stages import Bisection, bisect, stage_jobs
from bench.store import (
    Comparison,
    find_run,
    is_benchmark,
    is_comparison,
    load_comparison,
    make_run_folder,
    save_comparison,
    save_explanation,
)
from bench.trace_files import SUFFIX, is_traced, load_steps, saved_traces
from bench.turns import take_turns
from common.errors import ConfigError, ParityError, RankError
from common.harness.compare import Grade, ParityReport
from common.harness.instruments.gpu_trace import SNAPSHOT, TORCH_TRACE
from common.harness.launch import Ranks, launched_by_torchrun, open_ranks
from common.harness.records import Environment, Run
from common.harness.selftest.faults import job_of
from common.harness.stopwatch import Timing
from common.harness.train import assemble
from common.job import CPU

HOLDS, FAILS = 0, 1


def run(words: Sequence[str]) -> int:
    """Carry out the command that `words` name; return the exit code."""
    try:
        options = parse(words)
        if isinstance(options, ListOptions):
            return list_names(options)
        if isinstance(options, LanesOptions):
            return lanes(options)
        if isinstance(options, ExplainOptions):
            return explain(options)
        if isinstance(options, SelfTestOptions):
            return selftest(options)
        if isinstance(options, BenchOptions):
            return bench(options)
        return show(options) if isinstance(options, ShowOptions) else compare(options)
    except ParityError as error:
        _tell(error)
        return error.exit_code


def compare(options: CompareOptions) -> int:
    """Train the job on every engine and judge whether they agree."""
    job = settle(options.job, options.reference, options.engines, options.out)
    options = replace(options, job=job)
    if options.bisect_passes and not any(stage_jobs(engine, job) for engine in options.engines):
        raise ConfigError(
            f"bisect_passes: expected an engine that is compiled, found {', '.join(options.engines)} with the backend "
            f"{job.backend}; add compiled to --engines, with --backend aot_eager or inductor"
        )
    held = _baseline_of(options)
    if options.save_baseline is not None:
        check_savable(options.save_baseline)
    created = datetime.now().astimezone()
    with open_ranks(job.ranks) as ranks:
        folder = make_run_folder(options.out, job, created) if ranks.is_main else None
        comparison, runs = run_comparison(ranks, options, folder, created)
        comparison = replace(comparison, held=held)
        if folder is not None:
            save_comparison(folder, comparison)  # whatever comes of what follows
        if options.bisect_passes:
            comparison = replace(comparison, bisections=tuple(_bisect(ranks, comparison, runs, options.timeout_s)))
        if options.explain and not comparison.holds and all(report.passed for report in comparison.reports):
            _say(ranks, "explain: every pair passes, so there is nothing to replay; what fails is in the verdict")
        elif options.explain and not comparison.holds:
            comparison = replace(
                comparison, explanation=_explain(ranks, comparison, _first_to_explain(comparison), options.timeout_s)
            )
    if folder is not None:
        save_comparison(folder, comparison)
        emit(full_document(comparison, _traced_lanes(folder)), options.format)
        _tell_where(folder, options)
        if options.save_baseline is not None:
            _save_baseline(options.save_baseline, comparison)
    return HOLDS if comparison.holds else FAILS


def explain(options: ExplainOptions) -> int:
    """Replay a pair of a comparison to its first divergence; the exit code is the pair's verdict."""
    folder = find_run(options.run, options.out, kind="run of compare", fits=is_comparison)
    if is_benchmark(folder):
        raise ConfigError(f"explain {folder}: expected a run of compare, found one of bench; compare the same job")
    comparison = load_comparison(folder)
    report = _chosen(comparison, options.pair)
    settle(comparison.job, report.reference, [report.candidate], folder)
    with open_ranks(comparison.job.ranks) as ranks:
        explanation = _explain(ranks, comparison, report, options.timeout_s)
        if ranks.is_main:
            save_explanation(folder, explanation)
            emit(explanation_document(explanation), options.format)
    return HOLDS if explanation.passed else FAILS


def _baseline_of(options: CompareOptions) -> Held | None:
    """The baseline to hold a comparison against, if one is asked for; it has to be of the same comparison."""
    if options.baseline is None:
        return None
    baseline = load_baseline(options.baseline)
    check_same_job(str(options.baseline), baseline, options.job, options.reference, options.engines)
    # how torchrun was started only its user knows
    program = "torchrun ... -m bench" if launched_by_torchrun() else "fsdp-parity"
    return Held(str(options.baseline), f"{program} {shlex.join(options.refresh)}", baseline)


def _save_baseline(path: Path, comparison: Comparison) -> None:
    """Write a baseline, but none of engines that disagree."""
    if comparison.disagreements:
        print(f"baseline: {path} is not written, since parity does not hold", file=sys.stderr)
    else:
        save_baseline(path, comparison.to_baseline())
        print(f"baseline: {path}", file=sys.stderr)


def bench(options: BenchOptions) -> int:
    """Time engines in turns, cell by cell; each has to agree with the reference before its figures count."""
    cells = [
        replace(cell, job=settle(cell.job, options.reference, options.engines, options.out, alive=len(options.engines)))
        for cell in options.cells
    ]
    created = datetime.now().astimezone()
    ranks = open_ranks(max(cell.job.processes for cell in cells))
    folder = make_run_folder(options.out, cells[0].job, created) if ranks.is_main else None
    benchmark = Benchmark(
        created=created.isoformat(timespec="seconds"),
        reference=options.reference,
        swept=options.swept,
        torch=Environment.here().torch,
        cells=(),
    )
    for number, cell in enumerate(cells, 1):
        timed = _time_cell(ranks, options, cell, folder and folder / f"cell-{number}")
        benchmark = replace(benchmark, cells=(*benchmark.cells, timed))
        if folder is not None:
            save_benchmark(folder, benchmark)
    if folder is not None:
        emit(benchmark_document(benchmark), options.format)
        _tell_where(folder, options)
    return FAILS if benchmark.failures else HOLDS


def _time_cell(ranks: Ranks, options: BenchOptions, cell: BenchCell, folder: Path | None) -> Cell:
    """Judge and time the engines of one cell; write their records and turns to `folder`, if there is one."""
    job, link = cell.job, cell.link
    pairs = [] if not job.is_judged else [(options.reference, engine) for engine in options.engines]
    runs: dict[str, Run] = {}
    if pairs:
        jobs = {options.reference: job} | (judging_jobs(job) if needs_referee(job, pairs) else {})
        with ranks:
            runs = run_engines(ranks, jobs, folder, options.timeout_s, show=ranks.is_main)
    timing = Timing(link=link, steps=options.turn_steps, timeout_s=options.timeout_s, profile=options.profile)
    with watch(options.engines, job.steps, turns=options.turns, show=ranks.is_main) as watcher:
        timed = take_turns(
            ranks, options.engines, job, timing, turns=options.turns, timeout_s=options.timeout_s, watcher=watcher
        )
    turns: dict[str, TurnsByRank] = {}
    for engine, by_rank in timed.items():
        results = [each.result for each in by_rank]
        runs[engine] = assemble(engine, job, results)
        turns[engine] = list(zip(*(each.turns for each in by_rank), strict=True))
        if folder is not None:
            save_run(folder, engine, runs[engine], results)
    if folder is not None:
        save_turns(folder, turns)
    records = {engine: runs[engine][0] for engine in turns}
    reports = {engine: report for (_, engine), report in zip(pairs, judge(pairs, runs), strict=True)}
    rows = bench_rows(job, records, reports, turns, has_model=link.across is not None)
    return Cell(job, link.name, link.describe(), tuple(rows))


def show(options: ShowOptions) -> int:
    """Print what `compare` or `bench` printed, from its files; the exit code is that of the verdict."""
    folder = find_run(options.run, options.out)
    if is_benchmark(folder):
        benchmark = load_benchmark(folder)
        emit(benchmark_document(benchmark), options.format)
        return FAILS if benchmark.failures else HOLDS
    comparison = load_comparison(folder)
    emit(full_document(comparison, _traced_lanes(folder)), options.format)
    return HOLDS if comparison.holds else FAILS


def lanes(options: LanesOptions) -> int:
    """Draw one step of several engines, from the traces of a run."""
    folder = find_run(options.run, options.out, kind="run with --profile", fits=is_traced)
    steps = load_steps(folder, options.engines, cell=options.cell, rank=options.rank)
    emit(lanes_document(steps, rank=options.rank, width=options.width), options.format)
    return HOLDS


def _traced_lanes(folder: Path) -> Section | None:
    """One step of rank 0 of all engines that were traced in a comparison; None if none was."""
    if not saved_traces(folder):
        return None
    return lanes_section(load_steps(folder, (), cell=None, rank=0), rank=0)


def selftest(options: SelfTestOptions) -> int:
    """Plant faults and see that the judge catches each, by the right check and with the right cause."""
    with open_ranks(max(job_of(fault.job, options.ranks).ranks for fault in options.faults)) as ranks:
        test = SelfTest(ranks, options.ranks, timeout_s=options.timeout_s, on_run=_tell_run)
        verdicts = run_all(test, options.faults, options.engines)
    emit(selftest_document(verdicts), options.format)
    return HOLDS if all(each.holds for each in verdicts) else FAILS


def list_names(options: ListOptions) -> int:
    """Print what options can be given."""
    emit(list_document(), options.format)
    return HOLDS


def _chosen(comparison: Comparison, pair: tuple[str, str] | None) -> ParityReport:
    """The report on `pair`; without one on the pair that most needs explaining."""
    if pair is None:
        return _first_to_explain(comparison)
    for report in comparison.reports:
        if (report.reference, report.candidate) == pair:
            return report
    judged = "; ".join(f"{report.reference},{report.candidate}" for report in comparison.reports)
    raise ConfigError(f"pair: expected one that was judged, found {','.join(pair)}; judged are {judged}")


def _first_to_explain(comparison: Comparison) -> ParityReport:
    """The first pair that fails, else the first whose bits differ, else the first."""
    reports = comparison.reports
    differing = (report for report in reports if report.first_divergence is not None)
    return next((report for report in reports if not report.passed), next(differing, reports[0]))


def _explain(ranks: Ranks, comparison: Comparison, report: ParityReport, timeout_s: float) -> Explanation:
    records = [comparison.records[name] for name in (report.reference, report.candidate)]
    return explain_pair(ranks, comparison.job, report, records, timeout_s)


def _say(ranks: Ranks, line: str) -> None:
    if ranks.is_main:
        print(line, file=sys.stderr)


def _bisect(ranks: Ranks, comparison: Comparison, runs: Mapping[str, Run], timeout_s: float) -> Iterator[Bisection]:
    """Take apart each candidate that is compiled, against what it was first judged against."""
    first: dict[str, ParityReport] = {}
    for report in comparison.reports:
        first.setdefault(report.candidate, report)
    for report in first.values():
        bits = report.asked is Grade.BITWISE
        known = {name: run for name, run in runs.items() if name in (report.reference, REFEREE, *PEERS)}
        found = bisect(
            ranks, report.candidate, report.reference, comparison.job, bits=bits, known=known, timeout_s=timeout_s
        )
        if found is not None:
            yield found


def _tell_run(what: str) -> None:
    """Say which run begins, unless nobody watches."""
    if not os.environ.get("CI"):
        print(what, file=sys.stderr, flush=True)


def _tell_where(folder: Path, options: CompareOptions | BenchOptions) -> None:
    """Say where things went."""
    print(f"records: {folder}", file=sys.stderr)
    if not options.profile:
        return
    job, place = (
        (options.cells[0].job, folder / "cell-*") if isinstance(options, BenchOptions) else (options.job, folder)
    )
    if job.device == CPU:
        how = f"{place}/*{SUFFIX}, for ui.perfetto.dev; drawn by: fsdp-parity lanes {folder}"
    else:
        how = f"{place}/*{TORCH_TRACE}, for ui.perfetto.dev; *{SNAPSHOT}, for pytorch.org/memory_viz"
    print(f"traces: {how}", file=sys.stderr)


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
