"""The pool of ranks: results, a clean process for each task, the name of the rank that failed, died or hung."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError, ParityError, PlanError, RankError, RankTimeout
from common.harness.diagnosis import LINK, TORCH, Failure, Frame, Stack, blame_failure
from common.harness.launch import OnProgress, Progress, RankContext, RankPool
from common.harness.messages import Died, Failed
from parity_tests import faulty

HANG_TIMEOUT_S = 3.0
"""Enough to reach a collective; the ranks that have to hang do so for ever."""


@pytest.fixture(scope="module")
def fragile() -> Iterator[RankPool]:
    """A pool for tests that break it, so that the session's keeps its workers."""
    with RankPool(4) as pool:
        yield pool


def has_ended(pid: int) -> bool:
    """Whether a process, perhaps not our child, is over or about to be."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], 30)[0])
    finally:
        os.close(fd)


def fail(
    pool: RankPool,
    fn: Callable[..., Any],
    *args: Any,
    ranks: int = 2,
    timeout_s: float = 60.0,
    on_progress: OnProgress | None = None,
) -> ParityError:
    """Run something that must fail on a pool that works, and check that none of its processes is left."""
    assert pool.run(faulty.rank_of, ranks=ranks) == list(range(ranks))
    pids = pool.pids
    with pytest.raises(ParityError) as caught:
        pool.run(fn, *args, ranks=ranks, timeout_s=timeout_s, on_progress=on_progress)
    assert len(pids) >= ranks and all(has_ended(pid) for pid in pids)
    assert not pool.pids
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 2])
def test_pool_group_has_exactly_the_ranks_asked_for(pool: RankPool, ranks: int) -> None:
    """Every world size up to the pool's gets its own group, and results come in the order of ranks."""
    numbers = [10 + rank for rank in range(ranks)]
    assert pool.run(faulty.gather_values, 10, ranks=ranks) == [(rank, ranks, numbers) for rank in range(ranks)]


def test_pool_returns_tensors_unchanged(pool: RankPool) -> None:
    """Megabytes of tensors come back with dtype, shape and bits."""
    for rank, found in enumerate(pool.run(faulty.make_tensors, 2000, ranks=2)):
        expected = faulty.make_tensors(RankContext(rank, 2, print), 2000)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype is tensor.dtype and torch.equal(found[name], tensor), name


def test_pool_starts_workers_when_needed_and_keeps_them() -> None:
    """No process before the first run, no more than the widest run needs, the same ones after, none after closing."""
    with RankPool(4) as pool:
        assert not pool.pids
        pool.run(faulty.rank_of, ranks=1)
        first = pool.pids
        pool.run(faulty.rank_of, ranks=2)
        both = pool.pids
        pool.run(faulty.rank_of, ranks=1)
        assert (len(first), len(both)) == (1, 2) and both[:1] == first and pool.pids == both
    assert not pool.pids and all(has_ended(pid) for pid in both)


def test_pool_replaces_a_worker_that_died_between_tasks(fragile: RankPool) -> None:
    """A worker lost while idle costs a restart, not a failure."""
    fragile.run(faulty.rank_of, ranks=2)
    lost, kept = fragile.pids[:2]
    os.kill(lost, signal.SIGKILL)
    assert has_ended(lost)
    assert fragile.run(faulty.rank_of, ranks=2) == [0, 1]
    assert fragile.pids[1] == kept and fragile.pids[0] != lost


def test_pool_compiled_collectives_work_in_successive_tasks(pool: RankPool) -> None:
    """A compiled graph and a DTensor name a process group; the next task's group has the name, not the members."""
    for ranks in (2, 3, 2):
        gathered = [2.0 * rank + 1 for rank in range(ranks)]
        expected = (gathered, [float(rank) for rank in range(ranks)])
        assert pool.run(faulty.gather_compiled, ranks=ranks) == [expected] * ranks


