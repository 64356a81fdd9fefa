"""The judge: are two runs of one job the same, in which grade, and where do they part?

Reads records and step-0 gradients, nothing else. `grades` derives what each grade allows, `accuracy` measures, `report`
is what comes out. Not a number, infinity, a missing parameter or another shape fails in any grade.

Left out: what happens inside the first differing step (which module, forward or backward).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from common.engine import SHORT_NAMES, import_path
from common.errors import ConfigError
from common.harness.accuracy import Check, Kind, check_errors, check_gradients
from common.harness.causes import narrow_grid
from common.harness.distance import max_ulp, relative_error
from common.harness.grades import SPREAD, Grade, expected_grade, referee_job
from common.harness.records import Run, RunRecord
from common.harness.report import Divergence, ParamRow, ParityReport, StepRow, TrendRow
from common.harness.run_causes import run_causes
from common.job import JobConfig
from common.policy import DTYPES

__all__ = ["Grade", "ParityReport", "compare_runs", "expected_grade", "job_key", "referee_job"]

REASONS = 5
"""How many errors above their bounds are spelled out; the rest are counted."""


def job_key(job: Mapping[str, Any], *, dtypes: bool = True) -> dict[str, Any]:
    """The options that decide what is trained, whoever trains it; two runs are compared only if they agree on these.

    Args:
        job: `JobConfig.to_dict()`.
        dtypes: include those of parameters, compute and reduction; a referee has its own.
    """
    names = ["model", "steps", "batch", "seq", "optimizer", "lr", "data", "seed"]
    names += ["dtype", "param_dtype", "reduce_dtype"] if dtypes else []
    return {name: job[name] for name in names}


def compare_runs(
    reference: Run,
    candidate: Run,
    referee: Run | None = None,
    *,
    peers: Sequence[Run] = (),
    grade: Grade | None = None,
) -> ParityReport:
    """Judge `candidate` against `reference`.

    Args:
        reference: the run that is trusted.
        candidate: the run that is judged.
        referee: `single` on `referee_job` of the same job; needed for every grade but `BITWISE`, where it still
            tells which weaker grade holds.
        peers: runs of `common.harness.peers` on the same job, which tell what rounding comes to over steps; without
            them the reference alone does, and may by chance be too near to float64.
        grade: what to ask; None asks for `expected_grade`.

    Raises:
        ConfigError: runs of different jobs, no referee where one is needed, or one that is none.
    """
    for run in (candidate, *peers):
        _check_same_job(reference[0], run[0])
    job = JobConfig.from_dict(reference[0].job)
    asked = grade or expected_grade(
        job,
        reference[0].engine,
        candidate[0].engine,
        candidate_job=JobConfig.from_dict(candidate[0].job),
    )
    if referee is not None:
        _check_referee(reference[0], referee[0])
    elif asked is not Grade.BITWISE:
        raise ConfigError(
            f"compare: grade {asked} is judged against float64, found no referee; run engine single on referee_job "
            "and pass its record"
        )
    broken = [*_unequal_shapes(reference, candidate, referee, *peers), *_not_finite(reference, candidate, referee)]
    checks: dict[Grade, list[Check]] = {}
    if referee is not None and not broken:
        checks = {weaker: check_errors(weaker, reference, candidate, referee, peers) for weaker in SPREAD}
    reached = None if broken else _reached(reference[0], candidate[0], checks)
    # in a bitwise comparison the weakest bounds still tell which errors are out of proportion
    shown = checks.get(asked, checks.get(Grade.COMPILER, []))
    reasons = broken or [*_narrow(candidate)]
    if not broken and asked is not Grade.BITWISE and referee is not None:
        reasons += _off(reference, referee, peers)
    if not broken and not (reached and reached.covers(asked)):
        reasons += _reasons(asked, reference, candidate, shown)
    return ParityReport(
        reference=reference[0].engine,
        candidate=candidate[0].engine,
        asked=asked,
        reached=reached,
        margin=None if asked is Grade.BITWISE else min((check.margin for check in shown), default=None),
        passed=not reasons,
        reasons=tuple(reasons),
        causes=_causes(reference, candidate, referee, shown) if reasons and referee else (),
        first_divergence=_first_divergence(reference[0], candidate[0]),
        params=tuple(_param_rows(reference, candidate, shown, asked)),
        steps=tuple(_step_rows(reference[0], candidate[0])),
        trends=tuple(_trend_rows(shown, asked)),
    )


def _check_same_job(reference: RunRecord, candidate: RunRecord) -> None:
    ours, theirs = job_key(candidate.job), job_key(reference.job)
    differ = [f"{name} ({theirs[name]!r} and {ours[name]!r})" for name in ours if ours[name] != theirs[name]]
    if differ:
        raise ConfigError(
            f"compare: {reference.engine} and {candidate.engine} ran different jobs, which differ in "
            f"{', '.join(differ)}; run both with the same options"
        )


def _check_referee(reference: RunRecord, referee: RunRecord) -> None:
    expected = job_key(referee_job(JobConfig.from_dict(reference.job)).to_dict())
    found = job_key(referee.job)
    differ = [f"{name} {expected[name]!r}, found {found[name]!r}" for name in expected if found[name] != expected[name]]
    if referee.world_size != 1:
        differ.append(f"one process, found {referee.world_size}")
    if differ:
        raise ConfigError(
            f"compare: {referee.engine} is no referee of this job; expected {', '.join(differ)}; run engine single on "
            "referee_job of the same job"
        )


def _unequal_shapes(reference: Run, candidate: Run, *others: Run | None) -> Iterator[str]:
    """Steps, names and shapes that one side lacks."""
    expected_steps = reference[0].job["steps"]
    for record, gradients in (reference, candidate, *(run for run in others if run is not None)):
        for steps in {len(record.losses), len(record.param_norms), len(record.grad_digests)} - {expected_steps}:
            yield f"{record.engine} recorded {steps} of {expected_steps} steps; it was cut short"
        for name in dict.fromkeys((*reference[1], *gradients)):
            if name not in gradients:
                yield f"gradient of {name!r}: {reference[0].engine} has one, {record.engine} has none"
            elif name not in reference[1]:
                yield f"gradient of {name!r}: {record.engine} has one, {reference[0].engine} has none"
            elif gradients[name].shape != reference[1][name].shape:
                yield (
                    f"gradient of {name!r}: expected shape {list(reference[1][name].shape)}, found "
                    f"{list(gradients[name].shape)} in {record.engine}"
                )
        for step, (norms, digests) in enumerate(zip(record.param_norms, record.grad_digests, strict=False)):
            changed = sorted((norms.keys() ^ gradients.keys()) | (digests.keys() ^ gradients.keys()))
            if changed:
                yield f"gradient of {changed[0]!r}: {record.engine} has one at step 0 or at step {step}, not at both"
                break


def _not_finite(reference: Run, candidate: Run, referee: Run | None) -> Iterator[str]:
    """The first number of each run that is not finite."""
    for record, _ in (reference, candidate, *([referee] if referee else [])):
        for step, (losses, norms) in enumerate(zip(record.losses, record.param_norms, strict=False)):
            bad = [f"loss of rank {rank} is {loss}" for rank, loss in enumerate(losses) if not math.isfinite(loss)]
            bad += [f"gradient of {name!r} has norm {norm}" for name, norm in norms.items() if not math.isfinite(norm)]
            if bad:
                yield f"{record.engine}, step {step}: {bad[0]}" + (
                    f", and {len(bad) - 1} more like it" if bad[1:] else ""
                )
                break


def _narrow(candidate: Run) -> list[str]:
    """A reduction in a narrower dtype than asked, which no error bound can see when the compute dtype is narrow too."""
    record, gradients = candidate
    wide = min((record.job["reduce_dtype"], record.job["dtype"]), key=lambda name: DTYPES[name].itemsize)
    grid = narrow_grid(gradients.values(), DTYPES[wide]) if record.world_size > 1 else None
    if grid is None:
        return []
    return [
        f"every element of every gradient of {record.engine} is a {grid} number, though gradients are to be reduced "
        f"in {record.job['reduce_dtype']} and stored in {record.job['dtype']}; a mean over ranks has more digits: they "
        "were rounded, or come from one rank alone"
    ]


def _off(reference: Run, referee: Run, peers: Sequence[Run]) -> list[str]:
    """A reference that is itself further from float64 than its rounding: what its own error excuses says nothing."""
    if not peers or import_path(reference[0].engine) == SHORT_NAMES["single"]:
        return []
    checks = check_gradients(Grade.COMPILER, peers[0], reference, referee)
    failed = [check for check in checks if check.kind is Kind.GRADIENT and not check.holds]
    if not failed:
        return []
    worst = min(failed, key=lambda check: check.margin)
    return [
        f"the reference {reference[0].engine} is itself off, {worst.what}: relative error {worst.candidate_error:.3g} "
        f"against float64, at most {worst.limit:.3g} allowed (a single process with rounded weights has "
        f"{worst.reference_error:.3g}); nothing can be judged by it"
    ]


def _reached(reference: RunRecord, candidate: RunRecord, checks: Mapping[Grade, list[Check]]) -> Grade | None:
    """The strictest grade that holds."""
    if reference.losses == candidate.losses and reference.grad_digests == candidate.grad_digests:
        return Grade.BITWISE
    return next((grade for grade, each in checks.items() if all(check.holds for check in each)), None)


def _reasons(asked: Grade, reference: Run, candidate: Run, checks: list[Check]) -> Iterator[str]:
    """Why the asked grade does not hold, the worst first."""
    if asked is Grade.BITWISE:
        divergence = _first_divergence(reference[0], candidate[0])
        assert divergence is not None, "bits differ somewhere, or it would have passed"
        digests = zip(reference[0].grad_digests, candidate[0].grad_digests, strict=True)
        changed = sum(ours[name] != theirs[name] for theirs, ours in digests for name in theirs)
        yield (
            f"not equal in bits, first at step {divergence.step}: {divergence.what}; over all steps {changed} of "
            f"{sum(map(len, reference[0].grad_digests))} gradients differ"
        )
    failed = sorted((check for check in checks if not check.holds), key=lambda check: check.margin)
    for check in failed[:REASONS]:
        error = f"{check.candidate_error:.3g} against float64, at most {check.limit:.3g} allowed"
        what = "error in units of what rounding comes to" if check.kind is Kind.TREND else "relative error"
        yield f"{check.what}: {what} {error} ({reference[0].engine} has {check.reference_error:.3g})"
    if len(failed) > REASONS:
        yield f"and {len(failed) - REASONS} more errors above their bounds, of {len(checks)}"


def _causes(reference: Run, candidate: Run, referee: Run, checks: list[Check]) -> tuple[str, ...]:
    wrong = dict.fromkeys(check.param for check in checks if not check.holds and check.kind is not Kind.TREND)
    return run_causes(reference, candidate, referee, [name for name in wrong if name is not None])


def _first_divergence(reference: RunRecord, candidate: RunRecord) -> Divergence | None:
    """Loss before gradients; of the gradients the last parameter's, since backward starts there."""
    for step, (theirs, ours) in enumerate(zip(reference.losses, candidate.losses, strict=False)):
        if theirs != ours:
            return Divergence(step, "loss")
        before, after = reference.grad_digests[step], candidate.grad_digests[step]
        changed = [name for name in before if before[name] != after.get(name)]
        if changed:
            return Divergence(step, f"gradient of {changed[-1]!r}")
    return None


