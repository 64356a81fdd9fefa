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
