"""Optimizers that hold parameters as they were before sharding: they would run, and never train.

Counterpart: none; the compiled engine keeps the user's parameters.
Source: the FSDP2 tutorial, which says to build the optimizer after `fully_shard`; torch does not check it.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

from torch.optim import Optimizer

from common.errors import EngineError
from fsdp_eager.param import FSDPParam


def check_optimizers(params: Sequence[FSDPParam]) -> None:
    """Refuse optimizers that hold, instead of the shards of `params`, what was there before or is there at times.

    Raises:
        EngineError: there is such an optimizer.
    """
    wrong = {id(old): param.name for param in params for ref in param.replaced if (old := ref()) is not None}
    wrong |= {id(param.unsharded_param): param.name for param in params}
    if not _holders(wrong):
        return
    gc.collect()  # one that is no longer used may wait for this
    for title, names in _holders(wrong):
        raise EngineError(
            f"optimizer {title}: holds {len(names)} parameters as they were before sharding, or while they were whole, "
            f"such as {names[0]}, and would never train the model; build it after fully_shard and "
            "load_state_dict(assign=True), and not between unshard and reshard"
        )


def _holders(wrong: Mapping[int, str]) -> list[tuple[str, list[str]]]:
    """Optimizers that hold a parameter whose id is in `wrong`: the name of the class, and what `wrong` calls them."""
    found = []
    for thing in gc.get_objects():
        if issubclass(type(thing), Optimizer):  # a dead weak proxy cannot be asked for its class
            names = [wrong[id(held)] for group in thing.param_groups for held in group["params"] if id(held) in wrong]
            found += [(type(thing).__name__, names)] if names else []
    return found