def _param_rows(reference: Run, candidate: Run, checks: list[Check], asked: Grade) -> Iterator[ParamRow]:
    of = {(check.kind, check.param): check for check in checks}
    is_bounded = asked is not Grade.BITWISE
    for name, theirs in reference[1].items():
        ours = candidate[1].get(name)
        if ours is None or ours.shape != theirs.shape:
            continue
        row = ParamRow(
            name=name,
            bitwise=reference[0].grad_digests[0][name] == candidate[0].grad_digests[0][name],
            max_abs_diff=float((ours.double() - theirs.double()).abs().max()) if ours.numel() else 0.0,
            relative_distance=relative_error(ours, theirs),
            max_ulp=max_ulp(ours, theirs),
        )
        whole, worst = of.get((Kind.GRADIENT, name)), of.get((Kind.ROW, name))
        if whole is not None and worst is not None:
            row = replace(
                row,
                reference_error=whole.reference_error,
                candidate_error=whole.candidate_error,
                ratio=_ratio(whole.candidate_error, whole.reference_error),
                limit=whole.limit if is_bounded else None,
                reference_row_error=worst.reference_error,
                candidate_row_error=worst.candidate_error,
                row_limit=worst.limit if is_bounded else None,
            )
        yield row


def _ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs else (math.inf if ours else 1.0)


def _step_rows(reference: RunRecord, candidate: RunRecord) -> Iterator[StepRow]:
    rows = zip(reference.mean_losses, candidate.mean_losses, reference.grad_norms, candidate.grad_norms, strict=False)
    for step, (their_loss, our_loss, their_norm, our_norm) in enumerate(rows):
        before, after = reference.grad_digests[step], candidate.grad_digests[step]
        changed = sum(before.get(name) != after.get(name) for name in before.keys() | after.keys())
        yield StepRow(step, their_loss, our_loss, our_loss - their_loss, their_norm, our_norm, changed)


def _trend_rows(checks: list[Check], asked: Grade) -> Iterator[TrendRow]:
    for check in checks:
        if check.kind is Kind.TREND:
            limit = None if asked is Grade.BITWISE else check.limit
            yield TrendRow(check.what, check.reference_error, check.candidate_error, limit, check.judged_steps)
