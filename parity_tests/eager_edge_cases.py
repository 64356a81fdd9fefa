"""Steps that are given up, and forwards that nothing comes of: what they leave behind in the eager engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fsdp_eager
from common.harness.launch import RankContext
from common.mesh import build_mesh
from fsdp_eager import fully_shard
from parity_tests.eager_cases import loss_of, make_net, same, whole_gradients
from parity_tests.eager_scripts import apply, rows_of
from parity_tests.torch_private import gradient_hooks

FORWARDS = 20


def differences(ctx: RankContext, name: str) -> list[str]:
    """Where gradients after an event differ in bits from those of a model to which nothing happened."""
    event = EVENTS[name]
    options: dict[str, Any] = {"reshard_after_forward": 2} if name == "written_before_kept_backward" else {}
    model, undisturbed = (apply(fsdp_eager, make_net(), **options) for _ in range(2))
    loss = event(model, ctx)
    (loss_of(model, 1, ctx.rank) if loss is None else loss).backward()
    loss_of(undisturbed, 1, ctx.rank).backward()
    model.reshard()
    found, expected = whole_gradients(model), whole_gradients(undisturbed)
    return [key for key in expected if not same(found[key], expected[key])]


class Given(Exception):
    """A step is given up."""


def _raise(kind: type[BaseException]) -> Callable[..., Any]:
    def hook(*_: object) -> None:
        raise kind  # a new one: one that the hook held would hold, by its traceback, the graph that the hook is on

    return hook


def backward_raised(model: Any, ctx: RankContext) -> Tensor:
    """Two forwards, and the backward of one of them raises; the other's comes with no forward between."""
    loss = loss_of(model, 1, ctx.rank)

    def raise_in_backward(module: nn.Module, inputs: object, output: Tensor) -> None:
        output.register_hook(_raise(Given))

    handle = model.blocks[1].register_forward_hook(raise_in_backward)
    other = loss_of(model, 0, ctx.rank)
    handle.remove()
    try:
        other.backward()
    except Given:
        return loss
    raise AssertionError("nothing was raised")


def block_interrupted(model: Any, ctx: RankContext) -> None:
    """A block that is called alone is interrupted from the keyboard."""
    loss_of(model, 0, ctx.rank)
    handle = model.blocks[1].norm.register_forward_hook(_raise(KeyboardInterrupt))
    try:
        model.blocks[1](torch.ones(2, 10))
    except KeyboardInterrupt:
        handle.remove()
        return
    raise AssertionError("nothing was raised")


def one_rank_wrote(model: Any, ctx: RankContext) -> None:
    """One rank writes to its own shard, the values that are there, while whole weights are kept."""
    weight = model.blocks[0].up.weight
    model.set_reshard_after_backward(False)
    loss_of(model, 0, ctx.rank).backward()
    model.set_reshard_after_backward(True)
    if ctx.rank == 0:
        with torch.no_grad():
            weight.to_local().mul_(1)
    _clear_shards(model)


def written_before_kept_backward(model: Any, ctx: RankContext) -> None:
    """Shards get their values after a forward whose backward gathers the piece that was kept, and keeps that whole."""
    params = list(model.parameters())
    values = [param.detach().clone() for param in params]
    with torch.no_grad():
        for param in params:
            param.zero_()
        model.set_reshard_after_backward(False)
        with torch.enable_grad():
            loss = loss_of(model, 0, ctx.rank)
        for param, value in zip(params, values, strict=True):
            param.copy_(value)
    loss.backward()
    model.set_reshard_after_backward(True)
    _clear_shards(model)


def converted_then_evaluated(model: Any, ctx: RankContext) -> None:
    """The first forward after a conversion back is an evaluation."""
    model.double()
    with torch.no_grad():
        loss_of(model, 0, ctx.rank)
    model.float()
    with torch.inference_mode():
        loss_of(model, 0, ctx.rank)


EVENTS: dict[str, Callable[[Any, RankContext], Tensor | None]] = {
    event.__name__: event
    for event in (
        backward_raised,
        block_interrupted,
        one_rank_wrote,
        written_before_kept_backward,
        converted_then_evaluated,
    )
}


def _clear_shards(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, fsdp_eager.FSDPModule):
            for state in module.fsdp_state.groups:
                for param in state.group.params:
                    param.sharded_param.grad = None


def left_behind(ctx: RankContext) -> dict[str, int]:
    """What forwards without a backward, and outputs that are views of a parameter, leave behind."""
    model = apply(fsdp_eager, make_net())
    for _ in range(FORWARDS):
        loss_of(model, 0, ctx.rank)
    with torch.no_grad():
        loss_of(model, 0, ctx.rank)
    view = fully_shard(Transposed(), mesh=build_mesh())
    for _ in range(FORWARDS):
        view(rows_of(ctx, 3)).sum().backward()
    whole = view.fsdp_state.groups[0].group.params[0].unsharded_param
    awaited = model.fsdp_state.root.schedule.awaiting_backward()
    return {"awaited": len(awaited), "hooks": gradient_hooks(whole)}


class Transposed(nn.Module):
    """Returns a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.t()


def saved_bytes(ctx: RankContext) -> dict[str, tuple[int, int]]:
    """Of each value in a state dict that is not its size: bytes of its storage, which is what is saved, and its own."""
    shards = {name: value.to_local() for name, value in apply(fsdp_eager, make_net()).state_dict().items()}
    sizes = {name: (shard.untyped_storage().nbytes(), shard.nbytes) for name, shard in shards.items()}
    return {name: (found, expected) for name, (found, expected) in sizes.items() if found != expected}


def retried(ctx: RankContext) -> list[str]:
    """Sharding that was refused changes nothing: put right, the model trains as another."""
    model, other = (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.float64)) for _ in range(2))
    model[1].scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    try:
        fully_shard(model, mesh=build_mesh())
    except fsdp_eager.api.EngineError:
        del model[1].scale
    fully_shard(model, mesh=build_mesh())
    fully_shard(other, mesh=build_mesh())
    return [] if [*map(type, model.parameters())] == [*map(type, other.parameters())] else ["types"]
