"""What the commands take, made from the words of the command line."""

from __future__ import annotations

import argparse
import difflib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bench.parser import DEFAULT_LINK, build_parser, torchrun_ranks
from bench.selftest import ENGINES
from common.errors import ConfigError
from common.harness.grades import Grade
from common.harness.link import LinkChoice, parse_link
from common.harness.selftest.catalogue import FAULTS
from common.harness.selftest.faults import RANKS, Fault
from common.job import CPU, FAKE_LINK, JobConfig


@dataclass(frozen=True)
class CompareOptions:
    """What `compare` was asked for.

    Attributes:
        job: what every engine runs.
        engines: the candidates, by name, without the reference.
        reference: what each of them is judged against.
        out: folder that gets one folder per run.
        format: one of `bench.parser.FORMATS`.
        timeout_s: for one engine, compilation included.
        profile: trace one step of each candidate.
        explain: replay the first pair that does not pass, see `bench.explain`.
        bisect_passes: judge the compiled engine stage by stage, see `bench.stages`.
        grade: what to ask of each pair; None is the strictest it can keep.
        baseline: what to hold it against, if there is one.
        save_baseline: where to write one, if anywhere.
        refresh: the words that would write `baseline` anew.
    """

    job: JobConfig
    engines: tuple[str, ...]
    reference: str
    out: Path
    format: str
    timeout_s: float
    profile: bool
    explain: bool
    bisect_passes: bool
    grade: Grade | None
    baseline: Path | None
    save_baseline: Path | None
    refresh: tuple[str, ...]


@dataclass(frozen=True)
class BenchOptions:
    """What `bench` was asked for.

    Attributes:
        cells: the jobs and links to time, one table row per engine and cell; one cell unless something is swept.
        swept: names of what differs between cells.
        engines: what is timed, by name.
        reference: what each of them has to agree with.
        turns: how many each engine takes.
        turn_steps: steps timed in a turn.
        out: folder that gets one folder per run.
        format: one of `bench.parser.FORMATS`.
        timeout_s: for one engine to be built and trained, and again for each turn.
        profile: trace one step of each engine on its link.
    """

    cells: tuple[BenchCell, ...]
    swept: tuple[str, ...]
    engines: tuple[str, ...]
    reference: str
    turns: int
    turn_steps: int
    out: Path
    format: str
    timeout_s: float
    profile: bool


@dataclass(frozen=True)
class BenchCell:
    """One job on one link."""

    job: JobConfig
    link: LinkChoice


@dataclass(frozen=True)
class ShowOptions:
    """What `show` was asked for: a run's folder, or "latest" of those under `out`."""

    run: str
    out: Path
    format: str


@dataclass(frozen=True)
class ExplainOptions:
    """What `explain` was asked for.

    Attributes:
        run, out: as in `ShowOptions`.
        pair: reference and candidate, by engine name; None for the first pair that fails, or else differs.
        timeout_s: for each engine.
    """

    run: str
    out: Path
    pair: tuple[str, str] | None
    timeout_s: float
    format: str


@dataclass(frozen=True)
class LanesOptions:
    """What `lanes` was asked for.

    Attributes:
        run, out: as in `ShowOptions`.
        engines: which to draw, by name; none for all that were traced.
        cell: of a benchmark, from 1; None if it was not said.
        rank: whose step.
        width: characters of the longest step.
    """

    run: str
    out: Path
    engines: tuple[str, ...]
    cell: int | None
    rank: int
    width: int
    format: str


@dataclass(frozen=True)
class SelfTestOptions:
    """What `selftest` was asked for.

    Attributes:
        faults: what is planted; each in one of the engines at least.
        engines: where, by name.
        ranks: world size.
        timeout_s: for one run, compilation included.
        format: one of `bench.parser.FORMATS`.
    """

    faults: tuple[Fault, ...]
    engines: tuple[str, ...]
    ranks: int
    timeout_s: float
    format: str


@dataclass(frozen=True)
class ListOptions:
    """What `list` was asked for."""

    format: str


Options = CompareOptions | BenchOptions | ShowOptions | ExplainOptions | LanesOptions | SelfTestOptions | ListOptions


def parse(words: Sequence[str]) -> Options:
    """Read a command and its options.

    Raises:
        ConfigError: wrong usage.
        SystemExit: `--help` was asked for and given.
    """
    found = build_parser().parse_args(words)
    if found.command == "list":
        return ListOptions(found.format)
    if found.command == "show":
        return ShowOptions(found.run, found.out, found.format)
    if found.command == "lanes":
        _check_once(found.engines)
        return LanesOptions(found.run, found.out, found.engines, found.cell, found.rank, found.width, found.format)
    if found.command == "explain":
        return ExplainOptions(found.run, found.out, _pair(found.pair), found.timeout, found.format)
    if found.command == "selftest":
        return _selftest_options(found)
    given = {field.name: getattr(found, field.name) for field in fields(JobConfig) if hasattr(found, field.name)}
    if found.command == "bench":
        _check_not_given(words, [name for name, _ in found.sweep])
        return _bench_options(found, given)
    if found.link is None:
        given["link"] = _carrier(found.device, "gloo")
    _check_latency(parse_link(given["link"]), found.timeout)
    if given["link"] == FAKE_LINK:
        raise ConfigError("link fake: moves nothing, so there is nothing to judge; use bench, or another link")
    if found.baseline and found.save_baseline and found.baseline.resolve() == found.save_baseline.resolve():
        raise ConfigError(
            f"baseline {found.baseline}: held against and written at once, it would forget what is worse; give one of "
            "--baseline and --save-baseline, or two files"
        )
    return CompareOptions(
        job=JobConfig(**given),
        engines=_candidates(found.engines, found.reference),
        reference=found.reference,
        out=found.out,
        format=found.format,
        timeout_s=found.timeout,
        profile=found.profile,
        explain=found.explain,
        bisect_passes=found.bisect_passes,
        grade=found.grade and Grade(found.grade),
        baseline=found.baseline,
        save_baseline=found.save_baseline,
        refresh=_refreshing(words, found.baseline),
    )


