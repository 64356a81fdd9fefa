"""Devices: the same claims for each that this machine has; what a machine lacks is told before anything starts."""

from __future__ import annotations

import time

import pytest
import torch

from common.device import CPUDevice, Device, GPUDevice, device_of
from common.errors import ConfigError
from common.harness.launch import RankContext, RankPool
from common.job import DEVICES
from common.mesh import SHARD_DIM

HERE = [name for name in DEVICES if name == "cpu" or torch.cuda.is_available()]


@pytest.mark.parametrize("name", HERE)
def test_device_goes_by_its_name_and_takes_tensors(name: str) -> None:
    """What is sent arrives with its values, where the claimed device is."""
    device = device_of(name)
    tensor = torch.arange(5)
    there = device.send(tensor)
    assert device.type == name and there.device.type == device.claim(0).type == name
    assert torch.equal(there.cpu(), tensor)


def test_timer_of_a_cpu_goes_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its own start to its end, whatever other timers do."""
    times = iter([10.0, 11.0, 13.5, 17.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    first, second = CPUDevice().start_timer(), CPUDevice().start_timer()
    assert (first(), second()) == (3.5, 6.0)


def build_mesh_and_sum(context: RankContext, name: str) -> tuple[tuple[str, ...] | None, int, float]:
    device = device_of(name)
    there = device.claim(context.rank)
    mesh = device.mesh()
    total = torch.tensor(float(context.rank + 1), device=there)
    torch.distributed.all_reduce(total, group=mesh.get_group())
    return mesh.mesh_dim_names, mesh.size(), total.item()


@pytest.mark.parametrize("name", HERE)
def test_mesh_carries_tensors_of_the_device(pool: RankPool, name: str) -> None:
    """1-D, over all ranks, named, with a group that reduces what is on the device."""
    ranks = 2 if name == "cpu" else torch.cuda.device_count()
    found = pool.run(build_mesh_and_sum, name, ranks=ranks)
    assert found == [((SHARD_DIM,), ranks, ranks * (ranks + 1) / 2)] * ranks


@pytest.mark.parametrize(
    ("device", "gpus", "ranks", "link", "said"),
    [
        (CPUDevice(), 0, 2, "nccl", "--device cuda"),
        (GPUDevice(), 0, 1, "nccl", "no GPU"),
        (GPUDevice(), 1, 2, "nccl", "found 1"),
        (GPUDevice(), 2, 2, "gloo", "--link nccl"),
    ],
)
def test_what_a_machine_lacks_is_told(
    monkeypatch: pytest.MonkeyPatch, device: Device, gpus: int, ranks: int, link: str, said: str
) -> None:
    """Too few GPUs, and links that do not carry a device's tensors."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ConfigError, match=said):
        device.check(ranks, link)


def test_a_gpu_for_each_rank_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs for two ranks on NCCL; one for any number of them on the fake link, where one process stands for all."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    GPUDevice().check(2, "nccl")
    GPUDevice().check(1, "fake")
