"""What the tests of the eager engine run on ranks: branches, failures, hooks, odd modules, identity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from common.harness.launch import RankContext
from parity_tests.eager_cases import (
    Block,
    Net,
    local_gradients,
    loss_of,
    make_net,
    mean_gradients,
    same,
    shard,
    whole_gradients,
)


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
