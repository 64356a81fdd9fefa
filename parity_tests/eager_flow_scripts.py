"""Scripts about what runs when."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common.harness.launch import RankContext
from common.mesh import build_mesh
from parity_tests.eager_cases import BATCH, Block, loss_of, make_net, tokens
from parity_tests.eager_scripts import (
    SCRIPTS,
    Found,
    Script,
    apply,
    gradients,
    rows_of,
    same_values,
    script,
    steps,
)

# Flow


class Chain(nn.Module):
    """Calls its blocks one by one, under activation checkpointing of one kind."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(10, size) for size in (33, 7, 16)])
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


def recomputes(use_reentrant: bool) -> Script:
    """Activation checkpointing around each block, in the forward of a model."""

    def run(api: Any, ctx: RankContext) -> Found:
        model = Chain(use_reentrant)
        same_values(model)
        apply(api, model)
        x = rows_of(ctx, 10).requires_grad_()
        model(x).square().sum().backward()
        return {"input": x.grad, **gradients(model)}

    return run


SCRIPTS["checkpoint"] = recomputes(use_reentrant=False)
SCRIPTS["checkpoint_reentrant"] = recomputes(use_reentrant=True)


@script
def chunked_loss(api: Any, ctx: RankContext) -> Found:
    """A list of two modules, of which forward runs one, and the loss the other, piece by piece."""
    model = make_net(bare=True)
    head = model.head
    model.head = nn.Identity()
    for block in model.blocks:
        api.fully_shard(block, mesh=build_mesh())
    model.loss_head = head
    api.fully_shard([model.norm, model.loss_head], mesh=build_mesh())
    api.fully_shard(model, mesh=build_mesh())
    hidden = model(tokens(0, ctx.rank))
    leaf = hidden.detach().requires_grad_()
    for chunk in leaf.chunk(BATCH):
        model.loss_head(chunk).square().mean().backward()
    hidden.backward(leaf.grad)
    return gradients(model)


class Generator(nn.Module):
    """A model with a second way in."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(6, 9), Block(6, 5)])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))

    def encode(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def project(self, x: Tensor) -> Tensor:
        return self.head(x)


@script
def forward_method(api: Any, ctx: RankContext) -> Found:
    model = Generator()
    same_values(model)
    apply(api, model)
    api.register_fsdp_forward_method(model, "project")
    api.register_fsdp_forward_method(nn.Linear(1, 1), "nothing")
    model(rows_of(ctx, 6)).sum().backward()
    output = model.project(rows_of(ctx, 6))
    output.square().sum().backward()
    return {"output": output.detach(), **gradients(model)}


@script
def unshard_by_hand(api: Any, ctx: RankContext) -> Found:
    model = apply(api, make_net())
    handle = model.blocks[0].unshard(async_op=True)
    handle.wait()
    handle.wait()
    found = {f"whole {name}": param.detach().clone() for name, param in model.blocks[0].named_parameters()}
    model.blocks[0].reshard()
    model.blocks[1].unshard(async_op=True)  # nobody waits but the forward
    assert model.blocks[2].unshard() is None
    model.blocks[2].reshard()
    return found | steps(model, ctx, 1)


@script
def explicit_prefetch(api: Any, ctx: RankContext) -> Found:
    model = apply(api, make_net())
    first, second, third = model.blocks
    model.set_modules_to_forward_prefetch([first, second])
    first.set_modules_to_forward_prefetch([third])
    third.set_modules_to_backward_prefetch([second, first])
    model.set_reduce_scatter_max_input_buffers(3)
    return steps(model, ctx)


@script
def separate_group(api: Any, ctx: RankContext) -> Found:
    model = apply(api, make_net())
    model.set_separate_reduce_scatter_group()
    return steps(model, ctx)


@script
def hook_on_reduced(api: Any, ctx: RankContext) -> Found:
    """A hook that changes what was reduced."""
    model = apply(api, make_net())
    model.blocks[0].set_all_reduce_hook(lambda reduced: reduced.mul_(3))
    return steps(model, ctx, 1)


@script
def force_sum(api: Any, ctx: RankContext) -> Found:
    model = apply(api, make_net())
    for module in (model, *model.blocks):
        module.set_force_sum_reduction_for_comms(True)
    return steps(model, ctx, 1)


@script
def embedding_not_needed_in_backward(api: Any, ctx: RankContext) -> Found:
    model = make_net(bare=True)
    api.fully_shard(model.embed, mesh=build_mesh())
    apply(api, model)
    model.embed.set_unshard_in_backward(False)
    return steps(model, ctx)


@script
def unused_on_one_rank(api: Any, ctx: RankContext) -> Found:
    """Rank 0 uses one half of a group, the others the other."""
    model = Generator()
    same_values(model)
    api.fully_shard(model, mesh=build_mesh())
    api.register_fsdp_forward_method(model, "project")
    api.register_fsdp_forward_method(model, "encode")
    model.set_reduce_scatter_unused_params(True)
    use = model.project if ctx.rank == 0 else model.encode
    use(rows_of(ctx, 6)).sum().backward()
    return gradients(model)


@script
def after_an_error(api: Any, ctx: RankContext) -> Found:
    model = apply(api, make_net())
    handle = model.blocks[1].register_forward_hook(_fail)
    try:
        loss_of(model, 0, ctx.rank)
    except ZeroDivisionError:
        handle.remove()
    model.reset_iter_state()
    return steps(model, ctx, 1)


def _fail(*_: Any) -> None:
    raise ZeroDivisionError
