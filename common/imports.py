"""Import what a user names: an engine or a model, from the installed packages or the working directory."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from common.errors import ConfigError, Terminated


def import_named(path: str, *, what: str, way_out: str) -> ModuleType:
    """The module called `path`; what it raises itself is passed on.

    An installed command, unlike `python -m`, does not look in the working directory by itself.

    Args:
        path: dotted.
        what: the beginning of the message if there is no such module.
        way_out: its end.

    Raises:
        ConfigError: no such module, or none of a package above it.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not (path == error.name or path.startswith(error.name + ".")):
            raise  # the module exists; something it imports does not
        raise ConfigError(f"{what}: no module {error.name!r}{way_out}") from None


@contextmanager
def refusing_exits() -> Iterator[None]:
    """Where a user's code runs: an exit that it asks for ends nothing but this.

    Without it a script named as an engine, or a `sys.exit(0)` in a model, would end a comparison with success.

    Raises:
        ConfigError: in the place of SystemExit, but for the one that a signal brings.
    """
    try:
        yield
    except Terminated:
        raise
    except SystemExit as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"the code of a model or engine calls for an exit, at {where.filename}:{where.lineno}; "
            'keep what a script does under if __name__ == "__main__"'
        ) from error
