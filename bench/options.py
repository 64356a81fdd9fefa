"""The words of the command line, read into what the commands take.

Whether a value is allowed is decided where it is used, by `JobConfig` and `preflight`, so that the rules are written
once; here words become numbers and lists.

Left out: options of the job that no engine honours yet.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from common.errors import ConfigError
from common.gradient import Transport
from common.harness.launch import launched_by_torchrun
from common.harness.link import LinkChoice, parse_link
from common.job import BACKENDS, OPTIMIZERS, RESHARD, JobConfig
from common.plan import NAMED_PLANS
from common.policy import DTYPES

FORMATS = ("table", "json", "csv", "md", "html")
DEFAULT_ENGINES = "eager,compiled,torch-fsdp2,ddp"
DEFAULT_REFERENCE = "single"
DEFAULT_TIMEOUT_S = 600.0
LONGEST_TIMEOUT_S = 7 * 24 * 3600.0
RUNS = Path("runs")
BENCH_STEPS = 3
"""Judged before an engine is timed."""
DEFAULT_LINK = "pcie"
BENCH_ENGINES = "eager,compiled,torch-fsdp2,torch-fsdp2-prefetch,ddp"
SWEPT = ("link", "plan", "ranks", "reshard_after_forward", "backend")
EXIT_CODES = "exit codes: 0 parity holds; 1 it does not; 2 wrong usage or configuration; 3 a rank crashed or hung"
JOINS = ". Under torchrun it joins the ranks that are there."


@dataclass(frozen=True)
class CompareOptions:
    """What `compare` was asked for.

    Attributes:
        job: what every engine runs.
        engines: the candidates, by name, without the reference.
        reference: what each of them is judged against.
        out: folder that gets one folder per run.
        format: one of `FORMATS`.
        timeout_s: for one engine, compilation included.
    """

    job: JobConfig
    engines: tuple[str, ...]
    reference: str
    out: Path
    format: str
    timeout_s: float


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
        format: one of `FORMATS`.
        timeout_s: for one engine to be built and trained, and again for each turn.
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
class ListOptions:
    """What `list` was asked for."""

    format: str


def parse(words: Sequence[str]) -> CompareOptions | BenchOptions | ShowOptions | ListOptions:
    """Read a command and its options.

    Raises:
        ConfigError: wrong usage.
        SystemExit: `--help` was asked for and given.
    """
    found = _build_parser().parse_args(words)
    if found.command == "list":
        return ListOptions(found.format)
    if found.command == "show":
        return ShowOptions(found.run, found.out, found.format)
    given = {field.name: getattr(found, field.name) for field in fields(JobConfig) if hasattr(found, field.name)}
    if found.command == "bench":
        return _bench_options(found, given)
    return CompareOptions(
        job=JobConfig(**given),
        engines=_candidates(found.engines, found.reference),
        reference=found.reference,
        out=found.out,
        format=found.format,
        timeout_s=found.timeout,
    )


def torchrun_ranks() -> int | None:
    """How many ranks torchrun started, of which this process is one; None if it did not."""
    return int(os.environ["WORLD_SIZE"]) if launched_by_torchrun() else None


def _bench_options(found: argparse.Namespace, given: dict[str, Any]) -> BenchOptions:
    """The cells are all combinations of what is swept, the last name varying fastest."""
    sweep: dict[str, list[str]] = {}
    for name, value in found.sweep:
        if value in sweep.setdefault(name, []):
            raise ConfigError(f"sweep: expected each value once, found {name}={value} twice")
        sweep[name].append(value)
    if "ranks" in sweep and (launched := torchrun_ranks()) is not None:
        raise ConfigError(f"sweep: torchrun started {launched} ranks, and only it can start others; do not sweep ranks")
    cells = []
    for values in itertools.product(*sweep.values()):
        swept = dict(zip(sweep, values, strict=True))
        link = parse_link(swept.pop("link", found.link))
        job = {name: int(value) if name == "ranks" else value for name, value in swept.items()}
        if any(spec and spec.alpha_s >= found.timeout for spec in (link.across, link.within)):
            raise ConfigError(
                f"link {link.name}: an operation takes longer than the {found.timeout:g} s of --timeout; raise that"
            )
        cells.append(BenchCell(JobConfig(**given | job), link))
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
    )


class _Parser(argparse.ArgumentParser):
    """Raises wrong usage instead of printing it and ending the process; takes no abbreviations, which may change."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fsdp-parity", description="One model, sharded two ways, judged.", epilog=EXIT_CODES)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_compare(commands.add_parser("compare", help="train a job on several engines and judge whether they agree"))
    _add_bench(commands.add_parser("bench", help="time engines that agree, in turns, on an emulated link"))
    show = commands.add_parser("show", help="render the records of a run again")
    show.add_argument("run", metavar="RUN", help='a folder that compare or bench wrote, or "latest"')
    show.add_argument("--out", type=Path, default=RUNS, metavar="DIR", help='where "latest" looks (default: runs)')
    names = commands.add_parser("list", help="engines, models, plans, backends, transports and dtypes")
    for command in (show, names):
        _add_format(command)
    return parser


