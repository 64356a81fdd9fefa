"""The eager engine: FSDP2 style, per-parameter shards driven by hooks around each module.

Start reading at `state.py`, which tells one training step; `api.py` is the way in, `parallelize.py` the engine.
Built on DTensor, torch.distributed and hooks; it does not use `torch.distributed.fsdp`.
"""

from common.gradient import Transport
from common.policy import MixedPrecisionPolicy
from fsdp_eager.api import FSDPModule, fully_shard

__all__ = ["FSDPModule", "MixedPrecisionPolicy", "Transport", "fully_shard"]
