"""Engines for the judge: one process, in the job's own dtypes, from weights that were rounded once more.

A weight that moves by a rounding leaves no later rounding as it was, so such a run's errors against float64 are another
draw of what rounding does to an honest run, step by step; see [Note: error over steps] in `grades`.

Left out: all that `single` leaves out.
"""

from __future__ import annotations

import torch
from torch import nn

from common.baselines import in_job_precision
from common.harness.grades import unit_roundoff
from common.job import JobConfig
from common.policy import DTYPES
from common.seed import seed_for

PEERS = ("common.harness.peers.first", "common.harness.peers.second")
"""Their names as engines; two, so that all draws are rarely near zero by chance."""


def rounded_once_more(model: nn.Module, job: JobConfig, draw: int) -> nn.Module:
    """`model` in the job's precision, each element changed by up to a unit roundoff of the dtype that computes.

    Args:
        draw: which of the many ways to round.
    """
    size = unit_roundoff(DTYPES[job.param_dtype])
    with torch.no_grad():
        for name, param in model.named_parameters():
            if not param.is_floating_point():
                continue
            generator = torch.Generator().manual_seed(seed_for("peer", draw, job.seed, name))
            share = torch.rand(param.shape, generator=generator, dtype=torch.float64)
            param.mul_((1 + size * (2 * share - 1)).to(param.device))
    return in_job_precision(model, job)
