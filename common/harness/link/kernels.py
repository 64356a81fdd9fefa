"""The kernels that stand in for gloo's while a link is emulated: arguments in, a collective called, a work handle out.

[Note: futures]
A work's `wait` completes it, and nothing else does: its future is not done, and `is_completed` false, before. Whoever
waits for the future alone would wait for ever. `DistributedDataParallel` does, at the end of a backward, for the
all-reduces that it or its hook issued in that backward. So an all-reduce that is issued in a backward is waited for at
the end of it, in a callback queued before DDP's own; one that is issued by a callback at that end, at once.

Left out: point to point (`send`, `recv`), which is refused: no engine uses it, and a message that cost nothing would be
a lie; `monitored_barrier`, a diagnosis, stays gloo's; chains of futures that issue more (PowerSGD hooks).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common import torch_private
from common.errors import ConfigError, EngineError
from common.harness.link import collectives
from common.harness.link.link import Link
from common.harness.link.meter import Meter, Operation
from common.harness.link.reductions import ReduceOp
from common.harness.link.spec import LinkChoice
from common.mesh import backend_of

Boxed = Any
"""A group, reduction or work as kernels get and give it."""

_REFUSED = ("send", "recv_", "recv_any_source_", "gather_into_tensor_")
"""Operators that a link does not carry; the last is of torch 2.14."""


class Links:
    """The links of a rank, one per process group, made when a group is first used."""

    def __init__(self, choice: LinkChoice, *, timeout_s: float, arena_bytes: int) -> None:
        self.meter = Meter()
        self._choice, self._timeout_s, self._arena_bytes = choice, timeout_s, arena_bytes
        # The key keeps the group alive: one that is made after another has gone never gets the other's link.
        self._links: dict[dist.ProcessGroup, Link] = {}

    def of(self, boxed: Boxed) -> Link:
        """The link of a group.

        Raises:
            ConfigError: the group's transport is not gloo.
        """
        group = torch_private.unboxed_group(boxed)
        if group not in self._links:
            backend = backend_of(group, "cpu")
            if backend != "gloo":
                raise ConfigError(
                    f"link: the emulated link stands in for gloo, and group {group.group_name!r} uses {backend}; "
                    "use --link gloo, which leaves it alone"
                )
            ranks = dist.get_process_group_ranks(group)
            self._links[group] = Link(
                group=group.group_name,
                ranks=ranks,
                rank=group.rank(),
                store=group.get_group_store(),
                spec=self._choice.of_group(ranks),
                meter=self.meter,
                timeout_s=self._timeout_s,
                arena_bytes=self._arena_bytes,
            )
        return self._links[group]

    def close(self, *, failed: bool) -> None:
        """End all links; see `Link.settle` and `Link.close`.

        After a failure, be it that of one link which the program has caught, none is waited for: ranks that went
        different ways do not end together.
        """
        links = list(self._links.values())
        try:
            if not failed and not any(link.failure for link in links):
                # First every link takes in what it has, then each waits for its peers to have done so: whichever
                # order they close in, nobody waits for one that waits for him.
                for link in links:
                    link.settle()
                for link in links:
                    link.await_peers()
        finally:
            failure = next((link.failure for link in links if link.failure), None)
            for link in links:
                link.close(failure)
            self._links.clear()


class Kernels:
    """A kernel for each c10d operator that moves tensors among a group's ranks, in the argument order of its schema."""

    def __init__(self, links: Links, factor: Callable[[], float | None]) -> None:
        """`factor` tells that of the premultiplied sum that is being issued, None of another reduction."""
        self._links, self._factor = links, factor
        self._due: dict[int, list[dist.Work]] = {}  # by backward; see [Note: futures]

    def table(self) -> dict[str, Callable[..., Any]]:
        """Operator names and their kernels."""
        carried: dict[str, Callable[..., Any]] = {
            "_allgather_base_": self._allgather_base,
            "allgather_": self._allgather,
            "allgather_coalesced_": self._allgather_coalesced,
            "allgather_into_tensor_coalesced_": self._allgather_into_tensor_coalesced,
            "_reduce_scatter_base_": self._reduce_scatter_base,
            "reduce_scatter_": self._reduce_scatter,
            "reduce_scatter_tensor_coalesced_": self._reduce_scatter_tensor_coalesced,
            "allreduce_": self._allreduce,
            "allreduce_coalesced_": self._allreduce_coalesced,
            "broadcast_": self._broadcast,
            "alltoall_base_": self._alltoall_base,
            "alltoall_": self._alltoall,
            "gather_": self._gather,
            "scatter_": self._scatter,
            "reduce_": self._reduce,
            "barrier": self._barrier,
        }
        return carried | {name: self._refuse(name) for name in _REFUSED}

    # --- gathers

    def _allgather_base(self, out: Tensor, tensor: Tensor, group: Boxed, *_: Any) -> tuple[Tensor, Boxed]:
        link = self._links.of(group)
        return out, self._work(link, collectives.all_gather(link, [tensor], [[out]])).boxed()

    def _allgather(
        self, outs: list[list[Tensor]], tensors: list[Tensor], group: Boxed, *_: Any
    ) -> tuple[list[list[Tensor]], Boxed]:
        link = self._links.of(group)
        return outs, self._work(link, collectives.all_gather(link, tensors, outs)).boxed()

    def _allgather_coalesced(self, outs: list[list[Tensor]], tensors: list[Tensor], group: Boxed, *_: Any) -> Boxed:
        link = self._links.of(group)
        by_tensor = [list(column) for column in zip(*outs, strict=True)]
        return self._work(link, collectives.all_gather(link, tensors, by_tensor)).boxed()

    def _allgather_into_tensor_coalesced(
        self, outs: list[Tensor], tensors: list[Tensor], group: Boxed, *_: Any
    ) -> Boxed:
        link = self._links.of(group)
        return self._work(link, collectives.all_gather(link, tensors, [[out] for out in outs])).boxed()

    # --- reductions

    def _reduce_scatter_base(
        self, out: Tensor, tensor: Tensor, group: Boxed, op: Boxed, *_: Any
    ) -> tuple[Tensor, Boxed]:
        link, reduction = self._links.of(group), self._reduction(op)
        return out, self._work(link, collectives.reduce_scatter(link, [[tensor]], [out], reduction)).boxed()

    def _reduce_scatter(
        self, outs: list[Tensor], tensors: list[list[Tensor]], group: Boxed, op: Boxed, *_: Any
    ) -> tuple[list[Tensor], Boxed]:
        link, reduction = self._links.of(group), self._reduction(op)
        return outs, self._work(link, collectives.reduce_scatter(link, tensors, outs, reduction)).boxed()

    def _reduce_scatter_tensor_coalesced(
        self, outs: list[Tensor], tensors: list[Tensor], group: Boxed, op: Boxed, *_: Any
    ) -> Boxed:
        link, reduction = self._links.of(group), self._reduction(op)
        work = self._work(link, collectives.reduce_scatter(link, [[tensor] for tensor in tensors], outs, reduction))
        return work.boxed()

    def _allreduce(self, tensors: list[Tensor], group: Boxed, op: Boxed, *_: Any) -> tuple[list[Tensor], Boxed]:
        return tensors, self._allreduce_coalesced(tensors, group, op)

    def _allreduce_coalesced(self, tensors: list[Tensor], group: Boxed, op: Boxed, *_: Any) -> Boxed:
        link = self._links.of(group)
        operation = collectives.all_reduce(link, tensors, self._reduction(op))
        work = self._work(link, operation, result=tensors)
        self._finish_with_backward(work)
        return work.boxed()

    def _reduce(self, tensors: list[Tensor], group: Boxed, op: Boxed, root: int, root_tensor: int, *_: Any) -> Boxed:
        link = self._links.of(group)
        operation = collectives.reduce(link, tensors, self._reduction(op), root)
        return self._work(link, operation).boxed()

    def _reduction(self, op: Boxed) -> ReduceOp:
        return ReduceOp(torch_private.reduction_name(op), self._factor())

    # --- the rest

    def _broadcast(
        self, tensors: list[Tensor], group: Boxed, root: int, root_tensor: int, *_: Any
    ) -> tuple[list[Tensor], Boxed]:
        link = self._links.of(group)
        return tensors, self._work(link, collectives.broadcast(link, tensors, root)).boxed()

    def _alltoall_base(
        self, out: Tensor, tensor: Tensor, group: Boxed, out_splits: list[int], splits: list[int], *_: Any
    ) -> Boxed:
        link = self._links.of(group)
        collectives.check_written("all_to_all", [out])  # here, where it is still whole
        inputs, outputs = _split(tensor, splits, link.size), _split(out, out_splits, link.size)
        return self._work(link, collectives.all_to_all(link, inputs, outputs)).boxed()

    def _alltoall(self, outs: list[Tensor], tensors: list[Tensor], group: Boxed, *_: Any) -> tuple[list[Tensor], Boxed]:
        link = self._links.of(group)
        return outs, self._work(link, collectives.all_to_all(link, tensors, outs)).boxed()

    def _gather(self, outs: list[list[Tensor]], tensors: list[Tensor], group: Boxed, root: int, *_: Any) -> Boxed:
        link = self._links.of(group)
        return self._work(link, collectives.gather(link, tensors[0], outs[0] if outs else [], root)).boxed()

    def _scatter(
        self, outs: list[Tensor], tensors: list[list[Tensor]], group: Boxed, root: int, *_: Any
    ) -> tuple[list[Tensor], Boxed]:
        link = self._links.of(group)
        operation = collectives.scatter(link, tensors[0] if tensors else [], outs[0], root)
        return outs, self._work(link, operation).boxed()

    def _barrier(self, tensor: Tensor, group: Boxed, *_: Any) -> Boxed:
        link = self._links.of(group)
        return self._work(link, collectives.barrier(link)).boxed()

    @staticmethod
    def _refuse(name: str) -> Callable[..., Any]:
        def refuse(*_: Any) -> Any:
            raise EngineError(f"link: the emulated link does not carry {name.strip('_')}; run with --link gloo")

        return refuse

    # --- works

    def _work(self, link: Link, operation: Operation, result: Sequence[Tensor] | None = None) -> dist.Work:
        """A handle whose `wait` finishes the operation; `result` is what its future then holds."""
        future: list[torch.futures.Future[Any]] = []

        def wait(timeout: timedelta) -> bool:
            link.finish(operation, timeout.total_seconds() or None)
            if future and not future[0].done():
                future[0].set_result(list(result or ()))
            return True

        work = torch_private.callback_work(wait)
        if result is not None:
            future.append(work.get_future())
        return work

    def _finish_with_backward(self, work: dist.Work) -> None:
        """Complete the future of a work that was issued in a backward; see [Note: futures]."""
        backward = torch_private.backward_id()
        if backward is None:
            return
        if not torch_private.in_backward_node():
            work.wait()
            return
        if backward not in self._due:  # another one may be going on: a checkpoint runs a backward inside a backward
            self._due[backward] = []
            torch_private.call_after_backward(functools.partial(self._finish_due, backward))
        self._due[backward].append(work)

    def _finish_due(self, backward: int) -> None:
        for work in self._due.pop(backward):
            work.wait()


def _split(tensor: Tensor, splits: list[int], ranks: int) -> Sequence[Tensor]:
    """The rows for each rank: as many as `splits` says, or as many for each."""
    rows: Sequence[Tensor] = tensor.detach().split(splits or [tensor.shape[0] // ranks] * ranks)
    return rows
