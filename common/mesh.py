"""The mesh both engines shard over: one dimension, all ranks.

Left out: the second (replicating) dimension of hybrid sharding.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

SHARD_DIM = "shard"


def build_mesh(device_type: str = "cpu") -> DeviceMesh:
    """A 1-D mesh over all ranks of the default process group, its dimension named `shard`."""
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=(SHARD_DIM,))


def backend_of(group: dist.ProcessGroup, device_type: str) -> str:
    """The name of the backend that carries tensors of `device_type`, such as "gloo" or "nccl"."""
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    by_device = dict(entry.split(":", 1) for entry in config.split(",") if ":" in entry)
    return by_device.get(device_type, config)
