"""What the tests of the eager engine run on ranks: misuse, and the API used by hand."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fsdp_eager.parallelize
from common.harness.launch import RankContext
from common.harness.train import run_engine
from common.job import JobConfig
from common.mesh import build_mesh
from fsdp_eager import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    Transport,
    fully_shard,
    register_fsdp_forward_method,
)
from parity_tests.eager_cases import Block, loss_of, make_job, make_net, same, shard, whole_gradients
from parity_tests.torch_private import counting_graphs


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
    shard(model, ctx, plan="model")


@misuse
def meta(ctx: RankContext) -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 4)
    fully_shard(model, mesh=build_mesh())
    model(torch.randn(2, 3))


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
def assigned_plain(ctx: RankContext) -> None:
    model = shard(make_net(), ctx)
    whole = {name: nn.Parameter(torch.zeros(value.shape)) for name, value in model.state_dict().items()}
    model.load_state_dict(whole, assign=True)
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
    fully_shard(nn.Linear(3, 3), mesh=build_mesh(), reshard_after_forward=5)


@misuse
def early_optimizer(ctx: RankContext) -> None:
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(shard(model, ctx), 0, ctx.rank)
    optimizer.step()


@misuse
def optimizer_while_whole(ctx: RankContext) -> None:
    model = make_net()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=build_mesh())
    model.blocks[0].unshard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, 0, ctx.rank)
    optimizer.step()


@misuse
def no_such_dimension(ctx: RankContext) -> None:
    fully_shard(nn.Linear(3, 3), mesh=build_mesh(), shard_placement_fn=lambda _: Shard(1))


@misuse
def no_placement(ctx: RankContext) -> None:
    fully_shard(nn.Linear(3, 3), mesh=build_mesh(), shard_placement_fn=lambda _: 1)  # type: ignore[arg-type, return-value]


@misuse
def pinned_without_gpu(ctx: RankContext) -> None:
    fully_shard(nn.Linear(3, 3), mesh=build_mesh(), offload_policy=CPUOffloadPolicy())


@misuse
def three_dimensions(ctx: RankContext) -> None:
    fully_shard(nn.Linear(3, 3), mesh=init_device_mesh("cpu", (1, 1, ctx.ranks)))


@misuse
def pickled(ctx: RankContext) -> None:
    pickle.dumps(shard(make_net(), ctx))


@misuse
def divided_by_nothing(ctx: RankContext) -> None:
    shard(make_net(), ctx).set_gradient_divide_factor(0.0)


@misuse
def prefetch_of_plain(ctx: RankContext) -> None:
    shard(make_net(), ctx).set_modules_to_forward_prefetch([nn.Linear(3, 3)])  # type: ignore[list-item]


@misuse
def reset_inside(ctx: RankContext) -> None:
    model = shard(make_net(), ctx)
    model.blocks[0].reset_iter_state()


@misuse
def assigned_after_optimizer(ctx: RankContext) -> None:
    model = shard(make_net(), ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    loss_of(model, 0, ctx.rank).backward()
    optimizer.step()


@misuse
def assigned_after_a_step(ctx: RankContext) -> None:
    model = shard(make_net(), ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, 0, ctx.rank).backward()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    loss_of(model, 1, ctx.rank).backward()
    optimizer.step()


@misuse
def converted_before_backward(ctx: RankContext) -> None:
    model = shard(make_net(), ctx)
    loss = loss_of(model, 0, ctx.rank)
    model.double()
    loss_of(model, 0, ctx.rank)
    loss.backward()


@misuse
def sharded_while_whole(ctx: RankContext) -> None:
    inner, outer = make_net().blocks[0], nn.Module()
    fully_shard(inner, mesh=build_mesh())
    inner.double()
    inner.unshard()
    outer.weight = inner.up.weight
    fully_shard(nn.Sequential(outer), mesh=build_mesh())


@misuse
def gradients_of_gradients(ctx: RankContext) -> None:
    loss_of(shard(make_net(), ctx), 0, ctx.rank).backward(create_graph=True)


@misuse
def penalty_with_kept_weights(ctx: RankContext) -> None:
    """Weights are there all the time, and still nothing would reduce the penalty's gradients."""
    model = fully_shard(nn.Linear(3, 3), mesh=build_mesh())
    model.set_reshard_after_backward(False)
    x = torch.ones(2, 3, requires_grad=True)
    torch.autograd.grad(model(x).square().sum(), x, create_graph=True)


@misuse
def no_messages(ctx: RankContext) -> None:
    shard(make_net(), ctx).set_reduce_scatter_max_input_buffers(0)


@misuse
def no_gathers(ctx: RankContext) -> None:
    shard(make_net(), ctx).set_max_all_gathers(True)


@misuse
def reshard_to_two(ctx: RankContext) -> None:
    shard(make_net(), ctx).set_reshard_after_forward(2)  # type: ignore[arg-type]


@misuse
def no_such_method(ctx: RankContext) -> None:
    register_fsdp_forward_method(shard(make_net(), ctx), "generate")


@misuse
def custom_gather(ctx: RankContext) -> None:
    shard(make_net(), ctx).set_custom_all_gather(None)


@misuse
def stream_of_hook(ctx: RankContext) -> None:
    shard(make_net(), ctx).set_all_reduce_hook(lambda _: None, stream=object())


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
