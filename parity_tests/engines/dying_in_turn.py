"""An engine of which a rank dies in its turn, see `in_turn`."""

from __future__ import annotations

import os

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from common.job import JobConfig
from parity_tests.engines.in_turn import parallelize_and_fail


def parallelize(model: nn.Module, mesh: DeviceMesh | None, job: JobConfig) -> nn.Module:
    return parallelize_and_fail(model, mesh, job, lambda: os._exit(9))
