"""SimpleFSDP: sharding as a parametrization, traced into one graph whose collectives passes bucket and reorder.

Start with param.py (what a read of a parameter means), then graph.py (what happens to the graph), then the passes.
"""

from common.gradient import Transport
from common.policy import MixedPrecisionPolicy
from fsdp_compiled.api import SimpleFSDPModule, data_parallel

__all__ = ["MixedPrecisionPolicy", "SimpleFSDPModule", "Transport", "data_parallel"]
