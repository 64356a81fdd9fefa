"""The private torch names this room leans on, each behind one small function with the reason for it.

A new torch release that moves one of them breaks this file and no other. Seen in torch 2.13, whose own FSDP2 leans on
the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor


def in_backward() -> bool:
    """Whether autograd is running on this thread; a forward that runs then is a recomputation.

    Why private: the public question, "is gradient mode on", has the same answer in both cases.
    """
    return bool(torch._C._current_graph_task_id() != -1)


def call_after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` once, when the backward that is now running has computed every gradient.

    Why private: hooks on tensors can't tell which of them is the last one of a backward.
    """
    Variable._execution_engine.queue_callback(callback)


def held_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """What is registered in `module` under `name`.

    Why private: `getattr` is the slow way round, and a class may answer it otherwise.
    """
    return module._parameters.get(name)


def swap_parameter(
    owners: Iterable[tuple[nn.Module, str]], old: nn.Parameter, new: nn.Parameter
) -> tuple[nn.Module, str] | None:
    """Register `new` wherever the owners, modules and names, hold `old`; return the first that holds something else.

    Why private: `setattr` checks and bookkeeping cost more than everything else in a switch of states. A class that
    keeps its own book of parameters in `__setattr__` still gets the call.
    """
    for module, name in owners:
        parameters = module._parameters
        if parameters.get(name) is not old:
            return module, name
        if type(module).__setattr__ is nn.Module.__setattr__:
            parameters[name] = new
        else:
            setattr(module, name, new)
    return None


def holds_shard(owner: tuple[nn.Module, str], param: nn.Parameter, local: torch.Tensor) -> bool:
    """Whether the owner holds `param`, a DTensor, and that lies in `local`.

    Why private: as above; this is asked of each parameter before each gather.
    """
    return owner[0]._parameters.get(owner[1]) is param and param._local_tensor is local  # type: ignore[attr-defined]


def local_shard(dtensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, itself and not a view of it.

    Why private: `to_local` is differentiable and costs 20 times as much; gradients and checks need neither.
    """
    assert isinstance(dtensor, DTensor)
    return dtensor._local_tensor


def shard_like(local: torch.Tensor, like: torch.Tensor) -> DTensor:
    """A DTensor placed as `like`, over `local` as it is.

    Why private: `DTensor.from_local` takes 40 us, and one is made per gradient and step; this takes 2. `__init__`,
    which does nothing but takes 3 more, is left out.
    """
    assert isinstance(like, DTensor)
    return DTensor.__new__(DTensor, local, like._spec, requires_grad=False)


def standalone(dtensor: DTensor) -> DTensor:
    """The same shard, in the same memory, as a DTensor whose storage begins and ends where it does.

    Why private: as above. A DTensor over a view takes its offset along and then looks as if it had memory of its own:
    torch 2.13 can neither copy nor save it; and what is saved of a view is all of what it is a view of.
    """
    local = dtensor._local_tensor
    if local.is_meta or local.untyped_storage().nbytes() == local.nbytes:
        return dtensor
    begin = local.storage_offset() * local.itemsize
    storage = local.untyped_storage()[begin : begin + local.nbytes]
    return shard_like(local.new_empty(0).set_(storage, 0, local.shape, local.stride()), dtensor)


def run_post_accumulate_hooks(param: nn.Parameter) -> None:
    """Run the hooks that `param.register_post_accumulate_grad_hook` registered.

    Why private: autograd runs them for the gradients that it accumulates itself; ours are set by hand.
    """
    for hook in (param._post_accumulate_grad_hooks or {}).values():
        hook(param)


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that autograd counts `tensor` as a view of; None if it is not one.

    Why private: a change in place rebuilds the graph of a view, and hooks on the old graph are lost.
    """
    return tensor._base


def writes_to(tensors: Iterable[torch.Tensor]) -> int:
    """How often `tensors` were written to, together.

    Why private: autograd keeps the count for its own checks; nothing public tells of a write.
    """
    return sum([tensor._version for tensor in tensors])


def set_local_shard(dtensor: torch.Tensor, local: torch.Tensor) -> None:
    """Put `local`, of the same shape and dtype, where the local tensor of a DTensor is.

    Why private: the object must stay, an optimizer holds it; the public way is a new one.
    """
    assert isinstance(dtensor, DTensor)
    dtensor._local_tensor = local


def detailed_debugging() -> bool:
    """Whether users ask torch for its slow checks of collectives, by `TORCH_DISTRIBUTED_DEBUG=DETAIL`."""
    return dist.get_debug_level() == dist.DebugLevel.DETAIL  # type: ignore[attr-defined]
