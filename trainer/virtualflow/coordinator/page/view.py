"""What the live page shows of a job, in parts of which each changes by itself. Pure."""

from __future__ import annotations

from itertools import islice

from virtualflow.coordinator.settings import (
    SHOWN_CHANGES,
    SHOWN_LOST,
    SHOWN_METRICS,
    SHOWN_WORKERS,
)
from virtualflow.coordinator.state import JobState
from virtualflow.coordinator.status_view import describe
from virtualflow.protocol.http_api import Status
from virtualflow.protocol.live_view import ViewJob, ViewLog, ViewNow


def compose(job: JobState) -> tuple[ViewNow, ViewJob, ViewLog]:
    """All that the page shows but the figures over the steps, which :class:`Series` has."""
    status = describe(job)
    return _now(status, job), _job(status), _log(status, job)


def _now(status: Status, job: JobState) -> ViewNow:
    return ViewNow(
        time=job.history.wall,
        phase=status.phase,
        step=status.step,
        total_steps=status.total_steps,
        epoch=status.epoch,
        metrics=dict(islice(status.metrics.items(), SHOWN_METRICS)),
        steps_per_second=status.steps_per_second,
        step_ms=status.step_ms,
        predicted_step_ms=status.predicted_step_ms,
        goodput=job.history.goodput.share,
        worker_seconds=round(job.history.goodput.paid, 1),
    )


def _job(status: Status) -> ViewJob:
    workers = sorted(status.workers, key=lambda worker: (worker.first >= worker.last, worker.first))
    return ViewJob(
        generation=status.generation,
        virtual_nodes=status.virtual_nodes,
        reproducibility=status.reproducibility,
        wanted=status.wanted,
        wanted_reason=status.wanted_reason or "",
        workers=tuple(workers[:SHOWN_WORKERS]),
        workers_total=len(workers),
        lost=status.lost[-SHOWN_LOST:],
        proposed=status.proposed,
        reason=status.reason,
        hold=status.hold,
        error=status.error,
        traceback=status.traceback,
        digest=status.digest,
        non_finite=status.non_finite,
        checkpoint=status.checkpoint,
        memory=status.memory,
        version=status.version,
    )


def _log(status: Status, job: JobState) -> ViewLog:
    return ViewLog(
        changes=status.changes[-SHOWN_CHANGES:],
        changes_total=status.changes_total,
        repeated_steps=status.repeated_steps,
        events=job.latest_events,
    )
