"""What the tests of the eager engine run on ranks: small models with awkward shapes, and measurements of them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
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
from common.harness.train import run_engine
from common.job import JobConfig
from common.mesh import build_mesh
from common.models import build_model
from fsdp_eager import FSDPModule, MixedPrecisionPolicy, Transport, fully_shard
from parity_tests.torch_private import counting_graphs

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


# Cases


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


class Branches(nn.Module):
    """Uses `left` or `right` or both; `twice` calls a block two times."""

    def __init__(self) -> None:
        super().__init__()
        self.left = Block(6, 9)
        self.right = Block(6, 5)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.mixed = Block(6, 4)
        self.mixed.norm.requires_grad_(False)

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        x = self.mixed(self.frozen(x))
        if which in ("left", "both"):
            x = self.left(x)
        if which in ("right", "both"):
            x = self.right(x)
        if which == "twice":
            x = self.left(torch.tanh(self.left(x)))
        return x


BRANCHES_PLAN = "left,right,frozen,mixed"


def make_branches() -> Branches:
    """The same values in every process, in float64."""
    torch.manual_seed(2)
    return Branches().double()


def branch_loss(model: nn.Module, which: str, rank: int, seed: int) -> torch.Tensor:
    """A loss over one way through `Branches`."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * seed + rank), dtype=torch.float64)
    return model(x, which).square().mean()


def flow_errors(ctx: RankContext, ways: list[str], how: str, reshard: str) -> list[str]:
    """Where gradients after several ways through `Branches` leave the error bound around the plain model's.

    Both sides add the same terms, one per way and rank, in an order of their own, and divide by the ranks. With n
    terms either sum is within (n - 1) eps of the sum of their magnitudes, and the division adds half an eps.

    Args:
        ways: what each forward runs.
        how: "each" runs forward and backward for each way; "sum" all forwards, then one backward of the sum;
            "later" all forwards, then all backwards; "retain" each backward twice.
        reshard: "always" or "never".
    """
    fp64 = {"dtype": "fp64", "param_dtype": "fp64", "reduce_dtype": "fp64"}
    model = shard(make_branches(), ctx, plan="left,right,frozen,mixed", reshard_after_forward=reshard, **fp64)
    _run_ways(model, ways, how, ctx.rank)
    found = whole_gradients(model)
    terms: dict[str, list[torch.Tensor]] = {name: [] for name in found}
    for rank in range(ctx.ranks):
        for i, which in enumerate(ways):
            plain = make_branches()
            branch_loss(plain, which, rank, i).backward()
            for name, param in plain.named_parameters():
                if param.grad is not None:
                    terms[name] += [param.grad / ctx.ranks] * (2 if how == "retain" else 1)
    wrong = []
    for name, parts in terms.items():
        grad = found[name]
        if not parts or grad is None:
            wrong += [] if not parts and grad is None else [f"{name}: {'no' if grad is None else 'a'} gradient"]
            continue
        stacked = torch.stack(parts)
        bound = 2 * len(parts) * torch.finfo(torch.float64).eps * stacked.abs().sum(0)
        if ((grad - stacked.sum(0)).abs() > bound).any():
            wrong.append(f"{name}: off by {(grad - stacked.sum(0)).abs().max():.1e}")
    return wrong


def _run_ways(model: nn.Module, ways: list[str], how: str, rank: int) -> None:
    losses = []
    for i, which in enumerate(ways):
        loss = branch_loss(model, which, rank, i)
        losses.append(loss)
        if how == "each":
            loss.backward()
        if how == "retain":
            loss.backward(retain_graph=True)
            loss.backward()
    if how == "sum":
        torch.stack(losses).sum().backward()
    if how == "later":
        for loss in losses:
            loss.backward()


