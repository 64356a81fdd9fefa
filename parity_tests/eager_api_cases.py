"""What scripts of the eager engine's API are judged by: torch's `fully_shard`, or a formula where torch has none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import fsdp_eager
from common.harness.launch import RankContext
from common.mesh import build_mesh
from fsdp_eager import MixedPrecisionPolicy, Transport, fully_shard
from parity_tests import eager_flow_scripts, eager_number_scripts
from parity_tests.eager_cases import loss_of, make_net, mean_gradients, same, whole_gradients
from parity_tests.eager_scripts import Script, apply, rows_of, same_values, steps, zeroed_net

SCRIPTS: dict[str, Script] = {**eager_flow_scripts.SCRIPTS, **eager_number_scripts.SCRIPTS}


def differences(ctx: RankContext, name: str) -> list[str]:
    """What differs in bits between torch's results of a script and the engine's."""
    ours = SimpleNamespace(**vars(fsdp_eager))
    ours.fully_shard = functools.partial(fsdp_eager.fully_shard, transport=fsdp_eager.Transport.NATIVE)
    found, expected = SCRIPTS[name](ours, ctx), SCRIPTS[name](torch_fsdp, ctx)
    if found.keys() != expected.keys():
        return [f"names {sorted(found.keys() ^ expected.keys())}"]
    if not any(value is not None and value.numel() and value.abs().sum() for value in expected.values()):
        return ["nothing was computed"]
    return [key for key in expected if not same(found[key], expected[key])]


def cut_unevenly(ctx: RankContext, replicas: int) -> dict[str, Any]:
    """Matrices cut along other dimensions, in pieces that differ or are empty: what is wrong, and local shapes."""
    model, plain = _convolutions(), _convolutions()
    dims = {4: Shard(1), 3: Shard(2), 2: Shard(-1)}
    fully_shard(model, mesh=build_mesh(replicas=replicas), shard_placement_fn=lambda param: dims.get(param.ndim))
    output = model(_images(ctx.rank))
    output.square().sum().backward()
    total = {name: torch.zeros_like(param) for name, param in plain.named_parameters()}
    for rank in range(ctx.ranks):
        plain.zero_grad()
        plain(_images(rank)).square().sum().backward()
        for name, param in plain.named_parameters():
            assert param.grad is not None
            total[name] += param.grad / ctx.ranks
    found = whole_gradients(model)
    state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    wrong = [name for name in total if not torch.allclose(found[name], total[name], rtol=1e-12, atol=1e-12)]
    wrong += [f"value of {name}" for name, value in plain.state_dict().items() if not same(state[name], value)]
    wrong += [] if torch.allclose(output, plain(_images(ctx.rank)), rtol=1e-12) else ["output"]
    return {"wrong": wrong, "shapes": [tuple(param.to_local().shape) for param in model.parameters()]}


def _convolutions() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(2), nn.Conv1d(5, 2, 2), nn.Linear(8, 7)).double()
    same_values(model)
    return model


def _images(rank: int) -> Tensor:
    return torch.randn(2, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def divided(ctx: RankContext, transport: str, replicas: int) -> list[str]:
    """What is wrong with gradients of three dtypes that are divided by 2.5, in the whole tree or in one group."""
    wrong = []
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 2e-2)):
        sums: dict[str, Tensor] = {}
        for rank in range(ctx.ranks):
            plain = make_net().to(dtype)
            loss_of(plain, 0, rank).backward()
            for name, param in plain.named_parameters():
                assert param.grad is not None
                sums[name] = param.grad.double() + sums.get(name, 0)
        for recurse in (True, False):
            mesh = build_mesh(replicas=replicas)
            model = apply(fsdp_eager, make_net().to(dtype), mesh=mesh, transport=Transport(transport))
            model.set_gradient_divide_factor(2.5, recurse=recurse)
            loss_of(model, 0, ctx.rank).backward()
            for name, found in whole_gradients(model).items():
                factor = ctx.ranks if "blocks" in name and not recurse else 2.5
                expected = sums[name] / factor
                assert found is not None
                if not (found.double() - expected).abs().max() <= bound * sums[name].abs().max():
                    wrong.append(f"{dtype} {recurse} {name}")
    return wrong


def ordered_hybrid(ctx: RankContext, reshard: bool | int) -> list[str]:
    """What differs from the mean that a plain model's gradients have in float64, rows and replicas alike."""
    model = apply(fsdp_eager, make_net().double(), mesh=build_mesh(replicas=2), reshard_after_forward=reshard)
    loss_of(model, 0, ctx.rank).backward()
    found = whole_gradients(model)
    _, expected = mean_gradients(ctx.ranks, {}, torch.float64, torch.float64)
    return [
        name
        for name, value in expected.items()
        if (grad := found[name]) is None or not torch.allclose(grad.float(), value, rtol=1e-6, atol=1e-9)
    ]


