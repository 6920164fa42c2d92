"""How a job looks that does not simply run: it makes no sense, is limited, starts again, is suspended, queued, or over.

Pure. Each function amends what ``build_status`` made of the job.
"""

from __future__ import annotations

from typing import Any

import msgspec

from virtualflow.protocol.http_api import Status
from virtualflow.protocol.termination_message import TerminationMessage
from virtualflow.protocol.wording import counted, describe_end
from virtualflow_operator import reasons
from virtualflow_operator.api import ConditionType, Job, JobStatus, Truth, format_time
from virtualflow_operator.constants import LABEL_JOB
from virtualflow_operator.jobs.admission import AdmissionWait, Admitted
from virtualflow_operator.jobs.conditions import (
    MAX_MESSAGE,
    Aspect,
    amend,
    shown_loss,
    training_health,
    with_kstatus,
)

_OF_WHAT_RUNS: tuple[ConditionType, ...] = ("Ready", "Progressing", "Degraded")
NO_MEMORY_COPY: dict[str, Any] = {"memory_copy_step": None, "memory_copy_time": None, "memory_copy_bytes": None}
"""Of a status: the coordinator holds no copy of the training's state, or there is no coordinator."""


def invalid(status: JobStatus, job: Job, faults: str, now: float) -> JobStatus:
    message = f"The specification makes no sense, and nothing that runs is changed: {faults}"
    return _not_followed(status, job, reasons.INVALID_SPEC, message, now)


def not_allowed(status: JobStatus, job: Job, why: str, now: float) -> JobStatus:
    """The job wants to do without certificates, and may not."""
    return _not_followed(status, job, reasons.PLAINTEXT_NOT_ALLOWED, f"The job does not begin: {why}.", now)


def rejected(status: JobStatus, job: Job, why: str, now: float) -> JobStatus:
    """A job without workers has a template that the API server refuses."""
    return _not_followed(status, job, reasons.TEMPLATE_REJECTED, refused_template(why), now)


def creation_refused(status: JobStatus, job: Job, why: str, now: float) -> JobStatus:
    """The API server fails again and again at what a job without workers needs."""
    return _not_followed(status, job, reasons.CREATION_REFUSED, refused_creation(why), now)


def refused_creation(why: str) -> str:
    """The sentence about what a job needs and the API server does not make, or fails at."""
    return f"The API server refuses what the job needs: {why}"


def refused_template(why: str) -> str:
    """The sentence about templates of pods that the API server does not take."""
    return f"The API server refuses the pod template: {why}"


def _not_followed(status: JobStatus, job: Job, reason: str, message: str, now: float) -> JobStatus:
    kinds: tuple[ConditionType, ...] = ("Progressing",) if status.phase == "Running" else ("Progressing", "Degraded")
    truths: dict[ConditionType, Truth] = {"Progressing": "False", "Degraded": "True"}
    return amend(status, job, now, *((kind, truths[kind], reason, message) for kind in kinds))


def name_taken(status: JobStatus, job: Job, now: float) -> JobStatus:
    """A deleted job of the same name has left pods or a Service, whose labels would be this one's too."""
    command = (
        f"kubectl -n {job.namespace} delete pods,services,secrets,poddisruptionbudgets,networkpolicies "
        f"-l {LABEL_JOB}={job.name}"
    )
    message = (
        "An earlier job of this name was deleted with --cascade=orphan, and what it left is not this one's: "
        f"end that with `{command}`, or give this job another name."
    )
    return amend(status, job, now, ("Progressing", "False", reasons.NAME_TAKEN, message))


def limited(status: JobStatus, job: Job, admitted: Admitted, now: float) -> JobStatus:
    """It trains as it should, with fewer workers than its user asks for, and nothing else is to be said of it."""
    progressing = status.condition("Progressing")
    if progressing is None or progressing.reason != reasons.TRAINING:
        return status
    return amend(
        status, job, now, ("Progressing", "True", admitted.limit_reason, f"Workers are training. {admitted.limit}")
    )


def back_off(status: JobStatus, job: Job, now: float) -> JobStatus:
    message = f"Starting again at {status.failures.retry_time} after: {status.failures.message}"
    status = msgspec.structs.replace(status, phase="BackOff", ready_replicas=0, workers=f"0/{job.spec.desired}")
    return amend(
        status,
        job,
        now,
        ("Ready", "False", reasons.BACK_OFF, "The workers start again after a wait."),
        ("Progressing", "False", reasons.BACK_OFF, message),
        ("Degraded", "True", reasons.BACK_OFF, message),
    )


def suspending(status: JobStatus, job: Job, now: float) -> JobStatus:
    status = msgspec.structs.replace(status, phase="Suspending")
    return amend(
        status,
        job,
        now,
        (
            "Progressing",
            "True",
            reasons.SUSPENDING,
            "The workers leave, after a checkpoint." if job.spec.checkpoint else f"The workers leave. {_lost(status)}",
        ),
    )


