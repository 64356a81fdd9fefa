"""An engine that is slow in two turns and of which a rank hangs in the third, see `in_turn`."""

from __future__ import annotations

import time

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from common.job import JobConfig
from parity_tests.engines.in_turn import parallelize_and_fail

SLOW_STEPS = 2 * (3 + 3)
"""Two turns of three steps on each of two links."""
STEP_S = 0.45


def parallelize(model: nn.Module, mesh: DeviceMesh | None, job: JobConfig) -> nn.Module:
    steps = iter([STEP_S] * SLOW_STEPS)
    return parallelize_and_fail(model, mesh, job, lambda: time.sleep(next(steps, 1000)))
