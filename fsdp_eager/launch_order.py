"""Ranks that launch different collectives, since they call different modules: whose data meets whose is then chance.

Messages of one size get mixed up in silence, others end in an error of the backend or in a timeout. Where
`TORCH_DISTRIBUTED_DEBUG=DETAIL` asks for checks, ranks compare names before each launch; else a failure is explained.

Counterpart: none; all ranks run one graph.
Source: torch 2.13 `ProcessGroupWrapper`, which compares operators and shapes in the same mode. Differs: compares names.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from common.errors import EngineError
from fsdp_eager.torch_private import detailed_debugging

_HINT = "all ranks must call the same sharded modules in the same order, also those whose output a rank does not need"


def check_launch(what: str, mesh: DeviceMesh) -> None:
    """See that all ranks of `mesh` are about to launch the same, if checks are on; costs a message in each dimension.

    Raises:
        EngineError: they are not; on every rank.
    """
    if not detailed_debugging():
        return
    rank = dist.get_rank()
    known = {rank: what}
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        found: list[dict[int, str]] = [{}] * group.size()
        dist.all_gather_object(found, known, group=group)
        known = {of_rank: name for ranks in found for of_rank, name in ranks.items()}
    for other, found_there in known.items():
        if found_there != what:
            raise EngineError(f"rank {rank}: expected {what}, found {found_there} on rank {other}; {_HINT}")


def explain_failure(error: Exception, what: str) -> None:
    """Say with an error of the backend what was waited for and what may be wrong."""
    error.add_note(
        f"rank {dist.get_rank()}: {what} did not end; {_HINT} (TORCH_DISTRIBUTED_DEBUG=DETAIL checks it at each launch)"
    )
