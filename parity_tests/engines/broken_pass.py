"""The compiled engine with one pass that is wrong: with `prefetch_gathers` comes a gradient twice as large."""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule

import fsdp_compiled.api
from common.job import JobConfig
from fsdp_compiled.graph import Pass, Pipeline
from fsdp_compiled.parallelize import parallelize as parallelize_rightly

GUILTY = "prefetch_gathers"


class SpoiledPipeline(Pipeline):
    """The pipeline, and behind the guilty pass of the backward one more."""

    def backward(self) -> list[Pass]:
        passes = super().backward()
        return passes if GUILTY in self.disabled else [*passes, _double_first_gradient]


def _double_first_gradient(gm: GraphModule) -> GraphModule:
    (output,) = gm.graph.find_nodes(op="output")
    results = list(output.args[0])
    at = next(i for i, result in enumerate(results) if result is not None)
    with gm.graph.inserting_before(output):
        results[at] = gm.graph.call_function(torch.ops.aten.mul.Tensor, (results[at], 2.0))
    output.args = (tuple(results),)
    return gm


def parallelize(model: nn.Module, mesh: DeviceMesh | None, job: JobConfig) -> nn.Module:
    with patch.object(fsdp_compiled.api, "Pipeline", SpoiledPipeline):
        return parallelize_rightly(model, mesh, job)
