"""What the training thread is about: written by it, without locks, and told to the coordinator by the link's thread.

A heartbeat says that a process lives, and nothing of the thread that trains. So that thread marks what it begins, and
where it waits for others. It waits in few places, in slices in which it looks around; anywhere else it must come on.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType

from virtualflow.protocol.messages import Doing, Stacks
from virtualflow.protocol.settings import MAX_REASON
from virtualflow.transport.stacks import describe_threads, place_of


class Activity:
    """Of the thread that makes it."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.first = True
        """No step is complete in this process yet."""
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
        """Something begins."""
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
    """As long as others are waited for."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity

    def __enter__(self) -> None:
        self._activity.renew(waits=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._activity.renew(waits=False)