def suspended(status: JobStatus, job: Job, now: float) -> JobStatus:
    status = msgspec.structs.replace(
        status,
        phase="Suspended",
        replicas=0,
        ready_replicas=0,
        workers=f"0/{job.spec.desired}",
        assignment=(),
        start_time=None,
        training_time=None,
        coordinator=None,
        coordinator_image=None,
        plaintext=None,
        certificates=None,
        start_ticket=None,
        steps_per_second=None,
        step_milliseconds=None,
        predicted_step_milliseconds=None,
        **NO_MEMORY_COPY,
        scale_down_since=None,
    )
    return amend(
        status,
        job,
        now,
        *_at_rest(reasons.SUSPENDED, "The job is suspended; set spec.suspend to false to resume it."),
        ("Suspended", "True", reasons.SUSPENDED, f"The workers have left. {_resumes_from(status, job)}"),
    )


def _resumes_from(status: JobStatus, job: Job) -> str:
    saved, reached = status.checkpoint_step, status.step or 0
    if not job.spec.checkpoint:
        return _lost(status)
    if saved is not None and saved >= reached:
        return f"It resumes from its checkpoint of step {saved}."
    again = "begins from the first step" if saved is None else f"resumes from that of step {saved}"
    return f"No checkpoint of step {reached} was confirmed: it {again}, to the same bits."


def _lost(status: JobStatus) -> str:
    """What a job loses with its last worker that has no checkpoint."""
    made = status.earlier_steps + (status.step or 0)
    lost = f"the training is lost, {counted(made, 'step')}, and " if made else ""
    return f"It has no spec.checkpoint: {lost}it begins from the first step, to the same bits."


def queued(status: JobStatus, job: Job, wait: AdmissionWait, now: float) -> JobStatus:
    """The job has no workers because its queue gives it none: suspended if it ever ran, else still to begin."""
    ran = job.status.phase in ("Suspending", "Suspended") or (job.status.step or 0) > 0
    status = suspended(status, job, now)
    if not ran:
        status = msgspec.structs.replace(status, phase="Pending")
    message = f"{wait.why[:1].upper()}{wait.why[1:]}"
    kept = _resumes_from(status, job)
    return amend(
        status,
        job,
        now,
        *_at_rest(wait.reason, message[:MAX_MESSAGE]),
        (
            "Suspended",
            "True" if ran else "False",
            wait.reason,
            f"It waits {wait.whose}, and goes on by itself. {kept}",
        ),
    )


def finishing(status: JobStatus, job: Job, now: float) -> JobStatus:
    message = f"The training is complete after {status.step or 0} steps; the job is when its script has ended."
    status = msgspec.structs.replace(status, phase="Running")
    return amend(
        status,
        job,
        now,
        ("Ready", "True", reasons.FINISHING, message),
        ("Progressing", "True", reasons.FINISHING, message),
    )


def complete(status: JobStatus, job: Job, ended: Status | TerminationMessage, now: float) -> JobStatus:
    status = msgspec.structs.replace(
        status,
        phase="Complete",
        ready_replicas=0,
        digest=ended.digest,
        optimizer_digest=ended.optimizer_digest,
        step=ended.step,
        loss=shown_loss(ended.metrics) or status.loss,
        completion_time=format_time(now),
    )
    status = amend(status, job, now, *training_health(job.status, ended))
    ended_by = describe_end(ended.step, ended.total_steps or status.total_steps, ended.stopped_early)
    message = f"{ended_by[0].upper()}{ended_by[1:]}."
    return _over(status, job, now, reasons.COMPLETE, message, "Complete")


def failed(status: JobStatus, job: Job, reason: str, message: str, now: float) -> JobStatus:
    status = msgspec.structs.replace(status, phase="Failed", ready_replicas=0, completion_time=format_time(now))
    return _over(status, job, now, reason, f"{message[:1].upper()}{message[1:]}", "Failed")


def deleted(job: Job, now: float) -> JobStatus:
    """The job was deleted, none of its pods is left, and somebody else's finalizer holds it."""
    status = job.status
    if not status.finished:
        message = "It was deleted before its end; a finalizer holds it."
        status = msgspec.structs.replace(status, replicas=0, assignment=(), observed_generation=job.generation)
        status = failed(status, job, reasons.DELETED, message, now)
    return with_kstatus(status, job, now, waits=False)


def _over(status: JobStatus, job: Job, now: float, reason: str, message: str, which: ConditionType) -> JobStatus:
    status = msgspec.structs.replace(
        status,
        workers=f"0/{job.spec.desired}",
        steps_per_second=None,
        predicted_step_milliseconds=None,
        **NO_MEMORY_COPY,
    )
    return amend(
        status,
        job,
        now,
        *_at_rest(reasons.FINISHED, "The job is over."),
        (which, "True", reason, message),
    )


def _at_rest(reason: str, message: str) -> tuple[Aspect, ...]:
    """Nothing runs, and nothing is to, for one reason."""
    return tuple((kind, "False", reason, message) for kind in _OF_WHAT_RUNS)
