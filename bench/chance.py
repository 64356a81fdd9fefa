"""Find a forward that draws random numbers, such as functional dropout, which no look at the modules shows.

The forward runs once on the meta device, which has shapes and no numbers: it costs no memory, and time only by the
number of operators.

The loss is looked at with it.

Left out: a forward that cannot run there, since it looks at numbers; numbers that do not come from torch. An operator
that gets a generator of its own draws the same on every engine and is let through.
"""

from __future__ import annotations

import traceback
from contextlib import suppress
from typing import Any

import torch
from torch.func import functional_call

from common.harness.workload import Workload
from common.task import map_tensors
from common.torch_private import TorchDispatchMode, named_arguments


def find_draw(workload: Workload) -> str | None:
    """The first operator with which forward or loss draws from torch's global generator, and where; or None."""
    model = workload.model
    on_meta = {name: _to_meta(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    inputs, targets = map_tensors(workload.share(step=0, ranks=workload.job.batch), lambda tensor, _: _to_meta(tensor))
    draws = _Draws()  # type: ignore[no-untyped-call]
    # what it raises is not ours to tell: it needs numbers, or is wrong, and then fails again in the trial
    with draws, torch.no_grad(), torch.random.fork_rng(devices=[]), suppress(Exception):
        workload.loss_of(lambda *args, **kwargs: functional_call(model, on_meta, args, kwargs), inputs, targets)
    return draws.first


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


class _Draws(TorchDispatchMode):
    """Remembers the first operator that draws."""

    first: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.first is None and torch.Tag.nondeterministic_seeded in func.tags:
            given = named_arguments(func, args, kwargs or {})
            if given.get("generator") is None and given.get("dropout_p") != 0:
                self.first = f"{func.overloadpacket} {_place()}"
        return func(*args, **(kwargs or {}))


def _place() -> str:
    """The innermost line of the stack that is neither torch's nor ours."""
    torch_folder = torch.__file__.removesuffix("__init__.py")
    frames = reversed(traceback.extract_stack())
    frame = next(f for f in frames if f.filename != __file__ and not f.filename.startswith(torch_folder))
    return f"({frame.filename}:{frame.lineno})"
