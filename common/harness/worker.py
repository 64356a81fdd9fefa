"""One rank process of a pool: `python -m common.harness.worker RANK CONTROL_FD STACK_FD PARENT_PID`.

It takes one task after the other from its socket, and ends with its parent, whatever ends the parent.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import gc
import os
import pickle
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from common.harness.messages import Failed, Finished, Idle, Release, Started, Task
from common.harness.rank import RankContext, forget_task, process_group, set_initial_state

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Serve tasks until the pool closes the socket."""
    rank, control_fd, stack_fd, parent_pid = (int(argument) for argument in sys.argv[1:5])
    _die_with_parent(parent_pid)
    for fd in (control_fd, stack_fd):
        os.set_inheritable(fd, False)  # a compiler started by a task must not keep the socket open
    faulthandler.enable(stack_fd)
    faulthandler.register(signal.SIGUSR1, stack_fd)
    gc.collect()
    gc.freeze()  # the modules imported so far are no garbage: collecting after each task is then cheap
    connection = Connection(control_fd)
    try:
        _send(connection, Started(threading.main_thread().ident or 0))
        while True:
            task = _receive(connection)
            assert isinstance(task, Task), f"expected a task, found {task!r}"
            _serve(task, rank, connection)
    except (EOFError, ConnectionError):
        return  # the pool is closed or gone: the regular end of a worker


def _serve(task: Task, rank: int, connection: Connection) -> None:
    """Run one task; when it fails, say so and wait for the end with the process group open."""
    try:
        _adopt_surroundings(task)
        set_initial_state()
        _run(task, rank, connection)
        forget_task()
    except BaseException as error:  # SystemExit too: a rank that leaves early has failed
        _send(connection, Failed.from_exception(error))
        connection.recv_bytes()  # the pool answers by killing this process
    else:
        _send(connection, Idle())


def _run(task: Task, rank: int, connection: Connection) -> None:
    """Call the function inside the group, send its result, leave the group when all ranks are done."""
    function, arguments = pickle.loads(task.call)
    context = RankContext(rank, task.ranks, functools.partial(_send, connection))
    store = dist.FileStore(task.store, task.ranks)  # type: ignore[attr-defined]
    with process_group(store, rank, task.ranks, task.timeout_s):
        _send(connection, Finished(pickle.dumps(function(context, *arguments))))
        release = _receive(connection)
        assert isinstance(release, Release), f"expected a release, found {release!r}"


def _adopt_surroundings(task: Task) -> None:
    """Take over the import path, environment and folder of the caller; this also undoes what the last task changed."""
    sys.path[:] = task.sys_path
    os.environ.clear()
    os.environ.update(task.environ)
    os.chdir(task.cwd)


def _send(connection: Connection, message: object) -> None:
    # not Connection.send: torch teaches its pickler to pass tensors as shared memory, which would outlive the task
    connection.send_bytes(pickle.dumps(message))


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def _die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the parent's thread that started it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it ended before the call above
        sys.exit(f"parent {parent_pid} is gone")


if __name__ == "__main__":
    main()
