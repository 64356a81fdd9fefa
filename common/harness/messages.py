"""What a pool and its workers say to each other, pickled, over one socket pair per worker.

    pool    Task                        Release
    worker        Progress* Finished             Idle
                  Progress* Failed

A worker starts with `Started`. `Release` comes when every rank has finished: a rank that closed its connections
earlier could cut off a peer that still reads. After `Failed` the worker waits for its end, its group still open.
"""

from __future__ import annotations

import pickle
import time
import traceback
from dataclasses import dataclass, field

from common.errors import ConfigError
from common.harness.rank import is_connection_error, one_line


@dataclass(frozen=True)
class Started:
    """A worker is up; `main_thread` is how its main thread is called in a stack dump."""

    main_thread: int


@dataclass(frozen=True)
class Task:
    """One call to make.

    Attributes:
        call: pickled `(function, arguments)`, unpickled only once `sys_path` is in force.
        ranks: world size of the group to join.
        store: path of the rendezvous file.
        timeout_s: what the pool grants the call.
        sys_path, environ, cwd: the caller's, so that the call finds what it would find there.
    """

    call: bytes
    ranks: int
    store: str
    timeout_s: float
    sys_path: tuple[str, ...]
    environ: dict[str, str]
    cwd: str


@dataclass(frozen=True)
class Finished:
    """The call returned; `result` is pickled."""

    result: bytes


@dataclass(frozen=True)
class Failed:
    """The call raised.

    Attributes:
        summary: exception type and message on one line.
        detail: the traceback.
        is_secondary: it only says that a connection to a peer broke.
        config_error: the pickled exception, if it is a `ConfigError`.
        at_s: when, on the clock that all processes of a machine share.
    """

    summary: str
    detail: str
    is_secondary: bool
    config_error: bytes | None
    at_s: float = field(default_factory=time.monotonic)

    @classmethod
    def from_exception(cls, error: BaseException) -> Failed:
        """Describe `error`, which is being handled."""
        return cls(
            summary=one_line(error),
            detail="".join(traceback.format_exception(error)),
            is_secondary=is_connection_error(error),
            config_error=_pickle_config_error(error),
        )


@dataclass(frozen=True)
class Died:
    """The worker is gone; the pool says so in its place. `how` reads on from "rank 1"."""

    how: str
    at_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Release:
    """All ranks have finished: leave the group."""


@dataclass(frozen=True)
class Idle:
    """The group is destroyed and the process clean again."""


def _pickle_config_error(error: BaseException) -> bytes | None:
    """A pickle of `error` that is known to load, or None if it is no `ConfigError`."""
    if not isinstance(error, ConfigError):
        return None
    try:
        payload = pickle.dumps(error)
        pickle.loads(payload)
    except Exception:  # a subclass whose constructor does not take its own args: its kind and text still count
        return pickle.dumps(ConfigError(str(error)))
    return payload
