"""What a sharded module can be told: the methods of `FSDPModule`, with FSDP2's names and meaning.

Counterpart: none yet; a traced graph has most of these decided when it is built.
Source: torch 2.13 `_fully_shard.py`, class `FSDPModule`. Differs: a divide factor works on every backend, and for a
whole tree if asked; `log_schedule` and `set_max_all_gathers` have no model there.
Left out, each an error that says so: `set_custom_all_gather`, `set_custom_reduce_scatter`,
`set_allocate_memory_from_process_group_for_comm` and `set_symm_mem_for_comm`, which choose NCCL's buffers; a stream for
`set_all_reduce_hook`; `backward(create_graph=True)`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.errors import EngineError
from fsdp_eager.bucket import FSDPParamGroup
from fsdp_eager.param import ShardedState
from fsdp_eager.schedule import EventLog, Schedule
from fsdp_eager.state import FSDPState


def _left_out(name: str) -> Callable[..., NoReturn]:
    """What stands in the place of something of FSDP2's that this engine lacks."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise EngineError(
            f"{name} is left out of this engine; it is in torch.distributed.fsdp, see fsdp_eager/module.py"
        )

    return refuse


class UnshardHandle:
    """A gather that `FSDPModule.unshard` launched."""

    def __init__(self, module: FSDPModule) -> None:
        self._module: FSDPModule | None = module

    def wait(self) -> None:
        """Finish the gather, if nobody did; the module holds whole parameters from here on."""
        module, self._module = self._module, None
        if module is not None:
            module._finish_gathers()


