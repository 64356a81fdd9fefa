"""The exception tree: every error a user can cause, and the exit code it ends in.

    ParityError                     anything this project raises on purpose
    ├── ConfigError      (exit 2)   a wrong option, model, engine or job
    │   ├── PlanError               a bucket plan that does not fit the model
    │   └── DataError               a data file that cannot be read or is too short
    ├── EngineError      (exit 3)   an engine could not do what the job asked (inside a rank)
    │   └── PassError               a graph pass did less than the plan says
    └── RankError        (exit 3)   a rank raised, died or hung
        └── RankTimeout             ... by not finishing within the timeout

Each message names what was expected, what was found and the way out.
"""

from __future__ import annotations


class ParityError(Exception):
    """Base of all errors raised on purpose; `exit_code` is what the command line returns for it."""

    exit_code = 3


class ConfigError(ParityError):
    """A job that cannot be run as written: a wrong option, an unknown model or engine."""

    exit_code = 2


class PlanError(ConfigError):
    """A bucket plan that names no module, or groups parameters in a way an engine cannot keep."""


class DataError(ConfigError):
    """A data source that cannot be read, or holds less text than one batch needs."""


class EngineError(ParityError):
    """An engine was asked for something that it cannot do, or found its own contract broken."""


class PassError(EngineError):
    """A graph pass did less than the bucket plan asks; a silent no-op is never accepted."""


class RankError(ParityError):
    """A rank raised or died.

    Args:
        message: one line naming the rank and what happened.
        rank: the first rank that failed.
        detail: its traceback or stack, as text; may be empty.
    """

    def __init__(self, message: str, *, rank: int, detail: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.detail = detail

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_rank_error, (type(self), str(self), self.rank, self.detail)


class RankTimeout(RankError):
    """A rank did not finish within the timeout."""


def _rebuild_rank_error(cls: type[RankError], message: str, rank: int, detail: str) -> RankError:
    return cls(message, rank=rank, detail=detail)


class Terminated(SystemExit):
    """SIGTERM has come; told apart from an exit that a user's code asks for."""
