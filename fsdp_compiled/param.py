"""The life of one parameter: stored as a shard, replicated for compute whenever the module reads it.

A sharded module's class is swapped for a subclass with one property per parameter. `module.weight` then returns the
gathered weight, while what `state_dict`, `named_parameters` and the optimizer read stays the sharded DTensor: names and
storage are those of the plain model. Traced into a graph, the read becomes

    shard -> cast to param_dtype -> pad -> all-gather -> wait -> weight
    gradient -> cast to reduce_dtype -> pad -> reduce-scatter (mean) -> wait -> cast -> shard's gradient

which is all that SimpleFSDP is; the other files of this folder rewrite those chains.

[Note: the policy lives on the instance]
The swapped class is shared by all instances of a class in one model, so that guards do not recompile per layer.
Mesh and policy are therefore attributes of the instance: closing over them in the class would give a second module
the policy of the first.

Counterpart: fsdp_eager/param.py, the same life driven by hooks, with the gathered weight as an object.
Paper: arXiv 2411.00284, the parametrization.
Source: torchtitan `graph_trainer/simple_fsdp.py`. Differs: the note above; tied, frozen and repeatedly read
parameters stay what they were.
Left out: sharding along another dimension, hybrid meshes, tensor-parallel parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from common.policy import MixedPrecisionPolicy
from fsdp_compiled.torch_private import stored_parameter

_ATTRIBUTE = "_fsdp_replication"


class SimpleFSDPModule:
    """Mixed into the class of every module whose parameters are replicated on read."""


@dataclass
class Replication:
    """How the parameters of one model are replicated for compute; one object, held by each of its modules.

    Attributes:
        mesh: 1-D.
        policy: dtypes of compute and reduction.
        replicas: gathered parameters of the forward that runs now, by the shard's identity; used uncompiled
            only, where nothing else merges repeated reads.
    """

    mesh: DeviceMesh
    policy: MixedPrecisionPolicy
    replicas: dict[int, torch.Tensor] = field(default_factory=dict)

    def replicate(self, shard: DTensor) -> torch.Tensor:
        """Gather `shard` into the whole parameter, in the dtype that computes.

        Backward casts the gradient to the reduction dtype and reduce-scatters its mean.
        """
        whole = shard.redistribute(
            placements=[Replicate()],
            forward_dtype=self.policy.compute_dtype(shard),
            backward_dtype=self.policy.reduction_dtype(shard),
        )
        local: torch.Tensor = whole.to_local(grad_placements=[Partial("avg")])
        return local

    def read(self, shard: DTensor) -> torch.Tensor:
        """What a module sees when it reads a parameter: one gather per forward, however often it is read."""
        if torch.compiler.is_compiling():
            return self.replicate(shard)  # the graph passes merge repeated reads
        if id(shard) not in self.replicas:
            self.replicas[id(shard)] = self.replicate(shard)
        return self.replicas[id(shard)]

    def forget(self, *_: object) -> None:
        """Drop the gathered parameters; a hook before and after the root's forward."""
        self.replicas.clear()


def shard_parameter(param: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """Keep this rank's rows of `param` [d0, ...]: a DTensor parameter of the same global shape.

    Every rank holds the same values already, so nothing is sent.
    """
    sharded = distribute_tensor(param.detach(), mesh, [Shard(0)], src_data_rank=None)
    return nn.Parameter(sharded, requires_grad=param.requires_grad)


def replicate_on_read(model: nn.Module, replication: Replication) -> None:
    """Shard every parameter of `model` in place and replicate it wherever a module reads it.

    A parameter that several modules share stays one parameter.
    """
    shards: dict[int, nn.Parameter] = {}
    classes: dict[tuple[type, tuple[str, ...]], type] = {}
    for module in list(model.modules()):
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        if not own:
            continue
        for name, param in own.items():
            if id(param) not in shards:
                shards[id(param)] = shard_parameter(param, replication.mesh)
            module.register_parameter(name, shards[id(param)])
        key = (type(module), tuple(own))
        if key not in classes:
            classes[key] = _replicating_class(*key)
        module.__class__ = classes[key]
        setattr(module, _ATTRIBUTE, replication)


def _replicating_class(original: type, names: tuple[str, ...]) -> type:
    """A subclass of `original` whose parameters `names` are properties, holding no policy (see the module's note)."""
    properties = {name: property(_reader(name)) for name in names}
    return type(f"SimpleFSDP{original.__name__}", (SimpleFSDPModule, original), properties)


def _reader(name: str) -> Callable[[Any], torch.Tensor]:
    def read(module: Any) -> torch.Tensor:
        replication: Replication = module.__dict__[_ATTRIBUTE]
        return replication.read(stored_parameter(module, name))

    return read
