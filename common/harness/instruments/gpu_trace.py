"""What torch's own tools record of one step on a GPU, as files for the viewers that read them.

    .torch-trace.json   when the program launched what, and when each stream ran it, in the engine's named ranges;
                        for ui.perfetto.dev
    .memory.pickle      each block of the caching allocator, when it came and went, and the line that asked for it;
                        for pytorch.org/memory_viz

Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile

from common.torch_private import allocator_history

TORCH_TRACE, SNAPSHOT = ".torch-trace.json", ".memory.pickle"


@contextmanager
def record_with_torch() -> Iterator[dict[str, bytes]]:
    """Record the block; what it gives is filled at its end, by suffix of the file."""
    files: dict[str, bytes] = {}
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with allocator_history() as snapshot, profile(activities=activities, record_shapes=True) as profiler:
        yield files
        torch.cuda.synchronize()  # what was launched belongs to the step
    files[SNAPSHOT] = snapshot()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        files[TORCH_TRACE] = path.read_bytes()