def _add_compare(parser: argparse.ArgumentParser) -> None:
    """The options of `compare`."""
    parser.epilog = EXIT_CODES + JOINS
    _add_job(parser, JobConfig())
    add = parser.add_argument_group("what is judged, and where it goes").add_argument
    _add_judgement(add, DEFAULT_ENGINES)
    _add_format(parser)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    """The options of `bench`."""
    parser.epilog = EXIT_CODES + JOINS
    _add_job(parser, JobConfig(steps=BENCH_STEPS))
    add = parser.add_argument_group("what is timed").add_argument
    add(
        "--link",
        default=DEFAULT_LINK,
        metavar="NAME|SPEC",
        help="what collectives travel on: a preset, or latency and bandwidth as in 1ms,150MB/s (default: %(default)s)",
    )
    add("--turns", type=_count, default=7, metavar="N", help="turns of each engine (default: %(default)s)")
    add("--turn-steps", type=_count, default=3, metavar="N", help="steps timed in a turn (default: %(default)s)")
    add(
        "--sweep",
        type=_swept,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"one of several values of {', '.join(SWEPT)}; give it once for each value",
    )
    add = parser.add_argument_group("what has to agree, and where it goes").add_argument
    _add_judgement(add, BENCH_ENGINES)
    _add_format(parser)


def _add_job(parser: argparse.ArgumentParser, default: JobConfig) -> None:
    """The options of the job; a field of `JobConfig` has its name, and its default there is the default here."""
    add = parser.add_argument_group("what is trained").add_argument
    add("--model", default=default.model, metavar="NAME|MODULE:FUNCTION", help="see the list (default: %(default)s)")
    add("--steps", type=int, default=default.steps, metavar="N", help="optimizer steps judged (default: %(default)s)")
    add("--batch", type=int, metavar="N", default=default.batch, help="sequences over all ranks (default: %(default)s)")
    add("--seq", type=int, default=default.seq, metavar="N", help="tokens per sequence (default: %(default)s)")
    add("--optimizer", default=default.optimizer, metavar="|".join(OPTIMIZERS), help="default: %(default)s")
    add("--lr", type=_finite, default=default.lr, metavar="X", help="learning rate (default: %(default)s)")
    add("--data", metavar="PATH", help="text file, folder of text, or .bin of uint16 tokens (default: Python's source)")
    add("--seed", type=int, default=default.seed, metavar="N", help="of weights and batches (default: %(default)s)")
    add = parser.add_argument_group("how it is sharded").add_argument
    ranks = torchrun_ranks() or default.ranks
    add(
        "--ranks",
        type=int,
        default=ranks,
        metavar="N",
        help="processes (default: %(default)s; under torchrun, its own)",
    )
    plans = "|".join((*NAMED_PLANS, "A,B+C"))
    add("--plan", default=default.plan, metavar=plans, help="what travels together (default: %(default)s)")
    add(
        "--reshard-after-forward",
        default=default.reshard_after_forward,
        metavar="|".join(RESHARD),
        help="give gathered weights back after forward (default: %(default)s)",
    )
    dtypes = "|".join(DTYPES)
    add("--param-dtype", default=default.param_dtype, metavar=dtypes, help="compute in it (default: %(default)s)")
    add("--reduce-dtype", default=default.reduce_dtype, metavar=dtypes, help="sum in it (default: %(default)s)")
    add(
        "--backend",
        default=default.backend,
        metavar="|".join(BACKENDS),
        help="what compiles the engine compiled (default: %(default)s)",
    )
    add(
        "--transport",
        default=default.transport,
        metavar="|".join(Transport),
        help="how reductions travel: ordered is an all-to-all and a sum in rank order (default: %(default)s)",
    )


def _add_judgement(add: Callable[..., object], engines: str) -> None:
    add("--engines", type=_names, default=engines, metavar="A,B", help="candidates (default: %(default)s)")
    add("--reference", default=DEFAULT_REFERENCE, metavar="A", help="judge them against it (default: %(default)s)")
    add("--out", type=Path, default=RUNS, metavar="DIR", help="gets a folder per run (default: %(default)s)")
    add(
        "--timeout",
        type=_timeout,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help="seconds one engine may take, compilation included (default: %(default)g)",
    )


def _add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=FORMATS, default="table", help="of what is printed (default: %(default)s)")


def _candidates(engines: tuple[str, ...], reference: str) -> tuple[str, ...]:
    """The engines to judge: those named, each once, but for the reference."""
    for i, name in enumerate(engines):
        if name in engines[:i]:
            raise ConfigError(f"engines: expected each name once, found {name!r} twice")
    candidates = tuple(name for name in engines if name != reference)
    if not candidates:
        raise ConfigError(f"engines: expected one to judge against the reference {reference!r}, found no other")
    return candidates


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"expected names with a comma between them, found {text!r}")
    return names


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a number, found {text!r}")
    return value


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to 999999, found {text!r}")
    return int(text)


def _swept(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    name = name.replace("-", "_")
    if name not in SWEPT or not value:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE with one of {', '.join(SWEPT)}, found {text!r}")
    if name == "ranks":
        _count(value)
    return name, value


def _timeout(text: str) -> float:
    value = _finite(text)
    if not 0 < value <= LONGEST_TIMEOUT_S:
        raise argparse.ArgumentTypeError(f"expected seconds, above 0 and at most {LONGEST_TIMEOUT_S:g}, found {text!r}")
    return value
