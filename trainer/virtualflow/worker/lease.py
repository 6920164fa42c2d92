"""The leader's lease: for how long a worker may take for granted that nobody has taken its place.

A worker that is stopped, or cut off, does not notice; others go on without it. What shows that it has its place is an
exchange with the other members of its generation, if there are any, or the coordinator's answer. Each counts from the
moment before it was begun: by the end, the others may have gone on.
"""

from __future__ import annotations

import time
from collections.abc import Callable


def awake_and_asleep() -> float:
    """Seconds of a clock that also goes on while the machine is suspended, where there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


class Lease:
    """When this worker was last shown to have its place. Only the training thread uses it."""

    def __init__(self, clock: Callable[[], float] = awake_and_asleep) -> None:
        self._clock = clock
        self._began = self._shown = float("-inf")
        self._final = False

    def begin(self) -> None:
        """What may show it begins now."""
        self._began = self._clock()

    def renew(self) -> None:
        """What was begun has shown it."""
        self._shown = self._began

    def keep(self) -> None:
        """All have agreed that the training is over: nobody takes this worker's place any more."""
        self._final = True

    def holds(self, seconds: float) -> bool:
        """Whether it was shown within the last ``seconds``, or is so for ever."""
        return self._final or self._clock() - self._shown < seconds
