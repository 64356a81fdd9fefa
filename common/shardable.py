"""What can be sharded: the checks that both engines make before they touch a model, in one wording.

A sharded parameter is cut into rows, and rows travel: so a parameter has rows, lies in memory row by row, and is where
the mesh is.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from common.errors import EngineError


def check_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """Refuse meshes that the engines cannot shard over.

    Raises:
        EngineError: no mesh, or one of several dimensions.
    """
    if mesh is None or mesh.ndim != 1:
        found = "none" if mesh is None else f"one of {mesh.ndim} dimensions"
        raise EngineError(f"mesh: expected one of one dimension, found {found}; build it with common.mesh.build_mesh")
    return mesh


def check_shardable(params: Iterable[tuple[str, nn.Parameter]], device_type: str) -> None:
    """Refuse parameters that cannot be cut into rows.

    Args:
        params: name and parameter.
        device_type: of the mesh.

    Raises:
        EngineError: a parameter that is sharded already or of a class of its own, that has no dimensions, is not
            contiguous, or lies on another device.
    """
    for name, param in params:
        if isinstance(param, DTensor):
            raise EngineError(f"parameter {name!r} is a DTensor already; shard a model once, over one mesh dimension")
        if type(param) is not nn.Parameter:
            raise EngineError(
                f"parameter {name!r}: expected a plain nn.Parameter, found {type(param).__name__}; "
                "materialize or unwrap it before sharding"
            )
        if param.ndim == 0:
            raise EngineError(f"parameter {name!r}: has no dimensions, so no rows to shard; make its shape [1]")
        if not param.is_contiguous():
            raise EngineError(
                f"parameter {name!r}: not contiguous, strides {param.stride()} for shape {list(param.shape)}; "
                "replace it by a contiguous copy before sharding"
            )
        if param.device.type != device_type:
            raise EngineError(
                f"parameter {name!r}: on {param.device}, but the mesh is on {device_type!r}; "
                "move the model there before sharding it"
            )
