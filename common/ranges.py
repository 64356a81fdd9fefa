"""Named ranges in a profile: which bucket a collective serves, said the same way by both engines.

    fsdp::launch_gather (layers.0)     a gather is launched
    fsdp::wait_gather (layers.0)       compute waits for it
    fsdp::launch_reduce (layers.0)     the reduction of gradients is launched
    fsdp::wait_reduce (layers.0)       compute waits for it
    fsdp::graph {"gather": ["layers.0", ...], "reduce": [...]}
                                       a traced graph runs; the buckets that its collectives serve, in order of launch

Hooks mark each call. A graph has no Python between its operators, and Inductor drops operators that mark ranges; but
the order of its collectives is fixed, so that one range round the whole of it says as much. A range costs less than a
microsecond while nobody records. torch's `fully_shard` writes `FSDP::all_gather (layers.0)`, which reads the same.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from common.torch_private import RecordFunctionFast

GATHER, REDUCE = "gather", "reduce"
LAUNCH_GATHER, WAIT_GATHER = "launch_gather", "wait_gather"
LAUNCH_REDUCE, WAIT_REDUCE = "launch_reduce", "wait_reduce"

_GRAPH = "fsdp::graph "
_OF_BUCKET = re.compile(r"fsdp::(\w+) \((.*)\)", re.IGNORECASE)


def bucket_range(event: str, bucket: str) -> AbstractContextManager[object]:
    """A range for one of the four events above, which serves `bucket`."""
    return RecordFunctionFast(f"fsdp::{event} ({bucket})")


def graph_range(buckets: Mapping[str, Sequence[str]]) -> Callable[[], AbstractContextManager[object]]:
    """What makes a range for each call of a graph that launches gathers and reductions for these buckets, in order.

    Args:
        buckets: by `GATHER` and `REDUCE`.
    """
    return functools.partial(RecordFunctionFast, _GRAPH + json.dumps(buckets))


def read_bucket(name: str) -> tuple[str, str] | None:
    """Event and bucket of a range that `bucket_range`, or torch, named; None if `name` is another one's."""
    match = _OF_BUCKET.fullmatch(name)
    return (match[1], match[2].replace(", ", "+")) if match else None  # torch joins modules by commas


def read_graph(name: str) -> dict[str, list[str]] | None:
    """The buckets that `graph_range` was given; None if `name` is another one's."""
    if not name.startswith(_GRAPH):
        return None
    buckets: dict[str, list[str]] = json.loads(name.removeprefix(_GRAPH))
    return buckets
