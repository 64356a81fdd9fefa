"""What differs between devices for the harness, one class each with the same methods: where ranks compute, who carries
their messages, how a step is timed. Memory is in `common/harness/instruments/memory.py`, streams in the engines.

The GPU's has not run on a GPU yet.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from common.errors import ConfigError
from common.job import CPU, FAKE_LINK, GPU
from common.mesh import SHARD_DIM, build_mesh


class Device(ABC):
    """Where ranks compute.

    Attributes:
        type: as torch calls it, "cpu" or "cuda".
    """

    type: str

    @abstractmethod
    def check(self, ranks_here: int, link: str) -> None:
        """See that this machine has it for so many ranks, and that it goes with the link.

        Raises:
            ConfigError: it has not, or does not.
        """

    @abstractmethod
    def claim(self, rank: int) -> torch.device:
        """Take this rank's own, for everything that comes."""

    @abstractmethod
    def mesh(self) -> DeviceMesh:
        """A 1-D mesh over all ranks, with a process group for tensors that are here."""

    @abstractmethod
    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor made on the CPU, here; the program does not wait for it."""

    @abstractmethod
    def start_timer(self) -> Callable[[], float]:
        """Start to time what the program hands over from now on; the result ends it, waits, and says how long it took.

        Nothing waits in between.
        """


class CPUDevice(Device):
    """Ranks compute where they run."""

    type = CPU

    def check(self, ranks_here: int, link: str) -> None:
        """Any number of ranks; not NCCL."""
        if link == "nccl":
            raise ConfigError("link nccl: carries tensors of GPUs only; use --device cuda, or another link")

    def claim(self, rank: int) -> torch.device:
        """Nothing to take."""
        return torch.device(CPU)

    def mesh(self) -> DeviceMesh:
        """Over the default group, gloo or fake."""
        return build_mesh(CPU)

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """It is here."""
        return tensor

    def start_timer(self) -> Callable[[], float]:
        """By the clock: what the program hands over it has done."""
        start_s = time.perf_counter()
        return lambda: time.perf_counter() - start_s


class GPUDevice(Device):
    """One GPU per rank; NCCL carries what they send, gloo what the harness has to say."""

    type = GPU

    def check(self, ranks_here: int, link: str) -> None:
        """A GPU for each rank on this machine, and a link that carries its tensors."""
        if not torch.cuda.is_available():
            raise ConfigError("device cuda: torch finds no GPU here; use --device cpu")
        if torch.cuda.device_count() < ranks_here:
            raise ConfigError(
                f"device cuda: expected a GPU for each of {ranks_here} ranks, found {torch.cuda.device_count()}; "
                "use fewer ranks, or --link fake, on which one rank stands for all"
            )
        if link not in ("nccl", FAKE_LINK):
            raise ConfigError(f"device cuda: link {link} carries tensors of a CPU only; use --link nccl")

    def claim(self, rank: int) -> torch.device:
        """The GPU of this rank's number on its machine."""
        # torchrun's number; a variable that was left over from elsewhere would put all ranks on one GPU
        local_rank = int(os.environ.get("LOCAL_RANK", rank)) if "TORCHELASTIC_RUN_ID" in os.environ else rank
        torch.cuda.set_device(local_rank)
        return torch.device(GPU, local_rank)

    def mesh(self) -> DeviceMesh:
        """Over a group of its own, since the default group is gloo; over the fake one, which carries anything."""
        if dist.get_backend() == FAKE_LINK:
            return build_mesh(GPU)
        return DeviceMesh.from_group(dist.new_group(backend="nccl"), GPU, mesh_dim_names=(SHARD_DIM,))

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Through pinned memory, so that the copy is one more thing on the stream."""
        return tensor.pin_memory().to(GPU, non_blocking=True)

    def start_timer(self) -> Callable[[], float]:
        """By events on the stream, so that the program is not held up before the end."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()

        def stop() -> float:
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3

        return stop


def device_of(name: str) -> Device:
    """The device of that type."""
    return GPUDevice() if name == GPU else CPUDevice()
