"""What a self-test has to say, as a document."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from bench.documents import Document, Section
from bench.selftest import Verdict
from bench.tables import frame
from bench.views import FAIL, PASS, as_text


def selftest_document(verdicts: Sequence[Verdict]) -> Document:
    """The verdict on the judge, then each fault with what caught it and the cause that was named."""
    faults = [each for each in verdicts if each.fault is not None]
    healthy = [each for each in verdicts if each.fault is None]
    caught, passed = (sum(each.holds for each in group) for group in (faults, healthy))
    kinds = len({each.fault.name for each in faults if each.fault is not None})
    holds = all(each.holds for each in verdicts)
    table, baseline = _fault_table(faults), _healthy_table(healthy)
    return Document(
        title=f"THE JUDGE {'HOLDS' if holds else 'DOES NOT HOLD'}: {caught} of {len(faults)} planted faults of {kinds} "
        f"kinds are caught with their cause, {passed} of {len(healthy)} healthy runs pass",
        holds=holds,
        lines=tuple(f"{_title(each)} in {each.engine}: {each.why}" for each in verdicts if not each.holds),
        sections=(
            Section(
                "faults",
                "Planted faults",
                table,
                _view_faults(table),
                ("caught by: all checks that found something, the one that is meant for the fault first",),
            ),
            Section("healthy", "Healthy runs", baseline, _view_healthy(baseline)),
        ),
        machine={"holds": holds},
    )


def _title(verdict: Verdict) -> str:
    return f"healthy run of {verdict.job.model}" if verdict.fault is None else verdict.fault.name


def _fault_table(verdicts: Sequence[Verdict]) -> pd.DataFrame:
    """One row per fault and engine."""
    return frame(
        (
            {
                "fault": fault.name,
                "about": fault.about,
                "engine": each.engine,
                "ranks": each.job.ranks,
                "expected": str(fault.caught_by),
                "caught_by": ", ".join(each.caught_by) or None,
                "cause": each.named.cause if each.named else None,
                "finding": each.named.what if each.named else None,
                "caught": each.holds,
                "why": each.why or None,
            }
            for each in verdicts
            if (fault := each.fault) is not None
        ),
        ("fault", "about", "engine", "ranks", "expected", "caught_by", "cause", "finding", "caught", "why"),
    )


def _healthy_table(verdicts: Sequence[Verdict]) -> pd.DataFrame:
    """One row per engine and job."""
    return frame(
        (
            {
                "engine": each.engine,
                "model": each.job.model,
                "ranks": each.job.ranks,
                "passed": each.holds,
                "why": each.why or None,
            }
            for each in verdicts
        ),
        ("engine", "model", "ranks", "passed", "why"),
    )


def _view_faults(table: pd.DataFrame) -> pd.DataFrame:
    return as_text(
        {
            "fault": table["fault"],
            "engine": table["engine"],
            "caught by": table["caught_by"],
            "cause named": table["cause"],
            "verdict": [PASS if caught else FAIL for caught in table["caught"]],
        }
    )


def _view_healthy(table: pd.DataFrame) -> pd.DataFrame:
    return as_text(
        {
            "engine": table["engine"],
            "model": table["model"],
            "ranks": table["ranks"],
            "verdict": [PASS if passed else FAIL for passed in table["passed"]],
        }
    )
