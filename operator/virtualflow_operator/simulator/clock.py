"""Simulated time, and a job's books in it: what all simulations share. Pure.

Time jumps from one event to the next: a job comes or ends, capacity comes or goes, a joiner is ready, or a decision may
change because time passed. After all events of one moment there is one decision.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from virtualflow_operator.simulator.outcome import Outcome
from virtualflow_operator.simulator.trace import JobEvent, JobTrace

Occasion = Literal["trace", "end", "joined", "retry", "wake"]
"""``trace``: an event of the trace, by its index; ``end``: a job may have made its last step; ``joined``: joiners of a
job may be ready; ``retry``: a decision can be carried out further; ``wake``: a decision may change."""
Happen = Callable[[Occasion, int | str, int], bool]
"""Lets one event happen: its kind, its subject (the index, or the job's name) and the job's plan; whether a decision is
due. An event of an earlier plan is called off."""


class Clock:
    """Events in their order.

    Args:
        trace: its events come first of those of one moment.
    """

    def __init__(self, trace: JobTrace) -> None:
        self.now = trace.events[0].time
        self.to_come = len(trace.events)
        """Events of the trace that have not happened."""
        # Already in order, which makes it a heap.
        self._queue: list[tuple[float, int, Occasion, int | str, int]] = [
            (event.time, index, "trace", index, 0) for index, event in enumerate(trace.events)
        ]
        self._serial = len(self._queue)
        self._wake = math.inf

    def push(self, time: float, kind: Occasion, subject: str = "", plan: int = 0) -> None:
        self._serial += 1
        heapq.heappush(self._queue, (time, self._serial, kind, subject, plan))

    def wake(self, at: float) -> None:
        """Have a decision made then at the latest, and no more at the time that was named before."""
        if at != self._wake:
            self._wake = at
            if at < math.inf:
                self.push(at, "wake")

    def run(self, happen: Happen, decide: Callable[[], None], move: Callable[[], None] = lambda: None) -> None:
        """Let time pass until nothing is to happen any more.

        Args:
            decide: is called after those of one moment, if a decision is due.
            move: is called whenever time has moved on, before anything happens.
        """
        while self._queue:
            self.now = self._queue[0][0]
            move()
            due = False
            while self._queue and self._queue[0][0] <= self.now:
                _, _, kind, subject, plan = heapq.heappop(self._queue)
                self.to_come -= kind == "trace"
                if kind != "wake" or self._is_awake():
                    due |= happen(kind, subject, plan)
            if due:
                decide()

    def _is_awake(self) -> bool:
        if self.now < self._wake:
            return False  # a later decision saw no need for it
        self._wake = math.inf
        return True


@dataclass(kw_only=True)
class JobBooks(ABC):
    job: JobEvent
    done: float = 0.0
    """Steps, at ``synced``."""
    synced: float = 0.0
    resumes: float = 0.0
    """No progress before that."""
    plan: int = 0
    """Counts the expected ends: an event of an earlier one no longer counts."""
    started: float | None = None
    finished: float | None = None
    queued: float = 0.0
    service: float = 0.0
    resizes: int = 0
    suspensions: int = 0
    changes: list[tuple[float, int]] = field(default_factory=list)
    reason: str = ""

    @property
    @abstractmethod
    def given(self) -> int:
        """Workers that were given to it."""

    @property
    @abstractmethod
    def works(self) -> bool:
        """Whether any worker counts, of those that were given to it or on another job's devices."""

    @abstractmethod
    def speed(self) -> float:
        """Steps per second of those that count."""

    def catch_up(self, now: float) -> None:
        elapsed, given = now - self.synced, self.given
        self.service += given * elapsed
        self.queued += 0.0 if given or self.works else elapsed
        if self.works and now > self.resumes:
            gained = self.speed() * (now - max(self.synced, self.resumes))
            self.done = min(float(self.job.steps), self.done + gained)
        self.synced = now

    def change(self, now: float, given: int) -> None:
        """Note that it has been given another number of workers, or others."""
        self.changes.append((now, given))
        if self.started is None:
            self.started = now
        else:
            self.resizes += 1
            self.suspensions += not given

    def end(self, now: float) -> None:
        self.done, self.finished = self.job.steps, now
        self.changes.append((now, 0))

    def schedule_end(self, clock: Clock) -> None:
        """Have it end when it will have made its last step if nothing changes; its books are up to date."""
        self.plan += 1
        if self.works:
            time = max(self.synced, self.resumes) + (self.job.steps - self.done) / self.speed()
            if time < math.inf:
                clock.push(time, "end", self.job.name, self.plan)

    def outcome(self, expected: float | None = None, needed: float | None = None) -> Outcome:
        """How it fared in the end; see :class:`.Outcome` for what may be foreseen of it."""
        return Outcome(
            job=self.job,
            started=self.started,
            finished=self.finished,
            queued=self.queued,
            service=self.service,
            resizes=self.resizes,
            suspensions=self.suspensions,
            changes=tuple(self.changes),
            reason=self.reason,
            expected=expected,
            needed=needed,
        )
