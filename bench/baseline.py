"""A baseline: what one comparison found, small enough to review, for later ones to be held against.

    {"schema": 1, "environment": {...}, "job": {...}, "reference": "single",
     "engines": {"eager": {"against": {"single": {"asked": ..., "margin": ..., "reached": ...}},
                           "collectives": [...], "first_step_s": ..., "peak_bytes": ..., "start_bytes": ...}, ...}}

[Note: held against a baseline]
The job, the reference and the engines have to be the baseline's; `check_same_job` refuses others. Then every figure is
held against that of the baseline, without a tolerance:

grade         A weaker one is worse, and so is a pair that is judged no longer. On another machine or torch version
              kernels are others, and a grade stricter than the asked one is their merit: there only what no longer
              keeps the grade that the baseline asked is worse, any other difference is unsure.
collectives   Of each phase and kind, more operations or more bytes are worse. One that moved to another phase is more
              there. They are counted, so every difference is one.
start bytes   More is worse. They are found among Python's objects, so every difference is one.
peak bytes    More is worse: a reading is never above what was live, so the step does need more than the baseline says.
              Less is better where readings are exact, which is on an emulated link, and where no collective ran.
              Elsewhere one may be low ([Note: unreported frees] in the memory instrument), so less is unsure; and a
              baseline that was taken there may itself be low, which shows as worse on a later day. Taken on an emulated
              link, such as `none`, it is exact.
time, margin  Kept to be read. Time depends on the machine and on what else it does; a margin on the last digits, which
              a grade is there to allow for.

Memory is held against a baseline of another machine or torch version too: that an upgrade needs more is worth knowing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from bench.baseline_fields import check_type, checked
from bench.judge import REFEREE
from common.errors import ConfigError
from common.harness.grades import Grade
from common.harness.link import parse_link
from common.harness.records import CollectiveCount, Environment, RunRecord, json_ready
from common.harness.report import ParityReport
from common.job import JobConfig

SCHEMA_VERSION = 1


class Status(StrEnum):
    """How a figure stands to that of the baseline; [Note: held against a baseline] says when."""

    SAME = "same"
    WORSE = "WORSE"
    BETTER = "better"
    UNSURE = "unsure"


@dataclass(frozen=True)
class Change:
    """One figure, beside that of the baseline.

    Attributes:
        what: such as "peak", or "all_gather in forward".
        unit: of both numbers; "" for words.
    """

    engine: str
    what: str
    unit: str
    before: int | str
    now: int | str
    status: Status


@dataclass(frozen=True)
class Kept:
    """The grade that one engine kept against another."""

    asked: Grade
    reached: Grade | None
    margin: float | None


@dataclass(frozen=True)
class Figures:
    """What one engine did.

    Attributes:
        against: by the engine that it was judged against.
        collectives: of one step on rank 0.
        start_bytes, peak_bytes: the most of any rank.
        first_step_s: compilation included.
    """

    against: Mapping[str, Kept]
    collectives: tuple[CollectiveCount, ...]
    start_bytes: int
    peak_bytes: int
    first_step_s: float


@dataclass(frozen=True)
class Baseline:
    """What a comparison found; `engines` by name, without the referee."""

    environment: Environment
    job: JobConfig
    reference: str
    engines: Mapping[str, Figures]

    @classmethod
    def of(
        cls, job: JobConfig, reference: str, records: Mapping[str, RunRecord], reports: Sequence[ParityReport]
    ) -> Baseline:
        """The baseline that a comparison makes."""
        engines = {
            name: Figures(
                against={
                    report.reference: Kept(report.asked, report.reached, _rounded(report.margin))
                    for report in reports
                    if report.candidate == name
                },
                collectives=tuple(sorted(record.collectives, key=_place)),
                start_bytes=max(each.start_bytes for each in record.memory),
                peak_bytes=max(each.peak_bytes for each in record.memory),
                first_step_s=round(record.first_step_s, 3),
            )
            for name, record in records.items()
            if name != REFEREE
        }
        return cls(records[reference].environment, job, reference, engines)

    def to_dict(self) -> dict[str, Any]:
        """The baseline as JSON-ready data."""
        data: dict[str, Any] = json_ready(
            {
                "schema": SCHEMA_VERSION,
                "environment": dataclasses.asdict(self.environment),
                "job": self.job.to_dict(),
                "reference": self.reference,
                "engines": {name: dataclasses.asdict(figures) for name, figures in self.engines.items()},
            }
        )
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Baseline:
        """The baseline that `to_dict` described.

        Raises:
            ConfigError: one of another schema version, or a value that cannot be.
            KeyError, TypeError, ValueError, AttributeError: it is not as it was written.
        """
        if data.get("schema") != SCHEMA_VERSION:
            raise ConfigError(f"expected a baseline of schema {SCHEMA_VERSION}, found {data.get('schema')!r}")
        engines = check_type(data["engines"], (dict,), "engines")
        baseline = cls(
            environment=Environment(**checked(Environment, data["environment"], "environment")),
            job=JobConfig.from_dict(checked(JobConfig, data["job"], "job")),
            reference=check_type(data["reference"], (str,), "reference"),
            engines={name: _figures(figures, f"engines.{name}") for name, figures in engines.items()},
        )
        _check_pairs(baseline)
        return baseline


@dataclass(frozen=True)
class Held:
    """That a comparison is held against a baseline.

    Attributes:
        file: where the baseline was read from, as it was named.
        refresh: the command that takes it anew.
    """

    file: str
    refresh: str
    baseline: Baseline

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return {"file": self.file, "refresh": self.refresh, "baseline": self.baseline.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Held:
        """What `to_dict` described; raises as `Baseline.from_dict`."""
        return cls(data["file"], data["refresh"], Baseline.from_dict(data["baseline"]))


def check_same_job(file: str, baseline: Baseline, job: JobConfig, reference: str, engines: Iterable[str]) -> None:
    """See that a comparison can be held against `baseline`, read from `file`.

    Raises:
        ConfigError: it is of another job, reference or other engines.
    """
    before, now = baseline.job.to_dict(), job.to_dict()
    differ = [(name, before[name], now[name]) for name in now if before[name] != now[name]]
    if baseline.reference != reference:
        differ.append(("reference", baseline.reference, reference))
    candidates = sorted(set(baseline.engines) - {baseline.reference})
    if candidates != sorted(engines):
        differ.append(("engines", candidates, sorted(engines)))
    if differ:
        options = ", ".join(
            f"--{name.replace('_', '-')} ({_words(before)} there, {_words(now)} here)" for name, before, now in differ
        )
        raise ConfigError(
            f"baseline {file}: of another comparison, which differs in {options}; give the options that it was taken "
            "with, or take another with --save-baseline"
        )


def changes(baseline: Baseline, records: Mapping[str, RunRecord], reports: Sequence[ParityReport]) -> list[Change]:
    """Every figure of the baseline beside that of a comparison, see [Note: held against a baseline]."""
    found: list[Change] = []
    for name, figures in baseline.engines.items():
        record = records.get(name)
        if record is None:
            found.append(Change(name, "record", "", "there", "missing", Status.WORSE))
            continue
        judged = {report.reference: report for report in reports if report.candidate == name}
        is_elsewhere = bool(_moved(baseline.environment, record.environment))
        for against, kept in figures.against.items():
            found.append(_grade(name, against, kept, judged.get(against), is_elsewhere))
        found += _collectives(name, figures, record)
        found += _memory(name, figures, record)
    return found


def regressions(baseline: Baseline, records: Mapping[str, RunRecord], reports: Sequence[ParityReport]) -> list[str]:
    """What is worse than in the baseline, a line each; none if nothing is."""
    return [
        f"{each.engine}: {each.what}: {_shown(each.now)}{each.unit and f' {each.unit}'}, worse than the baseline's "
        f"{_shown(each.before)}"
        for each in changes(baseline, records, reports)
        if each.status is Status.WORSE
    ]


def environment_note(baseline: Baseline, records: Mapping[str, RunRecord]) -> str | None:
    """What differs between the baseline's machine and torch and those of a comparison; None if nothing does."""
    moved = _moved(baseline.environment, next(iter(records.values())).environment)
    if not moved:
        return None
    return (
        f"taken elsewhere: {', '.join(moved)}; no time is compared, a grade only with what was asked, "
        "and memory that differs may be torch's doing"
    )


