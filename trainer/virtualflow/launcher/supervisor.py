"""Processes that cannot outlive whoever started them, and their output, line by line.

Each gets a session of its own, so that Ctrl-C in a terminal reaches only the runner and everything that a
process started can be signalled together; and on Linux the kernel kills it when the runner dies, however that
happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Literal

Stream = Literal["stdout", "stderr"]
Sink = Callable[[Stream, str], None]

_PR_SET_PDEATHSIG = 1
_LONGEST_LINE = 1 << 16
# Loaded before any fork: a child between fork and exec must not import or allocate more than it has to.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def ourselves(*words: str) -> list[str]:
    """``virtualflow`` with these words as a process of its own.

    ``-P``: it does not look for modules in the present directory, which is the user's.
    """
    return [sys.executable, "-P", "-m", "virtualflow", *words]


def describe_exit(code: int) -> str:
    """How a process ended, in words: a return code as ``subprocess`` gives it."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


class Process:
    """A child process with its output; made by ``Supervisor.start``."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], tail: int) -> None:
        self.name = name
        self.pid = popen.pid
        self.code: int | None = None
        """Return code as ``subprocess`` gives it; ``None`` while the process lives."""
        self.ended = asyncio.Event()
        self.tail: deque[str] = deque(maxlen=tail)
        """The last lines of its standard error."""
        self.popen = popen
        self.pumps: list[_Pump] = []

    @property
    def alive(self) -> bool:
        return self.code is None

    def send(self, number: signal.Signals, pid: int | None = None) -> None:
        """Send a signal to the process, or to ``pid`` which runs on its behalf."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid or self.pid, number)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the process and all that it started."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def owns(self, pid: int) -> bool:
        """Whether ``pid`` is this process or one that it started."""
        if pid == self.pid:
            return True
        try:
            return os.getpgid(pid) == self.pid
        except ProcessLookupError:
            return False


class Supervisor:
    """Starts processes and notices their ends; runs in the main thread, which owns SIGCHLD while it is
    open.
    """

    def __init__(self, ended: Callable[[Process], None], tail: int) -> None:
        self._ended = ended
        self._tail = tail
        self._processes: list[Process] = []
        self._pumping: list[Process] = []
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, sink: Sink
    ) -> Process:
        """Start a process.

        Args:
            log: its output goes to the end of this file.
            sink: told each line of output, without its end.
        """
        popen = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with(os.getpid()),  # noqa: PLW1509 - the runner has one thread
        )
        process = Process(name, popen, self._tail)
        assert popen.stdout is not None
        assert popen.stderr is not None

        def tell_error(text: str) -> None:
            process.tail.append(text)
            sink("stderr", text)

        process.pumps = [
            _Pump(self._loop, popen.stdout, log, lambda text: sink("stdout", text)),
            _Pump(self._loop, popen.stderr, log, tell_error),
        ]
        self._processes.append(process)
        self._pumping.append(process)
        return process

    async def flush(self, process: Process) -> None:
        """Read all that a process which has ended wrote; a pipe that somebody keeps open is not waited for
        long.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                for pump in process.pumps:
                    await pump.closed.wait()

    def close(self) -> None:
        """Kill everything that lives, with all that it started, and wait for the ends."""
        for process in self._processes:
            process.signal_group(signal.SIGKILL)
        for process in self._processes:
            process.code = process.popen.wait()
        for process in self._pumping:
            for pump in process.pumps:
                pump.close()
        self._loop.remove_signal_handler(signal.SIGCHLD)

    def _reap(self) -> None:
        for process in list(self._processes):
            if not _has_ended(process.popen):
                continue
            # What it leaves behind goes with it. It has not been reaped yet, so nobody else has its number.
            process.signal_group(signal.SIGKILL)
            process.code = process.popen.wait()
            self._processes.remove(process)
            process.ended.set()
            self._ended(process)


def _has_ended(popen: subprocess.Popen[bytes]) -> bool:
    if not hasattr(os, "waitid"):
        return popen.poll() is not None
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return True


def die_with(parent: int) -> Callable[[], None] | None:
    """What a child runs before its program, so that the kernel kills it when ``parent`` dies."""
    if _libc is None:
        return None
    prctl = _libc.prctl

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # It died before the line above.
            os._exit(1)

    return prepare


class _Pump:
    """Reads a pipe without blocking and cuts it into lines."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, pipe: IO[bytes], log: Path, tell: Callable[[str], None]
    ) -> None:
        self.closed = asyncio.Event()
        self._loop, self._pipe, self._tell_line = loop, pipe, tell
        self._log = log.open("ab", buffering=0)
        self._rest = b""
        os.set_blocking(pipe.fileno(), False)
        loop.add_reader(pipe.fileno(), self._read)

    def close(self) -> None:
        """Read what is there and let go of the pipe."""
        while not self.closed.is_set() and self._read():
            pass
        if not self.closed.is_set():
            self._finish()

    def _read(self) -> bool:
        try:
            data = os.read(self._pipe.fileno(), _LONGEST_LINE)
        except BlockingIOError:
            return False
        if not data:
            self._finish()
            return False
        with contextlib.suppress(OSError):  # A full disk must not end the training.
            self._log.write(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._tell(line)
        if len(self._rest) > _LONGEST_LINE:
            self._tell(self._rest)
            self._rest = b""
        return True

    def _finish(self) -> None:
        self.closed.set()
        if self._rest:
            self._tell(self._rest)
        self._loop.remove_reader(self._pipe.fileno())
        self._pipe.close()
        self._log.close()

    def _tell(self, line: bytes) -> None:
        # A bar that redraws itself ends its versions by a carriage return: the last one counts.
        self._tell_line(line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace"))


def run_to_end(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    output: IO[bytes] | None = None,
    interrupt: signal.Signals = signal.SIGKILL,
) -> int:
    """Run a process to its end, while this one has nothing else to do.

    Args:
        output: where what it writes goes, and then it reads nothing; ``None``: to and from where ours goes.
        interrupt: what ends it if this process is interrupted.

    Returns:
        Its return code as ``subprocess`` gives it.
    """
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=None if output is None else subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        preexec_fn=die_with(os.getpid()),  # noqa: PLW1509 - there is one thread
    )
    try:
        return process.wait()
    except BaseException:
        process.send_signal(interrupt)
        process.wait()
        raise
