"""A job that is to have no workers: they stop behind the same step, with a checkpoint, then all pods go."""

from __future__ import annotations

from virtualflow.protocol.http_api import StopCall
from virtualflow_operator.api import JobStatus, format_time, parse_time
from virtualflow_operator.jobs import phases
from virtualflow_operator.jobs.draft import Draft
from virtualflow_operator.jobs.job_status_builder import build_status
from virtualflow_operator.jobs.scene import Facts


def suspend(facts: Facts, draft: Draft) -> JobStatus:
    """Stop the training, then take all pods away; the status on the way."""
    live = [worker for worker in facts.pods.workers if worker.pod.live]
    remote, now = facts.remote, facts.now
    # A suspended job is one of which no worker is wanted, and less are wanted since then.
    since = (parse_time(draft.status.scale_down_since) if draft.status.phase == "Suspending" else None) or now
    draft.amend(scale_down_since=format_time(since))
    deadline = since + float(facts.spec.elasticity.drain_grace_seconds)
    in_training = remote is not None and remote.phase in ("training", "evaluating")
    if live and in_training and facts.connected and now < deadline:
        draft.calls.append(StopCall(facts.rest))
        draft.wake(deadline)
        return phases.suspending(build_status(facts, draft.status), facts.job, now)
    for worker in live:
        ends_itself = remote is not None and remote.phase == "stopped" and worker.standing in ("training", "draining")
        if ends_itself and now < deadline:
            draft.wake(deadline)
        else:
            draft.delete(worker.pod, facts.rest, "suspend")
    if any(not worker.pod.finished and worker.fate != "lost" for worker in facts.pods.workers):
        return phases.suspending(build_status(facts, draft.status), facts.job, now)
    for pod in (*facts.pods.coordinators, *facts.pods.stale):
        if not pod.terminating:
            draft.delete(pod, facts.rest, "suspend")
    status = build_status(facts, draft.status)
    if facts.granted.waits:
        return phases.queued(status, facts.job, facts.granted.waits, now)
    return phases.suspended(status, facts.job, now)
