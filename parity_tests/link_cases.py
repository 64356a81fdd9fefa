"""What the tests of the emulated link run on ranks."""

from __future__ import annotations

import copy
import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from common.errors import EngineError, ParityError
from common.harness.launch import RankContext
from common.harness.link import FREE, LinkSpec, LogEntry, emulate, parse_link
from common.mesh import build_mesh
from parity_tests import eager_cases
from parity_tests.link_lottery import Lottery, Ops, gather_into, premultiplied, rank_order, scatter_into, world


def random_operations(ctx: RankContext, seed: int, count: int) -> tuple[list[str], int]:
    """Names of collectives with a wrong result, and how many kinds were drawn; waits out of order, some never."""
    arena = 1 << 16
    lottery, order = Lottery(ctx, seed, 2 * arena), random.Random(seed + 1 + ctx.rank)
    wrong, flying = [], []
    with emulate(FREE, timeout_s=30, arena_bytes=arena):
        for number in range(count):
            work, name, check = lottery.draw()
            flying.append((work, f"{number} {name}", check))
            while len(flying) > order.randrange(1, 20):
                work, name, check = flying.pop(order.randrange(len(flying)))
                if work is not None:
                    work.wait()
                    wrong += [] if check() else [name]
    return wrong + [name for _, name, check in flying if not check()], len(lottery.kinds)


def timed_operations(ctx: RankContext, spec: LinkSpec, count: int) -> tuple[list[LogEntry], float, float, list[str]]:
    """A log of random operations with compute between them, what was slept, the time of it all, and early ends."""
    lottery, early = Lottery(ctx, 5, 4000), []
    with emulate(spec, timeout_s=30) as meter:
        begin_s = time.monotonic()
        for number in range(count):
            work, name, _ = lottery.draw()
            if (number + ctx.rank) % 3 == 0:
                torch.randn(200, 200) @ torch.randn(200, 200)
            if number % 2 and work is not None:
                work.wait()
                if time.monotonic() < meter.log[-1].end_s and meter.log[-1].index == number:
                    early.append(name)
        whole_s = time.monotonic() - begin_s
        exposed_s = meter.exposed_s
    return meter.log, exposed_s, whole_s, early


def packed_and_in_pieces(ctx: RankContext, dtype: torch.dtype) -> list[str]:
    """Which of 6 gradients differ by a bit when they are reduced in one message laid out by rank, and each alone."""
    chunks = [1, 3, 7, 8, 61, 130]
    generator = torch.Generator().manual_seed(ctx.rank)
    gradients = [torch.randn(ctx.ranks, chunk, generator=generator).to(dtype) for chunk in chunks]
    packed = torch.cat(gradients, dim=1)
    together, alone = torch.empty(sum(chunks), dtype=dtype), [torch.empty(chunk, dtype=dtype) for chunk in chunks]
    whole = packed.clone().view(-1)
    with emulate(FREE):
        scatter_into(together, packed.view(-1), Ops.AVG, async_op=False)
        dist.all_reduce(whole, op=Ops.AVG)
        for gradient, out in zip(gradients, alone, strict=True):
            scatter_into(out, gradient.view(-1), Ops.AVG, async_op=False)
    pairs = zip(together.split(chunks), whole.view(ctx.ranks, -1)[ctx.rank].split(chunks), alone, strict=True)
    return [f"{n}" for n, (a, b, c) in enumerate(pairs) if not (torch.equal(a, c) and torch.equal(b, c))]


def engine_against_torch(ctx: RankContext, changes: dict[str, Any]) -> tuple[list[str], set[str]]:
    """Where the eager engine and torch's fully_shard differ over a link, and the kinds of operations on it."""
    with emulate(FREE, timeout_s=50) as meter:
        return eager_cases.against_torch(ctx, {}, changes, 2), {entry.kind for entry in meter.log}


def compiled_against_torch(ctx: RankContext) -> tuple[list[str], set[str]]:
    """As `engine_against_torch`, for the compiled engine: its graph calls functional collectives."""
    from parity_tests import compiled_cases  # here: it imports the compiler, which takes seconds

    with emulate(FREE, timeout_s=100) as meter:
        wrong = compiled_cases.against_torch(ctx, compiled_cases.Tied, "block", (None, None), True)
    return wrong, {entry.kind for entry in meter.log}


def native_against_ordered(ctx: RankContext) -> list[str]:
    """Where the eager engine with native sums differs from itself with ordered sums, over a link."""
    traces = []
    with emulate(FREE, timeout_s=50):
        for transport in ("native", "ordered"):
            model = eager_cases.shard(eager_cases.make_net(), ctx, transport=transport)
            traces.append(eager_cases.train(model, ctx, 2))
    return eager_cases.differences(*traces)


