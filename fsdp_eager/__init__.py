"""The eager engine: FSDP2 style, per-parameter shards driven by hooks around each module.

Start reading at `state.py`, which tells one training step; `api.py` is the way in, `parallelize.py` the engine.
Built on DTensor, torch.distributed and hooks; it does not use `torch.distributed.fsdp`.
"""

from common.gradient import Transport
from common.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fsdp_eager.api import fully_shard
from fsdp_eager.module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Transport",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
