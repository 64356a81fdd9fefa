"""Scripts about where gradients and parameters go: meshes, placements, accumulation, dtypes, optimizers."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from common.harness.launch import RankContext
from common.mesh import build_mesh
from common.policy import DTYPES
from parity_tests.eager_cases import Block, loss_of, make_net
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
    values,
)

# Meshes and placements


def hybrid(replicas: int, **options: Any) -> Script:
    """Training on a 2-D mesh."""
    return lambda api, ctx: steps(apply(api, make_net(bare=True), mesh=build_mesh(replicas=replicas), **options), ctx)


SCRIPTS["hybrid_2"] = hybrid(2)
SCRIPTS["hybrid_3"] = hybrid(3)
SCRIPTS["hybrid_2_keeps"] = hybrid(2, reshard_after_forward=False)
SCRIPTS["hybrid_halves"] = hybrid(2, reshard_after_forward=2)  # of 4, on 8 ranks


@script
def hybrid_bf16(api: Any, ctx: RankContext) -> Found:
    policy = api.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return steps(apply(api, make_net(bare=True), mesh=build_mesh(replicas=2), mp_policy=policy), ctx)


@script
def hybrid_fp16(api: Any, ctx: RankContext) -> Found:
    policy = api.MixedPrecisionPolicy(torch.float16, torch.float16)
    return steps(apply(api, make_net(bare=True), mesh=build_mesh(replicas=2), mp_policy=policy), ctx, 1)


@script
def reduce_replicas_only_at_the_last(api: Any, ctx: RankContext) -> Found:
    model = apply(api, make_net(bare=True), mesh=build_mesh(replicas=2))
    found: Found = {}
    for step in range(4):
        model.set_requires_all_reduce(step % 2 == 1)
        loss_of(model, step, ctx.rank).backward()
        found |= gradients(model, f"micro-batch {step}")
    return found


def reshards(value: bool | int | None) -> Script:
    """Training with a value of reshard_after_forward."""
    return lambda api, ctx: steps(apply(api, make_net(bare=True), reshard_after_forward=value), ctx)


SCRIPTS["reshard_none"] = reshards(None)
SCRIPTS["reshard_true"] = reshards(True)
SCRIPTS["reshard_false"] = reshards(False)
SCRIPTS["reshard_to_half"] = reshards(2)


@script
def other_dimension(api: Any, ctx: RankContext) -> Found:
    """Matrices by columns; the sizes divide, since torch refuses others."""
    model = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 4))
    same_values(model)
    api.fully_shard(model, mesh=build_mesh(), shard_placement_fn=lambda param: Shard(-1) if param.ndim == 2 else None)
    model(rows_of(ctx, 8)).square().sum().backward()
    return gradients(model)


@script
def ignored(api: Any, ctx: RankContext) -> Found:
    model = make_net(bare=True)
    left = {model.embed.weight, model.blocks[1].norm.bias}
    return steps(apply(api, model, ignored_params=left), ctx, 1)


# Accumulation


def accumulates(param: torch.dtype | None, reduce: torch.dtype | None, keep: bool) -> Script:
    """Three micro-batches, reduced at the last; twice, so that what is left over would be seen."""

    def run(api: Any, ctx: RankContext) -> Found:
        model = apply(api, make_net(), mp_policy=api.MixedPrecisionPolicy(param, reduce))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found: Found = {}
        for step in range(6):
            last = step % 3 == 2
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last or not keep)
            loss_of(model, step, ctx.rank).backward()
            if last:
                found |= gradients(model, f"micro-batch {step}")
                optimizer.step()
                optimizer.zero_grad()
        return found

    return run


SCRIPTS["accumulate_fp32"] = accumulates(None, None, keep=False)
SCRIPTS["accumulate_fp32_keeps"] = accumulates(None, None, keep=True)
SCRIPTS["accumulate_bf16_fp32"] = accumulates(torch.bfloat16, torch.float32, keep=True)
SCRIPTS["accumulate_bf16"] = accumulates(torch.bfloat16, torch.bfloat16, keep=False)


@script
def pipeline_order(api: Any, ctx: RankContext) -> Found:
    """Forwards first, then their backwards, of which only the last finishes."""
    model = apply(api, make_net())
    losses = [loss_of(model, step, ctx.rank) for step in range(3)]
    for loss in losses:
        model.set_is_last_backward(loss is losses[-1])
        loss.backward()
    return gradients(model)


# Numbers


def precision(**policy: Any) -> Script:
    """Training with a policy."""
    return lambda api, ctx: steps(apply(api, make_net(), mp_policy=api.MixedPrecisionPolicy(**policy)), ctx, 1)


for _param, _reduce in itertools.product(("fp32", "bf16", "fp16", None), repeat=2):
    SCRIPTS[f"precision_{_param}_{_reduce}"] = precision(
        param_dtype=_param and DTYPES[_param], reduce_dtype=_reduce and DTYPES[_reduce]
    )


@script
def no_input_cast(api: Any, ctx: RankContext) -> Found:
    model = nn.Sequential(Block(6, 9), Block(6, 5))
    same_values(model)
    policy = api.MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False, output_dtype=torch.float64)
    api.fully_shard(model, mesh=build_mesh(), mp_policy=policy)
    output = model(rows_of(ctx, 6).bfloat16())
    output.sum().backward()
    return {"output": output.detach(), **gradients(model)}


@script
def grad_scaler(api: Any, ctx: RankContext) -> Found:
    """Rank 0's second batch overflows: no rank steps, and all halve their scale."""
    model = apply(api, make_net(), mp_policy=api.MixedPrecisionPolicy(torch.float16, torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    found: Found = {}
    for step in range(3):
        loss = loss_of(model, step, ctx.rank)
        if step == 1 and ctx.rank == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == (8.0, 4.0, 4.0)[step]
        found |= {f"{name} {step}": value for name, value in values(model).items()}
    return found


@script
def clipping(api: Any, ctx: RankContext) -> Found:
    model = apply(api, make_net())
    loss_of(model, 0, ctx.rank).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert isinstance(norm, DTensor)
    return {"norm": norm.full_tensor(), **gradients(model)}


@script
def nan_everywhere(api: Any, ctx: RankContext) -> Found:
    """A NaN of one rank is in the norm of every rank."""
    model = apply(api, make_net())
    loss = loss_of(model, 0, ctx.rank)
    (loss * float("nan") if ctx.rank == 1 else loss).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert isinstance(norm, DTensor)
    assert norm.full_tensor().isnan()
    return values(model)


def optimizes(kind: type[torch.optim.Optimizer], **options: Any) -> Script:
    """An optimizer on shards, some of them empty."""

    def run(api: Any, ctx: RankContext) -> Found:
        model = apply(api, make_net())
        optimizer = kind(model.parameters(), **{"lr": 0.01, **options})
        for step in range(3):
            loss_of(model, step, ctx.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    return run


SCRIPTS["adamw_foreach"] = optimizes(torch.optim.AdamW, foreach=True)
SCRIPTS["adamw_fused"] = optimizes(torch.optim.AdamW, fused=True)
SCRIPTS["adamw_loop"] = optimizes(torch.optim.AdamW, foreach=False)
SCRIPTS["sgd_momentum"] = optimizes(torch.optim.SGD, momentum=0.9)
