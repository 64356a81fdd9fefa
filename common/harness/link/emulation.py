"""Turn the emulated link on and off inside a rank."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import ConfigError
from common.harness.link.board import futex_number
from common.harness.link.kernels import Kernels, Links
from common.harness.link.meter import Meter
from common.harness.link.spec import LinkChoice, LinkSpec
from common.torch_private import noted_factors, replaced_kernels

TIMEOUT_S = 300.0
ARENA_BYTES = 32 << 20

_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30


@contextmanager
def emulate(
    link: LinkChoice | LinkSpec, *, timeout_s: float = TIMEOUT_S, arena_bytes: int = ARENA_BYTES
) -> Iterator[Meter]:
    """Carry the CPU collectives of every gloo group over an emulated link, whichever front end calls them.

    It covers groups made before or inside the context, each a link of its own. All ranks of a group enter and leave
    together. On the way out what was never waited for is completed, gloo's kernels are back and the shared memory is
    gone; after an exception, or a failure of a link that was caught inside, nothing is waited for. For `gloo` nothing
    is done and the meter stays empty.

    Args:
        link: what it costs.
        timeout_s: how long to wait for a rank that does not join an operation.
        arena_bytes: shared memory per rank and group to begin with; more is made where messages need it.

    Raises:
        ConfigError: not on Linux, or a processor whose system calls are not known here.
        RankError: at an operation or on the way out, if another rank is gone or late.
    """
    choice = LinkChoice(str(link), "a link as given", link) if isinstance(link, LinkSpec) else link
    if choice.across is None:
        yield Meter()
        return
    if futex_number() is None:
        uname = os.uname()
        raise ConfigError(
            f"link: the emulated link needs Linux on x86_64 or aarch64, found {uname.sysname} on {uname.machine}; "
            "use --link gloo"
        )
    links = Links(choice, timeout_s=timeout_s, arena_bytes=arena_bytes)
    failed = True
    with noted_factors() as factor, replaced_kernels("c10d", Kernels(links, factor).table()), _exact_sleeps():
        try:
            yield links.meter
            failed = False
        finally:
            links.close(failed=failed)


@contextmanager
def _exact_sleeps() -> Iterator[None]:
    """Let this thread's sleeps end within microseconds; the kernel by default adds 50, to wake fewer times."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = libc.prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0)
    libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_TIMERSLACK, before, 0, 0, 0)
