"""What the tests of the eager engine run on ranks: small models with awkward shapes, and measurements of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import fsdp_eager.parallelize
from common.baselines import torch_fsdp2
from common.harness.launch import RankContext
from common.job import JobConfig
from common.mesh import build_mesh
from common.models import build_model
from fsdp_eager import FSDPModule

VOCAB = 13
SEQ = 5
BATCH = 2
COLLECTIVES = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::allreduce_": "all_reduce",
}


class Block(nn.Module):
    """A residual block; its sizes divide by no world size."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, norm and head, and two parameters of the root; `head` and `gain` leave some ranks empty.

    Args:
        tied: embedding and head share their weight.
        bare: the root has no parameters of its own.
        recompute: blocks run under activation checkpointing.
    """

    def __init__(self, *, tied: bool = False, bare: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.gain = None if bare else nn.Parameter(torch.ones(1))
        self.embed = nn.Embedding(VOCAB, 10)
        self.blocks = nn.ModuleList([Block(10, 33), Block(10, 7), Block(10, 16)])
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, VOCAB if tied else 3)
        self.shift = None if bare else nn.Parameter(torch.zeros(3, 1))
        if tied:
            self.head.weight = self.embed.weight
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if self.gain is not None:
            x = x * self.gain
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        x = self.head(self.norm(x))
        return x if self.shift is None else x + self.shift.sum()


def make_net(**options: bool) -> Net:
    """The same values in every process."""
    torch.manual_seed(1)
    net = Net(**options)
    with torch.no_grad():
        for param in net.parameters():
            param.normal_(std=0.5)
    return net


def make_job(ctx: RankContext, **changes: Any) -> JobConfig:
    """A job for this many ranks."""
    return JobConfig(ranks=ctx.ranks, batch=ctx.ranks, **changes)


def shard(model: nn.Module, ctx: RankContext, **changes: Any) -> FSDPModule:
    """Shard with the engine under test."""
    sharded = fsdp_eager.parallelize.parallelize(model, build_mesh(), make_job(ctx, **changes))
    assert isinstance(sharded, FSDPModule)
    return sharded


def tokens(step: int, rank: int) -> torch.Tensor:
    """One rank's batch of a step."""
    return torch.randint(VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """A loss whose gradients differ from rank to rank and have no structure."""
    return model(tokens(step, rank)).float().square().mean()


def whole_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Every gradient, gathered by DTensor's own means."""
    return {name: None if param.grad is None else _full(param.grad).clone() for name, param in model.named_parameters()}


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """This rank's part of every gradient, in a copy."""
    result: dict[str, torch.Tensor | None] = {}
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        assert param.grad is None or isinstance(param.grad, DTensor)
        result[name] = None if param.grad is None else param.grad.to_local().clone()
    return result


@dataclass(frozen=True)
class Trace:
    """What a few steps left: losses, and the local gradients of every parameter, step by step."""

    losses: list[torch.Tensor]
    gradients: list[dict[str, torch.Tensor | None]]


def train(model: nn.Module, ctx: RankContext, steps: int) -> Trace:
    """Train with SGD and record losses and local gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = Trace([], [])
    for step in range(steps):
        loss = loss_of(model, step, ctx.rank)
        loss.backward()
        trace.losses.append(loss.detach())
        trace.gradients.append(local_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return trace


def differences(found: Trace, expected: Trace) -> list[str]:
    """Where two traces differ in bits; a trace without gradients is a difference."""
    wrong = [f"loss {i}" for i, pair in enumerate(zip(found.losses, expected.losses, strict=True)) if not same(*pair)]
    for step, (ours, theirs) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        if ours.keys() != theirs.keys():
            wrong.append(f"step {step}: names {sorted(ours.keys() ^ theirs.keys())}")
        if not any(grad is not None and grad.numel() and grad.abs().sum() for grad in theirs.values()):
            wrong.append(f"step {step}: no gradient at all")
        wrong += [f"step {step}: {name}" for name in ours if not same(ours[name], theirs.get(name))]
    return wrong


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Equal in shape, dtype and bits, or both absent."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def against_torch(ctx: RankContext, options: dict[str, bool], changes: dict[str, Any], steps: int) -> list[str]:
    """Where this engine and torch's fully_shard differ, same grouping, native collectives."""
    ours = train(shard(make_net(**options), ctx, transport="native", **changes), ctx, steps)
    reference = torch_fsdp2.parallelize(make_net(**options), build_mesh(), make_job(ctx, **changes))
    return differences(ours, train(reference, ctx, steps))


def against_torch_registry(ctx: RankContext, name: str, changes: dict[str, Any]) -> list[str]:
    """As `against_torch`, on a model of the registry."""

    def run(parallelize: Callable[..., nn.Module], transport: str) -> Trace:
        model = build_model(name, seed=0)
        job = make_job(ctx, model=name, transport=transport, **changes)
        return train(parallelize(model, build_mesh(), job), ctx, 2)

    return differences(run(fsdp_eager.parallelize.parallelize, "native"), run(torch_fsdp2.parallelize, "auto"))


def against_plain(ctx: RankContext, options: dict[str, bool], changes: dict[str, Any]) -> list[str]:
    """Where one step differs from `mean_gradients` and from the plain model's loss on this rank's batch."""
    model = shard(make_net(**options), ctx, **changes)
    loss = loss_of(model, 0, ctx.rank)
    loss.backward()
    job = make_job(ctx, **changes)
    losses, expected = mean_gradients(
        ctx.ranks, options, job.mp_policy.param_dtype or torch.float32, job.mp_policy.reduce_dtype or torch.float32
    )
    found = whole_gradients(model)
    wrong = [] if torch.equal(loss.detach(), losses[ctx.rank]) else ["loss"]
    if found.keys() != expected.keys():
        wrong.append(f"names {sorted(found.keys() ^ expected.keys())}")
    return wrong + [name for name in expected if not same(found[name], expected[name])]


def mean_gradients(
    ranks: int, options: dict[str, bool], compute: torch.dtype, reduce: torch.dtype
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Each rank's loss, and the mean of their gradients, of the plain model: ((r0 + r1) + r2 ...) / ranks."""
    losses, sums = [], {}
    for rank in range(ranks):
        model = make_net(**options).to(compute)
        loss = loss_of(model, 0, rank)
        loss.backward()
        losses.append(loss.detach())
        for name, param in model.named_parameters():
            assert param.grad is not None
            grad = param.grad.to(reduce)
            sums[name] = grad if rank == 0 else sums[name] + grad
    return losses, {name: (total / ranks).float() for name, total in sums.items()}


def shapes(ctx: RankContext, tied: bool, changes: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """(global shape, global stride, local shape, requires_grad) of each entry of the state dict, before and after."""
    model = shard(make_net(tied=tied), ctx, **changes)
    before = model.state_dict()
    loss_of(model, 0, ctx.rank)  # awaits its backward
    between = model.state_dict()
    assert list(before) == list(between)
    result = {}
    for name, value in between.items():
        assert isinstance(value, DTensor), f"{name} is a {type(value).__name__}"
        assert torch.equal(value.full_tensor(), before[name].full_tensor())
        result[name] = (tuple(value.shape), value.stride(), tuple(value.to_local().shape))
    return result


def load_state(ctx: RankContext) -> bool:
    """Whether a model loaded with another's state computes what the other does."""
    source = shard(make_net(), ctx)
    target = make_net()
    with torch.no_grad():
        for param in target.parameters():
            param.zero_()
    target = shard(target, ctx, reshard_after_forward="never")
    loss_of(target, 0, ctx.rank)
    target.load_state_dict(source.state_dict())
    return torch.equal(loss_of(target, 1, ctx.rank), loss_of(source, 1, ctx.rank))


def collectives(ctx: RankContext, options: dict[str, bool], changes: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Collectives that the profiler sees in forward and in backward of the second step."""
    model = shard(make_net(**options), ctx, **changes)
    loss_of(model, 0, ctx.rank).backward()
    counts = {}
    with profile(activities=[ProfilerActivity.CPU]) as forward:
        loss = loss_of(model, 1, ctx.rank)
    with profile(activities=[ProfilerActivity.CPU]) as backward:
        loss.backward()
    for phase, profiler in (("forward", forward), ("backward", backward)):
        names = Counter(COLLECTIVES[e.name] for e in profiler.events() if e.name in COLLECTIVES)
        counts[phase] = dict(names)
    return counts


def events(ctx: RankContext, options: dict[str, bool], changes: dict[str, Any], steps: int) -> list[list[str]]:
    """The schedule's log of each step, with marks where a block's own forward and backward run."""
    model = make_net(**options)
    log: list[str] = []
    for i, block in enumerate(model.blocks):
        _mark_compute(block, i, log)
    sharded = shard(model, ctx, **changes)
    sharded.log_schedule(lambda event, group: log.append(f"{event} {group}"))
    result = []
    for step in range(steps):
        loss = loss_of(sharded, step, ctx.rank)
        log.append("-- backward")
        loss.backward()
        result.append(list(log))
        log.clear()
    return result


def _mark_compute(block: nn.Module, index: int, log: list[str]) -> None:
    """Log when a block computes: its first operation in forward, its last weight's gradient in backward."""
    assert isinstance(block, Block)

    def forward_mark(*_: Any) -> None:
        log.append(f"forward {index}")

    def backward_mark(*_: Any) -> None:
        log.append(f"backward {index}")

    block.norm.register_forward_pre_hook(forward_mark)
    block.up.register_full_backward_hook(backward_mark)


def storage_bytes(ctx: RankContext, reshard: str) -> dict[str, list[int]]:
    """Bytes of each block's whole parameters: inside forward (worst case), after forward, after backward."""
    model = shard(make_net(), ctx, reshard_after_forward=reshard)
    groups = [block.fsdp_state.groups[0].group for block in model.blocks]
    seen: list[list[int]] = []
    for block in model.blocks:
        block.norm.register_forward_pre_hook(lambda *_: seen.append([g.whole.allocated_bytes for g in groups]))
    loss = loss_of(model, 0, ctx.rank)
    after_forward = [g.whole.allocated_bytes for g in groups]
    loss.backward()
    return {
        "inside": [max(column) for column in zip(*seen, strict=True)],
        "after_forward": after_forward,
        "after_backward": [g.whole.allocated_bytes for g in groups],
    }
