"""The mesh an engine shards over: all ranks in one dimension, or, for hybrid sharding, replicas of shards in two."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.errors import ConfigError

SHARD_DIM = "shard"
REPLICATE_DIM = "replicate"


def build_mesh(device_type: str = "cpu", *, replicas: int = 1) -> DeviceMesh:
    """A mesh over all ranks of the default process group.

    Args:
        device_type: of what it will hold.
        replicas: how many times the model is held. 1: a mesh of one dimension, named `shard`. More: two dimensions,
            `replicate` and `shard`; the ranks of one row hold a whole model between them.

    Raises:
        ConfigError: replicas that the ranks cannot be divided into.
    """
    ranks = dist.get_world_size()
    if replicas < 1 or ranks % replicas:
        raise ConfigError(f"replicas: expected a divisor of the {ranks} ranks, found {replicas}")
    if replicas == 1:
        return init_device_mesh(device_type, (ranks,), mesh_dim_names=(SHARD_DIM,))
    return init_device_mesh(device_type, (replicas, ranks // replicas), mesh_dim_names=(REPLICATE_DIM, SHARD_DIM))


def backend_of(group: dist.ProcessGroup, device_type: str) -> str:
    """The name of the backend that carries tensors of `device_type`, such as "gloo" or "nccl"."""
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    by_device = dict(entry.split(":", 1) for entry in config.split(",") if ":" in entry)
    return by_device.get(device_type, config)


def neighbours(mesh: DeviceMesh, size: int) -> dist.ProcessGroup:
    """The group of this rank and the `size` - 1 next to it along the last dimension of `mesh`; made once for each mesh.

    Raises:
        ConfigError: `size` does not divide that dimension.
    """
    shards = mesh.size(mesh.ndim - 1)
    if size < 1 or shards % size:
        raise ConfigError(f"neighbours: expected a divisor of the {shards} ranks of a shard group, found {size}")
    # meshes and not their groups: DTensor's caches keep a mesh for good, and a group's sockets and threads with it
    known: dict[int, DeviceMesh] = vars(mesh).setdefault("_fsdp_neighbours", {})
    if size not in known:
        known[size] = DeviceMesh(mesh.device_type, mesh.mesh.reshape(-1, size))
    return known[size].get_group(1)
