"""What scripts of the eager engine's API are judged by: torch's `fully_shard`, or a formula where torch has none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import fsdp_eager
from common.harness.launch import RankContext
from common.mesh import build_mesh
from fsdp_eager import MixedPrecisionPolicy, Transport, fully_shard
from parity_tests import eager_change_scripts, eager_flow_scripts, eager_number_scripts
from parity_tests.eager_cases import loss_of, make_net, same, whole_gradients
from parity_tests.eager_scripts import Script, apply, rows_of, same_values, steps, zeroed_net

SCRIPTS: dict[str, Script] = eager_number_scripts.SCRIPTS | eager_flow_scripts.SCRIPTS | eager_change_scripts.SCRIPTS


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
    parts = [
        _parts(_convolutions(), lambda net, rank=rank: net(_images(rank)).square().sum()) for rank in range(ctx.ranks)
    ]
    wrong = [name for name, grad in whole_gradients(model).items() if not _is_sum(grad, parts, name, ctx.ranks)]
    state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    wrong += [f"value of {name}" for name, value in plain.state_dict().items() if not same(state[name], value)]
    wrong += [] if torch.equal(output, plain(_images(ctx.rank))) else ["output"]
    return {"wrong": wrong, "shapes": [tuple(param.to_local().shape) for param in model.parameters()]}


def _parts(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """The gradients of a plain model."""
    loss(model).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def _is_sum(found: Tensor | None, parts: list[dict[str, Tensor]], name: str, factor: float) -> bool:
    """Whether `found` is the sum of the parts of each rank over `factor`, as far as their dtype holds it.

    R addends are rounded R - 1 times, and once each when they are divided before and after: at most R + 1 times half an
    epsilon of the sum of magnitudes, to first order, so R + 2 with what is of higher order. A division before the sum
    may also lose half of the smallest number of the dtype in each addend.
    """
    assert found is not None
    addends = [part[name] for part in parts]
    limits = torch.finfo(addends[0].dtype)
    exact = sum(addend.double() for addend in addends) / factor
    magnitude = sum(addend.double().abs() for addend in addends) / factor
    bound = (len(parts) + 2) * limits.eps / 2 * magnitude + len(parts) * limits.smallest_normal * limits.eps
    return bool(((found.double() - exact).abs() <= bound).all())


def _convolutions() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(2), nn.Conv1d(5, 2, 2), nn.Linear(8, 7)).double()
    same_values(model)
    return model


def _images(rank: int) -> Tensor:
    return torch.randn(2, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def divided(ctx: RankContext, transport: str, replicas: int) -> list[str]:
    """What is wrong with gradients of three dtypes that are divided by 2.5, in the whole tree or in one group."""
    wrong = []
    for dtype in (torch.float64, torch.float32, torch.float16):
        parts = [_parts(make_net().to(dtype), functools.partial(_loss, rank=rank)) for rank in range(ctx.ranks)]
        for recurse in (True, False):
            mesh = build_mesh(replicas=replicas)
            model = apply(fsdp_eager, make_net().to(dtype), mesh=mesh, transport=Transport(transport))
            model.set_gradient_divide_factor(2.5, recurse=recurse)
            _loss(model, ctx.rank).backward()
            for name, found in whole_gradients(model).items():
                factor = ctx.ranks if "blocks" in name and not recurse else 2.5
                wrong += [] if _is_sum(found, parts, name, factor) else [f"{dtype} {recurse} {name}"]
    return wrong


def _loss(model: nn.Module, rank: int) -> Tensor:
    return loss_of(model, 0, rank)


def ordered_hybrid(ctx: RankContext, replicas: int, reshard: bool | int) -> list[str]:
    """What differs from the mean of the gradients of plain models, over all ranks, replicas or not."""
    mesh = build_mesh(replicas=replicas)
    model = apply(fsdp_eager, make_net().double(), mesh=mesh, reshard_after_forward=reshard)
    _loss(model, ctx.rank).backward()
    parts = [_parts(make_net().double(), functools.partial(_loss, rank=rank)) for rank in range(ctx.ranks)]
    return [name for name, grad in whole_gradients(model).items() if not _is_sum(grad, parts, name, ctx.ranks)]


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
    """Parameters of two dtypes in one call: how many groups there are, and which gradients are wrong."""
    model = _two_dtypes()
    fully_shard(model, mesh=build_mesh(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model(rows_of(ctx, 4)).sum().backward()
    parts = []
    for rank in range(ctx.ranks):
        rows = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank)).bfloat16()
        parts.append(_parts(_two_dtypes().bfloat16(), lambda net, rows=rows: net(rows).sum()))
    dtypes = {name: param.dtype for name, param in _two_dtypes().named_parameters()}
    means = {name: sum(part[name].float() for part in parts) / ctx.ranks for name in dtypes}
    found = whole_gradients(model)
    wrong = [name for name, mean in means.items() if not same(found[name], mean.to(dtypes[name]))]
    return {"groups": len(model.fsdp_state.groups), "wrong": wrong}


def _two_dtypes() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5, dtype=torch.bfloat16))
    same_values(model)
    return model
