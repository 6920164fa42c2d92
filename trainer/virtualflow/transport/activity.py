"""What the training thread is about: written by it, without locks, and told to the coordinator by the link's thread.

A heartbeat says that a process lives, and nothing of the thread that trains. So that thread marks what it begins, and
where it waits for others. It waits in few places, in slices in which it looks around; anywhere else it must come on.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import FrameType, TracebackType

from virtualflow.protocol.messages import Doing, Stacks
from virtualflow.protocol.settings import MAX_REASON


class Activity:
    """Of the thread that makes it."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.first = True
        self.slowest = 0.0
        """Seconds of the slowest of the latest steps."""
        self.waiting = _Waiting(self)
        """To be entered while others are waited for."""
        self._native = threading.get_native_id()
        self._waits = False
        # One value, so that the other thread sees all of it or nothing.
        self._mark = ("starting", 0, time.monotonic())
        self._seen = self._mark
        self._observed = 0.0
        self._looked = time.monotonic()

    # --- for the training thread -------------------------------------------------------------------------------------

    def mark(self, stage: str, step: int) -> None:
        self._mark = stage, step, time.monotonic()

    def renew(self, waits: bool) -> None:
        """The same goes on, and others are waited for from now on, or no more; of another thread it says nothing."""
        if threading.get_ident() == self.thread:
            stage, step, _ = self._mark
            self._mark, self._waits = (stage, step, time.monotonic()), waits

    # --- for any other -----------------------------------------------------------------------------------------------

    def report(self, most: float) -> Doing:
        """What goes on now; to be asked in even intervals, by one thread.

        Args:
            most: seconds that count between two questions: a process that was stopped in between did nothing.
        """
        now, mark = time.monotonic(), self._mark
        passed, self._looked = min(now - self._looked, most), now
        self._observed = self._observed + passed if mark is self._seen else min(now - mark[2], passed)
        self._seen = mark
        return Doing(mark[0], mark[1], max(0.0, self._observed), self._waits, self.first, self.slowest)

    @property
    def stuck(self) -> float:
        """Seconds without progress that nobody else is the reason of."""
        return 0.0 if self._waits else time.monotonic() - self._mark[2]

    def stacks(self) -> Stacks:
        """Where this process is. It takes no lock and reads no source file: either may be what it hangs in."""
        place = place_of(self.thread, self._native)
        return Stacks(place[:MAX_REASON], describe_threads(self.thread, place))


class _Waiting:
    def __init__(self, activity: Activity) -> None:
        self._activity = activity

    def __enter__(self) -> None:
        self._activity.renew(waits=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._activity.renew(waits=False)


# Where the threads of this process are, as text that fits into a message.
#
# For a process that hangs, so nothing here may hang with it: no lock is taken, no source file is read (the file system
# may be what hangs), and of other processes only what the kernel answers at once.

_TEXT = 3_000
"""Characters of all stacks; an event holds a little more."""
_FRAMES = 20
"""Innermost frames of the training thread,"""
_FEW = 3
"""and of each other one."""
_PLACE = 2
"""Innermost frames that say in one line where a thread is."""

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "stuck in the kernel, most likely in input or output (state D)",
    "T": "stopped by a signal (state T)",
    "t": "stopped by a debugger (state t)",
    "Z": "dead (state Z)",
}


def place_of(thread: int, native: int) -> str:
    """Where ``thread`` is, innermost first, in one line; ``native`` is its number in the kernel."""
    frames = _frames(sys._current_frames().get(thread), _PLACE)
    names = [f"{os.path.basename(f.f_code.co_filename)}:{f.f_lineno} in {f.f_code.co_qualname}" for f in frames]
    place = ", called from ".join(names) or "it has ended"
    if _state(f"self/task/{native}") == "D":
        place = f"{place}, {_STATES['D']}"
    process = _awaited_loader(sys._current_frames().get(thread))
    return place if process is None else f"{place}; it waits for {_describe_process(process)}"


def describe_threads(first: int, place: str) -> str:
    """All threads' frames, the training thread's ``first``, each most recent call last."""
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in list(threading._active.values())}  # type: ignore[attr-defined]
    lines = [f"the training thread is at {place}", *_stack(frames.pop(first, None), _FRAMES)]
    frames.pop(threading.get_ident(), None)
    for number, frame in frames.items():
        lines += [f"thread {names.get(number, number)}:", *_stack(frame, _FEW)]
    return "\n".join(lines)[:_TEXT]


def _awaited_loader(frame: FrameType | None) -> int | None:
    """The process from which a ``torch.utils.data.DataLoader`` is to get its next batch, if that is waited for."""
    for inner in _frames(frame, _FRAMES):
        if inner.f_code.co_qualname.endswith("DataLoaderIter._next_data"):
            # Its own notes, which no documentation promises: the worker that each batch was asked of.
            iterator = inner.f_locals.get("self")
            asked = getattr(iterator, "_task_info", {}).get(getattr(iterator, "_rcvd_idx", None))
            workers = getattr(iterator, "_workers", ())
            return workers[asked[0]].pid if asked and asked[0] < len(workers) else None
    return None


def _describe_process(process: int) -> str:
    state = _state(str(process))
    return f"loader process {process}, which is {_STATES.get(state, state)}" if state else f"loader process {process}"


def _frames(frame: FrameType | None, most: int) -> list[FrameType]:
    found: list[FrameType] = []
    while frame is not None and len(found) < most:
        found.append(frame)
        frame = frame.f_back
    return found


def _stack(frame: FrameType | None, most: int) -> list[str]:
    return [
        f'  File "{f.f_code.co_filename}", line {f.f_lineno}, in {f.f_code.co_qualname}'
        for f in reversed(_frames(frame, most))
    ]


def _state(task: str) -> str:
    try:
        with open(f"/proc/{task}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""
