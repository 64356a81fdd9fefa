"""Each repeated block of a model compiled by itself, on engines that leave the model's code as it is.

What a compiler fuses is no merit of sharding. The compiled engine always has a compiler; with this one the engines that
shard by hooks, and plain data parallelism, have it too, so that a comparison can hold it still.

[Note: hooks stay outside]
Hooks break a graph, and those of sharding must run on each call, not once while tracing. So it is the block's `forward`
that is compiled, in place on the instance, and not its `__call__`, which `nn.Module.compile` would take and which runs
the hooks. Blocks are compiled before the model is sharded; Dynamo takes parameters as inputs of the graph and asks only
what they look like, so shards that become whole, storage that is freed and refilled, and the next block of the same
class are all served by the one graph. Autograd saves whole weights for a compiled backward as for any other, and gives
them back with the storage.

Source: torchtitan `models/llama3/parallelize.py`, `apply_compile`. Differs: `forward` in place of `Module.compile`, for
hooks that a caller has put there; works on any model that has repeated blocks.
"""

from __future__ import annotations

import torch
from torch import nn

from common.errors import ConfigError, PlanError
from common.job import JobConfig
from common.plan import BucketPlan, repeated_blocks


def compile_blocks(model: nn.Module, job: JobConfig, plan: BucketPlan | None = None) -> None:
    """Let `job.block_backend` compile the forward of each repeated block of `model`, in place; "eager" changes nothing.

    Args:
        model: not sharded yet.
        job: what is run.
        plan: which modules will get hooks; None if none will.

    Raises:
        ConfigError, PlanError: see `check_blocks`.
    """
    if job.block_backend == "eager":
        return
    for name in check_blocks(model, job, plan):
        block = model.get_submodule(name)
        block.forward = torch.compile(block.forward, backend=job.block_backend, fullgraph=True, dynamic=False)


def check_blocks(model: nn.Module, job: JobConfig, plan: BucketPlan | None = None) -> list[str]:
    """The names of the blocks that can be compiled; the arguments are those of `compile_blocks`.

    Raises:
        ConfigError: the model has no repeated blocks.
        PlanError: a hook inside a block, which would break its graph.
    """
    # a block without a forward of its own only holds modules: compiling it would do nothing
    blocks = [
        name for name in repeated_blocks(model) if type(model.get_submodule(name)).forward is not nn.Module.forward
    ]
    if not blocks:
        raise ConfigError(
            f"block_backend {job.block_backend}: expected a model with repeated blocks, found none in "
            f"{type(model).__name__} (see common/plan.py for what counts as one); use --block-backend eager"
        )
    for bucket in plan.buckets if plan else ():
        for module in bucket.modules:
            inside = next((block for block in blocks if module.startswith(f"{block}.")), None)
            if inside is not None:
                raise PlanError(
                    f"plan {job.plan!r}: puts hooks on {module!r} inside the block {inside!r}, where they would break "
                    f"the graph that block_backend {job.block_backend} compiles; use plan block or model, name whole "
                    "blocks, or use --block-backend eager"
                )
    return blocks
