"""What a decision has come to so far: the rules add to it, one after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from virtualflow.protocol.http_api import Call
from virtualflow_operator.api import Job, JobStatus, Pod
from virtualflow_operator.jobs.actions import Action, DeletePod, EventMessage, Plan
from virtualflow_operator.jobs.event_messages import messages_of_change
from virtualflow_operator.jobs.job_status_builder import fresh_changes, known_step
from virtualflow_operator.jobs.scene import Facts
from virtualflow_operator.queues import with_allocation

FAILED_GRACE = 2.0
"""Seconds for a worker that the job goes on without: it has nothing to hand over."""


class Draft:
    """A plan in the making."""

    def __init__(self, facts: Facts) -> None:
        self.status: JobStatus = facts.granted.status
        """The job's status as far as it is decided."""
        self.calls: list[Call] = []
        self.written_calls: list[Call] = []
        """See :class:`Plan`."""
        self.recoveries: set[str] = set()
        """See :class:`Plan`."""
        self.actions: list[Action] = []
        self.events: list[EventMessage] = []
        self._facts = facts
        self._wakes: list[float] = []
        self._doomed: set[str] = set()
        """Uids of the pods that this decision deletes."""

    def amend(self, **changes: Any) -> None:
        """Change fields of the status."""
        self.status = msgspec.structs.replace(self.status, **changes)

    def delete(self, pod: Pod, reason: str, cause: str, grace: float | None = None) -> None:
        """Delete a pod, with what it says itself or so many seconds between SIGTERM and SIGKILL."""
        if pod.uid not in self._doomed:  # the first reason counts
            self._doomed.add(pod.uid)
            self.actions.append(DeletePod(pod.name, pod.uid, reason, cause, grace))

    def wake(self, at: float | None) -> None:
        """Decide again then; ``None``: no need."""
        if at is not None:
            self._wakes.append(at)

    @property
    def job(self) -> Job:
        """The job with the status as it is about to be written."""
        return replace(self._facts.job, status=self.status)

    @property
    def step(self) -> int:
        """How many steps the job is known to have made, in all runs of the script."""
        remote = self._facts.remote
        earlier = self.status.earlier_steps if remote is None else remote.earlier_steps
        return earlier + (known_step(self.status, remote) or 0)

    def plan(self, status: JobStatus) -> Plan:
        """All that was decided, with the job's next status."""
        facts, old = self._facts, self._facts.scene.job.status
        changes = fresh_changes(old, status, facts.remote)
        status = with_allocation(status, facts.job, facts.granted, facts.now)
        return Plan(
            status=msgspec.structs.replace(status, observed_generation=facts.job.generation),
            calls=tuple(self.calls),
            written_calls=tuple(self.written_calls),
            recoveries=frozenset(self.recoveries),
            actions=tuple(self.actions),
            events=(*self.events, *messages_of_change(old, status, changes)),
            changes=tuple(changes),
            wake_at=min((wake for wake in self._wakes if wake > facts.now), default=None),
            workers_wanted=0 if status.finished else facts.spec.desired,
        )
