"""The status of a job as it is shown to people: ``GET /v1/status`` and the messages of ``GET /v1/watch``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from virtualflow import calls
from virtualflow.balance import known_pace
from virtualflow.settings import BRIEF_CHANGES, BRIEF_EVENTS

if TYPE_CHECKING:
    from virtualflow.job import Job

WorkerState = Literal["starting", "ready", "training", "draining", "silent", "done"]


def describe(job: Job, brief: bool) -> calls.Status:
    """All that may be known about ``job`` from outside; ``brief``: of what has happened only the latest."""
    history, progress, result = job.history, job.history.progress, job.history.result
    changes, events = history.ordered_changes(), tuple(history.events)
    proposed, predicted = job.proposed, job.predicted_step()
    carried = {x.incarnation: x.virtual_nodes for x in job.running.members} if job.running else {}
    return calls.Status(
        phase=job.phase,
        incarnation=job.incarnation,
        generation=job.running_generation.counter,
        virtual_nodes=job.virtual_nodes,
        reproducibility=job.reproducibility,
        wanted=job.wanted,
        minimum=job.minimum,
        workers=tuple(
            _worker(job, i, carried.get(i, range(0)))
            for i, worker in job.roster.workers.items()
            if not (worker.gone or worker.left)
        ),
        lost=tuple(job.roster.lost.values()),
        proposed=proposed.generation.counter if proposed else None,
        proposed_workers=tuple(member.incarnation for member in proposed.members) if proposed else (),
        prepared=job.is_prepared,
        reason=job.reason,
        step=history.step,
        total_steps=history.total_steps,
        epoch=progress.epoch if progress else 0,
        metrics=result.metrics if result else progress.metrics if progress else {},
        steps_per_second=progress.steps_per_second if progress else 0.0,
        step_ms=result.step_ms if result else progress.step_ms if progress else None,
        hold=job.hold,
        last_change=changes[-1] if changes else None,
        changes=changes[-BRIEF_CHANGES:] if brief else changes,
        changes_total=history.changes_total,
        repeated_steps=history.repeated_steps,
        events=events[-BRIEF_EVENTS:] if brief else events,
        digest=result.digest if result else None,
        optimizer_digest=result.optimizer_digest if result else None,
        error=history.error,
        traceback=history.traceback,
        predicted_step_ms=None if predicted is None else 1_000 * predicted,
    )


def _worker(job: Job, incarnation: str, carried: range) -> calls.WorkerStatus:
    worker, contact = job.roster.workers[incarnation], job.roster.contacts[incarnation]
    state: WorkerState = "starting"
    if worker.done:
        state = "done"
    elif not worker.connected:
        state = "silent"
    elif worker.draining:
        state = "draining"
    elif carried:
        state = "training"
    elif worker.ready_at is not None:
        state = "ready"
    pace = known_pace(worker)
    return calls.WorkerStatus(
        worker.name,
        incarnation,
        contact.address,
        contact.pid,
        state,
        carried.start,
        carried.stop,
        None if pace is None else 1_000 * pace,
    )
