"""In which dtype a sharded model computes, reduces and returns; both engines keep the same policy.

Source: torch 2.13 `torch.distributed.fsdp.MixedPrecisionPolicy`, same fields and meaning.
Left out: tensors inside dataclasses are cast where the engine can look into them, which is `fsdp_eager`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from common.torch_private import tree_map

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}

T = TypeVar("T")


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """In which dtype a sharded module gathers, computes, reduces and returns.

    Args:
        param_dtype: dtype of gathered parameters and of compute; None keeps the parameter's own.
            The cast happens before the gather, so bf16 halves the traffic.
        reduce_dtype: dtype in which gradients are summed over ranks; None keeps the gradient's own.
        output_dtype: dtype that floating-point outputs of a module are cast to; None leaves them.
        cast_forward_inputs: cast floating-point inputs of a sharded module to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def compute_dtype(self, param: torch.Tensor) -> torch.dtype:
        """The dtype in which `param` is gathered and used; only floating-point parameters are cast."""
        if self.param_dtype is None or not param.is_floating_point():
            return param.dtype
        return self.param_dtype

    def reduction_dtype(self, param: torch.Tensor) -> torch.dtype:
        """The dtype in which the gradient of `param` is summed over ranks."""
        return self.reduce_dtype or self.compute_dtype(param)

    def cast_inputs(self, tree: T, map_leaves: Callable[..., Any] = tree_map) -> T:
        """Cast the floating-point tensors of a module's inputs, if the policy asks for it; see `cast_floating`."""
        return cast_floating(tree, self.param_dtype, map_leaves) if self.cast_forward_inputs else tree

    def cast_outputs(self, tree: T, map_leaves: Callable[..., Any] = tree_map) -> T:
        """Cast the floating-point tensors of a module's outputs, if the policy asks for it; see `cast_floating`."""
        return cast_floating(tree, self.output_dtype, map_leaves)


@dataclass(frozen=True)
class OffloadPolicy:
    """Where shards live: where the model computes."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, their gradients and with them the optimizer live on the CPU; what is gathered lives where it computes.

    Args:
        pin_memory: hold shards in page-locked memory, from which a GPU copies beside its compute.
    """

    pin_memory: bool = True


def cast_floating(tree: T, dtype: torch.dtype | None, map_leaves: Callable[..., Any] = tree_map) -> T:
    """Cast each floating-point tensor in a nested structure to `dtype`; None changes nothing.

    Args:
        tree: the nest.
        dtype: what to cast to.
        map_leaves: applies a function to the leaves of a nest; the default does not look into dataclasses.
    """
    if dtype is None:
        return tree

    def cast(leaf: object) -> object:
        is_floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if is_floating else leaf  # type: ignore[attr-defined]

    result: T = map_leaves(cast, tree)
    return result
