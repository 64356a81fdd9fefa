"""What the ranks of `test_compiled_engine.py` run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from common.gradient import Transport
from common.harness.launch import RankContext
from common.mesh import build_mesh
from common.plan import build_plan
from common.policy import MixedPrecisionPolicy
from fsdp_compiled import data_parallel
from fsdp_eager import fully_shard as eager_shard
from parity_tests.graph_cases import Net

Build = Callable[[], nn.Module]


class Repeats(nn.Module):
    """One weight read three times, a bias of its own, sizes that no small world divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 10)
        self.again = nn.Linear(10, 10)
        self.head = nn.Linear(10, 13)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids [batch, seq] to logits [batch, seq, 13]."""
        x = self.embed(tokens)
        for _ in range(3):
            x = torch.tanh(self.again(x))
        return self.head(x)


class Frozen(Net):
    """A frozen block between trained ones, and a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[1].up.bias.requires_grad_(False)


class Tied(Net):
    """Head and embedding are one parameter."""

    def __init__(self) -> None:
        super().__init__(tied=True)


class Narrow(nn.Module):
    """Fewer rows than ranks: some shards are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 3)
        self.squeeze = nn.Linear(3, 1)
        self.head = nn.Linear(1, 13)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids [batch, seq] to logits [batch, seq, 13]."""
        return self.head(self.squeeze(self.embed(tokens)))


class Adds(nn.Module):
    """A layer, and the sum of a parameter that has no elements."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(shape))
        self.layer = nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., 10] to the same."""
        return self.layer(x) + self.nothing.sum()


class Empty(nn.Module):
    """Parameters of no elements: in a bucket with others, and the only one of its bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.alone = nn.Parameter(torch.empty(0, 4))
        self.embed = nn.Embedding(13, 10)
        self.rowless = Adds(0, 4)
        self.widthless = Adds(4, 0)
        self.head = nn.Linear(10, 13)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids [batch, seq] to logits [batch, seq, 13]."""
        return self.head(self.widthless(self.rowless(self.embed(tokens)))) + self.alone.sum()


def batch(context: RankContext, step: int) -> torch.Tensor:
    """Token ids [2, 6] of this rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + context.rank)
    return torch.randint(0, 13, (2, 6), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Next-token loss on `tokens` against themselves."""
    return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def against_torch(
    context: RankContext, build: Build, plan: str, policy: tuple[torch.dtype | None, torch.dtype | None], reshard: bool
) -> list[str]:
    """Train 3 steps beside torch's `fully_shard`, same grouping, native sums; name everything that differs."""
    shard = partial(fully_shard, mp_policy=TorchPolicy(*policy))
    return _against(context, shard, build, plan, MixedPrecisionPolicy(*policy), reshard, Transport.NATIVE)


def against_eager(context: RankContext, build: Build, plan: str, transport: Transport) -> list[str]:
    """Train 3 steps beside the eager engine, for models with which torch's `fully_shard` fails; as `against_torch`."""
    shard = partial(eager_shard, transport=transport)
    return _against(context, shard, build, plan, MixedPrecisionPolicy(), True, transport)


def _against(
    context: RankContext,
    shard: Callable[..., object],
    build: Build,
    plan: str,
    policy: MixedPrecisionPolicy,
    reshard: bool,
    transport: Transport,
) -> list[str]:
    torch.manual_seed(0)
    ours = build()
    theirs = copy.deepcopy(ours)
    mesh = build_mesh()
    buckets = build_plan(ours, plan, reshard_after_forward=reshard)
    for bucket in buckets.buckets:
        modules = [theirs.get_submodule(name) for name in bucket.modules if name]
        if modules:
            shard(modules, mesh=mesh, reshard_after_forward=reshard)
    shard(theirs, mesh=mesh, reshard_after_forward=reshard)
    data_parallel(
        ours,
        mesh,
        plan=buckets,
        mp_policy=policy,
        backend="aot_eager",
        transport=transport,
    )
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    differing = []
    for step in range(3):
        tokens = batch(context, step)
        losses = [loss_of(model, tokens) for model in (ours, theirs)]
        for loss in losses:
            loss.backward()
        differing += [f"loss at {step}"] if losses[0].item() != losses[1].item() else []
        differing += [f"{name} at {step}" for name in _differing_gradients(ours, theirs)]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return differing


def _differing_gradients(ours: nn.Module, theirs: nn.Module) -> list[str]:
    names = []
    for (name, left), (_, right) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        if left.grad is None or right.grad is None:
            same = left.grad is right.grad
        else:
            assert isinstance(left.grad, DTensor) and isinstance(right.grad, DTensor)
            same = torch.equal(left.grad.to_local(), right.grad.to_local()) and left.grad.dtype is right.grad.dtype
        names += [] if same else [name]
    return names


def uncompiled_against_compiled(context: RankContext, build: Build) -> list[str]:
    """The parametrization as it is, without a graph, beside the same compiled; name everything that differs."""
    torch.manual_seed(0)
    plain = build()
    traced = copy.deepcopy(plain)
    mesh = build_mesh()
    for model, backend in ((plain, "eager"), (traced, "aot_eager")):
        plan = build_plan(model, "param", reshard_after_forward=False)
        data_parallel(model, mesh, plan=plan, backend=backend, transport=Transport.NATIVE)
    for _ in range(2):  # the second backward adds to the first one's gradients
        for step in range(2):
            losses = [loss_of(model, batch(context, step)) for model in (plain, traced)]
            for loss in losses:
                loss.backward()
    return _differing_gradients(plain, traced)


def eval_then_train(context: RankContext) -> tuple[bool, list[bool]]:
    """A forward without gradients, then a step: is the output the same, does every parameter get a gradient."""
    torch.manual_seed(0)
    model = Net()
    data_parallel(model, build_mesh(), backend="aot_eager")
    tokens = batch(context, 0)
    with torch.no_grad():
        quiet = model(tokens)
    loud = model(tokens)
    loud.sum().backward()
    return torch.equal(quiet, loud.detach()), [param.grad is not None for param in model.parameters()]


def state_dict_round_trip(context: RankContext) -> tuple[bool, bool]:
    """Save, change, load between compiled steps: are the values back, and does the graph use them."""
    torch.manual_seed(0)
    model = Net()
    data_parallel(model, build_mesh(), backend="aot_eager")
    tokens = batch(context, 0)
    before = model(tokens).detach()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    changed = model(tokens).detach()
    model.load_state_dict(saved)
    return torch.equal(before, model(tokens).detach()), torch.equal(before, changed)