def after_failure(ctx: RankContext, where: str, reshard: str) -> list[str]:
    """Where a step differs from the same step of a fresh model, after one that raised in forward or in backward."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    fresh = shard(make_net(), ctx, reshard_after_forward=reshard)
    loss_of(fresh, 0, ctx.rank).backward()
    model = shard(make_net(), ctx, reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    place = model.blocks[1].up
    handle = (
        place.register_forward_pre_hook(fail) if where == "forward" else place.register_full_backward_pre_hook(fail)
    )
    try:
        loss_of(model, 3, ctx.rank).backward()
    except ZeroDivisionError:
        handle.remove()
    else:
        return ["nothing was raised"]
    if where == "forward" and reshard == "always":
        whole = [name for name, param in model.named_parameters() if not isinstance(param, DTensor)]
        if whole:
            return [f"{name} is whole after the exception" for name in whole]
    optimizer.zero_grad()
    loss_of(model, 0, ctx.rank).backward()
    found, expected = local_gradients(model), local_gradients(fresh)
    return [name for name in expected if not same(found[name], expected[name])]


def misprediction(ctx: RankContext) -> tuple[list[str], set[str]]:
    """The log of a step that runs less than the step before, and what the modules hold after its forward."""
    fp64 = {"dtype": "fp64", "param_dtype": "fp64", "reduce_dtype": "fp64"}
    model = shard(make_branches(), ctx, plan="left,right,frozen,mixed", **fp64)
    branch_loss(model, "both", ctx.rank, 0).backward()
    log: list[str] = []
    model.log_schedule(lambda event, group: log.append(f"{event} {group}"))
    loss = branch_loss(model, "left", ctx.rank, 0)
    held = {type(param.data).__name__ for param in model.parameters()}
    loss.backward()
    return log, held


def eval_then_train(ctx: RankContext, inference: bool, reshard: str) -> list[str]:
    """What is wrong in forwards without gradients, and in a step after them."""
    model = shard(make_net(), ctx, reshard_after_forward=reshard)
    with torch.inference_mode() if inference else torch.no_grad():
        evaluated = [loss_of(model, step, ctx.rank) for step in (7, 8)]
    wrong = [f"{name} is whole" for name, param in model.named_parameters() if not isinstance(param, DTensor)]
    plain = make_net()
    wrong += [f"loss {s}" for s, loss in zip((7, 8), evaluated, strict=True) if loss != loss_of(plain, s, ctx.rank)]
    loss_of(model, 0, ctx.rank).backward()
    found = whole_gradients(model)
    _, expected = mean_gradients(ctx.ranks, {}, torch.float32, torch.float32)
    return wrong + [name for name in expected if not same(found[name], expected[name])]


class Passing(nn.Module):
    """Returns its input beside its output; the input is older than the module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x + self.inner(x)


class Passed(nn.Module):
    """Uses both outputs of each `Passing`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([Passing() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            before, after = block(x)
            x = before * after
        return x


def passed_through(ctx: RankContext) -> Counter[str]:
    """How often each group is gathered in one step of modules that hand their input on."""
    torch.manual_seed(5)
    model = shard(Passed(), ctx)
    log: list[str] = []
    model.log_schedule(lambda event, group: log.append(f"{event} {group}"))
    model(torch.randn(2, 6)).sum().backward()
    return Counter(line for line in log if line.startswith("wait_gather"))


def post_accumulate_hooks(ctx: RankContext) -> Counter[str]:
    """How often each parameter's post-accumulate hook ran in a step, with the type of gradient it saw."""
    model = shard(make_net(), ctx)
    seen: Counter[str] = Counter()
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(
            lambda held, name=name: seen.update([f"{name} {type(held.grad).__name__}"])
        )
    loss_of(model, 0, ctx.rank).backward()
    return seen


def compiled_blocks(ctx: RankContext) -> tuple[list[str], int, list[str]]:
    """Blocks compiled after sharding: where gradients differ, graphs made, and lines of the engine in those graphs."""
    plain = shard(make_net(), ctx)
    loss_of(plain, 0, ctx.rank).backward()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    model = shard(make_net(), ctx)
    for block in model.blocks:
        block.compile(backend=keep)
    loss_of(model, 0, ctx.rank).backward()
    found, expected = local_gradients(model), local_gradients(plain)
    traces = [node.stack_trace or "" for graph in graphs for node in graph.graph.nodes]
    return (
        [name for name in expected if not same(found[name], expected[name])],
        len(graphs),
        [trace for trace in traces if "fsdp_eager" in trace],
    )


@dataclass
class Carried:
    """What `Carrier` modules hand to each other."""

    x: torch.Tensor
    extra: dict[str, Any]


class Carrier(nn.Module):
    """Takes and returns a dataclass with tensors in a dict; changes an output, which is a view, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.two = nn.Linear(6, 6)

    def forward(self, carried: Carried) -> Carried:
        return Carried(self.one(carried.x), {"sum": [self.two(carried.x).sum(), None, 1]})


class Ledger(nn.Linear):
    """Keeps a book of its parameters in `__setattr__`, and computes with what is in the book."""

    def __init__(self, dim: int) -> None:
        object.__setattr__(self, "book", {})
        super().__init__(dim, dim)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter):
            self.book[name] = value
        super().__setattr__(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.book["weight"], self.book["bias"])


class Holder(nn.Module):
    """Only holds a parameter: it has no forward, so no hook on it would run."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.full((5,), 0.25))


