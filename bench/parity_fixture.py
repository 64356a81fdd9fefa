"""What the fixture `fsdp_parity` is: `fsdp-parity compare`, called from a test and ending in its verdict.

All tests of a session share the rank processes. Ranks import the function that builds the model by its module and name,
from the same folders as the test did, whatever pytest's import mode; what a test has patched is not patched there.

Left out: projects that have a top-level package called `common` or `bench`, as this one does; only one of the two can
be imported.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

import pytest

from bench.comparison import run_comparison
from bench.documents import headline
from bench.judge import off_plan
from bench.options import CompareOptions, parse
from bench.preflight import settle
from bench.store import Comparison, make_run_folder, save_comparison
from common.errors import ConfigError, ParityError, RankError
from common.harness.grades import Grade
from common.harness.launch import open_ranks
from common.harness.report import ParityReport
from common.job import JobConfig

MOST_RANKS = 1024
"""Size of the pool, which starts the ranks that a comparison needs; what memory does not hold is refused before."""
TIMEOUT_S = 600.0
_OWN = ("model", "ranks", "backend", "dtype")
JOB_FIELDS = tuple(field.name for field in fields(JobConfig) if field.name not in _OWN)
"""What a test may say of the job besides; `dtype` only the referee has another of."""


class FsdpParity:
    """Compares engines; a context that ends its ranks on the way out.

    Args:
        out: folder for the records of all comparisons.
        ranks, backend: used instead of what a call says, unless None.
    """

    def __init__(self, out: Path, *, ranks: int | None, backend: str | None) -> None:
        self._out, self._ranks, self._backend = out, ranks, backend
        self._pool = open_ranks(MOST_RANKS)

    def __call__(
        self,
        *,
        build: Callable[[], object] | str,
        ranks: int = 2,
        engines: Sequence[str] = ("eager", "compiled"),
        grade: str | None = None,
        backend: str = "aot_eager",
        timeout_s: float = TIMEOUT_S,
        **job: Any,
    ) -> tuple[ParityReport, ...]:
        """Train a model on each engine, and fail the test unless all agree with the first.

        Args:
            build: a function without arguments at the top level of a module, which returns an `nn.Module` from token
                ids to logits, or a task (`common.task`); or what `fsdp-parity compare --model` takes.
            ranks: data-parallel world size.
            engines: names or import paths; the first is the reference.
            grade: "bitwise", "reduction-order" or "compiler"; None asks of each pair the strictest it can keep.
            backend: what compiles the engine compiled; "aot_eager" needs no C++ compiler.
            timeout_s: for one engine, compilation included.
            job: fields of `common.job.JobConfig`, such as `steps`, `batch`, `seq`, `plan` or `param_dtype`.

        Returns:
            A report for each engine but the first, in their order.
        """
        __tracebackhide__ = True
        given = {
            "model": build,
            "ranks": ranks if self._ranks is None else self._ranks,
            "backend": backend if self._backend is None else self._backend,
        }
        outcome = self._judge(given, job, engines, grade, timeout_s)
        if isinstance(outcome, str):
            pytest.fail(f"fsdp_parity: {outcome}", pytrace=False)
        return outcome

    def _judge(
        self, given: dict[str, Any], job: dict[str, Any], engines: Sequence[str], grade: str | None, timeout_s: float
    ) -> tuple[ParityReport, ...] | str:
        """The reports if all is well, else what is wrong."""
        try:
            _check_names(job)
            asked = _grade(grade)
            with _importable(given["model"]) as model:
                options = _options(given | job | {"model": model}, engines, self._out, timeout_s)
                settled = settle(options.job, options.reference, options.engines, options.out)
                comparison, folder = self._compare(replace(options, job=settled, grade=asked))
        except ParityError as error:
            if isinstance(error, RankError):
                print(error.detail, file=sys.stderr)  # pytest shows it apart from the message
            return str(error)
        return comparison.reports if comparison.holds else _told(comparison, folder)

    def _compare(self, options: CompareOptions) -> tuple[Comparison, Path]:
        created = datetime.now().astimezone()
        folder = make_run_folder(options.out, options.job, created)
        pairs = [(options.reference, engine) for engine in options.engines]
        comparison, _ = run_comparison(self._pool, options, folder, created, pairs=pairs, show=False)
        save_comparison(folder, comparison)
        return comparison, folder

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.__exit__(kind, error, trace)


def _check_names(job: Mapping[str, object]) -> None:
    for name in job:
        if name not in JOB_FIELDS:
            close = difflib.get_close_matches(name, JOB_FIELDS, n=1)
            hint = "give the model as build" if name == "model" else f"did you mean {close[0]}?" if close else ""
            raise ConfigError(
                f"expected build, ranks, engines, grade, backend, timeout_s or one of {', '.join(JOB_FIELDS)}, found "
                f"{name}" + (f"; {hint}" if hint else "")
            )


def _grade(name: str | None) -> Grade | None:
    if name is not None and name not in list(Grade):
        raise ConfigError(f"grade: expected one of {', '.join(Grade)}, or None, found {name!r}")
    return None if name is None else Grade(name)


def _options(given: dict[str, Any], engines: Sequence[str], out: Path, timeout_s: float) -> CompareOptions:
    """What `compare` would be given on the command line, so that the same is refused for the same reasons."""
    names = engines.split(",") if isinstance(engines, str) else list(engines)
    words = given | {"engines": names, "reference": names[0] if names else "", "out": out, "timeout": timeout_s}
    options = parse(
        (
            "compare",
            *(f"--{name.replace('_', '-')}={_word(value)}" for name, value in words.items() if value is not None),
        )
    )
    assert isinstance(options, CompareOptions), "the word compare says so"
    return options


def _word(value: object) -> str:
    return (",".join(map(str, value)) or "none") if isinstance(value, (list, tuple)) else str(value)


@contextmanager
def _importable(build: Callable[[], object] | str) -> Iterator[str]:
    """The name by which ranks import `build`; inside, the folder they find it in is on the import path.

    Raises:
        ConfigError: it has no such name.
    """
    before = list(sys.path)
    try:
        if isinstance(build, str):
            yield build
            return
        module = sys.modules.get(getattr(build, "__module__", None) or "")
        name = getattr(build, "__qualname__", type(build).__qualname__)
        if module is None or module.__name__ == "__main__" or getattr(module, name, None) is not build:
            raise ConfigError(
                f"build: expected a function at the top level of a module, which ranks import by its name, found {name}"
                "; define it there with def, or name a model that compare knows"
            )
        root = _root(module)
        if root is not None and root not in sys.path:
            sys.path.insert(0, root)
        yield f"{module.__name__}:{name}"
    finally:
        sys.path[:] = before


def _root(module: ModuleType) -> str | None:
    """The folder from which `module` can be imported under its name; None if its file says nothing of it."""
    parts = module.__name__.split(".")
    path = Path(module.__file__).with_suffix("") if module.__file__ else Path()
    path = path.parent if path.name == "__init__" else path
    return str(path.parents[len(parts) - 1]) if path.parts[-len(parts) :] == tuple(parts) else None


def _told(comparison: Comparison, folder: Path) -> str:
    """The verdict, then of each pair that failed where it parts first, why, and what is likely to be wrong."""
    lines = [headline(comparison)]
    for report in comparison.reports:
        if report.passed:
            continue
        pair = f"{report.candidate} against {report.reference}"
        lines.append(f"{pair}: asked {report.asked}, reached {report.reached or 'none'}")
        if report.first_divergence is not None:
            lines.append(
                f"  first bit that differs: step {report.first_divergence.step}: {report.first_divergence.what}"
            )
        lines += [f"  {reason}" for reason in report.reasons]
        lines += [f"  likely: {cause}" for cause in report.causes]
    lines += off_plan(comparison.records)
    lines.append(f"more: fsdp-parity show {folder}")
    if not all(report.passed for report in comparison.reports):
        lines.append(f"      fsdp-parity explain {folder}    # from where the model's module can be imported")
    return "\n".join(lines)
