"""Traces on disk, one file per engine and rank, as Perfetto (ui.perfetto.dev) and chrome://tracing open them.

runs/<run>/[cell-<i>/]<engine>-rank<r>.trace.json

Each lane is a thread of the process that stands for the rank. What the format has no place for is in `args`. Of a step
on a GPU the files are torch's own, see `common.harness.instruments.gpu_trace`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.store import is_benchmark, naming, read_json
from common.errors import ConfigError
from common.harness.instruments.gpu_trace import TORCH_TRACE
from common.harness.instruments.trace import OPERATORS, PHASE, Span, Trace

SUFFIX = ".trace.json"
_FILE = re.compile(r"(?P<engine>.+)-rank(?P<rank>[0-9]+)\.trace\.json")


def save_trace(folder: Path, engine: str, trace: Trace) -> None:
    """Write one rank's step to `folder`, which is there."""
    for suffix, data in trace.files.items():
        (folder / f"{engine}-rank{trace.rank}{suffix}").write_bytes(data)
    if not trace.spans:
        return
    lanes = list(dict.fromkeys(span.lane for span in trace.spans))
    events: list[dict[str, Any]] = [_metadata("process_name", trace.rank, 0, f"{engine}, rank {trace.rank}")]
    for number, lane in enumerate(lanes):
        events.append(_metadata("thread_name", trace.rank, number, lane))
        events.append({**_metadata("thread_sort_index", trace.rank, number, ""), "args": {"sort_index": number}})
    events += [_event(span, trace.rank, lanes.index(span.lane)) for span in trace.spans]
    written = {"displayTimeUnit": "ms", "traceEvents": events}
    (folder / f"{engine}-rank{trace.rank}{SUFFIX}").write_text(json.dumps(written))


def saved_traces(folder: Path) -> dict[str, dict[int, Path]]:
    """The traces in a folder, by engine, in the order in which they were written, and rank."""
    found: dict[str, dict[int, Path]] = {}
    for path in sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns):
        if match := _FILE.fullmatch(path.name):
            found.setdefault(match["engine"], {})[int(match["rank"])] = path
    return found


def is_traced(folder: Path) -> bool:
    """Whether a run has traces of ours, in itself or in its cells."""
    return any(folder.rglob(f"*{SUFFIX}"))


def load_steps(folder: Path, engines: Sequence[str], *, cell: int | None, rank: int) -> dict[str, list[Span]]:
    """The traced steps of one rank, by engine.

    Args:
        folder: of a comparison or benchmark.
        engines: which, by name; all that were traced if none is given.
        cell: of a benchmark, from 1, which is also what None means there.
        rank: whose.

    Raises:
        ConfigError: there is no such trace.
    """
    place = folder
    if is_benchmark(folder):
        place = folder / f"cell-{cell or 1}"
        if not place.is_dir():
            raise ConfigError(
                f"run {folder}: expected a cell from 1 to {len(list(folder.glob('cell-*')))}, found {cell}"
            )
    elif cell is not None:
        raise ConfigError(f"run {folder}: a comparison has no cells, found --cell {cell}; leave it out")
    traces = saved_traces(place)
    if not traces and any(place.glob(f"*{TORCH_TRACE}")):
        raise ConfigError(f"run {place}: its traces are torch's, of a GPU; open them in ui.perfetto.dev")
    if not traces:
        raise ConfigError(f"run {place}: holds no traces; run it with --profile")
    for engine in engines or traces:
        if engine not in traces:
            raise ConfigError(f"run {place}: no trace of {engine!r}, those of {', '.join(traces)} are there")
        if rank not in traces[engine]:
            ranks = ", ".join(map(str, sorted(traces[engine])))
            raise ConfigError(f"run {place}: no trace of rank {rank} of {engine!r}, those of rank {ranks} are there")
    return {engine: load_spans(traces[engine][rank]) for engine in engines or traces}


def load_spans(path: Path) -> list[Span]:
    """The spans of a trace, but for those of operators.

    Raises:
        ConfigError: the file is broken.
    """
    data = read_json(path)
    with naming(path):
        events = data["traceEvents"]
        lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        spans = list(_spans(events, lanes))
    if not any(span.lane == PHASE and span.name and span.end_s > 0 for span in spans):
        raise ConfigError(f"{path}: holds no phase of a step; run with --profile again")
    if not all(0 <= span.start_s <= span.end_s < math.inf and isinstance(span.name, str) for span in spans):
        raise ConfigError(f"{path}: holds spans that no step has; run with --profile again")
    return spans


def _spans(events: Iterable[dict[str, Any]], lanes: dict[int, str]) -> Iterable[Span]:
    for event in events:
        if event["ph"] == "X" and lanes[event["tid"]] != OPERATORS:
            start_s = event["ts"] / 1e6
            details = event["args"]
            yield Span(
                lanes[event["tid"]],
                event["cat"],
                details["subject"],
                start_s,
                start_s + event["dur"] / 1e6,
                details.get("bytes", 0),
            )


def _event(span: Span, rank: int, thread: int) -> dict[str, Any]:
    """One span, named as a viewer shows it: what is done and for whom."""
    title = span.name if span.lane in (OPERATORS, span.kind) and span.name else f"{span.kind} {span.name}".strip()
    details: dict[str, Any] = {"subject": span.name} | ({"bytes": span.bytes} if span.bytes else {})
    return {
        "ph": "X",
        "name": title,
        "cat": span.kind,
        "pid": rank,
        "tid": thread,
        "ts": span.start_s * 1e6,
        "dur": (span.end_s - span.start_s) * 1e6,
        "args": details,
    }


def _metadata(name: str, rank: int, thread: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": thread, "args": {"name": value}}