class FSDPModule(nn.Module):
    """What a sharded module is an instance of, besides its own class.

    Methods with `recurse` hold for all sharded modules inside as well, unless it is False.
    """

    fsdp_state: FSDPState

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance of the original class: a slice of a sharded `nn.Sequential` is a plain one."""
        original = next(base for base in cls.__bases__ if base is not FSDPModule)
        return original(*args, **kwargs)

    def __deepcopy__(self, memo: object) -> FSDPModule:
        """Refuse: a copy would share buffers, hooks and process group with the original."""
        raise EngineError(
            f"{type(self).__name__}: a sharded module cannot be copied; copy it before sharding, or use its state_dict"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse: what is pickled would lack the process group."""
        raise EngineError(f"{type(self).__name__}: a sharded module cannot be pickled; save its state_dict")

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Convert shards, as `.to`, `.half` and `.to_empty` ask for; the next gather takes them over."""
        self.reshard()
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    # Whole parameters

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this module's groups now; `reshard`, or the end of a step, gives them back.

        Args:
            async_op: only launch the gathers, and return what waits for them; a forward waits by itself.
        """
        schedule = self._schedule()
        for group in self._groups(recurse=False):
            if async_op:
                schedule.launch(group)
            else:
                schedule.unshard(group, refresh=True)
        return UnshardHandle(self) if async_op else None

    def reshard(self) -> None:
        """Hold shards and free the whole parameters of this module's groups."""
        schedule = self._schedule()
        for group in self._groups(recurse=False):
            schedule.discard(group)
            schedule.reshard(group)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Free whole parameters after forward, or keep them for backward; for the root too, None or not.

        Raises:
            EngineError: no bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise EngineError(f"reshard_after_forward: expected a bool, found {reshard_after_forward!r}")
        for group in self._groups(recurse=recurse):
            group.switches.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Free whole parameters after backward, or keep them for the next micro-batch.

        A forward that finds the shards changed since gathers again. A change that one rank makes alone, to what
        `to_local()` gave it, is not seen.
        """
        for group in self._groups(recurse=recurse):
            group.switches.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Say whether backward needs this module's parameters; that of an embedding does not."""
        for group in self._groups(recurse=False):
            group.switches.unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """When this module's forward begins, launch the gathers of these, in the place of what came next last time."""
        self.fsdp_state.forward_prefetch = _states(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """When this module's backward begins, launch the gathers of these, in the place of what comes next."""
        self.fsdp_state.backward_prefetch = _states(modules)

    def set_max_all_gathers(self, limit: int | None) -> None:
        """Launch no gather ahead of its use while so many are in flight in the whole model; None: no limit.

        Raises:
            EngineError: less than 1.
        """
        if limit is not None:
            _check_positive("limit", limit)
        self.fsdp_state.switches.max_gathers = limit

    # Gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Reduce gradients in backward, or accumulate whole ones on this rank, in `reduce_dtype`."""
        for group in self._groups(recurse=recurse):
            group.reducer.switches.reduce = requires_gradient_sync
            group.reducer.switches.all_reduce = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """With hybrid sharding, reduce over replicas, or accumulate this rank's shard of the gradients."""
        for group in self._groups(recurse=recurse):
            group.reducer.switches.all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the next backward is the last before the optimizer; others leave reductions in flight."""
        self.fsdp_state.switches.is_last_backward = is_last_backward

    def set_gradient_divide_factor(self, factor: float, *, recurse: bool = False) -> None:
        """Divide the sum over all ranks by `factor`, in the place of their number.

        Raises:
            EngineError: not a positive number.
        """
        if not factor > 0 or factor == float("inf"):
            raise EngineError(f"gradient divide factor: expected a positive number, found {factor!r}")
        for group in self._groups(recurse=recurse):
            group.reducer.switches.divide_factor = float(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Let native collectives sum and never average; the division is a step of its own."""
        for group in self._groups(recurse=False):
            group.reducer.switches.force_sum = enable

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Let parameters without a gradient take part with zeros: needed where ranks use different ones."""
        for group in self._groups(recurse=recurse):
            group.reducer.switches.reduce_unused = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Hold as many messages of gradients at once, in the whole model; `recurse` is there for FSDP2's callers.

        Raises:
            EngineError: less than 1.
        """
        _check_positive("max_input_buffers", max_input_buffers)
        self.fsdp_state.switches.max_messages = max_input_buffers

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Reduce over a process group of its own, so that gathers and reductions may overlap; all ranks call it."""
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for group in self._groups(recurse=recurse):
            ranks = tuple(group.shard_ranks)
            if enable and ranks not in made:
                made[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
            group.reducer.switches.separate_group = made[ranks] if enable else None

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: object = None) -> None:
        """Call `hook` with the reduced shard of each of this module's groups, 1D, before it is cast.

        What it is given is the mean where the backend averages, else a sum that is divided afterwards.

        Raises:
            EngineError: a stream; it runs where reductions do.
        """
        if stream is not None:
            raise EngineError(
                "set_all_reduce_hook: a stream of one's own is left out; the hook runs where reductions do"
            )
        for group in self._groups(recurse=False):
            group.reducer.switches.hook = hook

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next gather wait for `event`, once, and not for all that compute was given before it."""
        self.fsdp_state.switches.after_optimizer = event

    def reset_iter_state(self) -> None:
        """Drop a step that raised: its gradients, also those accumulated, and its whole parameters.

        The next forward does so by itself after a backward that raised.

        Raises:
            EngineError: a module inside the root.
        """
        root = self.fsdp_state.root
        if root is None:
            return  # no step has begun
        if root.module_state is not self.fsdp_state:
            name = type(root.module_state.module).__name__
            raise EngineError(f"reset_iter_state: {type(self).__name__} is not the root; call it on the {name}")
        root.abandon_step()

    set_custom_all_gather = _left_out("set_custom_all_gather")
    set_custom_reduce_scatter = _left_out("set_custom_reduce_scatter")
    set_allocate_memory_from_process_group_for_comm = _left_out("set_allocate_memory_from_process_group_for_comm")
    set_symm_mem_for_comm = _left_out("set_symm_mem_for_comm")

    # What all of these use

    def log_schedule(self, log: EventLog | None) -> None:
        """Tell `log` of each launch, wait and free in the whole model from now on; None ends it."""
        self.fsdp_state.switches.log = log

    def _groups(self, *, recurse: bool) -> Iterator[FSDPParamGroup]:
        for module in self.modules() if recurse else (self,):
            if isinstance(module, FSDPModule):
                yield from (state.group for state in module.fsdp_state.groups)

    def _finish_gathers(self) -> None:
        schedule = self._schedule()
        for group in self._groups(recurse=False):
            if group.state is ShardedState.GATHERING:
                schedule.unshard(group)

    def _schedule(self) -> Schedule:
        """The model's schedule; before the first forward, when nobody knows what the model is, one of its own."""
        if self.fsdp_state.root is not None:
            return self.fsdp_state.root.schedule
        state = self.fsdp_state
        return Schedule([item.group for item in state.groups], state.device, state.switches)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of `module` be a forward: parameters are whole while it runs. Nothing happens if it is not sharded.

    Raises:
        EngineError: no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise EngineError(f"{type(module).__name__} has no method {method_name!r}")

    @functools.wraps(method)
    def between_hooks(*args: Any, **kwargs: Any) -> Any:
        return module.fsdp_state.run(method, args, kwargs)

    setattr(module, method_name, between_hooks)


share_comm_ctx = _left_out("share_comm_ctx")


def _states(modules: Sequence[FSDPModule]) -> list[FSDPState]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise EngineError(f"prefetch: expected sharded modules, found {type(module).__name__}; shard it first")
    return [module.fsdp_state for module in modules]


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise EngineError(f"{name}: expected a whole number from 1 on, found {value!r}")
