"""What a message travels beside is counted in operators, and what the optimizer moved is measured: made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.harness.instruments.overlap import Flight, flights_of
from common.job import JobConfig
from common.torch_private import Operator, TensorArgument
from parity_tests.runs import Runs

GATHER, REDUCE, MM = "c10d::_allgather_base_", "c10d::alltoall_base_", "aten::mm"
WAIT = "_c10d_functional::wait_tensor"


def events(*steps: str) -> list[Operator]:
    """A forward of these operators, in turn; `OPERATOR BUCKET` in a range, `OPERATOR @ADDRESS` of a graph."""
    found = [Operator("step phase: forward", 0, 10_000, (), ())]
    for at, step in enumerate(steps, 1):
        name, _, rest = step.partition(" ")
        address = int(rest[1:]) if rest.startswith("@") else None
        tensor = (TensorArgument((8,), 4, address),)
        event = {GATHER: "launch_gather", REDUCE: "launch_reduce"}.get(name, "")
        inside = (f"fsdp::{event} ({rest})",) if event and address is None else ()
        name = f"fsdp::{name} ({rest})" if name in ("wait_gather", "wait_reduce") else name
        found.append(Operator(name, at * 100, at * 100 + 50, inside, (tensor, tensor)))
    return found


def test_flights_of_hooks_are_told_by_bucket() -> None:
    """A gather ahead of its use travels beside the products before its wait; one waited for at once beside none."""
    flights = flights_of(
        events(
            f"{GATHER} a", "wait_gather a", f"{GATHER} b", MM, MM, "wait_gather b", MM, f"{REDUCE} b", "wait_reduce b"
        ),
        2,
    )
    assert flights == [
        Flight("forward", "gather", "a", before=0, beside=0, ahead=0),
        Flight("forward", "gather", "b", before=0, beside=2, ahead=0),
        Flight("forward", "reduce", "b", before=3, beside=0, ahead=0),
    ]


def test_flights_of_graphs_are_told_by_buffer() -> None:
    """A wait belongs to the last launch that writes its buffer; a buffer may be used again."""
    flights = flights_of(
        events(f"{GATHER} @1", f"{GATHER} @2", f"{WAIT} @1", MM, f"{WAIT} @2", f"{REDUCE} @1", MM, MM, f"{WAIT} @1"), 2
    )
    assert [(each.way, each.before, each.beside, each.ahead) for each in flights] == [
        ("gather", 0, 0, 1),
        ("gather", 0, 1, 0),
        ("reduce", 1, 2, 0),
    ]


def test_flights_without_a_wait_are_left_out() -> None:
    """What is never waited for, as far as anyone tells, is not taken for hidden."""
    assert flights_of(events(f"{GATHER} a", MM), 2) == []


@pytest.mark.parametrize("engine", ["single", "ddp", "eager"])
def test_updates_are_the_rate_times_the_gradient(runs: Runs, engine: str) -> None:
    """Under SGD every parameter moves by the learning rate times its gradient, whole or sharded; each step counts."""
    job = replace(JobConfig(backend="aot_eager", steps=2, batch=4, seq=16), lr=0.25)
    record, _ = runs(engine, job)
    assert len(record.update_norms) == job.steps
    for updates, norms in zip(record.update_norms, record.param_norms, strict=True):
        assert updates.keys() == norms.keys()
        for name, norm in norms.items():
            # weights of size 1 are stored with errors of 6e-8, and move by some 1e-3
            assert updates[name] == pytest.approx(job.lr * norm, rel=1e-3, abs=1e-6), name
