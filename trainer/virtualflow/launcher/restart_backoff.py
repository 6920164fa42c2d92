"""How long to wait before a worker that keeps ending is started again, and when to stop trying. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class RestartBackoff:
    """Counts the ends of workers without a step of progress in between.

    Args:
        first: seconds to wait after the second end in a row of a worker; doubled at each further one.
        most: seconds, at most.
    """

    first: float
    most: float
    not_before: float = 0.0
    """No worker is started before that time."""
    _ends: dict[int, int] = field(default_factory=dict)
    """In a row, by the worker's ordinal."""
    _highest_step: int = 0

    def advance(self, step: int, members: Iterable[int]) -> None:
        """The job has completed that step: if no step was higher, the counts of those who made it begin anew.

        Progress of others says nothing of a worker that ends before it takes part.

        Args:
            step: the latest.
            members: ordinals of the workers that virtual nodes are assigned to.
        """
        if step > self._highest_step:
            self._highest_step = step
            for ordinal in members:
                self._ends.pop(ordinal, None)

    def forget(self, ordinal: int) -> None:
        """The last one of that ordinal has left in order, or no more are started until it is asked for."""
        self._ends.pop(ordinal, None)

    def note_end(self, ordinal: int, now: float) -> int:
        """A worker has ended; how many times in a row it has."""
        self._ends[ordinal] = ends = self._ends.get(ordinal, 0) + 1
        if ends > 1:
            self.not_before = max(self.not_before, now + min(self.first * 2 ** (ends - 2), self.most))
        return ends
