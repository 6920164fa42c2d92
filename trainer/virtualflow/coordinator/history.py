"""What has happened in the job so far, for people: events, membership changes, how far the training is, and how much of
the workers' time went into steps that count.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from virtualflow.coordinator.series import Series
from virtualflow.coordinator.settings import MAX_EVENTS
from virtualflow.protocol import http_api
from virtualflow.protocol import messages as m
from virtualflow.protocol.http_api import WorkerSeconds
from virtualflow.protocol.job_record import GoodputRecord
from virtualflow.protocol.job_view import describe_change
from virtualflow.protocol.settings import MAX_CHANGES, MAX_TEXT


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


Figure = TypeVar("Figure", int, float)
logger = logging.getLogger("virtualflow.coordinator")


class History:
    """The figures and the chronicle of one job, as far as this coordinator has heard of them."""

    def __init__(self) -> None:
        self.wall = 0.0
        """Unix time of what happens now, as the server has set it."""
        self.events: deque[http_api.Event] = deque(maxlen=MAX_EVENTS)
        self.changes: dict[m.Generation, m.Change] = {}
        self._partial: dict[m.Generation, tuple[m.Change, int]] = {}
        """Of which not all members have told yet, with how many have: each knows its own pause, a joiner none."""
        self._forgotten = m.NO_GENERATION
        """The newest generation whose change is not remembered any more, only counted."""
        self._forgotten_changes = 0
        self._forgotten_steps = 0
        self.earlier: tuple[http_api.Event, ...] = ()
        """Events that coordinators before this one have told, as far as workers have kept them."""
        self.began: float | None = None
        """When the training began, as far as is known."""
        self.series = Series()
        self.goodput = Goodput()
        self.progress: m.Progress | None = None
        self.draws_early = False
        """Whether anybody has told that the script draws random numbers before the micro-batches of a step."""
        self.step = 0
        self.highest_step = 0
        """Of all steps that were ever reported: a restart from a checkpoint repeats what is between."""
        self.total_steps: int | None = None
        self.result: m.Done | None = None
        self.non_finite: m.NonFinite | None = None
        """The first metric that was not finite."""
        self.checkpoint: m.CheckpointState | None = None
        self.error: str | None = None
        self.traceback: str | None = None
        self.does_not_fit = False
        """Whether ``error`` is that nothing fits into a worker's budget of memory."""
        self._number = 0

    def begin_run(self) -> None:
        """The script goes on to another run: what was about the one before is forgotten, what happened is not."""
        self.settle()
        self.series = Series()
        self.progress = self.total_steps = self.result = self.non_finite = self.checkpoint = None
        self.step = self.highest_step = 0
        self.draws_early = False

    def tell(self, kind: http_api.EventKind, text: str, refusal: http_api.Refusal | None = None) -> None:
        self._number += 1
        logger.info("%s", text)
        self.events.append(http_api.Event(self._number, self.wall, kind, text[:MAX_TEXT], refusal))

    def reached(self, step: int) -> None:
        """A worker has the state of so many completed steps."""
        self.step = max(self.step, step)
        self.highest_step = max(self.highest_step, step)

    def began_at(self, step: int) -> None:
        """A generation without predecessors begins from the state of so many completed steps."""
        self.step = step
        self.highest_step = max(self.highest_step, step)

    def is_news(self, progress: m.Progress) -> bool:
        """Whether a report says more than how far the training is by now."""
        evaluates = progress.phase == "evaluating"
        return evaluates != self.evaluating or progress.total_steps != self.total_steps

    def take_progress(self, progress: m.Progress) -> bool:
        """Take note of where the training is; whether a step was completed."""
        forward = progress.step > self.step
        self.progress, self.step = progress, progress.step
        self.highest_step = max(self.highest_step, progress.step)
        self.total_steps = progress.total_steps
        self.draws_early |= progress.draws_early
        return forward

    def take_checkpoint(self, told: m.CheckpointState) -> str | None:
        """Take note of a checkpoint; what is older than what is known is of a worker that wrote them before.

        Returns:
            Where the former ones were written, if that is elsewhere.
        """
        known = self.checkpoint
        if known is not None and told.at < known.at:
            return None
        if known is not None and told.step is None:
            told = msgspec.structs.replace(told, step=known.step, written=known.written)
        self.checkpoint = told
        if known is None or not known.directory or not told.directory or known.directory == told.directory:
            return None
        return known.directory

    @property
    def evaluating(self) -> bool:
        return self.progress is not None and self.progress.phase == "evaluating"

    def merge_change(self, change: m.Change, fresh: bool = True) -> None:
        """Take note of a membership change: every member tells of it, and the survivors' longest pause counts.

        It is news when all members have told it, so that one pause is said of it, or the training has gone on without
        the others (:meth:`settle`).

        Args:
            change: as one of them saw it.
            fresh: it has just happened, so that what was reached before tells how much a restart repeats.
        """
        generation = change.generation
        partial, told = self._partial.pop(generation, (None, 0))
        known = self.changes.get(generation) or partial
        if known is not None:
            change = msgspec.structs.replace(
                known,
                pause_ms=_longest(known.pause_ms, change.pause_ms),
                state_bytes=_longest(known.state_bytes, change.state_bytes),
                state_ms=_longest(known.state_ms, change.state_ms),
                state_donors=_longest(known.state_donors, change.state_donors),
                repeated_steps=max(known.repeated_steps, change.repeated_steps),
                repeated_virtual_nodes=max(known.repeated_virtual_nodes, change.repeated_virtual_nodes),
            )
        elif generation <= self._forgotten:
            return  # it was counted before it was forgotten
        elif change.cause == "restart" and fresh:
            change = msgspec.structs.replace(change, repeated_steps=max(0, self.highest_step - (change.step - 1)))
        if generation in self.changes:
            self.changes[generation] = change
        elif fresh and (change.pause_ms is None or told + 1 < change.to):
            self._partial[generation] = (change, told + 1)
            if len(self._partial) > MAX_CHANGES:
                self._add(self._partial.pop(min(self._partial))[0])
        else:
            self._add_partial(lambda earlier: earlier.generation < generation)  # who follows them tells them in order
            self._add(change)

    def settle(self, progress: m.Progress | None = None) -> bool:
        """The training has come so far, or to its end: who has not told of a change before that will not.

        Returns:
            Whether there was one, which is news.
        """
        if progress is None:
            return self._add_partial(lambda _: True)
        return self._add_partial(lambda c: c.generation < progress.generation or c.step < progress.step)

    def _add_partial(self, condition: Callable[[m.Change], bool]) -> bool:
        settled = [known for known in sorted(self._partial) if condition(self._partial[known][0])]
        for generation in settled:
            self._add(self._partial.pop(generation)[0])
        return bool(settled)

    def _add(self, change: m.Change) -> None:
        self.changes[change.generation] = change
        self.tell("change", describe_change(change))
        while len(self.changes) > MAX_CHANGES:
            oldest = min(self.changes)
            self._forgotten = max(self._forgotten, oldest)
            self._forgotten_steps += self.changes.pop(oldest).repeated_steps
            self._forgotten_changes += 1

    @property
    def forgotten(self) -> tuple[m.Generation, int, int]:
        """Of the changes that are not remembered any more: the newest, how many, and the steps that they repeated."""
        return self._forgotten, self._forgotten_changes, self._forgotten_steps

    def resume_forgotten(self, newest: m.Generation, changes: int, steps: int) -> None:
        """Count what a coordinator before this one has forgotten, and workers do not tell of."""
        if newest <= self._forgotten:
            return
        self._forgotten, self._forgotten_changes, self._forgotten_steps = newest, changes, steps
        self.changes = {known: change for known, change in self.changes.items() if known > newest}
        self._partial = {known: partial for known, partial in self._partial.items() if known > newest}

    @property
    def changes_total(self) -> int:
        return self._forgotten_changes + len(self.changes)

    @property
    def repeated_steps(self) -> int:
        return self._forgotten_steps + sum(change.repeated_steps for change in self.changes.values())

    def ordered_changes(self) -> tuple[m.Change, ...]:
        return tuple(self.changes[generation] for generation in sorted(self.changes))


def _longest(known: Figure | None, told: Figure | None) -> Figure | None:
    """The larger of two figures, or the one that there is."""
    return max((figure for figure in (known, told) if figure is not None), default=None)
