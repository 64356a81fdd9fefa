"""What can be sharded: the checks that both engines make before they touch a model, in one wording.

A sharded parameter is cut into slices, by default rows, and those travel: so a parameter has a dimension, and lies in
memory row by row.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from common.errors import EngineError


def check_mesh(mesh: DeviceMesh | None, *, max_dims: int = 1) -> DeviceMesh:
    """Refuse meshes that an engine cannot shard over.

    Args:
        mesh: to shard over its last dimension.
        max_dims: 2 if it may have another, of replicas, before that.

    Raises:
        EngineError: no mesh, or one of more dimensions.
    """
    if mesh is None or not 1 <= mesh.ndim <= max_dims:
        found = "none" if mesh is None else f"one of {mesh.ndim} dimensions"
        expected = "one dimension" if max_dims == 1 else "one dimension, or of two for hybrid sharding"
        raise EngineError(f"mesh: expected one of {expected}, found {found}; build it with common.mesh.build_mesh")
    return mesh


def check_shardable(params: Iterable[tuple[str, nn.Parameter]], device_type: str | None) -> None:
    """Refuse parameters that cannot be cut into rows.

    Args:
        params: name and parameter.
        device_type: where they have to be, if the engine does not move them.

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
        if device_type is not None and param.device.type != device_type:
            raise EngineError(
                f"parameter {name!r}: on {param.device}, but the mesh is on {device_type!r}; "
                "move the model there before sharding it"
            )
