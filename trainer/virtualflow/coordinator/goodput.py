"""How much of the workers' time went into steps that count. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from virtualflow.protocol.http_api import WorkerSeconds
from virtualflow.protocol.job_record import GoodputRecord


@dataclass
class Goodput:
    """Worker-seconds that were paid, and those of them in which a step was made that counts.

    A worker is paid from its first connection until it is over. A step counts the first time that it is completed, with
    what steps of its generation usually take, once for each member. So what is missing from the whole is starting and
    warming up, pauses of membership changes, steps that are repeated, evaluation, waiting.
    """

    paid: float = 0.0
    used: float = 0.0
    _looked_at: float | None = None
    _step: int | None = None
    """The highest that was counted; ``None``: nobody trains yet."""
    _step_at: float = 0.0
    _present: int = 0
    _paid_before: float = 0.0
    _used_before: float = 0.0
    """What coordinators before this one have counted of both."""

    @property
    def total(self) -> WorkerSeconds:
        """What coordinators before this one have counted, and it."""
        return WorkerSeconds(self.paid, self.used)

    @property
    def own(self) -> WorkerSeconds:
        """What this coordinator has counted itself: it grows from 0, as a counter that is scraped has to."""
        return WorkerSeconds(round(self.paid - self._paid_before, 3), round(self.used - self._used_before, 3))

    def look(self, now: float, present: int, members: int, step: int | None, step_seconds: float | None) -> None:
        """Count what was since the last look.

        Args:
            now: of one monotonic clock.
            present: workers that are there.
            members: of the running generation.
            step: the highest that was ever completed; ``None``: nobody has told yet.
            step_seconds: what a step usually takes; ``None``: not known.
        """
        if self._looked_at is not None:
            self.paid += (now - self._looked_at) * present
        self._looked_at, self._present = now, present
        if step is None:
            return
        if self._step is None:
            self._step, self._step_at = step, now
        elif step > self._step:
            passed = now - self._step_at
            seconds = passed if step_seconds is None else min(passed, (step - self._step) * step_seconds)
            self.used += seconds * members
            self._step, self._step_at = step, now

    def record(self) -> GoodputRecord:
        """What :meth:`resume` of another one needs."""
        return GoodputRecord(self.paid, self.used, self._step, self._present)

    def resume(self, record: GoodputRecord, age: float, now: float) -> None:
        """Count on from what was recorded elsewhere ``age`` seconds ago; it takes the place of what was counted here.

        The workers that there were are paid for the time in between, and the steps that they have made in it count with
        the next look. What is this coordinator's own becomes no less by it.
        """
        paid, used = self.paid - self._paid_before, self.used - self._used_before
        self.paid, self.used = record.paid + age * record.present, record.used
        self._step, self._step_at, self._looked_at = record.step, now - age, now
        self._present = record.present
        self._paid_before = min(record.paid, self.paid - paid)
        self._used_before = min(record.used, self.used - used)