def events(ctx: RankContext, replicas: int, settings: dict[str, Any]) -> list[str]:
    """The schedule's log of the second step; `settings` are calls on the model before it."""
    model = apply(fsdp_eager, make_net(bare=True), mesh=build_mesh(replicas=replicas), reshard_after_forward=True)
    blocks = list(model.blocks)
    if settings.get("prefetch_all"):
        model.set_modules_to_forward_prefetch(blocks)
    model.set_max_all_gathers(settings.get("limit"))
    model.set_reduce_scatter_max_input_buffers(settings.get("messages", 1))
    log: list[str] = []
    for step in range(2):
        log.clear()
        model.log_schedule(lambda event, group: log.append(f"{event} {group}"))
        loss = loss_of(model, step, ctx.rank)
        log.append("-- backward")
        loss.backward()
    return log


def stale_weights(ctx: RankContext) -> dict[str, list[str]]:
    """Ways to change shards while whole parameters are kept or on their way, and where training then goes wrong."""
    expected = steps(apply(fsdp_eager, make_net()), ctx, 3)
    found: dict[str, list[str]] = {}
    for name, change in STALE.items():
        result = steps(change(ctx), ctx, 3)
        # losses: while whole weights are kept, those are what the model shows, and gradients are on the shards
        losses = [key for key in expected if key.startswith("loss")]
        found[name] = [key for key in losses if not same(result[key], expected[key])]
    return found


def _kept_after_backward(ctx: RankContext) -> Any:
    model = apply(fsdp_eager, make_net())
    model.set_reshard_after_backward(False)
    return model


def _kept_by_evaluation(ctx: RankContext) -> Any:
    model = apply(fsdp_eager, make_net(), reshard_after_forward=False)
    with torch.inference_mode():
        loss_of(model, 7, ctx.rank)
    return model


def _loaded_while(ctx: RankContext, async_op: bool) -> Any:
    """Values of another model, loaded after a gather by hand."""
    model, source = apply(fsdp_eager, zeroed_net()), apply(fsdp_eager, make_net())
    for block in model.blocks:
        block.unshard(async_op=async_op)
    model.load_state_dict(source.state_dict())
    return model


def _written_while(ctx: RankContext) -> Any:
    """The same, parameter by parameter, after a gather that nobody waited for."""
    model, source = apply(fsdp_eager, zeroed_net()), apply(fsdp_eager, make_net())
    params = list(zip(model.parameters(), source.parameters(), strict=True))
    for block in model.blocks:
        block.unshard(async_op=True)
    with torch.no_grad():
        for param, value in params:
            param.copy_(value)
    return model


STALE: dict[str, Callable[[RankContext], Any]] = {
    "kept after backward": _kept_after_backward,
    "kept by an evaluation": _kept_by_evaluation,
    "loaded while whole": functools.partial(_loaded_while, async_op=False),
    "loaded while on the way": functools.partial(_loaded_while, async_op=True),
    "written while on the way": _written_while,
}


def mixed_dtypes(ctx: RankContext) -> dict[str, Any]:
    """Parameters of two dtypes in one call: the dtypes of their gradients, and how many groups there are."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5, dtype=torch.bfloat16))
    same_values(model)
    first, second = model
    fully_shard(model, mesh=build_mesh(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model(rows_of(ctx, 4)).sum().backward()
    grads = {str(param.grad.dtype) for param in (first.weight, second.weight)}
    assert isinstance(first.weight.grad, DTensor)
    return {"dtypes": sorted(grads), "groups": len(model.fsdp_state.groups)}
