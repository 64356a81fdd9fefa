"""The experimental torch names that `common` needs, in one file, so that a new torch release breaks here and loudly.

    torch.profiler.profile(...).profiler.kineto_results.experimental_event_tree()

The tree of events that torch itself reads for memory timelines. The public forms lack what is needed: `events()` has
no shapes inside tensor lists and no addresses, the exported trace no dtypes inside tensor lists. Fields used: `name`,
`start_time_ns`, `end_time_ns`, `children`, and `extra_fields` with `inputs` (of operators) or `ptr`, `alloc_size`,
`device` (of allocations).

    torch.utils._pytree.tree_map, tree_leaves

Go over nested tuples, lists and dicts; Dynamo traces them, which it does not do with a recursion of ours.

    torch.utils._python_dispatch.TorchDispatchMode, torch._ops.OpOverload()._schema

The mode sees every operator of a forward, with the tags by which torch knows those that draw random numbers; the schema
names its arguments.

    torch.distributed.distributed_c10d.ProcessGroupGloo, its `_Options` with `_devices`, `_timeout` and `_threads`

The only way to choose how many threads run a gloo group's collectives; see `one_thread_per_gloo_group`.

    torch.distributed.device_mesh.DeviceMesh()._pg_registry (from 2.13 on)

By which a mesh keeps its process groups alive after they were destroyed; see `release_groups`.

    torch._C._distributed_c10d: ProcessGroup.unbox, PythonCallbackWork; torch.library.Library._destroy

The emulated link replaces the kernels of c10d operators, under every front end at once; a public way is a backend of
one's own, which from Python does not see what functional collectives call. Kernels get groups boxed, give back work
handles, and have to go again.

    torch.distributed.ReduceOp().__getstate__, which gives its name and factor

Of premultiplied sums kernels are told the name only; see `noted_factors`.

    torch._C._current_autograd_node, torch._C._current_graph_task_id, Variable._execution_engine.queue_callback

`DistributedDataParallel` waits for the future of an all-reduce and not for its handle: somebody has to complete it at
the end of the backward in which it was issued, before the wait.

    torch.cuda.memory._record_memory_history, _snapshot

What torch documents under "Understanding CUDA Memory Usage": the allocator's own account, which nothing public gives.

    torch._C._profiler._RecordFunctionFast

`record_function` costs some 10 us for each range, even if nobody records; this is what torch uses in hot places.

    torch.distributed.fsdp.FSDPModule()._set_unshard_async_op

Without streams, the only way to let torch's FSDP2 gather beside compute.

    torch.testing._internal.distributed.fake_pg

The backend "fake", and a store for it: a process group of any size in one process.

Seen in torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import functools
import gc
import os
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import Variable
from torch.distributed import ProcessGroup, ProcessGroupGloo, Work, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

RecordFunctionFast = _RecordFunctionFast


def named_arguments(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What an operator was given, by the names of its schema."""
    names = (argument.name for argument in operator._schema.arguments)
    return dict(zip(names, args, strict=False)) | dict(kwargs)


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """One tensor that an operator was called with.

    Attributes:
        address: of its storage, None if it has none.
        is_expanded: elements share memory, as those of a row that is repeated do.
    """

    shape: tuple[int, ...]
    itemsize: int
    address: int | None
    is_expanded: bool = False

    @property
    def bytes(self) -> int:
        """Size of the elements, were they contiguous."""
        total = self.itemsize
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator, user range or backend range.

    Attributes:
        name: such as "aten::add", or the label of a `record_function`.
        start_ns, end_ns: on one clock for all threads.
        inside: names of the events it ran in, on its own thread, outermost first.
        arguments: per argument, the tensors in it: none, one, or those of a list. A list of lists shows none.
    """

    name: str
    start_ns: int
    end_ns: int
    inside: tuple[str, ...]
    arguments: tuple[tuple[TensorArgument, ...], ...]


@dataclass(frozen=True, slots=True)
class Allocation:
    """One block taken (`bytes` > 0) or given back (`bytes` < 0), in the events named by `inside`."""

    time_ns: int
    address: int
    bytes: int
    device_type: str
    inside: tuple[str, ...]


@dataclass
class Recording:
    """What ran while recording, in order of time; filled when the recording ends."""

    operators: list[Operator] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)


MAX_ALLOCATIONS = 1_000_000
"""The most that a GPU's allocator notes of one step."""
SETTLE_S = 0.05
"""A pause before recording ends. A backend's threads report the end of a collective to the profiler a little after the
caller has waited for it; a recording that ends before that lacks the event, and memory.py a lifetime."""


