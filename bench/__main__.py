"""The command line, `fsdp-parity` or `python -m bench`: calls a command and turns what comes of it into an exit code.

    0    parity holds (`compare`, `show`), or the command did what it says
    1    parity does not hold
    2    wrong usage or configuration: one line on stderr
    3    a rank crashed or hung, or this program failed
    130  interrupted
    143  ended by SIGTERM

Left out of the imports at the top: torch and all that needs it, so that a Python or torch too old for them is told in
one line.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from common.errors import Terminated

INTERRUPTED, TERMINATED = 130, 143
OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; `argv` is that of the process if not given. Returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    try:
        if lacking := lacking_software():
            print(f"fsdp-parity: {lacking}", file=sys.stderr)
            return 2
        from bench.commands import run

        with _cleaning_up_on_sigterm():
            return run(words)
    except KeyboardInterrupt:
        print("fsdp-parity: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Terminated:
        print("fsdp-parity: ended by SIGTERM", file=sys.stderr)
        raise
    except Exception:
        # Python's own exit code for this is 1, which here says that parity does not hold.
        traceback.print_exc()
        return 3


@contextmanager
def _cleaning_up_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the body as an error does, so that ranks and temporary folders go.

    Not for ranks of torchrun, which have to end at once, whatever they wait in.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        yield
        return
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(*_: object) -> None:
    raise Terminated(TERMINATED)


def lacking_software() -> str | None:
    """What is missing or too old to run any command, on one line with the way out; None if nothing."""
    if sys.version_info < OLDEST_PYTHON:
        return f"needs Python {_dotted(OLDEST_PYTHON)} or newer, found {sys.version.split()[0]}; install a newer one"
    way_out = "install it with: pip install -c constraints.txt -e ."
    for package in ("torch", "pandas", "rich"):
        try:
            found = version(package)
        except PackageNotFoundError:
            return f"needs the package {package}, which is not installed; {way_out}"
        numbers = tuple(int(number) for number in re.findall(r"\d+", found)[:2])
        if package == "torch" and numbers < OLDEST_TORCH:
            return f"needs torch {_dotted(OLDEST_TORCH)} or newer, found {found}; {way_out}"
    return None


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


if __name__ == "__main__":
    sys.exit(main())
