"""A job that is to have no workers: they stop behind the same step, with a checkpoint, then all pods go."""

from __future__ import annotations

import msgspec

from virtualflow.protocol.http_api import StopCall
from virtualflow_operator.api import JobStatus, format_time, parse_time
from virtualflow_operator.jobs import phases
from virtualflow_operator.jobs.actions import Draft
from virtualflow_operator.jobs.beginnings import unheard
from virtualflow_operator.jobs.job_status_builder import build_status
from virtualflow_operator.jobs.scene import Facts


def _patience(facts: Facts) -> int:
    """Seconds for the checkpoint, beside those for the step under way."""
    return facts.spec.checkpoint.timeout_seconds if facts.spec.checkpoint is not None else 0


def _with_last_words(facts: Facts, status: JobStatus) -> JobStatus:
    """``status`` with the newest checkpoint that workers tell of as they end: the coordinator may not have told it."""
    words = [worker.pod.exit.last_word for worker in facts.pods.workers if worker.pod.exit is not None]
    steps = [word.checkpoint for word in words if word is not None and word.checkpoint is not None]
    newest = max(steps, default=-1)
    if status.checkpoint_step is not None and newest <= status.checkpoint_step:
        return status
    written = format_time(facts.now)
    return status if newest < 0 else msgspec.structs.replace(status, checkpoint_step=newest, checkpoint_time=written)


def _saving(facts: Facts, status: JobStatus) -> bool:
    """Whether the workers have stopped, and one of them may still write the checkpoint of the last step."""
    remote = facts.remote
    if facts.spec.checkpoint is None or remote is None or remote.phase != "stopped" or not remote.step:
        return False
    told = remote.checkpoint
    if told is not None and (told.failure is not None or (told.step or 0) >= remote.step):
        return False
    return any(worker.pod.live and worker.standing != "absent" for worker in facts.pods.workers)


def suspend(facts: Facts, draft: Draft) -> JobStatus:
    """Stop the training, then take all pods away; the status on the way."""
    live = [worker for worker in facts.pods.workers if worker.pod.live]
    remote, now = facts.remote, facts.now
    # A suspended job is one of which no worker is wanted, and less are wanted since then.
    since = (parse_time(draft.status.scale_down_since) if draft.status.phase == "Suspending" else None) or now
    draft.amend(scale_down_since=format_time(since))
    deadline = since + facts.spec.elasticity.drain_grace_seconds + _patience(facts)
    if live and unheard(facts) and now < deadline:
        # A coordinator that took another's place knows of no training to stop before these have reached it.
        draft.wake(deadline)
        return phases.suspending(build_status(facts, draft.status), facts.job, now)
    in_training = remote is not None and remote.phase in ("training", "evaluating")
    if live and (in_training or _saving(facts, draft.status)) and facts.connected and now < deadline:
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
    status = _with_last_words(facts, build_status(facts, draft.status))
    if facts.admitted.wait is not None:
        return phases.queued(status, facts.job, facts.admitted.wait, now)
    return phases.suspended(status, facts.job, now)