def _pair(names: tuple[str, ...] | None) -> tuple[str, str] | None:
    if names is None:
        return None
    if len(names) != 2 or names[0] == names[1]:
        raise ConfigError(f"pair: expected a reference and a candidate, as in single,eager, found {','.join(names)}")
    return names[0], names[1]


def _refreshing(words: Sequence[str], baseline: Path | None) -> tuple[str, ...]:
    """The words of a comparison with its baseline, changed so that they write it; none without one."""
    if baseline is None:
        return ()
    names = ("--baseline", "--save-baseline")
    kept = [
        word
        for before, word in zip(("", *words), words, strict=False)
        if word.partition("=")[0] not in names and before not in names
    ]
    return (*kept, "--save-baseline", str(baseline))


def _bench_options(found: argparse.Namespace, given: dict[str, Any]) -> BenchOptions:
    """The cells are all combinations of what is swept, the last name varying fastest."""
    sweep: dict[str, list[Any]] = {}
    for name, value in found.sweep:
        if value in sweep.setdefault(name, []):
            text = ",".join(value) if isinstance(value, tuple) else value
            raise ConfigError(f"sweep: expected each value once, found {name}={text or 'none'} twice")
        sweep[name].append(value)
    if "ranks" in sweep and (launched := torchrun_ranks()) is not None:
        raise ConfigError(f"sweep: torchrun started {launched} ranks, and only it can start others; do not sweep ranks")
    cells = []
    for values in itertools.product(*sweep.values()):
        cell = given | dict(zip(sweep, values, strict=True))
        link = parse_link(_carrier(found.device, DEFAULT_LINK) if cell["link"] is None else cell["link"])
        _check_latency(link, found.timeout)
        if link.name == FAKE_LINK and torchrun_ranks() is not None:
            raise ConfigError("link fake: one process stands for all ranks; start bench without torchrun")
        # judged on what carries the timed steps, at no cost
        is_emulated = link.across is not None and found.device == CPU
        cells.append(BenchCell(JobConfig(**cell | {"link": "none" if is_emulated else link.name}), link))
    return BenchOptions(
        cells=tuple(cells),
        swept=tuple(sweep),
        engines=_candidates(found.engines, found.reference),
        reference=found.reference,
        turns=found.turns,
        turn_steps=found.turn_steps,
        out=found.out,
        format=found.format,
        timeout_s=found.timeout,
        profile=found.profile,
    )


def _selftest_options(found: argparse.Namespace) -> SelfTestOptions:
    if torchrun_ranks() is not None:
        raise ConfigError(
            "selftest: starts ranks of its own, for some faults more than for others; do without torchrun"
        )
    if found.ranks not in RANKS:
        raise ConfigError(f"ranks: a self-test runs on {RANKS[0]} to {RANKS[-1]}, found {found.ranks}")
    _check_known("engines", found.engines, ENGINES)
    _check_known("faults", found.faults, tuple(FAULTS))
    for name in found.faults:
        if not set(FAULTS[name].plants) & set(found.engines):
            raise ConfigError(
                f"faults: {name!r} can be planted in {', '.join(FAULTS[name].plants)}, found --engines "
                f"{','.join(found.engines)}; add one of them, or leave the fault out"
            )
    chosen = tuple(FAULTS[name] for name in found.faults or FAULTS)
    faults = tuple(fault for fault in chosen if set(fault.plants) & set(found.engines))
    return SelfTestOptions(faults, found.engines, found.ranks, found.timeout, found.format)


def _check_known(what: str, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    """See that each of `names` is known to the self-test, and there once."""
    for i, name in enumerate(names):
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(known)}"
            raise ConfigError(f"{what}: {name!r} is none that a self-test has; {hint}")
        if name in names[:i]:
            raise ConfigError(f"{what}: expected each name once, found {name!r} twice")


def _carrier(device: str, on_cpu: str) -> str:
    """The link that is meant if none was named."""
    return on_cpu if device == CPU else "nccl"


def _check_latency(link: LinkChoice, timeout_s: float) -> None:
    if any(spec and spec.alpha_s >= timeout_s for spec in (link.across, link.within)):
        raise ConfigError(
            f"link {link.name}: an operation takes longer than the {timeout_s:g} s of --timeout; raise that"
        )


def _candidates(engines: tuple[str, ...], reference: str) -> tuple[str, ...]:
    """The engines to judge: those named, each once, but for the reference."""
    _check_once(engines)
    candidates = tuple(name for name in engines if name != reference)
    if not candidates:
        raise ConfigError(f"engines: expected one to judge against the reference {reference!r}, found no other")
    return candidates


def _check_once(engines: tuple[str, ...]) -> None:
    for i, name in enumerate(engines):
        if name in engines[:i]:
            raise ConfigError(f"engines: expected each name once, found {name!r} twice")


def _check_not_given(words: Sequence[str], swept: Sequence[str]) -> None:
    """See that what is swept has no value of its own as well, which would be dropped."""
    for name in swept:
        option = "--" + name.replace("_", "-")
        if any(word.partition("=")[0] == option for word in words):
            raise ConfigError(f"sweep: {option} is swept; give its values as --sweep {option[2:]}=VALUE only")
