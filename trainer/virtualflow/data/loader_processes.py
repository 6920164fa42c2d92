"""What the end of a loader process means, and where it may interrupt this one.

torch tells of it by an exception out of a signal handler: between any two lines of the main thread, also of this
library's, where it would leave locks taken and messages half sent. While a run lasts, it may come only out of code that
reads from a ``DataLoader``, ours or the script's: there it ends a wait that might have no end. What a dead process
means elsewhere, the next read says.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from torch.utils.data import dataloader as torch_dataloader
from torch.utils.data._utils import signal_handling

from virtualflow.errors import LoaderEnded, LoaderKilled

Handler = Callable[[int, FrameType | None], Any]

_READING = torch_dataloader.__file__, "_get_data"
"""The code of a ``DataLoader`` that waits for its processes: file and function."""

_ends = 0
"""How often a child process of this one has ended, or stopped, while a run lasted."""

_DYING = 1.0
"""Seconds until a process that has closed its connections must have ended."""

_LOOK = 0.001
"""Seconds between two looks at it."""


def read(iterator: Iterator[Any], seen: int) -> tuple[Any, int]:
    """The next item of a ``DataLoader``'s ``iterator``, and how many ends of child processes it takes account of.

    Args:
        iterator: of the loader.
        seen: of those ends, how many former reads have taken account of.

    Raises:
        LoaderKilled: a process of the loader was killed.
        LoaderEnded: it has ended by itself.
        Exception: what the loader raised otherwise.
    """
    if _ends != seen:
        seen = _ends
        _explain(iterator, None)
    try:
        return next(iterator), seen
    except StopIteration:
        raise
    except Exception as error:
        # A connection may break a moment before its process has ended.
        dying = _DYING if isinstance(error, ConnectionError | EOFError | FileNotFoundError) else 0.0
        _explain(iterator, error, dying)
        raise


def _explain(iterator: Iterator[Any], error: Exception | None, dying: float = 0.0) -> None:
    """Raise what the loader's broken process tells, if there is one."""
    processes: list[BaseProcess] = list(getattr(iterator, "_workers", ()))
    if not processes:
        return
    _await_end(processes, dying)
    failed = [process for process in processes if process.exitcode is not None]
    # Those that end behind the first have found that it is gone.
    killed = next((process for process in failed if (process.exitcode or 0) < 0), None)
    if killed is not None:
        number = -(killed.exitcode or 0)
        raise LoaderKilled(
            f"a loader process (pid {killed.pid}) was killed by {_name(number)}{_CAUSES.get(number, '')}"
        ) from error
    stopped = next((process for process in failed if process.exitcode), None)
    if stopped is not None or (failed and error is not None):
        process = stopped or failed[0]
        raise LoaderEnded(
            f"a loader process (pid {process.pid}) ended by itself with exit code {process.exitcode}: what it wrote "
            "says why; a dataset must not call sys.exit(), and where processes are spawned the script must train under "
            'if __name__ == "__main__":'
        ) from error


def _await_end(processes: list[BaseProcess], patience: float) -> None:
    """Wait until one of these has ended, if that is under way."""
    deadline = time.monotonic() + patience
    closed = set(connection.wait([process.sentinel for process in processes], patience))
    for process in processes:
        # What it had open is closed a moment before its exit code is there.
        while process.sentinel in closed and process.exitcode is None and time.monotonic() < deadline:
            time.sleep(_LOOK)


_CAUSES: dict[int, str] = {
    signal.SIGKILL: ", most likely because memory ran out; use fewer num_workers or a smaller prefetch_factor if it "
    "happens again",
    signal.SIGBUS: ", most likely because shared memory (/dev/shm) is full; give the container more of it if it "
    "happens again",
}


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def hear_of_ends() -> Callable[[], None]:
    """From now on, let ends of loader processes raise only where a ``DataLoader`` is read; what undoes that."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    signal_handling._set_SIGCHLD_handler()  # else a later loader would put it before ours
    former = signal.getsignal(signal.SIGCHLD)
    if not callable(former):
        return lambda: None
    handler = _at_reads(former)
    signal.signal(signal.SIGCHLD, handler)

    def undo() -> None:
        if signal.getsignal(signal.SIGCHLD) is handler:
            signal.signal(signal.SIGCHLD, former)

    return undo


def _at_reads(former: Handler) -> Handler:
    def handle(number: int, frame: FrameType | None) -> None:
        global _ends  # noqa: PLW0603 - there is one handler, and one main thread
        _ends += 1
        try:
            former(number, frame)
        except RuntimeError:
            if _reads(frame):
                raise

    return handle


def _reads(frame: FrameType | None) -> bool:
    """Whether the code under way there, or what has called it, waits for the processes of a ``DataLoader``."""
    while frame is not None:
        if (frame.f_code.co_filename, frame.f_code.co_name) == _READING:
            return True
        frame = frame.f_back
    return False
