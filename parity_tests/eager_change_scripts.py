"""Scripts about parameters that are made, loaded, converted or copied, also at odd moments."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.tensor import DTensor

from common.harness.launch import RankContext
from common.mesh import build_mesh
from parity_tests.eager_cases import Block, loss_of, make_net
from parity_tests.eager_scripts import (
    SCRIPTS,
    Found,
    apply,
    gradients,
    rows_of,
    same_values,
    script,
    steps,
    values,
    zeroed_net,
)

__all__ = ["SCRIPTS"]

# Deferred initialisation, state dicts, conversion


@script
def from_meta(api: Any, ctx: RankContext) -> Found:
    with torch.device("meta"):
        model = zeroed_net()
    apply(api, model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.fill_(0.1 * (index + 1))
    return steps(model, ctx)


@script
def from_meta_by_assignment(api: Any, ctx: RankContext) -> Found:
    source = apply(api, make_net())
    with torch.device("meta"):
        model = zeroed_net()
    apply(api, model)
    model.load_state_dict({name: value.clone() for name, value in source.state_dict().items()}, assign=True)
    return steps(model, ctx)


@script
def converted(api: Any, ctx: RankContext) -> Found:
    return steps(apply(api, make_net()).to(torch.float64), ctx)


@script
def full_state(api: Any, ctx: RankContext) -> Found:
    """Whole values out of one model and into another, optimizer and all, with torch's own functions."""
    source = apply(api, make_net())
    optimizer = torch.optim.AdamW(source.parameters(), lr=0.01)
    loss_of(source, 0, ctx.rank).backward()
    optimizer.step()
    whole = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
    saved, saved_optimizer = dcp.get_state_dict(source, optimizer, options=whole)
    target = apply(api, zeroed_net())
    fresh = torch.optim.AdamW(target.parameters(), lr=0.01)
    spread = dcp.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    is_first = ctx.rank == 0
    dcp.set_model_state_dict(target, dict(saved) if is_first else {}, options=spread)
    dcp.set_optimizer_state_dict(target, fresh, saved_optimizer if is_first else {}, options=spread)
    loss_of(target, 1, ctx.rank).backward()
    fresh.step()
    return values(target) | {f"saved {name}": value for name, value in saved.items()}


@dataclass
class Pair:
    """Two outputs, one of which needs no gradient."""

    first: Tensor
    second: Tensor


class Pairing(nn.Module):
    """Takes and returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6)])

    def forward(self, pair: Pair) -> Pair:
        return Pair(self.blocks[0](pair.first), pair.second + 1)


@script
def dataclasses(api: Any, ctx: RankContext) -> Found:
    model = Pairing()
    same_values(model)
    apply(api, model, mp_policy=api.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float64))
    output = model(Pair(rows_of(ctx, 6), torch.ones(2)))
    output.first.sum().backward()
    return {"first": output.first.detach(), "second": output.second, **gradients(model)}


# Odd moments


@script
def loaded_between_forward_and_backward(api: Any, ctx: RankContext) -> Found:
    model = apply(api, make_net(), reshard_after_forward=True)
    loss = loss_of(model, 0, ctx.rank)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    loss.backward()
    return gradients(model)


@script
def loaded_tied(api: Any, ctx: RankContext) -> Found:
    model, source = (apply(api, make_net(tied=True), reshard_after_forward=True) for _ in range(2))
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict({name: value.clone() for name, value in source.state_dict().items()}, assign=True)
    loss = loss_of(model, 0, ctx.rank)
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


@script
def ignored_by_an_inner_call(api: Any, ctx: RankContext) -> Found:
    model = make_net()
    weight = model.blocks[0].up.weight
    for block in model.blocks:
        api.fully_shard(block, mesh=build_mesh(), ignored_params={weight})
    api.fully_shard(model, mesh=build_mesh())
    assert not isinstance(model.blocks[0].up.weight, DTensor)
    return steps(model, ctx, 1)


@script
def handle_waited_for_late(api: Any, ctx: RankContext) -> Found:
    model = apply(api, make_net())
    handle = model.blocks[0].unshard(async_op=True)
    loss_of(model, 0, ctx.rank).backward()
    handle.wait()
    return gradients(model)


@script
def copied_parameters(api: Any, ctx: RankContext) -> Found:
    """An average of weights is kept in a copy of them; torch copies no DTensor that is empty here."""
    model = apply(api, make_net(bare=True))
    average = copy.deepcopy(dict(model.named_parameters()))
    found = steps(model, ctx, 1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            average[name].lerp_(param, 0.5)
    return found | {f"average of {name}": value.to_local().clone() for name, value in average.items()}


@script
def saved(api: Any, ctx: RankContext) -> Found:
    """A state dict is saved and loaded, with parameters in it or their values."""
    source, target = apply(api, make_net(bare=True)), apply(api, zeroed_net(bare=True))
    for keep_vars in (False, True):
        file = io.BytesIO()
        torch.save(source.state_dict(keep_vars=keep_vars), file)
        file.seek(0)
        target.load_state_dict(torch.load(file, weights_only=False))
    return steps(target, ctx, 1)


class Encoder(nn.Module):
    """Has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(6, 9)

    def encode(self, x: Tensor) -> Tensor:
        return self.block(x)


@script
def without_forward(api: Any, ctx: RankContext) -> Found:
    model = Encoder()
    same_values(model)
    api.fully_shard(model, mesh=build_mesh())
    api.register_fsdp_forward_method(model, "encode")
    model.encode(rows_of(ctx, 6)).square().sum().backward()
    return gradients(model)


@script
def told_inside(api: Any, ctx: RankContext) -> Found:
    """What holds for the whole model, said to a block before the first forward."""
    model = apply(api, make_net())
    for block in model.blocks:
        block.set_reduce_scatter_max_input_buffers(2)
        block.set_is_last_backward(True)
    return steps(model, ctx)


@script
def offloaded(api: Any, ctx: RankContext) -> Found:
    """On a CPU shards live where the model computes."""
    return steps(apply(api, make_net(), offload_policy=api.CPUOffloadPolicy(pin_memory=False)), ctx)
