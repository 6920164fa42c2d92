"""What came of a simulation."""

from __future__ import annotations

from dataclasses import dataclass

from virtualflow_operator.simulator.trace import JobEvent


@dataclass(frozen=True)
class Outcome:
    """How one job fared."""

    job: JobEvent
    started: float | None
    """When it was first given workers; ``None``: never."""
    finished: float | None
    """``None``: never; ``reason`` says why."""
    queued: float
    """Seconds between arrival and end in which it had no workers: before its start, and while it was suspended."""
    service: float
    """Seconds times workers that it was given."""
    resizes: int
    """Changes of its workers between start and end, suspensions included."""
    suspensions: int
    changes: tuple[tuple[float, int], ...]
    """When it was given which number of workers; 0 when it ended."""
    reason: str
    """What the policy last said of it."""
    expected: float | None = None
    """Unit-seconds at its minimum that it was expected to need when it came; ``None``: nothing was."""
    needed: float | None = None
    """Those that it needed, as far as its speed was seen."""

    @property
    def completion(self) -> float | None:
        """Seconds from arrival to end."""
        return None if self.finished is None else self.finished - self.job.time


@dataclass(frozen=True)
class Result:
    """How all fared."""

    outcomes: tuple[Outcome, ...]
    """In the order of arrival."""
    capacity: tuple[tuple[float, int], ...]
    """Units from each time on."""
    decisions: int

    @property
    def unfinished(self) -> tuple[Outcome, ...]:
        """Those that the policy never let end."""
        return tuple(outcome for outcome in self.outcomes if outcome.finished is None)