class Chain(nn.Module):
    """`Carrier`s, a `Holder`, a `Ledger`, an LSTM (which lists its weights) and a parameter list (never called)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Carrier() for _ in range(2)])
        self.holder = Holder()
        self.ledger = Ledger(6)
        self.rnn = nn.LSTM(6, 5, batch_first=True)
        self.scales = nn.ParameterList([torch.ones(5), torch.full((2,), 0.5)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for block in self.blocks:
            carried = block(Carried(x, {}))
            x = carried.x
            x += 1  # in place, on a view
            total = total + carried.extra["sum"][0]
        return (self.rnn(self.ledger(x))[0] * self.scales[0] + self.holder.offset).square().sum() * self.scales[
            1
        ].sum() + total


def odd_modules(ctx: RankContext, plan: str, reshard: str) -> list[str]:
    """Where gradients of `Chain` are not the mean of the plain model's, in bits."""

    def run(model: nn.Module, rank: int) -> None:
        model(torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(rank))).backward()

    def make() -> Chain:
        torch.manual_seed(4)
        return Chain()

    model = shard(make(), ctx, plan=plan, reshard_after_forward=reshard)
    run(model, ctx.rank)
    sums: dict[str, torch.Tensor] = {}
    for rank in range(ctx.ranks):
        plain = make()
        run(plain, rank)
        for name, param in plain.named_parameters():
            assert param.grad is not None
            sums[name] = param.grad if rank == 0 else sums[name] + param.grad
    found = whole_gradients(model)
    return [name for name, total in sums.items() if not same(found[name], total / ctx.ranks)]


def identity(ctx: RankContext, plan: str) -> dict[str, Any]:
    """What sharding keeps of a model with tied and frozen parameters, and what its modules hold while they run."""

    def make() -> Net:
        net = make_net(tied=True)
        net.blocks[0].requires_grad_(False)
        net.norm.weight.no_decay = True  # a mark for the optimizer
        return net

    model = make()
    before = [(name, param.requires_grad) for name, param in model.named_parameters()]
    inside: list[set[str]] = []
    model.blocks[1].up.register_forward_pre_hook(
        lambda module, _: inside.append({type(param.data).__name__ for param in module.parameters()})
    )
    sharded = shard(model, ctx, plan=plan)
    loss_of(sharded, 0, ctx.rank).backward()
    without = {name for name, param in sharded.named_parameters() if param.grad is None}
    sharded.blocks[0].requires_grad_(True)  # unfreeze
    loss_of(sharded, 0, ctx.rank).backward()
    return {
        "kept": [(name, param.requires_grad) for name, param in make().named_parameters()] == before,
        "tied": sharded.head.weight is sharded.embed.weight,
        "marked": getattr(sharded.norm.weight, "no_decay", False),
        "inside": inside[0],
        "outside": {type(param.data).__name__ for param in sharded.parameters()},
        "without": without,
        "still_without": {name for name, param in sharded.named_parameters() if param.grad is None},
        "class": type(sharded).__name__,
        "is_net": isinstance(sharded, Net),
    }


def errors(ctx: RankContext) -> dict[str, str]:
    """The type and message of the error that each misuse ends in; "none" if there is none."""
    found = {}
    for name, commit in MISUSES.items():
        try:
            commit(ctx)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = "none"
    return found


MISUSES: dict[str, Callable[[RankContext], None]] = {}


def misuse(fn: Callable[[RankContext], None]) -> Callable[[RankContext], None]:
    """Enter a misuse under its name."""
    MISUSES[fn.__name__] = fn
    return fn


@misuse
def twice(ctx: RankContext) -> None:
    fully_shard(fully_shard(nn.Linear(3, 3), mesh=build_mesh()), mesh=build_mesh())


@misuse
def parallelize_twice(ctx: RankContext) -> None:
    shard(shard(make_net(), ctx), ctx)


@misuse
def list_container(ctx: RankContext) -> None:
    fully_shard(nn.ModuleList([nn.Linear(3, 3)]), mesh=build_mesh())


@misuse
def scalar(ctx: RankContext) -> None:
    model = nn.Linear(3, 3)
    model.scale = nn.Parameter(torch.tensor(1.0))
    fully_shard(model, mesh=build_mesh())


@misuse
def strided(ctx: RankContext) -> None:
    model = nn.Linear(3, 4)
    model.weight = nn.Parameter(torch.randn(3, 4).t())
    fully_shard(model, mesh=build_mesh())


@misuse
def two_dtypes(ctx: RankContext) -> None:
    model = nn.Linear(3, 4)
    model.bias = nn.Parameter(model.bias.detach().bfloat16())
    fully_shard(model, mesh=build_mesh())


@misuse
def meta(ctx: RankContext) -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 4)
    fully_shard(model, mesh=build_mesh())


