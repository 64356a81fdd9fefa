"""What drives the engine: the backend that takes a traced model through the passes, and the order of those passes.

One training step of the compiled engine, after the first call traced it:

  1. TRACE      Dynamo records forward as one graph; each read of a parameter is a replicate (param.py).
  2. JOINT      AOTAutograd adds backward: one joint graph of gathers, compute and reduce-scatters.
                mark_collectives -> merge_repeated_reads -> tag_gathers
  3. PARTITION  min-cut splits it; tagged gathers are copied into backward instead of being saved (reshard.py).
  4. FORWARD    bucket_gathers -> prefetch_gathers
  5. BACKWARD   check_resharded -> bucket_reductions -> lower_reductions -> bucket_gathers -> prefetch_gathers
                -> delay_reduction_waits
  6. COMPILE    each graph runs as it is ("aot_eager"), or Inductor compiles it, its own reordering switched off.

Every pass is `(gm, *, ...) -> gm`, its configuration bound by `functools.partial`; the runner knows none of them. The
four that make messages few and hide them (`common.job.PASSES`) can be left out by name, to see what each is worth; the
others are what makes the graph right. On one rank nothing travels, and `add_before_casts` is the only pass.

Counterpart: fsdp_eager/state.py, hooks and training states in the place of a pipeline.
Source: torchtitan `graph_trainer` for the pass signature; torch 2.13 `compile_fx` for where the graphs pass by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from common.errors import EngineError, PassError
from common.gradient import Reduction, Transport, plan_reduction
from common.mesh import backend_of
from common.plan import BucketPlan
from common.policy import MixedPrecisionPolicy
from common.ranges import GATHER, REDUCE, graph_range
from fsdp_compiled import torch_private
from fsdp_compiled.bucket import bucket_gathers, bucket_reductions
from fsdp_compiled.collectives import (
    find_gathers,
    find_lowered,
    mark_collectives,
    param_of,
)
from fsdp_compiled.reads import add_before_casts, merge_repeated_reads
from fsdp_compiled.reduction import lower_reductions
from fsdp_compiled.reshard import check_resharded, tag_gathers
from fsdp_compiled.schedule import delay_reduction_waits, prefetch_gathers

Pass = Callable[[GraphModule], GraphModule]

# What Inductor may not touch: the order of the collectives is the plan's, and its own passes must not bucket again.
_INDUCTOR = {
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": False,
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    # Different ranks hold different shard sizes; cached graphs would skip the passes.
    "fx_graph_cache": False,
}


@dataclass(frozen=True)
class Pipeline:
    """The passes of one model, by the graph they run on.

    Attributes:
        plan: which parameters travel together.
        mesh: 1-D; its process group carries the collectives.
        transport: how reductions travel.
        policy: dtypes of compute and reduction.
        disabled: names of `common.job.PASSES` that are left out.
    """

    plan: BucketPlan
    mesh: DeviceMesh
    transport: Transport
    policy: MixedPrecisionPolicy
    disabled: tuple[str, ...] = ()

    @property
    def is_alone(self) -> bool:
        """Whether there is one rank, so that nothing travels."""
        return self.mesh.size() == 1

    def joint(self, params: Mapping[int, str]) -> list[Pass]:
        """Passes over the joint graph."""
        if self.is_alone:
            return [partial(add_before_casts, params=params, policy=self.policy)]
        return [
            partial(mark_collectives, params=params),
            merge_repeated_reads,
            partial(tag_gathers, plan=self.plan),
        ]

    def forward(self) -> list[Pass]:
        """Passes over the forward graph."""
        if self.is_alone:
            return []
        return [*self._optional(bucket_gathers, plan=self.plan), *self._optional(prefetch_gathers, plan=self.plan)]

    def backward(self) -> list[Pass]:
        """Passes over the backward graph."""
        if self.is_alone:
            return []
        return [
            check_resharded,
            *self._optional(bucket_reductions, plan=self.plan),
            partial(lower_reductions, decide=self.decide, rank=self.mesh.get_local_rank()),
            *self.forward(),
            *self._optional(delay_reduction_waits),
        ]

    def inference(self, params: Mapping[int, str]) -> list[Pass]:
        """Passes over a forward that no backward follows."""
        if self.is_alone:
            return []
        return [partial(mark_collectives, params=params), merge_repeated_reads, *self.forward()]

    def _optional(self, graph_pass: Callable[..., GraphModule], **configuration: object) -> list[Pass]:
        """The pass, unless its name is disabled."""
        return [] if graph_pass.__name__ in self.disabled else [partial(graph_pass, **configuration)]

    def decide(self, dtype: torch.dtype) -> Reduction:
        """The gradient contract for a buffer of `dtype`."""
        return plan_reduction(
            world_size=self.mesh.size(),
            reduce_dtype=dtype,
            backend=backend_of(self.mesh.get_group(), self.mesh.device_type),
            transport=self.transport,
        )


class GraphCompiler:
    """Takes one traced model through the passes and hands each graph to what runs it.

    Args:
        pipeline: the passes.
        params: parameter name by index among the traced function's inputs.
    """

    def __init__(self, pipeline: Pipeline, params: Mapping[int, str]) -> None:
        self.pipeline = pipeline
        self.params = params

    def joint(self, gm: GraphModule, inputs: object = None) -> GraphModule:
        """Rewrite the joint graph; what AOTAutograd calls between tracing and partitioning."""
        return self.run(gm, self.pipeline.joint(self.params))

    def split(self, gm: GraphModule, is_backward: bool, is_inference: bool) -> GraphModule:
        """Rewrite the forward or backward graph that the partitioner made, or the forward of inference."""
        if is_inference:
            return self.run(gm, self.pipeline.inference(self.params))
        return self.run(gm, self.pipeline.backward() if is_backward else self.pipeline.forward())

    def run(self, gm: GraphModule, passes: Sequence[Pass]) -> GraphModule:
        """Run `passes` over `gm` in order."""
        for graph_pass in passes:
            gm = graph_pass(gm)
        gm.recompile()
        return gm

    def range_of(self, gm: GraphModule) -> Callable[[], AbstractContextManager[object]]:
        """What names, in a profile, the buckets that the collectives of a rewritten graph serve."""
        labels, bucket_of = self.pipeline.plan.labels, self.pipeline.plan.bucket_of()
        return graph_range(
            {
                GATHER: [labels[bucket_of[gather.param]] for gather in find_gathers(gm.graph)],
                REDUCE: [labels[bucket_of[param_of(start)]] for start in find_lowered(gm.graph)],
            }
        )

    def aot_eager(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Run the rewritten graphs operator by operator: the arithmetic of eager PyTorch."""

        def compiler(is_backward: bool, is_inference: bool) -> Callable[..., Any]:
            def compile_graph(graph: GraphModule, graph_inputs: Sequence[Any]) -> Callable[..., Any]:
                graph = self.split(graph, is_backward, is_inference)
                return torch_private.in_range(self.range_of(graph), torch_private.boxed(graph, graph_inputs))

            return compile_graph

        with torch_private.functorch_patch(joint_custom_pass=self.joint, enable_autograd_cache=False):
            backend = torch_private.aot_autograd(
                fw_compiler=compiler(is_backward=False, is_inference=False),
                bw_compiler=compiler(is_backward=True, is_inference=False),
                inference_compiler=compiler(is_backward=False, is_inference=True),
                partition_fn=torch_private.min_cut_rematerialization_partition,
            )
            return backend(gm, inputs)

    def inductor(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Let Inductor compile the rewritten graphs, keeping their order."""

        def inner(graph: GraphModule, graph_inputs: Sequence[Any], **options: Any) -> Any:
            graph = self.split(graph, options.get("is_backward", False), options.get("is_inference", False))
            range_of_graph = self.range_of(graph)
            with torch_private.inductor_patch(_INDUCTOR):
                compiled = torch_private.compile_fx_inner(graph, graph_inputs, **options)
            return torch_private.in_range(range_of_graph, compiled)

        with torch_private.functorch_patch(joint_custom_pass=self.joint, enable_autograd_cache=False):
            return cast(Callable[..., Any], torch_private.compile_fx(gm, inputs, inner_compile=inner))


def compile_model(model: nn.Module, pipeline: Pipeline, backend: str) -> None:
    """Compile `model`'s forward, and the backward that follows from it, in place and as one graph.

    Args:
        model: sharded, its parameters replicated on read.
        pipeline: the passes.
        backend: "aot_eager" or "inductor".

    What the backend raises at the first call (EngineError: a traced graph reads sharded values that are no parameters
    of the model; PassError) arrives as the `inner_exception` of torch's BackendCompilerFailed.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    traced: list[set[str]] = []
    original = model.forward

    def compile_graph(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        params = {i: names[id(value)] for i, value in enumerate(inputs) if id(value) in names}
        foreign = sum(isinstance(value, DTensor) and id(value) not in names for value in inputs)
        if foreign:
            raise EngineError(
                f"compiled engine: {foreign} of {len(inputs)} inputs of a traced graph are DTensors, yet no parameters "
                f"of {type(model).__name__}; were parameters replaced after sharding? Change values in place instead"
            )
        _check_whole(set(params.values()), traced, pipeline.plan)
        compiler = GraphCompiler(pipeline, params)
        return compiler.aot_eager(gm, inputs) if backend == "aot_eager" else compiler.inductor(gm, inputs)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    # A function of ours round the model's: Dynamo would not begin a trace in torch's own code, such as the forward of
    # `nn.Sequential`, and would trace each child alone.
    model.forward = torch.compile(forward, backend=compile_graph, fullgraph=True, dynamic=False)


def _check_whole(params: set[str], traced: list[set[str]], plan: BucketPlan) -> None:
    """See that no bucket is spread over several graphs, in which it would travel in pieces; note what was traced."""
    if not params:
        return
    for bucket in plan.buckets:
        here = params & set(bucket.params)
        elsewhere = [other & set(bucket.params) for other in traced if not other & params]
        if here and any(elsewhere):
            raise PassError(
                f"trace: bucket {bucket.name!r} is spread over several graphs ({min(here)!r} in one, "
                f"{min(next(filter(None, elsewhere)))!r} in another); the model's forward must trace as one graph"
            )
    traced.append(params)