@contextmanager
def record_events(*, memory: bool = False) -> Iterator[Recording]:
    """Record the operators, and on request the allocations, of this thread and of those it hands work to."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's library else prints two lines per recording
    recording = Recording()
    profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=memory)
    with profiler:
        yield recording
        time.sleep(SETTLE_S)
    results: Any = profiler.profiler and profiler.profiler.kineto_results
    pending: list[tuple[Any, tuple[str, ...]]] = [(event, ()) for event in results.experimental_event_tree()]
    while pending:
        event, inside = pending.pop()
        details = event.extra_fields
        if hasattr(details, "alloc_size"):
            device = details.device.type
            allocation = Allocation(event.start_time_ns, details.ptr, details.alloc_size, device, inside)
            recording.allocations.append(allocation)
        elif hasattr(details, "inputs"):
            arguments = tuple(_tensors(argument) for argument in details.inputs)
            recording.operators.append(Operator(event.name, event.start_time_ns, event.end_time_ns, inside, arguments))
        path = (*inside, event.name)
        pending += [(child, path) for child in event.children]
    recording.operators.sort(key=lambda operator: operator.start_ns)
    recording.allocations.sort(key=lambda allocation: allocation.time_ns)


def _tensors(argument: Any) -> tuple[TensorArgument, ...]:
    if isinstance(argument, (list, tuple)):
        return tuple(tensor for item in argument for tensor in _tensors(item))
    if not hasattr(argument, "sizes"):
        return ()
    shape, strides = tuple(argument.sizes), tuple(argument.strides)
    is_expanded = any(size > 1 and stride == 0 for size, stride in zip(shape, strides, strict=True))
    return (TensorArgument(shape, argument.dtype.itemsize, argument.storage_data_ptr, is_expanded),)


@contextmanager
def one_thread_per_gloo_group() -> Iterator[None]:
    """Let gloo groups that are made in the block run their collectives one after the other, on one thread.

    By default two threads take turns at them. In torch 2.13 the two then free the same memory now and then, and the
    process dies of it, at a later and unrelated place (docs/log.md tells how that was found).
    """
    original: Any = ProcessGroupGloo

    class OneThreadGloo(ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **options: Any) -> None:
            interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
            found = original._Options()
            found._devices = [
                original.create_device(interface=name) if name else original.create_default_device()
                for name in interfaces
            ]
            found._timeout = timeout
            found._threads = 1
            for name, value in options.items():  # torch 2.14 has one more
                setattr(found, name, value)
            super().__init__(store, rank, size, found)

    names: Any = distributed_c10d
    names.ProcessGroupGloo = OneThreadGloo
    try:
        yield
    finally:
        names.ProcessGroupGloo = original


@contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    """A default process group of `ranks` ranks, of which this process is rank 0, and whose collectives move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def release_groups() -> None:
    """Take their process groups from all meshes that are left; the groups must have been destroyed.

    Caches of DTensor and guards of compiled code keep meshes for as long as the process lives. With a group go its
    sockets, and threads that else wake up a hundred times a second.
    """
    for thing in gc.get_objects():
        if type(thing) is DeviceMesh:
            vars(thing).get("_pg_registry", {}).clear()


@contextmanager
def replaced_kernels(namespace: str, kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Within the context, operators of a namespace run these functions for CPU tensors; names torch lacks are left out.

    A kernel is called with the operator's arguments, groups and reductions boxed.
    """
    operators = getattr(torch.ops, namespace)
    library = torch.library.Library(namespace, "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is overridden, which is the intention
            for name, kernel in kernels.items():
                if hasattr(operators, name):
                    library.impl(name, kernel, "CPU")
        yield
    finally:
        library._destroy()


class _Noted(threading.local):
    """A kernel runs on the thread that issues its operation, and backward may issue on another than forward."""

    factor: float | None = None


@contextmanager
def noted_factors() -> Iterator[Callable[[], float | None]]:
    """Within the context, tells the factor of the premultiplied sum that this thread is issuing, None of other calls.

    A kernel is told a reduction's name only, so the methods of groups that take one are wrapped, and note it.
    """
    noted = _Noted()

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def issue(*args: Any, **kwargs: Any) -> Any:
            given = [getattr(value, "reduceOp", value) for value in (*args, *kwargs.values())]
            states: list[Any] = [op.__getstate__() for op in given if isinstance(op, torch.distributed.ReduceOp)]
            noted.factor = next((float(factor) for _, factor in states if factor is not None), None)
            try:
                return method(*args, **kwargs)
            finally:
                noted.factor = None

        return issue

    # what the class holds, to be put back; a function that `getattr` makes of it would not be bound to a group again
    originals = {name: method for name, method in vars(ProcessGroup).items() if "reduce" in name}
    for name in originals:
        setattr(ProcessGroup, name, noting(getattr(ProcessGroup, name)))
    try:
        yield lambda: noted.factor
    finally:
        for name, method in originals.items():
            setattr(ProcessGroup, name, method)


@contextmanager
def allocator_history() -> Iterator[Callable[[], bytes]]:
    """Within the context, the GPU's allocator notes what it does; once it is left, the result pickles those notes."""
    snapshot: Any = None
    torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)
    try:
        yield lambda: pickle.dumps(snapshot)
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def unboxed_group(boxed: Any) -> ProcessGroup:
    """The group that a kernel was given; the same object each time, for as long as somebody holds it."""
    group: ProcessGroup = torch._C._distributed_c10d.ProcessGroup.unbox(boxed)
    return group


def reduction_name(boxed: Any) -> str:
    """The name of the reduction that a kernel was given, such as "SUM"."""
    return str(torch.distributed.ReduceOp.RedOpType(boxed.op()).name)


def callback_work(wait: Callable[[Any], bool]) -> Work:
    """A work handle whose `wait` calls `wait`, with a timedelta that is 0 for no timeout."""
    work: Work = torch._C._distributed_c10d.PythonCallbackWork(wait)
    return work


def backward_id() -> int | None:
    """A number for the backward that runs on this thread, its final callbacks included; None if there is none."""
    number = int(torch._C._current_graph_task_id())
    return None if number == -1 else number


def in_backward_node() -> bool:
    """Whether a node of a backward is being computed on this thread; not so in its final callbacks."""
    return torch._C._current_autograd_node() is not None


def call_after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward that is now running is over, before what others will ask for from now on."""
    Variable._execution_engine.queue_callback(callback)


def gather_asynchronously(root: Any) -> None:
    """Let torch's FSDP2 hold handles of its all-gathers instead of waiting for each, in the whole model `root`."""
    root._set_unshard_async_op(True)
