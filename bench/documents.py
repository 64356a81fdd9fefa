"""What each command has to say, as one document that `render` writes in any format.

A comparison's document is made from what is stored of it and nothing else, so that `show` prints what `compare` did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from bench import tables, views
from bench.baseline import Status, environment_note
from bench.judge import is_main
from bench.memory_picture import memory_picture
from bench.store import Comparison
from common.harness.records import RunRecord, json_ready
from common.harness.report import ParityReport
from common.job import JobConfig

SCHEMA_VERSION = 1
"""Of the JSON that is printed."""


@dataclass(frozen=True)
class Section:
    """One table.

    Attributes:
        name: what machine formats call it.
        data: for machines, at full precision; None where another section holds it.
        view: for people, cells as text; None for a table that only machine formats hold.
        notes: what has to be known to read the view.
        picture: SVG, which a page shows in the place of view and notes; "" for none.
    """

    name: str
    title: str
    data: pd.DataFrame | None
    view: pd.DataFrame | None = None
    notes: tuple[str, ...] = ()
    picture: str = ""


@dataclass(frozen=True)
class Document:
    """Tables with a title.

    Attributes:
        holds: the verdict that the title tells; None if there is none to tell.
        lines: what stands between title and tables; of a failed comparison, why.
        machine: what JSON holds besides the tables.
    """

    title: str
    holds: bool | None
    lines: tuple[str, ...]
    sections: tuple[Section, ...]
    machine: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The document as JSON-ready data."""
        held = {section.name: section.data for section in self.sections if section.data is not None}
        rows = {name: data.to_dict(orient="records") for name, data in held.items()}
        data: dict[str, Any] = json_ready({"schema": SCHEMA_VERSION, **self.machine, "tables": rows})
        return data


def comparison_document(comparison: Comparison, lanes: Section | None = None) -> Document:
    """The verdict, then loss, gradients, memory and collectives, what differs from the baseline, and `lanes`."""
    records = {name: record.to_dict() for name, record in comparison.records.items()}
    return Document(
        title=headline(comparison),
        holds=comparison.holds,
        lines=(*comparison.failures, _describe(comparison), *_baseline_lines(comparison)),
        sections=(*_sections(comparison), *_baseline_sections(comparison), *([lanes] if lanes else [])),
        machine=comparison.to_dict() | {"records": records},
    )


def _sections(comparison: Comparison) -> tuple[Section, ...]:
    records, reports = comparison.records, comparison.reports
    graded = {report.candidate: report for report in reports if report.reference == comparison.reference}
    verdict, loss = tables.verdict_table(reports), tables.loss_table(records, graded)
    gradients, collectives = tables.gradient_table(reports), tables.collective_table(records, graded)
    return (
        Section(
            "verdict",
            "Parity",
            verdict,
            views.view_verdict(verdict),
            (
                "margin: how many times the limit of the asked grade exceeds the error, at the tightest of its checks",
                *_unjudged(comparison),
            ),
        ),
        Section("loss", "Loss", loss, views.view_loss(loss), _loss_notes(comparison.job.steps)),
        Section(
            "gradients",
            "Gradients of step 0",
            gradients,
            views.view_gradients(gradients),
            (
                "error: relative L2 distance of the worst parameter's gradient to a float64 run of the same step; "
                "max ulp is large where an element is near zero",
            ),
        ),
        Section("parameters", "Gradients of step 0, by parameter", tables.parameter_table(reports)),
        Section("trends", "Errors over steps", tables.trend_table(reports)),
        *_memory_sections(records, graded),
        Section(
            "collectives",
            "Collectives of one step",
            collectives,
            views.view_collectives(collectives),
            _collective_notes(collectives),
        ),
    )


def _memory_sections(records: Mapping[str, RunRecord], graded: Mapping[str, ParityReport]) -> Iterator[Section]:
    memory, classes = tables.memory_table(records, graded), tables.memory_class_table(records, graded)
    lines = tables.timelines(records)
    notes = ["tracked bytes of live tensors during one step, the most of any rank; buffers of gloo are not counted"]
    if lines:
        notes.append("along a phase lie allocations and frees in their order, which is not time")
    yield Section("memory", "Memory", memory, views.view_memory(memory, lines), tuple(notes))
    yield Section(
        "memory_timeline",
        "Memory over one step",
        tables.timeline_table(records, graded),
        picture=memory_picture(lines) if lines else "",
    )
    yield Section(
        "memory_classes",
        "Memory by class",
        classes,
        views.view_memory_classes(classes) if len(classes) else None,
        (
            "of the rank with the highest peak; parameters: as they are kept between steps; gathered: whole parameters "
            "that came by a collective; messages: other buffers of collectives; a formula predicts the first four",
        ),
    )


