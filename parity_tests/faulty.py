"""Functions that ranks run in the tests of launching: some work, the others fail, each in one way."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from common.errors import PlanError
from common.harness.rank import RankContext

KEPT: list[Any] = []


def rank_of(context: RankContext) -> int:
    return context.rank


def gather_values(context: RankContext, base: int) -> tuple[int, int, list[int]]:
    """The group as torch sees it, and one number of each rank."""
    numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(context.ranks)]
    dist.all_gather(numbers, torch.tensor([base + context.rank]))
    return dist.get_rank(), dist.get_world_size(), [int(number) for number in numbers]


def make_tensors(context: RankContext, rows: int) -> dict[str, torch.Tensor]:
    return {
        "wide": torch.arange(rows * 1000, dtype=torch.float32).view(rows, 1000) + context.rank,
        "bf16": torch.full((3,), 0.1 + context.rank, dtype=torch.bfloat16),
        "view": torch.arange(10)[2:4],
    }


def gather_compiled(context: RankContext) -> tuple[list[float], list[float]]:
    """A functional all-gather in a compiled graph, and a DTensor that is gathered; both find the group by name."""
    group = dist.group.WORLD
    assert group is not None
    name, ranks = group.group_name, context.ranks

    @torch.compile(backend="aot_eager", fullgraph=True)
    def gather(x: torch.Tensor) -> torch.Tensor:
        whole = torch.ops._c10d_functional.all_gather_into_tensor(x * 2, ranks, name)
        waited: torch.Tensor = torch.ops._c10d_functional.wait_tensor(whole) + 1
        return waited

    mesh = init_device_mesh("cpu", (ranks,))
    sharded = distribute_tensor(torch.arange(float(ranks)), mesh, [Shard(0)])
    whole = sharded.redistribute(placements=[Replicate()]).to_local()
    return gather(torch.tensor([float(context.rank)])).tolist(), whole.tolist()


def native_threads(context: RankContext) -> Counter[str]:
    """How many threads of each name this process has, Python's and those of torch and gloo, in the middle of a task."""
    dist.all_reduce(torch.ones(1))
    return Counter(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))


def keep_group(context: RankContext) -> int:
    """Leak what refers to the group, as a cache might."""
    KEPT.append((dist.group.WORLD, init_device_mesh("cpu", (context.ranks,))))
    return len(KEPT)


def surroundings(context: RankContext) -> dict[str, Any]:
    """Everything process-wide that a task may rely on."""
    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "torch": torch.rand(()).item(),
        "python": random.random(),
        "environ": dict(os.environ),
        "cwd": os.getcwd(),
        "path": list(sys.path),
    }


def change_surroundings(context: RankContext) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)
    torch.manual_seed(123)
    random.seed(123)
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    sys.path.insert(0, "/left/behind")


def report_steps(context: RankContext, steps: int) -> int:
    for step in range(steps):
        context.progress("step", step + 1, steps)
    context.progress("closing")
    return context.rank


def speak(context: RankContext) -> None:
    print(f"out of {context.ranks}")
    print("to stderr", file=sys.stderr)


def raise_error(context: RankContext, rank: int) -> None:
    """`rank` raises, the others wait for it."""
    if context.rank == rank:
        print("about to fail")
        context.progress("step", 3, 10)
        raise ValueError(f"bad value\non rank {rank}")
    dist.all_reduce(torch.ones(1))


def raise_plan_error(context: RankContext) -> NoReturn:
    raise PlanError("plan 'x': names no module")


def return_lambda(context: RankContext) -> Any:
    return lambda: 1


def exit_after_breaking_connections(context: RankContext, folder: Path) -> None:
    """Rank 1 closes its connections, and leaves when rank 0 has failed because of it."""
    if context.rank == 1:
        dist.destroy_process_group()
        while not (folder / "lost").exists():
            pass
        time.sleep(0.2)  # let rank 0 be heard first, so that the test can tell order from cause
        sys.exit("the cause")
    try:
        dist.recv(torch.ones(1), src=1)
    except RuntimeError as error:
        (folder / "lost").touch()
        raise OSError("a step failed") from error


def be_killed_in_collective(context: RankContext) -> None:
    """Rank 1 tells its process id and enters a collective that cannot end; rank 0 waits for it."""
    if context.rank == 1:
        context.progress("pid", os.getpid())
        dist.all_reduce(torch.ones(1))
    dist.recv(torch.ones(1), src=1)


def crash(context: RankContext) -> None:
    """Read where one must not."""
    ctypes.string_at(0)


def leave_child_behind(context: RankContext) -> None:
    """Rank 1 forks a process that keeps every descriptor open, then ends without a word; the others wait for it."""
    if context.rank == 1:
        child = os.fork()
        if child == 0:
            signal.pause()
        context.progress("pid", child)
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def hang_while_others_wait(context: RankContext, hanging: int) -> None:
    """`hanging` spins; each other rank waits for it in the same collective, called in its own way."""
    whole, own = [torch.zeros(1) for _ in range(context.ranks)], torch.ones(1)
    context.progress("step", 5, 10)
    if context.rank == hanging:
        spin()
    elif context.rank == 0:
        dist.all_gather(whole, own)
    elif context.rank == 1:
        work = dist.all_gather(whole, own, async_op=True)
        assert work is not None
        work.wait()
    else:
        group = dist.group.WORLD
        assert group is not None
        started = torch.ops._c10d_functional.all_gather_into_tensor(own, context.ranks, group.group_name)
        torch.ops._c10d_functional.wait_tensor(started)


def spin() -> NoReturn:
    while True:
        pass


def stop(context: RankContext) -> None:
    """Be stopped by a signal, able to tell nothing."""
    os.kill(os.getpid(), signal.SIGSTOP)


def mismatch(context: RankContext) -> None:
    """Each rank waits for the other one to send."""
    if context.rank == 0:
        wait_for_gift(1)
    dist.barrier()


def mismatch_sizes(context: RankContext) -> None:
    """Rank 0 gets more than it asked for, at which gloo ends the process."""
    dist.all_reduce(torch.ones(1000 if context.rank else 4))


def wait_for_gift(source: int) -> None:
    dist.recv(torch.ones(1), src=source)


def call_fewer_collectives(context: RankContext) -> None:
    """Rank 0 returns at once, rank 1 calls a collective."""
    if context.rank == 1:
        dist.all_reduce(torch.ones(1))