@misuse
def shared(ctx: RankContext) -> None:
    model = make_net(tied=True)
    fully_shard(model.embed, mesh=build_mesh())
    fully_shard(model.head, mesh=build_mesh())


@misuse
def outside_in(ctx: RankContext) -> None:
    model = make_net()
    fully_shard(model, mesh=build_mesh())
    fully_shard(model.blocks[0], mesh=build_mesh())


@misuse
def inner_first(ctx: RankContext) -> None:
    model = make_net()
    for block in model.blocks:
        fully_shard(block, mesh=build_mesh())
    fully_shard(model, mesh=build_mesh())
    model.blocks[0](torch.randn(2, 10))
    loss_of(model, 0, ctx.rank)


@misuse
def no_single_root(ctx: RankContext) -> None:
    model = make_net()
    fully_shard([model.norm, model.head], mesh=build_mesh())
    model.norm(torch.randn(2, 10))


@misuse
def converted(ctx: RankContext) -> None:
    loss_of(shard(make_net(), ctx).to(torch.float64), 0, ctx.rank)


@misuse
def converted_part(ctx: RankContext) -> None:
    model = shard(make_net(), ctx)
    model.blocks[1].up.to(torch.float64)
    loss_of(model, 0, ctx.rank)


@misuse
def replaced(ctx: RankContext) -> None:
    model = shard(make_net(), ctx)
    model.blocks[1].up.weight = nn.Parameter(torch.zeros(7, 10))
    loss_of(model, 0, ctx.rank)


@misuse
def assigned(ctx: RankContext) -> None:
    model = shard(make_net(), ctx)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    loss_of(model, 0, ctx.rank)


@misuse
def sparse(ctx: RankContext) -> None:
    model = nn.Embedding(8, 3, sparse=True)
    fully_shard(model, mesh=build_mesh())
    model(torch.tensor([1, 2])).sum().backward()


class Opaque(nn.Module):
    """Returns its output in an object that nobody can look into."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        return iter([self.inner(x)])


@misuse
def opaque(ctx: RankContext) -> None:
    model = Opaque()
    fully_shard(model, mesh=build_mesh())
    next(model(torch.randn(2, 3))).sum().backward()


@misuse
def deepcopy(ctx: RankContext) -> None:
    copy.deepcopy(shard(make_net(), ctx))


@misuse
def no_mesh(ctx: RankContext) -> None:
    fsdp_eager.parallelize.parallelize(make_net(), None, make_job(ctx))


@misuse
def reshard_number(ctx: RankContext) -> None:
    fully_shard(nn.Linear(3, 3), mesh=build_mesh(), reshard_after_forward=2)


def by_hand(ctx: RankContext) -> dict[str, Any]:
    """`fully_shard` called as FSDP2's is: from the inside out, a list and the root among them, bf16 and casts."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float64)

    def make() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(Block(6, 9), Block(6, 5), nn.Linear(6, 6), nn.Linear(6, 4, bias=False))

    def batch(rank: int) -> torch.Tensor:
        return torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))

    model = make()
    for block in (model[0], model[1], [model[2], model[3]], model):
        returned = fully_shard(block, mesh=build_mesh(), mp_policy=policy, transport=Transport.ORDERED)
        assert returned is block
    first = model[0]
    assert isinstance(first, FSDPModule)
    first.unshard()
    plain = type(first.up.weight.data).__name__
    first.reshard()
    output = model(batch(ctx.rank))
    output.square().sum().backward()
    sums: dict[str, torch.Tensor] = {}
    for rank in range(ctx.ranks):
        reference = make().bfloat16()
        x = batch(rank).bfloat16()
        for module in reference:  # each module casts what it returns to float64, and the next one casts it back
            x = module(x)
        expected = x.double() if rank == ctx.rank else None
        x.double().square().sum().backward()
        wrong_output = expected is not None and not torch.equal(expected, output)
        assert not wrong_output, "output"
        for name, param in reference.named_parameters():
            assert param.grad is not None
            sums[name] = param.grad.float() if rank == 0 else sums[name] + param.grad.float()
    found = whole_gradients(model)
    return {
        "output": output.dtype,
        "wrong": [name for name, total in sums.items() if not same(found[name], total / ctx.ranks)],
        "unsharded": plain,
        "resharded": type(first.up.weight.data).__name__,
        "slice": type(model[:2]).__name__,
    }


def graphs_of_blocks(context: RankContext, engine: str, job: JobConfig) -> int:
    """How many graphs a whole run of `job` traces; raises if one is traced again."""
    with counting_graphs() as graphs:
        run_engine(context, engine, job)
        return graphs()