def _moved(before: Environment, now: Environment) -> list[str]:
    """In what that decides kernels two environments differ."""
    pairs = {"machine": (before.machine, now.machine), "torch": (before.torch, now.torch)}
    return [f"{name} {there} there, {here} here" for name, (there, here) in pairs.items() if there != here]


def _grade(engine: str, against: str, kept: Kept, report: ParityReport | None, is_elsewhere: bool) -> Change:
    now = "not judged" if report is None else str(report.reached or "none")
    status = Status.WORSE if report is None else _grade_status(kept, report, is_elsewhere)
    return Change(engine, f"grade against {against}", "", str(kept.reached or "none"), now, status)


def _grade_status(kept: Kept, report: ParityReport, is_elsewhere: bool) -> Status:
    if report.reached is kept.reached:
        return Status.SAME
    if report.reached is None:
        return Status.WORSE
    if is_elsewhere and report.reached.covers(kept.asked):
        return Status.UNSURE
    is_stricter = kept.reached is None or report.reached.covers(kept.reached)
    return Status.BETTER if is_stricter else Status.WORSE


def _collectives(engine: str, figures: Figures, record: RunRecord) -> Iterator[Change]:
    before = {_place(each): each for each in figures.collectives}
    now = {_place(each): each for each in record.collectives}
    for place in sorted(before.keys() | now.keys()):
        what = f"{place[1]} in {place[0]}"
        none = CollectiveCount(*place, 0, 0)
        old, new = before.get(place, none), now.get(place, none)
        yield Change(engine, what, "operations", old.count, new.count, _less_is_better(old.count, new.count))
        yield Change(engine, what, "bytes", old.bytes, new.bytes, _less_is_better(old.bytes, new.bytes))


