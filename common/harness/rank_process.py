"""One worker process as its parent sees it: start, talk, look, kill."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common.harness.diagnosis import Stack, is_complete, thread_state
from common.harness.rank import Progress, disable_flight_recorder, use_loopback

WORKER_MODULE = "common.harness.worker"
POLL_S = 0.01


class RankProcess:
    """A worker that was started; it may still be importing.

    Attributes:
        rank: its rank in every task.
        connection: our end of its socket.
        progress: the last progress of its present task.
        main_thread: how its main thread is called in a stack dump; 0 until it has reported for work.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.progress: Progress | None = None
        self.main_thread = 0
        # Unlinked files, not pipes: nobody has to read while the rank works, and nothing stays on disk.
        self._output = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - both live as long as the process
        self._stacks = tempfile.TemporaryFile("a+b")  # noqa: SIM115
        self.connection, theirs = multiprocessing.Pipe()
        fds = (theirs.fileno(), self._stacks.fileno())
        with theirs:
            self._popen = subprocess.Popen(
                # -u: what a killed rank printed is not lost; -P: the caller's import path and nothing before it
                [sys.executable, "-u", "-P", "-m", WORKER_MODULE, str(rank), *map(str, fds), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env=worker_environment(),
                pass_fds=fds,
                process_group=0,  # Ctrl-C reaches the parent alone, and a kill reaches the rank's own children too
            )

    @property
    def pid(self) -> int:
        """Its process id, which is also its process group's."""
        return self._popen.pid

    def send(self, message: object) -> None:
        """Send a message; if the process has died, its death is found when reading."""
        with contextlib.suppress(ConnectionError):
            self.connection.send_bytes(pickle.dumps(message))

    def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError, OSError: the process has died.
        """
        return pickle.loads(self.connection.recv_bytes())

    def death(self, wait_s: float = 0.0) -> str | None:
        """How the process ended, or None if it still runs after `wait_s`.

        It is not reaped: until `kill`, its id cannot be given to another process.
        """
        deadline = time.monotonic() + wait_s
        while (found := os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
            if time.monotonic() >= deadline:
                return None
            time.sleep(POLL_S)
        if found.si_code == os.CLD_EXITED:
            return f"ended with exit code {found.si_status}"
        number = found.si_status
        name = signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"
        return f"was killed by {name}" + (" (often the kernel, out of memory)" if name == "SIGKILL" else "")

    def end(self) -> None:
        """End the process and its own children now; `kill` does the rest."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End the process and its own children now, and reap it."""
        self.end()
        self._popen.wait()
        self.connection.close()
        self._output.close()
        self._stacks.close()

    def take_output(self) -> str:
        """What it has written to stdout and stderr since the last call."""
        self._output.seek(0)
        text = self._output.read().decode(errors="replace")
        self._output.truncate(0)
        return text

    def stack(self, wait_s: float) -> Stack:
        """Where its main thread is, as the process itself says; without frames if it does not answer."""
        state = thread_state(self.pid)  # first: the signal wakes a sleeper
        start = os.fstat(self._stacks.fileno()).st_size
        os.kill(self.pid, signal.SIGUSR1)
        deadline = time.monotonic() + wait_s
        text = ""
        while not is_complete(text) and time.monotonic() < deadline:
            time.sleep(POLL_S)
            text = self._stack_text(start)
        return Stack.parse(text, self.main_thread, state)

    def crash_stack(self) -> str:
        """The stacks it wrote by itself, when a signal such as SIGSEGV ended it."""
        return self._stack_text(0)

    def _stack_text(self, start: int) -> str:
        size = os.fstat(self._stacks.fileno()).st_size - start
        return os.pread(self._stacks.fileno(), size, start).decode(errors="replace")


def worker_environment() -> dict[str, str]:
    """The environment of a rank: ours, one thread, and loopback for ranks that are all on this machine."""
    environ = dict(os.environ)
    environ["OMP_NUM_THREADS"] = "1"
    environ["PYTHONPATH"] = os.pathsep.join(import_path())
    use_loopback(environ)
    disable_flight_recorder(environ)
    return environ


def import_path() -> list[str]:
    """Our `sys.path`, absolute; an empty entry means the current folder."""
    return [str(Path(entry).absolute()) for entry in sys.path]
