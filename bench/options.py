"""The words of the command line, read into what the commands take.

Whether a value is allowed is decided where it is used, by `JobConfig` and `preflight`, so that the rules are written
once; here words become numbers and lists.

Left out: options of the job that no engine honours yet.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from common.errors import ConfigError
from common.gradient import Transport
from common.harness.launch import launched_by_torchrun
from common.job import BACKENDS, OPTIMIZERS, RESHARD, JobConfig
from common.plan import NAMED_PLANS
from common.policy import DTYPES

FORMATS = ("table", "json", "csv", "md", "html")
DEFAULT_ENGINES = "eager,compiled,torch-fsdp2,ddp"
DEFAULT_REFERENCE = "single"
DEFAULT_TIMEOUT_S = 600.0
LONGEST_TIMEOUT_S = 7 * 24 * 3600.0
RUNS = Path("runs")
EXIT_CODES = "exit codes: 0 parity holds; 1 it does not; 2 wrong usage or configuration; 3 a rank crashed or hung"


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
class ShowOptions:
    """What `show` was asked for: a run's folder, or "latest" of those under `out`."""

    run: str
    out: Path
    format: str


@dataclass(frozen=True)
class ListOptions:
    """What `list` was asked for."""

    format: str


def parse(words: Sequence[str]) -> CompareOptions | ShowOptions | ListOptions:
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
    show = commands.add_parser("show", help="render the records of a run again")
    show.add_argument("run", metavar="RUN", help='a folder that compare wrote, or "latest"')
    show.add_argument("--out", type=Path, default=RUNS, metavar="DIR", help='where "latest" looks (default: runs)')
    names = commands.add_parser("list", help="engines, models, plans, backends, transports and dtypes")
    for command in (show, names):
        _add_format(command)
    return parser


def _add_compare(parser: argparse.ArgumentParser) -> None:
    """The options of `compare`; a field of `JobConfig` has its name, and its default there is the default here."""
    default = JobConfig()
    parser.epilog = EXIT_CODES + ". Under torchrun it joins the ranks that are there."
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
    add = parser.add_argument_group("what is judged, and where it goes").add_argument
    add("--engines", type=_names, default=DEFAULT_ENGINES, metavar="A,B", help="candidates (default: %(default)s)")
    add("--reference", default=DEFAULT_REFERENCE, metavar="A", help="judge them against it (default: %(default)s)")
    add("--out", type=Path, default=RUNS, metavar="DIR", help="gets a folder per run (default: %(default)s)")
    _add_format(parser)
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


def _timeout(text: str) -> float:
    value = _finite(text)
    if not 0 < value <= LONGEST_TIMEOUT_S:
        raise argparse.ArgumentTypeError(f"expected seconds, above 0 and at most {LONGEST_TIMEOUT_S:g}, found {text!r}")
    return value