def divided_by_fully_shard(ctx: RankContext, factor: float) -> tuple[Tensor, Tensor]:
    """A gradient that torch's fully_shard divided by `factor` over a link, and what it should be."""

    def backward(rank: int, model: nn.Module) -> Tensor:
        torch.manual_seed(rank)
        model(torch.randn(3, 5)).pow(2).sum().backward()
        found = model.weight.grad
        assert isinstance(found, Tensor)
        return found.full_tensor() if isinstance(found, DTensor) else found

    torch.manual_seed(9)
    model = nn.Linear(5, 7)
    alone = [backward(rank, copy.deepcopy(model)) for rank in range(ctx.ranks)]
    with emulate(FREE, timeout_s=50):
        sharded = fully_shard(model, mesh=build_mesh())
        sharded.set_gradient_divide_factor(factor)
        found = backward(ctx.rank, sharded)
    return found, rank_order([gradient * torch.tensor(1 / factor) for gradient in alone], "SUM")


class Checkpointed(nn.Linear):
    """A linear layer whose backward is a backward of its own inside the model's."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=True)
        return result


def ddp_steps(
    ctx: RankContext, link: str, hook: bool, options: dict[str, Any], nested: bool
) -> tuple[list[Tensor], int]:
    """Gradients of three DDP steps over a link, and how many all-reduces it carried."""
    torch.manual_seed(3)
    middle = Checkpointed(50, 50) if nested else nn.Linear(50, 50)  # the last layer fills a bucket before its backward
    net = nn.Sequential(nn.Linear(9, 50), nn.GELU(), middle, nn.GELU(), nn.Linear(50, 40))
    grads = []
    with emulate(parse_link(link), timeout_s=30) as meter:
        parallel = DistributedDataParallel(net, bucket_cap_mb=0.005, **options)
        if hook:
            parallel.register_comm_hook(None, fp16_compress_hook)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        for step in range(3):
            data = torch.randn(8, 9, generator=torch.Generator().manual_seed(10 * step + ctx.rank))
            optimizer.zero_grad()
            parallel(data).pow(2).mean().backward()
            grads += [param.grad.clone() for param in net.parameters() if param.grad is not None]
            optimizer.step()
    return grads, sum(entry.kind == "all_reduce" for entry in meter.log)


def mesh_links(ctx: RankContext) -> list[tuple[tuple[int, ...], str, float]]:
    """Ranks, kind and duration of what two collectives in each dimension of a 2 x 2 mesh log over nodes of 2 ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with emulate(parse_link("nodes:2"), timeout_s=30) as meter:
        for name in ("replicate", "shard"):
            group = mesh.get_group(name)
            dist.all_reduce(torch.ones(1000), group=group)
            DTensor.from_local(torch.ones(500), mesh[name], [Shard(0)]).full_tensor()
    return [(entry.ranks, entry.kind, entry.end_s - entry.start_s) for entry in meter.log]


