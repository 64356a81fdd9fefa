"""The judge on trial: faults are planted one at a time, and it has to catch each, by the right check, with its cause.

1. The healthy engines run on each job that is needed, and have to pass.
2. Each fault is planted in a run of its own, which is judged as `compare` judges: against a single process, against
   another engine, and its collectives against the plan's; and besides against the healthy run of its engine, for bytes
   and for what its messages travel beside.
3. It is caught if the check that is meant for it finds something, and names the cause; one that was never reached, or
   that ends the ranks, proves nothing and counts as missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bench import judge
from common.errors import RankError
from common.harness.launch import Ranks
from common.harness.selftest.faults import Check, Fault, job_of
from common.harness.selftest.healthy import Finding, against_healthy
from common.harness.selftest.run import Trial, try_engine
from common.job import JobConfig

ENGINES = ("eager", "compiled", "torch-fsdp2")
"""Those that faults can be planted in."""
_REFERENCE = "single"
_OTHERS = {"eager": "compiled", "compiled": "eager", "torch-fsdp2": "eager"}


@dataclass(frozen=True)
class Verdict:
    """What became of one fault in one engine; of no fault, whether the healthy engine passes.

    Attributes:
        fault: None for the healthy engine.
        engine: where.
        job: what was trained.
        findings: all that the judge found.
        problem: why the fault was not put to the test, if it was not.
    """

    fault: Fault | None
    engine: str
    job: JobConfig
    findings: tuple[Finding, ...]
    problem: str = ""

    @property
    def caught_by(self) -> tuple[Check, ...]:
        """The checks that found something."""
        return tuple(dict.fromkeys(finding.check for finding in self.findings))

    @property
    def named(self) -> Finding | None:
        """The finding of the check that is meant for the fault, with its cause; None if there is none."""
        fault = self.fault
        if fault is None:
            return None
        meant = [each for each in self.findings if each.check is fault.caught_by]
        return next((each for each in meant if self.cause in each.cause), None)

    @property
    def cause(self) -> str:
        """What has to be named."""
        return "" if self.fault is None else self.fault.cause.replace("LAST", str(self.job.ranks - 1))

    @property
    def holds(self) -> bool:
        """Whether the judge did what it should."""
        if self.problem:
            return False
        return not self.findings if self.fault is None else self.named is not None

    @property
    def why(self) -> str:
        """Why it does not hold; "" if it does."""
        if self.holds:
            return ""
        if self.problem:
            return self.problem
        if self.fault is None:
            return "; ".join(finding.what for finding in self.findings)
        if self.fault.caught_by not in self.caught_by:
            found = ", ".join(self.caught_by) or "nothing"
            return f"expected {self.fault.caught_by} to catch it, found {found}"
        causes = [finding.cause for finding in self.findings if finding.check is self.fault.caught_by and finding.cause]
        return f"expected a cause with {self.cause!r}, found {' | '.join(causes) or 'none'}"


def run_all(test: SelfTest, faults: Iterable[Fault], engines: Sequence[str]) -> list[Verdict]:
    """Each of `engines` healthy on each job that is needed, then each fault in each engine that can have it."""
    pairs = [(fault, engine) for fault in faults for engine in engines if engine in fault.plants]
    needed = dict.fromkeys((engine, fault.job) for fault, engine in pairs)
    healthy = [test.judge_healthy(engine, job) for engine, job in needed]
    return healthy + [test.judge_fault(fault, engine) for fault, engine in pairs]


class SelfTest:
    """Runs engines on jobs, healthy ones once, and judges them.

    Args:
        ranks: where.
        world_size: of every job but those that need more, see `job_of`.
        timeout_s: for one run.
        on_run: told what runs next.
    """

    def __init__(
        self, ranks: Ranks, world_size: int, *, timeout_s: float, on_run: Callable[[str], None] = lambda what: None
    ) -> None:
        self._ranks, self._world_size = ranks, world_size
        self._timeout_s, self._on_run = timeout_s, on_run
        self._healthy: dict[tuple[str, str], Trial] = {}

    def healthy(self, engine: str, job: str) -> Trial:
        """`engine`, or a run that judging takes, on the job called `job`."""
        key = (engine, job)
        if key not in self._healthy:
            self._on_run(f"{engine}, healthy, {job}")
            plain = self._job(job)
            self._healthy[key] = try_engine(
                self._ranks,
                judge.engine_of(engine),
                judge.judging_jobs(plain).get(engine, plain),
                timeout_s=self._timeout_s,
            )
        return self._healthy[key]

    def judge_healthy(self, engine: str, job: str) -> Verdict:
        """Whether the healthy engine passes."""
        return Verdict(None, engine, self._job(job), tuple(self._findings(engine, job, self.healthy(engine, job))))

    def judge_fault(self, fault: Fault, engine: str) -> Verdict:
        """What the judge makes of `fault`, planted in `engine`."""
        self._on_run(f"{engine}, {fault.name}")
        try:
            trial = try_engine(self._ranks, engine, self._job(fault.job), fault.name, timeout_s=self._timeout_s)
        except RankError as error:
            return Verdict(fault, engine, self._job(fault.job), (), f"ended the ranks: {error}")
        if not trial.hits:
            return Verdict(fault, engine, self._job(fault.job), (), "not planted: what it replaces was never called")
        return Verdict(fault, engine, self._job(fault.job), tuple(self._findings(engine, fault.job, trial)))

    def _job(self, name: str) -> JobConfig:
        return job_of(name, self._world_size)

    def _findings(self, engine: str, job: str, trial: Trial) -> Iterable[Finding]:
        if trial.run is None:
            yield Finding(Check.CONTRACT, trial.refusal, trial.refusal)
            return
        against = (_REFERENCE, _OTHERS[engine])
        names = (*against, *judge.judging_jobs(self._job(job)))
        runs = {name: run for name in names if (run := self.healthy(name, job).run) is not None}
        for report in judge.judge([(name, engine) for name in against], runs | {engine: trial.run}):
            if not report.passed:
                check = Check.GRADE if report.trends else Check.SHAPE
                yield Finding(check, "; ".join(report.reasons[:1]), "; ".join(report.causes[:1]))
        for what, cause in judge.collective_failures(engine, trial.run[0]):
            yield Finding(Check.COLLECTIVES, what, cause)
        yield from against_healthy(trial, self.healthy(engine, job))