def _memory(engine: str, figures: Figures, record: RunRecord) -> Iterator[Change]:
    start = max(each.start_bytes for each in record.memory)
    peak = max(each.peak_bytes for each in record.memory)
    yield Change(engine, "start", "bytes", figures.start_bytes, start, _less_is_better(figures.start_bytes, start))
    status = _less_is_better(figures.peak_bytes, peak)
    if status is Status.BETTER and not _reads_peaks_exactly(record):
        status = Status.UNSURE
    yield Change(engine, "peak", "bytes", figures.peak_bytes, peak, status)


def _less_is_better(before: int, now: int) -> Status:
    return Status.SAME if now == before else Status.WORSE if now > before else Status.BETTER


def _reads_peaks_exactly(record: RunRecord) -> bool:
    return not record.collectives or parse_link(JobConfig.from_dict(record.job).link).across is not None


def _figures(data: Any, where: str) -> Figures:
    found = checked(Figures, data, where)
    against = {name: _kept(kept, f"{where}.against.{name}") for name, kept in found["against"].items()}
    collectives = tuple(
        CollectiveCount(**checked(CollectiveCount, each, f"{where}.collectives[{i}]"))
        for i, each in enumerate(found["collectives"])
    )
    return Figures(**found | {"against": against, "collectives": collectives})


def _kept(data: Any, where: str) -> Kept:
    found = check_type(data, (dict,), where)
    if found["margin"] == str(math.inf):  # as JSON has it
        found = found | {"margin": math.inf}
    found = checked(Kept, found, where)
    for name in ("asked", "reached"):
        if found[name] is not None and found[name] not in list(Grade):
            raise ConfigError(f"{where}.{name}: expected one of {', '.join(Grade)}, found {found[name]!r}")
        found[name] = found[name] and Grade(found[name])
    return Kept(**found)


def _check_pairs(baseline: Baseline) -> None:
    """See that each engine was judged against the reference, which is among them, and against none that is not."""
    known = ", ".join(baseline.engines)
    if baseline.reference not in baseline.engines:
        raise ConfigError(f"reference: expected one of the engines {known or '(none)'}, found {baseline.reference!r}")
    for name, figures in baseline.engines.items():
        where, found = f"engines.{name}.against", ", ".join(figures.against) or "none"
        if name != baseline.reference and baseline.reference not in figures.against:
            raise ConfigError(f"{where}: expected the reference {baseline.reference!r} among them, found {found}")
        if not figures.against.keys() <= baseline.engines.keys():
            raise ConfigError(f"{where}: expected engines of {known}, found {found}")


def _place(each: CollectiveCount) -> tuple[str, str]:
    return each.phase, each.kind


def _rounded(margin: float | None) -> float | None:
    return None if margin is None else round(margin, 3)


def _shown(value: int | str | None) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _words(value: Any) -> str:
    """A value as the command line has it."""
    if isinstance(value, list):
        return ",".join(value) or "none"
    return "none" if value is None else str(value)
