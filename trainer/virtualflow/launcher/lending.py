"""Whose turn it is on a device: pure, and fair by construction.

Jobs take turns in the order in which they asked. A turn is a job's, so its workers on the node have it together, each
once: what they exchange with each other waits for the last of them. Nobody can have a turn for long while others wait,
so whoever hangs in it, or is stopped, holds them up for ``limit`` seconds at most. It is not told: what it goes on to
compute disturbs others for once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Asked(NamedTuple):
    worker: int
    job: str


@dataclass
class Device:
    """One device, and who shares it. Workers are numbered by their connections; times are seconds of one clock."""

    limit: float
    waiting: list[Asked] = field(default_factory=list)
    """By arrival."""
    job: str | None = None
    holders: set[int] = field(default_factory=set)
    """Its workers that compute."""
    _until: float = 0.0
    _took_part: set[int] = field(default_factory=set)
    """In this turn."""

    def ask(self, worker: int, job: str, now: float) -> list[int]:
        """A worker wants the device, which it has not and has not asked for; who gets it now."""
        if job == self.job and not self.waiting:
            self._until = now + self.limit
        elif job != self.job or worker in self._took_part:
            self.waiting.append(Asked(worker, job))
            return self.look(now)
        self._admit(worker)
        return [worker]

    def give_back(self, worker: int, now: float) -> list[int]:
        """A worker does not want it any more, or is gone; who gets it now."""
        self.holders.discard(worker)
        self.waiting = [asked for asked in self.waiting if asked.worker != worker]
        return self.look(now)

    def look(self, now: float) -> list[int]:
        """Who gets it now, because it is free or was held for too long."""
        if not self.waiting or (self.holders and now < self._until):
            if not self.holders:
                self.job = None
            return []
        self.job, self._until = self.waiting[0].job, now + self.limit
        granted = [asked.worker for asked in self.waiting if asked.job == self.job]
        self.waiting = [asked for asked in self.waiting if asked.job != self.job]
        self.holders.clear()
        self._took_part.clear()
        for worker in granted:
            self._admit(worker)
        return granted

    def due(self) -> float | None:
        """When to :meth:`look` again, whatever happens until then; ``None``: nobody waits."""
        return self._until if self.waiting and self.holders else None

    def most(self, worker: int, now: float) -> float:
        """Seconds until a worker that waits has its turn, at most."""
        place = next(n for n, asked in enumerate(self.waiting) if asked.worker == worker)
        ahead = {asked.job for asked in self.waiting[:place]} - {self.waiting[place].job}
        return max(0.0, self._until - now) + len(ahead) * self.limit

    def _admit(self, worker: int) -> None:
        self.holders.add(worker)
        self._took_part.add(worker)
