"""Optimizers that hold parameters as they were before sharding: they would run, and never train.

Counterpart: none; the compiled engine keeps the user's parameters.
Source: the FSDP2 tutorial, which says to build the optimizer after `fully_shard`; torch does not check it.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

from torch.optim import Optimizer

from common.errors import EngineError
from fsdp_eager.param import FSDPParam


def check_optimizers(params: Sequence[FSDPParam]) -> None:
    """Refuse optimizers that hold what `params` have replaced.

    What nobody holds is gone by now, so in a correct program there is nothing to look for.

    Raises:
        EngineError: there is such an optimizer.
    """
    replaced = {id(old): param.name for param in params for ref in param.replaced if (old := ref()) is not None}
    if not replaced:
        return
    for thing in gc.get_objects():
        if isinstance(thing, Optimizer):
            _check(thing, replaced)


def _check(optimizer: Optimizer, replaced: dict[int, str]) -> None:
    names = [replaced[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in replaced]
    if names:
        raise EngineError(
            f"optimizer {type(optimizer).__name__}: holds {len(names)} parameters as they were before sharding, such "
            f"as {names[0]}, and would never train the model; build it after fully_shard, and after "
            "load_state_dict(assign=True)"
        )