def errors_of(ctx: RankContext, what: str) -> str:
    """The error that a rank gets from a collective that cannot be done, or that others do not join."""
    x = torch.ones(4)
    calls: dict[str, Callable[[], object]] = {
        "send": lambda: dist.send(x, 1 - ctx.rank) if ctx.rank else dist.recv(x, 1 - ctx.rank),
        "mean": lambda: dist.all_reduce(x.long(), op=Ops.AVG),
        "premultiplied": lambda: dist.all_reduce(x.long(), op=premultiplied(0.5)),
        "mismatch": lambda: dist.all_reduce(x) if ctx.rank else dist.broadcast(x, 0),
        "sizes": lambda: dist.all_reduce(torch.ones(4 + ctx.rank)),
        "late": lambda: dist.all_reduce(x) if ctx.rank == 0 else time.sleep(1.5),
        "left": lambda: dist.all_reduce(x) if ctx.rank == 0 else leave(x),
    }
    try:
        with emulate(FREE, timeout_s=0.5 if what == "late" else 30):
            dist.barrier()
            dist.barrier()  # past it, every rank has seen the other's memory, and one that fails now is missed by name
            calls[what]()
    except (ParityError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def disagreements(ctx: RankContext) -> dict[str, str]:
    """What two ranks are told that issue collectives of one kind and size with different terms."""
    me, ones = ctx.rank, torch.ones
    x, pair = ones(4), [ones(4), ones(4)]
    splits = [ones(1 + 2 * me), ones(3 - 2 * me)]
    other = torch.int32 if me else torch.float32
    calls: dict[str, Callable[[], object]] = {
        "broadcast": lambda: dist.broadcast(x, me),
        "reduce": lambda: dist.reduce(x, me),
        "gather": lambda: dist.gather(x, pair, dst=me),
        "scatter": lambda: dist.scatter(x, pair, src=me),
        "reduction": lambda: dist.all_reduce(x, op=Ops.MAX if me else Ops.SUM),
        "dtype": lambda: dist.all_reduce(x.to(other)),
        "exchange": lambda: dist.all_to_all_single(ones(4, dtype=other), x.to(other)),
        "splits": lambda: world().allgather_into_tensor_coalesced([ones(2 * len(s)) for s in splits], splits).wait(),
    }
    return {name: caught(call) for name, call in calls.items()}


def caught(call: Callable[[], object]) -> str:
    """The error of a call over a link, caught inside; leaving the link must not raise another."""
    text = ""
    with emulate(FREE, timeout_s=30):
        try:
            call()
        except ParityError as error:
            text = f"{type(error).__name__}: {error}"
    return text


def shared_elements(ctx: RankContext) -> tuple[dict[str, str], Tensor]:
    """What a rank is told that lets collectives write where elements share memory; a sum where they only interleave."""
    me, flat = ctx.rank, torch.ones(8)
    tensors = {
        "expanded": lambda: torch.ones(1).expand(4),
        "slid": lambda: torch.arange(3.0).as_strided((2, 2), (1, 1)),
    }
    calls: dict[str, Callable[[Tensor], object]] = {
        "all_reduce": lambda x: dist.all_reduce(x),
        "all_reduce many": lambda x: world().allreduce_coalesced([flat, x]),
        "reduce": lambda x: dist.reduce(x, 0),
        "broadcast": lambda x: dist.broadcast(x, 0),
        "all_gather": lambda x: gather_into(x, flat[:2], async_op=False),
        "all_gather list": lambda x: dist.all_gather([torch.ones(x.shape), x], torch.ones(x.shape)),
        "reduce_scatter": lambda x: scatter_into(x, flat, Ops.SUM, async_op=False),
        "all_to_all": lambda x: dist.all_to_all_single(x, torch.ones(x.shape)),
        "gather": lambda x: dist.gather(torch.ones(x.shape), [torch.ones(x.shape), x], dst=me),
        "scatter": lambda x: dist.scatter(x, [torch.ones(x.shape)] * 2 if me == 0 else None, src=0),
    }
    texts = {
        f"{name}, {kind}": caught(partial(call, make()))
        for name, call in calls.items()
        for kind, make in tensors.items()
    }
    interleaved = torch.arange(8.0).as_strided((3, 2), (2, 3))
    with emulate(FREE, timeout_s=30):
        dist.all_reduce(interleaved)
        gather_into(torch.zeros(8), torch.ones(1).expand(4), async_op=False)  # an input may share its elements
    return texts, interleaved


def left_behind(ctx: RankContext, is_connected: bool, is_reused: bool) -> tuple[str, list[float]]:
    """What a slow rank is told, and what is in its tensor, after the other one has left a link that failed.

    Args:
        ctx: of rank 0, which leaves, and rank 1, which has issued the same and another operation and then waits.
        is_connected: rank 1 has seen rank 0's memory before.
        is_reused: after rank 0 has left, its file descriptors are those of other files.
    """
    store, x = world().get_group_store(), torch.ones(4)
    key, others = f"{is_connected} {is_reused}", []
    text = ""
    with emulate(FREE, timeout_s=30):
        if is_connected:
            dist.barrier()
        if ctx.rank == 0:
            store.wait([f"{key} issued"])
        try:
            first = dist.all_reduce(x, async_op=True)
            second = (
                dist.all_reduce(torch.ones(5)) if ctx.rank == 0 else dist.broadcast(torch.ones(5), 1, async_op=True)
            )
            assert first is not None and second is not None
            store.set(f"{key} issued", "")
            store.wait([f"{key} left"])
            first.wait()
        except ParityError as error:
            text = f"{type(error).__name__}: {error}"
    if ctx.rank == 0:
        if is_reused:
            others = [os.memfd_create("another") for _ in range(8)]
            for file in others:
                os.write(file, b"\1" * (1 << 20))
        store.set(f"{key} left", "")
        store.wait([f"{key} told"])
    else:
        store.set(f"{key} told", "")
    for file in others:
        os.close(file)
    return text, x.tolist()


def failure_beside(ctx: RankContext) -> str:
    """What ranks are told whose link fails while that of another group has an operation that only one has issued."""
    group = dist.new_group([0, 1])

    def call() -> None:
        dist.barrier(group=group)
        if ctx.rank == 0:
            dist.all_reduce(torch.ones(3), group=group, async_op=True)
        dist.broadcast(torch.ones(3), ctx.rank)

    return caught(call)


def leave(x: Tensor) -> None:
    """Fail before the collective that the others call."""
    raise EngineError("left")


def what_stays(ctx: RankContext) -> tuple[list[str], int, int]:
    """Traces of shared memory after a link with operations that nobody waited for, and operations logged after it."""
    with emulate(FREE, timeout_s=30, arena_bytes=1 << 12) as meter:
        works = [dist.all_reduce(torch.ones(10_000), async_op=True) for _ in range(3)]
        inside = Path("/proc/self/maps").read_text().count("fsdp-link")
    logged = len(meter.log)
    dist.all_reduce(torch.ones(3))
    del works
    files = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert logged == 3
    return [line for line in files + maps if "fsdp-link" in line], inside, len(meter.log) - logged


def die(ctx: RankContext) -> None:
    """Rank 1 ends its process in the middle of a link."""
    with emulate(FREE, timeout_s=30):
        dist.all_reduce(torch.ones(10))
        if ctx.rank == 1:
            os._exit(7)
        dist.all_reduce(torch.ones(10))


def hang(ctx: RankContext) -> None:
    """Rank 1 never joins, and does not end."""
    with emulate(FREE, timeout_s=300):
        dist.barrier()
        if ctx.rank == 1:
            time.sleep(300)
        dist.all_reduce(torch.ones(10))
