"""The gradients of one group, from where autograd leaves them to `.grad` of the shards.

Counterpart: fsdp_compiled/reduction.py, where they are nodes of the backward.
Source: torch 2.13 `_fsdp_param_group.py` (`post_backward`) and `_fsdp_collectives.py` (`foreach_reduce`). Differs: what
was accumulated or reduced in part is kept for each parameter, so that steps may use different ones.

One group's gradients, in phases:

    1  take      from autograd, with what earlier backwards left (`accumulate`)
    2  pack      into one message
    3  scatter   reduce over the ranks that share a model
    4  replicas  hybrid sharding only: reduce over the ranks that hold the same shard, or keep for later
    5  accept    divide, cast to the parameter's dtype, set or add to `.grad`

Each of 3 and 4 is launched and waited for by the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from common.gradient import Reduction, Transport, plan_reduction
from fsdp_eager.collectives import (
    Message,
    PendingReduction,
    launch_all_reduce,
    launch_reduce_scatter,
    pack_gradients,
)
from fsdp_eager.param import FSDPParam
from fsdp_eager.torch_private import local_shard

Gradients = list[tuple[FSDPParam, Tensor]]


@dataclass
class ReductionSwitches:
    """What users set on a group about its gradients, each by a method of `FSDPModule`.

    Attributes:
        reduce: reduce in backward; else accumulate whole gradients on this rank.
        all_reduce: with hybrid sharding, reduce over replicas too; else accumulate shards.
        reduce_unused: parameters without a gradient take part with zeros, so that ranks that use different
            parameters send messages of one size.
        divide_factor: what the sum over ranks is divided by; None: their number.
        force_sum: native collectives sum and never average.
        hook: called with the reduced shard, 1D, before phase 5.
        separate_group: what gradients are reduced over instead of the group of the gathers.
    """

    reduce: bool = True
    all_reduce: bool = True
    reduce_unused: bool = False
    divide_factor: float | None = None
    force_sum: bool = False
    hook: Callable[[Tensor], None] | None = None
    separate_group: dist.ProcessGroup | None = None


class GradientReducer:
    """The way of one group's gradients.

    Attributes:
        switches: may change at any time.
        reduce_dtype: in which gradients travel.
    """

    def __init__(
        self,
        params: Sequence[FSDPParam],
        *,
        shard_group: dist.ProcessGroup,
        replica_group: dist.ProcessGroup | None,
        reduce_dtype: torch.dtype,
        transport: Transport,
        backend: str,
    ) -> None:
        """Reduce the gradients of `params`.

        Args:
            params: in registration order.
            shard_group: the ranks that share a model.
            replica_group: those that hold the same shard, if there are replicas.
            reduce_dtype: in which gradients travel.
            transport: how they travel.
            backend: name of the backend that carries them.
        """
        self.switches = ReductionSwitches()
        self._params = params
        self._shard_group, self._replica_group = shard_group, replica_group
        self.reduce_dtype = reduce_dtype
        self._transport, self._backend = transport, backend
        self._accumulated: dict[FSDPParam, Tensor] = {}  # whole gradients that were not reduced
        self._partial: dict[FSDPParam, Tensor] = {}  # 1D shards that were not reduced over replicas

    def accumulate(self) -> None:
        """Keep the whole gradients that autograd left, in the dtype in which they will travel."""
        for param in self._params:
            grad = param.take_gradient()
            if grad is not None:
                self._accumulate(param, grad)

    def take(self) -> Gradients:
        """Phase 1: hand out gradients; unused and frozen parameters have none."""
        taken: Gradients = []
        for param in self._params:
            grad = param.take_gradient()
            if param in self._accumulated:
                if grad is not None:
                    self._accumulate(param, grad)
                grad = self._accumulated.pop(param)
            if grad is None and self._owes(param):
                grad = torch.zeros_like(param.unsharded_param, memory_format=torch.contiguous_format)
            if grad is not None:
                taken.append((param, grad))
        return taken

    def drop(self) -> None:
        """Forget all gradients that did not get to `.grad`."""
        self._accumulated.clear()
        self._partial.clear()
        for param in self._params:
            param.take_gradient()

    def pack(self, gradients: Gradients) -> Message:
        """Phase 2. Empties the list, so that the memory is free before more is asked for."""
        cuts = [param.cut for param, _ in gradients]
        grads = [grad for _, grad in gradients]
        gradients.clear()
        size = self._group.size()
        keeps_own = size == 1 or self._plan().transport is Transport.ORDERED
        return pack_gradients(grads, cuts, size, self.reduce_dtype, keep=self._group.rank() if keeps_own else None)

    def launch(self, params: Sequence[FSDPParam], message: Message) -> InFlight:
        """Phase 3, as the switches are now."""
        reduction = self._plan()
        pending = launch_reduce_scatter(message, self._group, reduction)
        return InFlight(params, pending, reduction, self.switches.all_reduce, self.switches.hook)

    def advance(self, flight: InFlight) -> bool:
        """Wait for phase 3 and launch phase 4; say whether there is one."""
        total = flight.pending.wait()
        flight.pending = PendingReduction(total)
        if self._replica_group is None:
            return False
        pieces = total.split([param.cut.chunk_numel for param in flight.params])
        for param, piece in zip(flight.params, pieces, strict=True):
            if (before := self._partial.pop(param, None)) is not None:
                piece.add_(before)
        if not flight.all_reduce:
            self._partial.update(zip(flight.params, pieces, strict=True))
            flight.params = ()
            return False
        flight.pending = launch_all_reduce(total, self._replica_group, flight.reduction)
        return True

    def accept(self, flight: InFlight) -> None:
        """Wait for phase 4, and do phase 5: parts of one buffer become `.grad` of the shards."""
        if not flight.params:
            return
        total = flight.pending.wait()
        if flight.hook is not None:
            flight.hook(total)
        if flight.reduction.postdivide not in (None, 1.0):
            total.div_(flight.reduction.postdivide)
        shard = local_shard(flight.params[0].sharded_param)
        total = total.to(shard.dtype).to(shard.device)
        pieces = total.split([param.cut.chunk_numel for param in flight.params])
        for param, piece in zip(flight.params, pieces, strict=True):
            param.accept_gradient(piece)

    @property
    def _group(self) -> dist.ProcessGroup:
        return self.switches.separate_group or self._shard_group

    def _plan(self) -> Reduction:
        return plan_reduction(
            world_size=self._shard_group.size(),
            replicas=self._replica_group.size() if self._replica_group is not None else 1,
            reduce_dtype=self.reduce_dtype,
            backend=self._backend,
            transport=self._transport,
            divide_factor=self.switches.divide_factor,
            force_sum=self.switches.force_sum,
        )

    def _accumulate(self, param: FSDPParam, grad: Tensor) -> None:
        before = self._accumulated.get(param)
        if before is None:
            self._accumulated[param] = grad.to(self.reduce_dtype)
        else:
            before.add_(grad)

    def _owes(self, param: FSDPParam) -> bool:
        """Whether a parameter without a gradient takes part: other ranks may have one, or part of one is kept."""
        return (self.switches.reduce_unused and param.sharded_param.requires_grad) or param in self._partial


@dataclass
class InFlight:
    """A reduction between phases 3 and 5.

    Attributes:
        params: whose gradients travel; empties when they are kept for later.
        pending: what to wait for.
        reduction: the arithmetic.
        all_reduce: whether there is a phase 4, if there are replicas.
        hook: called before phase 5.
    """

    params: Sequence[FSDPParam]
    pending: PendingReduction
    reduction: Reduction
    all_reduce: bool
    hook: Callable[[Tensor], None] | None
