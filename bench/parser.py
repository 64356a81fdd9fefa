"""The command line's grammar: commands, their options in groups, and words that become numbers and lists.

Whether a value is allowed is decided where it is used, by `JobConfig` and `preflight`, so that the rules are written
once.

Left out: `dtype` of the job, which only the referee has another of.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from common.errors import ConfigError
from common.gradient import Transport
from common.harness.grades import Grade
from common.harness.launch import launched_by_torchrun
from common.job import BACKENDS, DEFAULT_SEQ, DEVICES, OPTIMIZERS, PASSES, RESHARD, JobConfig, in_pass_order
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
LANES_WIDTH = 100
SELFTEST_ENGINES = "eager,compiled,torch-fsdp2"
BENCH_ENGINES = "eager,compiled,torch-fsdp2,torch-fsdp2-prefetch,ddp"
SWEPT = ("link", "plan", "ranks", "reshard_after_forward", "backend", "block_backend", "disabled_passes")
EXIT_CODES = (
    "exit codes: 0 parity holds; 1 it does not, or a figure is worse than the baseline's; "
    "2 wrong usage or configuration; 3 a rank crashed or hung"
)
JOINS = ". Under torchrun it joins the ranks that are there."


def torchrun_ranks() -> int | None:
    """How many ranks torchrun started, of which this process is one; None if it did not."""
    return int(os.environ["WORLD_SIZE"]) if launched_by_torchrun() else None


class _Parser(argparse.ArgumentParser):
    """Raises wrong usage instead of printing it and ending the process; takes no abbreviations, which may change."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; what it finds is read by `bench.options.parse`."""
    parser = _Parser(prog="fsdp-parity", description="One model, sharded two ways, judged.", epilog=EXIT_CODES)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_compare(commands.add_parser("compare", help="train a job on several engines and judge whether they agree"))
    _add_bench(commands.add_parser("bench", help="time engines that agree, in turns, on an emulated link"))
    show = commands.add_parser("show", help="render the records of a run again")
    show.add_argument("run", metavar="RUN", help='a folder that compare or bench wrote, or "latest"')
    show.add_argument("--out", type=Path, default=RUNS, metavar="DIR", help='where "latest" looks (default: runs)')
    _add_explain(commands.add_parser("explain", help="replay a comparison to its first divergence and name the place"))
    _add_lanes(commands.add_parser("lanes", help="draw a traced step of several engines under each other"))
    _add_selftest(commands.add_parser("selftest", help="plant faults in engines, and see that the judge catches each"))
    names = commands.add_parser("list", help="engines, models, plans, backends, passes, links, transports and dtypes")
    for command in (show, names):
        _add_format(command)
    return parser


def _add_compare(parser: argparse.ArgumentParser) -> None:
    """The options of `compare`."""
    parser.epilog = EXIT_CODES + JOINS
    _add_job(parser, JobConfig())
    add = parser.add_argument_group("what is judged, and where it goes").add_argument
    _add_link(add, JobConfig().link)
    _add_judgement(add, DEFAULT_ENGINES)
    add("--explain", action="store_true", help="if parity does not hold, replay and name the first divergence")
    add(
        "--grade",
        choices=[str(grade) for grade in Grade],
        metavar="GRADE",
        help=f"{', '.join(Grade)}: what to ask of each pair (default: the strictest that it can be asked for)",
    )
    add("--bisect-passes", action="store_true", help="judge the engine compiled stage by stage, pass after pass, too")
    add("--baseline", type=Path, metavar="FILE", help="fail if anything is worse than in this file")
    add("--save-baseline", type=Path, metavar="FILE", help="write that file, if parity holds")
    _add_format(parser)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    """The options of `bench`."""
    parser.epilog = EXIT_CODES + JOINS
    _add_job(parser, JobConfig(steps=BENCH_STEPS))
    add = parser.add_argument_group("what is timed").add_argument
    _add_link(add, DEFAULT_LINK)
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


def _add_explain(parser: argparse.ArgumentParser) -> None:
    """The options of `explain`."""
    parser.epilog = EXIT_CODES + JOINS
    add = parser.add_argument
    add("run", metavar="RUN", help='a folder that compare wrote, or "latest"')
    add("--pair", type=_names, metavar="A,B", help="reference and candidate (default: the first pair that fails)")
    add("--out", type=Path, default=RUNS, metavar="DIR", help='where "latest" looks (default: runs)')
    _add_timeout(add)
    _add_format(parser)


