"""How a fault is put in: one name of one module is replaced while one run lasts, and put back whatever happens.

Engines know nothing of it. Code is named, not imported, as engines are: "package.module:function" or
"package.module:Class.method". What stands in for it tells the scene each time it does something wrong, so that a fault
which was never reached is not taken for one that nobody noticed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Scene:
    """One run with a fault, on one rank.

    Attributes:
        rank, ranks: this rank and how many there are.
        hits: how often the fault did something.
        kept: what it wants to remember from step to step.
    """

    rank: int
    ranks: int
    hits: int = 0
    kept: dict[Any, Any] = field(default_factory=dict)

    @property
    def is_last(self) -> bool:
        """Whether this is the last rank, which holds padding and what is left over."""
        return self.rank == self.ranks - 1

    def hit(self) -> None:
        """Note that the fault does something now."""
        self.hits += 1


Act = Callable[[Scene, Callable[..., Any]], Callable[..., Any]]
"""Makes what stands in for a function, given the scene and the function."""


@dataclass(frozen=True)
class Plant:
    """One replacement: what is at `at` gives way to what `act` makes of it."""

    at: str
    act: Act


@contextmanager
def planted(plants: tuple[Plant, ...], scene: Scene) -> Iterator[None]:
    """Run the block with `plants` in place."""
    with ExitStack() as stack:
        for plant in plants:
            stack.enter_context(_replaced(plant, scene))
        yield


@contextmanager
def _replaced(plant: Plant, scene: Scene) -> Iterator[None]:
    owner, name = find(plant.at)
    original = getattr(owner, name)
    was_own = name in vars(owner)
    setattr(owner, name, functools.wraps(original)(plant.act(scene, original)))
    try:
        yield
    finally:
        if was_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def find(place: str) -> tuple[Any, str]:
    """What holds the name that `place` ends in, and that name."""
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module)), name


def named(place: str) -> Any:
    """What is at `place`."""
    owner, name = find(place)
    return getattr(owner, name)
