"""What torch's own tools record of a step for `--profile` on a GPU, as far as a machine without one can tell."""

from __future__ import annotations

import inspect
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.tables import memory_table
from bench.trace_files import load_steps, save_trace
from bench.views import view_memory
from common.errors import ConfigError
from common.harness.instruments import gpu_trace
from common.harness.instruments.collectives import FORWARD, phase
from common.harness.instruments.gpu_trace import SNAPSHOT, TORCH_TRACE
from common.harness.instruments.memory import measure_memory
from common.harness.instruments.trace import Trace, record_trace
from common.harness.link import Meter
from common.harness.memory_record import StepMemory
from common.harness.records import Environment, RunRecord
from common.job import GPU
from common.ranges import LAUNCH_GATHER, bucket_range
from common.torch_private import allocator_history
from parity_tests.torch_private import allocator_snapshot, record_memory_history


def test_allocator_history_is_taken_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator notes the block and nothing after it, also when the block fails; what it noted can be unpickled."""
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **kw: calls.append(kw))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: calls.append("snapshot") or {"segments": [3]})
    with allocator_history() as snapshot:
        calls.append("block")
    assert pickle.loads(snapshot()) == {"segments": [3]}
    noting, *others = calls
    assert others == ["block", "snapshot", {"enabled": None}] and noting["max_entries"] > 0
    for keywords in (noting, {"enabled": None}):
        inspect.signature(record_memory_history).bind(**keywords)
    inspect.signature(allocator_snapshot).bind()
    with pytest.raises(ZeroDivisionError), allocator_history():
        _ = 1 / 0
    assert calls[-1] == {"enabled": None} and calls.count("snapshot") == 1


@contextmanager
def faked_history() -> Iterator[Callable[[], bytes]]:
    """An allocator that noted something."""
    yield lambda: b"blocks"


def test_a_step_on_a_gpu_is_kept_as_torchs_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both files of each rank, with our ranges and the operators in them, none of ours; `lanes` says where to look."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu_trace, "allocator_history", faked_history)
    with record_trace(1, 2, Meter(), GPU) as trace, phase(FORWARD), bucket_range(LAUNCH_GATHER, "layers.0"):
        torch.ones(3) @ torch.ones(3)
    assert isinstance(trace, Trace) and trace.spans == []
    save_trace(tmp_path, "eager", trace)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"eager-rank1{SNAPSHOT}", f"eager-rank1{TORCH_TRACE}"]
    assert (tmp_path / f"eager-rank1{SNAPSHOT}").read_bytes() == b"blocks"
    events = json.loads((tmp_path / f"eager-rank1{TORCH_TRACE}").read_text())["traceEvents"]
    assert {"aten::dot", "fsdp::launch_gather (layers.0)"} <= {event["name"] for event in events}
    with pytest.raises(ConfigError, match=r"ui\.perfetto\.dev"):
        load_steps(tmp_path, (), cell=None, rank=1)


def test_memory_of_a_gpu_is_its_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    """The growth of what is allocated, on top of what was live; what was active, and what was reserved."""
    calls = {"memory_allocated": 100, "max_memory_allocated": 350, "max_memory_reserved": 900}
    for name, value in calls.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"active_bytes.all.peak": 420})
    with measure_memory({1: 40, 2: 60}, device_type=GPU) as meter:
        pass
    assert meter.memory == StepMemory(100, 350, reserved_bytes=900, active_bytes=420)
    record = RunRecord("eager", {}, 1, Environment("", "", "", "", ""), [], [], [], [], memory=[meter.memory])
    table = memory_table({"eager": record}, {})
    view = view_memory(table)
    assert (view["active"].tolist(), view["reserved"].tolist()) == (["420 B"], ["900 B"])