def _add_lanes(parser: argparse.ArgumentParser) -> None:
    """The options of `lanes`."""
    add = parser.add_argument
    add("run", metavar="RUN", help='a folder that compare or bench wrote with --profile, or "latest"')
    add("--engines", type=_names, default=(), metavar="A,B", help="which to draw (default: all that were traced)")
    add("--cell", type=_count, metavar="N", help="of a benchmark with a sweep (default: 1)")
    add("--rank", type=_rank, default=0, metavar="N", help="whose step (default: %(default)s)")
    add(
        "--width",
        type=_count,
        default=LANES_WIDTH,
        metavar="N",
        help="characters of the longest step, in table and md (default: %(default)s)",
    )
    add("--out", type=Path, default=RUNS, metavar="DIR", help='where "latest" looks (default: runs)')
    _add_format(parser)


def _add_selftest(parser: argparse.ArgumentParser) -> None:
    """The options of `selftest`."""
    parser.epilog = (
        "exit codes: 0 healthy engines pass and each fault is caught, with its cause; 1 not so; 2 wrong usage or "
        "configuration; 3 a rank of a healthy engine crashed or hung"
    )
    add = parser.add_argument
    add("--faults", type=_names, default=(), metavar="A,B", help="which to plant (default: all)")
    add("--engines", type=_names, default=SELFTEST_ENGINES, metavar="A,B", help="where (default: %(default)s)")
    add("--ranks", type=_count, default=2, metavar="N", help="processes; faults of order take 3 (default: %(default)s)")
    add(
        "--timeout",
        type=_timeout,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help="seconds one run may take, compilation included (default: %(default)g)",
    )
    _add_format(parser)


def _add_job(parser: argparse.ArgumentParser, default: JobConfig) -> None:
    """The options of the job; a field of `JobConfig` has its name, and its default there is the default here."""
    add = parser.add_argument_group("what is trained").add_argument
    models = "NAME|NAME,FIELD=X|MODULE:FUNCTION"
    add("--model", default=default.model, metavar=models, help="see the list (default: %(default)s)")
    add("--steps", type=int, default=default.steps, metavar="N", help="optimizer steps judged (default: %(default)s)")
    add("--batch", type=int, metavar="N", default=default.batch, help="sequences over all ranks (default: %(default)s)")
    add("--seq", type=int, metavar="N", help=f"tokens per sequence (default: {DEFAULT_SEQ}); not of a task")
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
    add("--device", default=default.device, metavar="|".join(DEVICES), help="where (default: %(default)s)")
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
        "--block-backend",
        default=default.block_backend,
        metavar="|".join(BACKENDS),
        help="what compiles each repeated block on the other engines but single (default: %(default)s)",
    )
    add(
        "--disabled-passes",
        type=_passes,
        default=default.disabled_passes,
        metavar="none|A,B",
        help=f"what the engine compiled leaves out of {', '.join(PASSES)} (default: none)",
    )
    add(
        "--transport",
        default=default.transport,
        metavar="|".join(Transport),
        help="how reductions travel: ordered is an all-to-all and a sum in rank order (default: %(default)s)",
    )


def _add_link(add: Callable[..., object], default: str) -> None:
    add(
        "--link",
        metavar="NAME|SPEC",
        help="what collectives travel on: a preset, or latency and bandwidth as in 1ms,150MB/s "
        f"(default: {default}, on GPUs nccl)",
    )


def _add_judgement(add: Callable[..., object], engines: str) -> None:
    add("--engines", type=_names, default=engines, metavar="A,B", help="candidates (default: %(default)s)")
    add("--reference", default=DEFAULT_REFERENCE, metavar="A", help="judge them against it (default: %(default)s)")
    add("--out", type=Path, default=RUNS, metavar="DIR", help="gets a folder per run (default: %(default)s)")
    _add_timeout(add)
    add("--profile", action="store_true", help="trace one step of each candidate, for Perfetto and the command lanes")


def _add_timeout(add: Callable[..., object]) -> None:
    add(
        "--timeout",
        type=_timeout,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help="seconds one engine may take, compilation included (default: %(default)g)",
    )


def _add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=FORMATS, default="table", help="of what is printed (default: %(default)s)")


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


def _rank(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _passes(text: str) -> tuple[str, ...]:
    return () if text == "none" else in_pass_order(_names(text))


def _swept(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    name = name.replace("-", "_")
    if name not in SWEPT or not value:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE with one of {', '.join(SWEPT)}, found {text!r}")
    read = {"ranks": _count, "disabled_passes": _passes}.get(name, str)
    return name, read(value)


def _timeout(text: str) -> float:
    value = _finite(text)
    if not 0 < value <= LONGEST_TIMEOUT_S:
        raise argparse.ArgumentTypeError(f"expected seconds, above 0 and at most {LONGEST_TIMEOUT_S:g}, found {text!r}")
    return value