def _baseline_sections(comparison: Comparison) -> tuple[Section, ...]:
    """What differs from the baseline; for people only if something does."""
    held = comparison.held
    if held is None:
        return ()
    table = tables.baseline_table(comparison.changes)
    view = views.view_baseline(table)
    notes = [environment_note(held.baseline, comparison.records)]
    if Status.UNSURE in set(table["status"]):
        notes.append("unsure: a peak that may read low on this link, or a grade that other kernels may have changed")
    shown = tuple(note for note in notes if note)
    return (Section("baseline", f"Against {held.file}", table, view if len(view) else None, shown),)


def _baseline_lines(comparison: Comparison) -> tuple[str, ...]:
    """How it stands to its baseline, and how that is taken anew."""
    held = comparison.held
    if held is None:
        return ()
    found = [change.status for change in comparison.changes]
    counts = ", ".join(f"{found.count(status)} {status.lower()}" for status in Status if status in found)
    line = f"baseline {held.file} (commit {held.baseline.environment.commit}): {counts}"
    is_changed = Status.WORSE in found or Status.BETTER in found
    return (line, f"to take it anew: {held.refresh}") if is_changed else (line,)


def headline(comparison: Comparison) -> str:
    """The verdict in one line."""
    passed = sum(report.passed for report in comparison.reports)
    total = len(comparison.reports)
    main = next((report for report in comparison.reports if is_main(report)), None)
    subject = "" if main is None else f": compiled agrees with eager (asked {main.asked}, reached {main.reached})"
    if not comparison.disagreements:
        worse = len(comparison.regressions)
        warning = f"WORSE THAN THE BASELINE in {worse} figure{'s' if worse > 1 else ''}. " if worse else ""
        return f"{warning}PARITY HOLDS{subject}; {passed} of {total} comparisons pass"
    astray = "" if passed < total else ", but collectives or bytes are not those of the plan"
    return f"PARITY DOES NOT HOLD: {passed} of {total} comparisons pass{astray}"


def _describe(comparison: Comparison) -> str:
    first = next(iter(comparison.records.values()))
    carrier = f"process group {first.process_group}, link {comparison.job.link}"
    return f"{describe_job(comparison.job)}; {carrier}; torch {first.environment.torch}"


def describe_job(job: JobConfig) -> str:
    """All that decides what was trained, and how it was sharded, on one line."""
    tokens = f"{job.batch} x {job.seq} tokens from {job.data or 'the standard library'}"
    batches = f"{job.batch} samples of its own" if job.seq is None else tokens
    return (
        f"{job.model}, {job.ranks} ranks on {job.device}, {job.steps} steps of {batches}, "
        f"{job.optimizer} lr {job.lr:g}, seed {job.seed}; plan {job.plan}, "
        f"reshard after forward {job.reshard_after_forward}, compute {job.param_dtype}, reduce {job.reduce_dtype}, "
        f"transport {job.transport}, backend {job.backend}"
        + (f", without {' and '.join(job.disabled_passes)}" if job.disabled_passes else "")
        + (f", blocks of other engines {job.block_backend}" if job.block_backend != "eager" else "")
    )


def _unjudged(comparison: Comparison) -> tuple[str, ...]:
    """Which steps of which pair say nothing; see [Note: error over steps] in `common.harness.grades`."""
    notes = []
    for report in comparison.reports:
        known = [row.judged_steps for row in report.trends if row.limit is not None and row.judged_steps is not None]
        if known and min(known) < comparison.job.steps:
            notes.append(
                f"{report.candidate} against {report.reference}: some numbers are judged in {min(known)} of "
                f"{comparison.job.steps} steps; in the others a gradient of zero would pass, so much does training "
                "make of a rounding"
            )
    return tuple(notes)


def _loss_notes(steps: int) -> tuple[str, ...]:
    shown = len(views.shown_steps(steps))
    notes = [f"{shown} of {steps} steps; csv and json hold all, with gradient norms"] if shown < steps else []
    return (*notes, "the grade is that of the pair, in all its checks")


def _collective_notes(collectives: pd.DataFrame) -> tuple[str, ...]:
    notes = ["one rank's, with the size of the whole buffer"]
    if "all_to_all" in set(collectives["kind"]):
        notes.append(
            "reductions travel as all_to_all, a rank's own part stays where it is, and are summed in rank order, "
            "see common/gradient.py"
        )
    return ("; ".join(notes),)
