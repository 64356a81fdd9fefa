"""torch's own FSDP2 at its best: asynchronous gathers, each launched one group ahead, forward and backward.

By default torch gathers ahead on streams of a GPU, and on a CPU waits for every collective. Told explicitly what comes
next, it overlaps there too: the fair opponent on a link. What comes next is learned in the first forward.

Source: torch 2.13 `FSDPModule.set_modules_to_forward_prefetch` and `set_modules_to_backward_prefetch`.
Left out: asynchronous reductions, which torch does on streams only.
"""

from __future__ import annotations

from itertools import pairwise

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from common.baselines import torch_fsdp2
from common.job import JobConfig
from common.torch_private import gather_asynchronously


def parallelize(model: nn.Module, mesh: DeviceMesh | None, job: JobConfig) -> nn.Module:
    """Shard `model` in place as `torch_fsdp2` does, and let each group gather the one that is needed after it.

    Raises:
        EngineError, ConfigError, PlanError: see `torch_fsdp2.shard_groups`.
    """
    groups = torch_fsdp2.shard_groups(model, mesh, job)
    gather_asynchronously(model)
    _prefetch_in_order(model, [[model.get_submodule(name) for name in group.modules] for group in groups])
    return model


def _prefetch_in_order(model: nn.Module, groups: list[list[nn.Module]]) -> None:
    """Note in which order groups are needed in the first forward, and from then on gather each one ahead."""
    needed: dict[int, None] = {}
    hooks = [
        module.register_forward_pre_hook(lambda *_, number=number: needed.setdefault(number))
        for number, modules in enumerate(groups)
        for module in modules
    ]

    def tell_order(*_: object) -> None:
        for hook in hooks:
            hook.remove()
        for number, following in pairwise(needed):
            before, after = _sharded(groups[number]), _sharded(groups[following])
            for module in before:
                module.set_modules_to_forward_prefetch(after[:1])
            for module in after:
                module.set_modules_to_backward_prefetch(before[:1])

    hooks.append(model.register_forward_hook(tell_order))


def _sharded(modules: list[nn.Module]) -> list[FSDPModule]:
    return [module for module in modules if isinstance(module, FSDPModule)]