def test_pool_tasks_leave_no_group_behind(pool: RankPool) -> None:
    """Caches keep the meshes of old tasks, compiled or not; their sockets and threads end all the same."""
    before = pool.run(faulty.native_threads, ranks=2)
    for _ in range(3):
        pool.run(faulty.gather_compiled, ranks=2)
    assert pool.run(faulty.native_threads, ranks=2) == before


def test_gloo_group_runs_on_one_thread(pool: RankPool) -> None:
    """Two threads of one group can free the same memory, so groups of tasks have one; it moves data (see above)."""
    for threads in pool.run(faulty.native_threads, ranks=3):
        assert threads["pt_gloo_runloop"] == 1


def test_pool_survives_references_to_an_old_group(fragile: RankPool) -> None:
    """A task that keeps its group and mesh alive does not disturb the next ones."""
    assert [fragile.run(faulty.keep_group, ranks=2) for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]
    assert fragile.run(faulty.gather_values, 0, ranks=2)[1] == (1, 2, [0, 1])


def test_pool_task_finds_a_new_process(pool: RankPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Default dtype, device, grad mode, threads, seeds, environment, folder and import path do not leak."""
    before = pool.run(faulty.surroundings, ranks=2)
    pool.run(faulty.change_surroundings, ranks=2)
    assert pool.run(faulty.surroundings, ranks=2) == before
    assert before[0] == before[1]
    assert (before[0]["dtype"], before[0]["threads"], before[0]["grad"]) == (torch.float32, 1, True)
    assert before[0]["device"] == torch.device("cpu") and not before[0]["deterministic"]

    monkeypatch.setenv("SET_BY_CALLER", "yes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    after = pool.run(faulty.surroundings, ranks=1)[0]
    assert (after["environ"]["SET_BY_CALLER"], after["cwd"], after["path"][0]) == ("yes", str(tmp_path), str(tmp_path))


def test_pool_reports_progress_in_order(pool: RankPool) -> None:
    """Each rank's events arrive complete and in order before its result is returned."""
    events: list[tuple[int, Progress]] = []
    pool.run(faulty.report_steps, 50, ranks=2, on_progress=lambda rank, event: events.append((rank, event)))
    expected = [Progress("step", step, 50) for step in range(1, 51)] + [Progress("closing")]
    for rank in (0, 1):
        assert [event for source, event in events if source == rank] == expected


def test_pool_shows_what_ranks_print(pool: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    """Output of a task goes to stderr with its rank, once; stdout stays free for results."""
    pool.run(faulty.speak, ranks=2)
    pool.run(faulty.rank_of, ranks=2)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert sorted(shown.err.splitlines()) == [
        "[rank 0] out of 2",
        "[rank 0] to stderr",
        "[rank 1] out of 2",
        "[rank 1] to stderr",
    ]


def test_pool_leaves_no_files(fragile: RankPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rendezvous files are gone after success and after failure, here by a result that cannot be pickled."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fragile.run(faulty.gather_values, 0, ranks=2)
    assert list(tmp_path.iterdir()) == []
    error = fail(fragile, faulty.return_lambda, ranks=1)
    assert str(error).startswith("rank 0: ") and "return_lambda.<locals>.<lambda>" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_pool_rejects_calls_it_cannot_make(pool: RankPool) -> None:
    """Too many ranks, none, no time, and a function of the main script are configuration errors."""
    with pytest.raises(ConfigError, match="1 to 4, the size of the pool, found 5"):
        pool.run(faulty.rank_of, ranks=5)
    with pytest.raises(ConfigError, match="found 0"):
        pool.run(faulty.rank_of, ranks=0)
    with pytest.raises(ConfigError, match="at least 1, found 0"):
        RankPool(0)
    with pytest.raises(ConfigError, match="timeout: expected a positive"):
        pool.run(faulty.rank_of, ranks=1, timeout_s=0)

    def local(context: RankContext) -> None: ...

    local.__module__ = "__main__"
    with pytest.raises(ConfigError, match="move it into a module"):
        pool.run(local, ranks=1)


def test_raising_rank_is_named_with_its_traceback(fragile: RankPool) -> None:
    """One line with rank, type, message and progress; the traceback and the rank's output in the detail."""
    error = fail(fragile, faulty.raise_error, 1)
    assert type(error) is RankError and error.exit_code == 3
    assert (str(error), error.rank) == ("rank 1: ValueError: bad value on rank 1 (at step 3/10)", 1)
    assert "in raise_error" in error.detail and "about to fail" in error.detail
    assert error.detail in error.__notes__  # so that a test that dies of it shows it


def test_config_error_of_a_rank_keeps_its_type(fragile: RankPool) -> None:
    """A wrong job found inside a rank ends in exit code 2, as if found here."""
    error = fail(fragile, faulty.raise_plan_error, ranks=1)
    assert type(error) is PlanError and error.exit_code == 2 and str(error) == "plan 'x': names no module"
    assert isinstance(error.__cause__, RankError) and "in raise_plan_error" in error.__cause__.detail


def test_cause_is_named_before_the_connection_errors_it_leads_to(fragile: RankPool, tmp_path: Path) -> None:
    """A rank that lost its peer fails first, even with its own error on top; the peer, which left, is to blame."""
    error = fail(fragile, faulty.exit_after_breaking_connections, tmp_path)
    assert isinstance(error, RankError) and str(error) == "rank 1: SystemExit: the cause"
    assert "then rank 0: OSError: a step failed" in error.detail


def test_death_is_blamed_before_any_exception() -> None:
    """Death, then a genuine exception, then a broken connection; among equals the earliest."""

    def failed(rank: int, at_s: float, is_secondary: bool = False) -> Failure:
        return Failure(rank, Failed(f"E{rank}", "", is_secondary, None, at_s), None, "")

    lost, late, early, died = (
        failed(0, 1.0, True),
        failed(1, 3.0),
        failed(2, 2.0),
        Failure(3, Died("died", 4.0), None, ""),
    )
    assert str(blame_failure([lost, late, early, died])) == "rank 3 died"
    assert str(blame_failure([lost, late, early])) == "rank 2: E2"
    assert str(blame_failure([lost])) == "rank 0: E0"


def test_rank_killed_in_a_collective_is_named(fragile: RankPool) -> None:
    """SIGKILL from outside: the victim is named, not the peer whose connection broke."""

    def kill(rank: int, progress: Progress) -> None:
        os.kill(progress.done, signal.SIGKILL)

    error = fail(fragile, faulty.be_killed_in_collective, on_progress=kill)
    assert isinstance(error, RankError) and error.rank == 1
    assert str(error).startswith("rank 1 was killed by SIGKILL")


def test_rank_that_crashes_is_named_with_its_stack(fragile: RankPool) -> None:
    """A segmentation fault shows the signal, and in the detail the Python line it came from."""
    error = fail(fragile, faulty.crash, ranks=1)
    assert isinstance(error, RankError) and str(error) == "rank 0 was killed by SIGSEGV" and "in crash" in error.detail


def test_children_of_a_dead_rank_end_with_it(fragile: RankPool) -> None:
    """A child that keeps the rank's descriptors open neither hides its end by `os._exit` nor outlives it."""
    children: list[int] = []
    error = fail(fragile, faulty.leave_child_behind, on_progress=lambda rank, event: children.append(event.done))
    assert str(error) == f"rank 1 ended with exit code 7 (at pid {children[0]})"
    assert has_ended(children[0])


def test_hanging_rank_is_named_and_not_those_that_wait_for_it(fragile: RankPool) -> None:
    """However the others wait - a call, a work handle, a functional wait - the one that computes is to blame."""
    error = fail(fragile, faulty.hang_while_others_wait, 3, ranks=4, timeout_s=HANG_TIMEOUT_S)
    assert type(error) is RankTimeout and error.rank == 3
    hung, _, waiting = str(error).partition("; waiting for it: ")
    assert hung.startswith("rank 3 at spin (parity_tests/faulty.py:") and hung.endswith("within 3 s")
    assert "(at step 5/10)" in hung
    for start in ("rank 0 in all_gather at hang_while", "rank 1 in wait at hang_while", "rank 2 in a coll"):
        assert start in waiting
    assert "in spin" in error.detail and "in hang_while_others_wait" in error.detail


def test_stopped_rank_is_named(fragile: RankPool) -> None:
    """A rank that cannot even give a stack is named, with the reason, and ended."""
    error = fail(fragile, faulty.stop, ranks=1, timeout_s=HANG_TIMEOUT_S)
    assert type(error) is RankTimeout and error.rank == 0
    assert str(error).startswith("rank 0 at an unknown place (no stack: stopped by a signal) did not finish")


def test_mismatched_collectives_are_told_from_a_hang(fragile: RankPool) -> None:
    """When all ranks wait for each other, each one's place is shown."""
    error = fail(fragile, faulty.mismatch, timeout_s=HANG_TIMEOUT_S)
    assert type(error) is RankTimeout and "collectives that do not match; ranks may have" in str(error)
    assert "rank 0 in recv at wait_for_gift (parity_tests/faulty.py:" in str(error)
    assert "rank 1 in barrier at mismatch (parity_tests/faulty.py:" in str(error)


def test_abort_of_gloo_is_explained(fragile: RankPool) -> None:
    """A rank that gloo ends, since another one sent more than it asked for, is named with the likely reason."""
    error = fail(fragile, faulty.mismatch_sizes)
    assert error.rank == 0 and error.exit_code == 3
    assert str(error).startswith("rank 0 was killed by SIGABRT: ranks may have issued different collectives; within")
    assert "gloo::EnforceNotMet" in error.detail


def test_deadline_can_be_moved_while_ranks_work(fragile: RankPool) -> None:
    """What `allow` gives counts instead of the run's timeout."""

    def hear(rank: int, progress: Progress) -> None:
        fragile.allow(0.25)

    error = fail(fragile, faulty.hang_while_others_wait, 1, ranks=2, timeout_s=600, on_progress=hear)
    assert type(error) is RankTimeout and "within 0.25 s" in str(error)


def test_rank_that_returned_without_a_collective_is_named(fragile: RankPool) -> None:
    """A rank waits for one that has returned: the message says so."""
    error = fail(fragile, faulty.call_fewer_collectives, timeout_s=HANG_TIMEOUT_S)
    assert type(error) is RankTimeout
    assert "rank 1 in all_reduce" in str(error) and "for rank 0, which has returned" in str(error)


def test_error_in_the_parent_ends_the_ranks(fragile: RankPool) -> None:
    """Ctrl-C while ranks work comes through and leaves no process."""

    def interrupt(rank: int, progress: Progress) -> None:
        raise KeyboardInterrupt

    fragile.run(faulty.rank_of, ranks=1)
    pids = fragile.pids
    with pytest.raises(KeyboardInterrupt):
        fragile.run(faulty.hang_while_others_wait, 0, ranks=1, on_progress=interrupt)
    assert not fragile.pids and all(has_ended(pid) for pid in pids)


def test_ranks_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """SIGKILL gives the parent no time to clean up; its ranks, in the middle of a task, end all the same."""
    command = [sys.executable, "-m", "parity_tests.abandoned_pool"]
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as parent:
        assert parent.stdout is not None
        ranks = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
    assert len(ranks) == 2 and all(has_ended(rank) for rank in ranks)


def test_a_rank_that_polls_in_the_link_waits() -> None:
    """Whatever its thread is at that moment; elsewhere a thread that runs does something."""
    backward = Frame(TORCH + "autograd/graph.py", 1, "_engine_run_backward")
    connect = Frame(LINK + "link.py", 1, "_connect")
    waits = {
        (state, frames[0]): Stack("", frames, state).waits_in
        for state in ("S", "R")
        for frames in ((backward,), (connect, backward))
    }
    assert waits == {
        ("S", backward): "a collective",
        ("R", backward): None,
        ("S", connect): "a collective",
        ("R", connect): "a collective",
    }
