"""How a job looks that is to run: its status, made from its pods and from what the coordinator says.

Pure. Nothing here depends on anything that changes by itself, so that a job in which nothing happens is never written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from virtualflow.protocol.http_api import MemoryCopyState, Status
from virtualflow.protocol.job_view import describe_nodes
from virtualflow.protocol.messages import Change, CheckpointState
from virtualflow.protocol.wording import printable
from virtualflow_operator import reasons
from virtualflow_operator.api import (
    ANY_KIND,
    EndedRun,
    JobStatus,
    LastChange,
    Phase,
    Pod,
    WorkerShare,
    format_time,
    parse_time,
)
from virtualflow_operator.constants import COORDINATOR_PORT
from virtualflow_operator.jobs.conditions import Aspect, shown_loss, training_health, with_conditions
from virtualflow_operator.jobs.coordinators import unheard
from virtualflow_operator.jobs.identities import describe_late_renewal, in_plaintext
from virtualflow_operator.jobs.node_fit import never_fits
from virtualflow_operator.jobs.phases import NO_MEMORY_COPY, limited, refused_creation, refused_template
from virtualflow_operator.jobs.pod_classification import PodClassification
from virtualflow_operator.jobs.scaling_history import remember
from virtualflow_operator.jobs.scene import JobFacts
from virtualflow_operator.jobs.worker_plan import WorkerPlan

_NOT_SUSPENDED = "The job is not suspended."
_NOT_SAVED = "The job is not suspended. It has no spec.checkpoint: a suspension would lose all steps of its training."


def build_status(facts: JobFacts, status: JobStatus, plan: WorkerPlan | None = None) -> JobStatus:
    """The status of a job that is not over, from what there is and what the coordinator says."""
    spec, remote, workers = facts.spec, facts.remote, facts.pods.workers
    live = [w for w in workers if w.pod.live and w.fate in ("healthy", "planned", "stuck", "announced")]
    if remote is not None and facts.connected:
        ready = sum(1 for worker in workers if worker.standing == "training" and not worker.pod.finished)
    else:  # the coordinator is away: those who trained go on
        ready = min(status.ready_replicas, sum(worker.pod.phase == "Running" for worker in live))
    begun = ready > 0 or (remote is not None and remote.phase in ("training", "evaluating"))
    status = msgspec.structs.replace(
        status,
        phase=_phase(status, begun, bool(live), facts.now),
        replicas=len(live),
        ready_replicas=ready,
        workers=f"{ready}/{spec.desired}",
        training_time=status.training_time or (format_time(facts.now) if begun else None),
        assignment=_assignment(facts.pods, remote) if remote is not None and remote.workers else status.assignment,
    )
    if (spec.queue or spec.elasticity.min_efficiency) and not facts.shares_devices:
        told_apart = facts.admitted.placement.kinds_differ
        kinds = {worker.pod.name: worker.kind if told_apart else ANY_KIND for worker in workers}
        scaling = remember(status.scaling, remote if facts.connected else None, kinds)
        status = msgspec.structs.replace(status, scaling=scaling)
    if remote is not None:
        status = _with_progress(status, remote)
    status = with_conditions(
        status,
        facts.job.generation,
        facts.now,
        _ready(facts, begun, ready),
        _progressing(facts, status, plan, begun),
        _degraded(facts, status, ready, begun),
        *training_health(status, remote),
        ("Suspended", "False", reasons.NOT_SUSPENDED, _NOT_SUSPENDED if spec.checkpoint else _NOT_SAVED),
        ("Complete", "False", reasons.NOT_FINISHED, "The training is not complete."),
        ("Failed", "False", reasons.NOT_FINISHED, "The job has not failed."),
    )
    return limited(status, facts.job, facts.admitted, facts.now) if facts.admitted.limit else status


def _phase(status: JobStatus, begun: bool, live: bool, now: float) -> Phase:
    if begun:
        return "Running"
    retry = parse_time(status.failures.retry_time)
    if not live and retry is not None and now < retry:
        return "BackOff"
    return "Running" if live and status.phase == "Running" else "Pending"


def _assignment(pods: PodClassification, remote: Status) -> tuple[WorkerShare, ...]:
    nodes = {worker.pod.name: worker.pod.node for worker in pods.workers}
    assigned = [worker for worker in remote.workers if worker.last > worker.first]
    shares = [WorkerShare(w.worker, describe_nodes(w.ranges), nodes.get(w.worker, "")) for w in assigned]
    return tuple(sorted(shares, key=lambda share: (len(share.worker), share.worker)))


def _with_progress(status: JobStatus, remote: Status) -> JobStatus:
    return msgspec.structs.replace(
        status,
        generation=remote.generation or status.generation,
        run=remote.run,
        ended_runs=tuple(EndedRun(run.run, run.step, run.digest) for run in remote.runs),
        earlier_steps=remote.earlier_steps,
        step=known_step(status, remote),
        total_steps=remote.total_steps if remote.total_steps is not None else status.total_steps,
        epoch=remote.epoch if remote.step else status.epoch,
        loss=shown_loss(remote.metrics) or status.loss,
        steps_per_second=f"{remote.steps_per_second:.4g}" if remote.steps_per_second else status.steps_per_second,
        step_milliseconds=_shown(remote.step_ms) or status.step_milliseconds,
        predicted_step_milliseconds=_shown(remote.predicted_step_ms),
        goodput=status.goodput if remote.goodput is None else f"{remote.goodput:.3f}",
        **_newest_checkpoint(status, remote.checkpoint),
        **_memory_copy(remote.memory_copy),
        last_change=_latest_change(status, remote),
        # All that workers remember; after a start from a checkpoint that may be less than was counted before.
        changes=max(status.changes, remote.changes_total),
        repeated_steps=max(status.repeated_steps, remote.repeated_steps),
    )


def _newest_checkpoint(status: JobStatus, checkpoint: CheckpointState | None) -> dict[str, Any]:
    """What is known of the newest checkpoint; a worker may have told of a later one as it ended."""
    if checkpoint is None or checkpoint.step is None or checkpoint.written is None:
        return {}
    if int(checkpoint.written) < (parse_time(status.checkpoint_time) or 0.0):
        return {}
    return {"checkpoint_step": checkpoint.step, "checkpoint_time": format_time(checkpoint.written)}


def _memory_copy(copy: MemoryCopyState | None) -> dict[str, Any]:
    if copy is None:
        return NO_MEMORY_COPY
    return {
        "memory_copy_step": copy.step,
        "memory_copy_time": format_time(copy.at),
        "memory_copy_bytes": copy.size,
    }


def _shown(milliseconds: float | None) -> str | None:
    return f"{milliseconds:.4g}" if milliseconds else None


def known_step(status: JobStatus, remote: Status | None) -> int | None:
    """The step that the job has reached; a coordinator that waits for its workers, or never had any, does not know."""
    if remote is None or remote.phase == "waiting" or (remote.phase in ("stopped", "failed") and not remote.step):
        return status.step
    return remote.step


def fresh_changes(old: JobStatus, new: JobStatus, remote: Status | None) -> list[Change]:
    """Membership changes that one status shows and the one before it did not, oldest first."""
    if remote is None or new.last_change == old.last_change:
        return []
    last = old.last_change
    known = (last.incarnation, last.generation) if last is not None else (0, 0)
    return [change for change in remote.changes if _order(change) > known]


def _order(change: Change) -> tuple[int, int]:
    return change.generation.incarnation, change.generation.counter


def _latest_change(status: JobStatus, remote: Status) -> LastChange | None:
    """The last change that is known; a coordinator that was replaced may not have heard of it yet."""
    change, known = remote.last_change, status.last_change
    if change is None:
        return known
    if known is not None and (known.incarnation, known.generation) > _order(change):
        return known
    return LastChange(
        generation=change.generation.counter,
        incarnation=change.generation.incarnation,
        before=change.from_,
        to=change.to,
        cause=change.cause,
        reason=printable(change.reason),
        step=change.step,
        pause_milliseconds=None if change.pause_ms is None else round(change.pause_ms),
        repeated_steps=change.repeated_steps,
        repeated_virtual_nodes=change.repeated_virtual_nodes,
    )


def _ready(facts: JobFacts, begun: bool, ready: int) -> Aspect:
    link, minimum = facts.link, facts.spec.least
    if link is not None and link.incompatible:
        message = (
            f"The operator cannot talk to the coordinator ({link.refused}); workers that train go on. Suspended and "
            "resumed, the job gets a coordinator of the operator's version."
        )
        return ("Ready", "Unknown", reasons.PROTOCOL_MISMATCH, message)
    if link is not None and link.refused:
        way_out = (
            "give the operator its former key back, or suspend the job and resume it."
            if in_plaintext(facts)
            else "if the operator has another key, the pods get certificates by it, and all talk again in some minutes."
        )
        message = f"The coordinator does not talk to the operator ({link.refused}): {way_out}"
        return ("Ready", "Unknown", reasons.TOKEN_REFUSED, message)
    if link is not None and link.misbehaves and not link.connected:
        message = (
            f"The operator leaves the coordinator alone for a while ({link.misbehaves}): see what runs in its pod, or "
            "suspend the job and resume it."
        )
        return ("Ready", "Unknown", reasons.COORDINATOR_MISBEHAVES, message)
    if link is not None and link.busy and not link.connected:
        message = f"The operator leaves the coordinator alone for a while ({link.busy}); workers that train go on."
        return ("Ready", "Unknown", reasons.TOO_BUSY, message)
    if begun and (link is None or not link.connected):
        message = "The operator does not reach the coordinator; workers that train go on."
        return ("Ready", "Unknown", reasons.COORDINATOR_UNREACHABLE, message)
    if begun and ready >= minimum:
        return ("Ready", "True", reasons.TRAINING, "Workers are training.")
    message = f"Waiting for workers; training begins with {minimum} of them."
    awaited = unheard(facts)
    if awaited and not begun:
        names = ", ".join(awaited[:8])
        message = (
            f"A new coordinator waits for workers that may still train, until they reach it or have ended: {names}."
        )
    if begun:
        message = f"Fewer workers train than minReplicas ({minimum}); they go on."
    return ("Ready", "False", reasons.WAITING, message)


def _progressing(facts: JobFacts, status: JobStatus, plan: WorkerPlan | None, begun: bool) -> Aspect:
    hindrance = _hindrance(facts, status, begun)
    if hindrance is not None:
        return ("Progressing", "False", *hindrance)
    if not begun:
        return ("Progressing", "True", reasons.STARTING, _slow_start(facts) or "Workers are starting.")
    planned = facts.pods.of("planned")
    if planned:
        names = ", ".join(worker.pod.name for worker in planned[:8])
        return ("Progressing", "True", reasons.ROLLING, f"To be replaced, one at a time: {names}.")
    if plan is not None and (plan.create or plan.retire):
        return ("Progressing", "True", reasons.SCALING, "The number of workers is changing.")
    return ("Progressing", "True", reasons.TRAINING, "Workers are training.")


def _hindrance(facts: JobFacts, status: JobStatus, begun: bool) -> tuple[str, str] | None:
    """What is in the way of the job: a reason and a sentence."""
    rejection, trouble = facts.rejection, facts.scene.trouble or facts.scene.failure
    if rejection:
        return reasons.TEMPLATE_REJECTED, refused_template(rejection)
    if trouble and not begun:
        return reasons.CREATION_REFUSED, refused_creation(trouble)
    if status.phase == "BackOff":
        return reasons.BACK_OFF, f"Starting again at {status.failures.retry_time} after: {status.failures.message}"
    return None if begun else _obstacle(facts)


def _obstacle(facts: JobFacts) -> tuple[str, str] | None:
    """Why a worker that should run does not: a reason and a sentence."""
    pods = (*facts.pods.coordinators, *(worker.pod for worker in facts.pods.workers))
    for pod in pods:
        if _cannot_start(pod, facts):
            return reasons.CANNOT_START, _why_not(pod, facts)
    for pod in pods:
        if pod.live and pod.unschedulable:
            why = _why_not(pod, facts)
            return reasons.UNSCHEDULABLE, f"{why[:1].upper()}{why[1:]}"
    return None


def _slow_start(facts: JobFacts) -> str:
    """What a pod does that should have started, or a worker that should have called; empty: there is none."""
    for pod in (*facts.pods.coordinators, *(worker.pod for worker in facts.pods.workers)):
        if facts.overdue(pod):
            event = facts.scene.events.get(pod.uid)
            said = event.said if event is not None and event.said else "no event says what it waits for"
            return f"{pod.name} on {pod.node} has not started yet: {said}"
    if not facts.connected or facts.scene.service is None:
        return ""
    late = facts.now - facts.settings.startup_patience
    for worker in facts.pods.of("healthy", "planned"):
        pod = worker.pod
        if pod.phase == "Running" and worker.standing == "absent" and pod.created <= late:
            return (
                f"{pod.name} on {pod.node} runs and has not called its coordinator at {facts.scene.service.address}, "
                f"port {COORDINATOR_PORT}: its script has not come to vf.elastic yet, or a NetworkPolicy or a proxy "
                "keeps it from there; see its log."
            )
    return ""


def _degraded(facts: JobFacts, status: JobStatus, ready: int, begun: bool) -> Aspect:
    desired, retry = facts.spec.desired, parse_time(status.failures.retry_time)
    if not begun:
        hindrance, slow = _hindrance(facts, status, begun), _slow_start(facts)
        if hindrance is not None:
            return ("Degraded", "True", *hindrance)
        if slow:
            return ("Degraded", "Unknown", reasons.STARTING, slow)
    if late := describe_late_renewal(facts, status):  # which ends the training, and fewer workers do not
        return ("Degraded", "True", reasons.CERTIFICATES_LATE, late)
    if not begun or ready >= desired:
        return ("Degraded", "False", reasons.AS_WANTED, "As many workers train as are wanted, or they are starting.")
    causes = (_why_not(worker.pod, facts) for worker in facts.pods.workers)
    why = next(filter(None, causes), facts.rejection or facts.scene.trouble or facts.scene.failure)
    if not why and status.failures.unfit:
        groups = ", ".join(unfit.group for unfit in status.failures.unfit)
        why = f"nothing fits into the memory of worker group {groups}, so no worker is made there"
    if not why and retry is not None and facts.now < retry:
        why = f"no worker is made before {status.failures.retry_time}, because of those that ended too soon"
    why = (why or _slow_start(facts)).rstrip(".")
    message = f"Fewer workers train than the {desired} that are wanted: {why or 'the others are starting'}."
    ended = _latest_end(status, facts.now)
    if ended:
        message += f" The latest that ended too soon: {ended}."
    return ("Degraded", "True", reasons.FEWER_WORKERS, message)


def _latest_end(status: JobStatus, now: float) -> str:
    """How the latest worker ended that counts as crashed, if that was since there are too few."""
    degraded, last = status.condition("Degraded"), parse_time(status.failures.last_time)
    known = degraded is not None and degraded.status == "True"
    since = parse_time(degraded.last_transition_time) if degraded is not None and known else None
    if last is None or last < int(now if since is None else since):
        return ""
    return status.failures.message.partition("\n")[0]


def _cannot_start(pod: Pod, facts: JobFacts) -> str:
    """What keeps a pod that has a node from starting, by its status or its latest event; empty: nothing is known."""
    if not pod.live or pod.waiting:
        return pod.waiting if pod.live else ""
    event = facts.scene.events.get(pod.uid)
    return event.said if event is not None and event.warning and facts.overdue(pod) else ""


def _why_not(pod: Pod, facts: JobFacts) -> str:
    why = _cannot_start(pod, facts)
    if why:
        return f"{pod.name} cannot start: {why}"
    if pod.live and pod.unschedulable:
        return f"no node takes {pod.name}: {never_fits(pod, facts.scene.nodes) or pod.unschedulable}"
    return ""


# --- how soon it is to be written -------------------------------------------------------------------------------------

_PROGRESS = frozenset(
    {
        "assignment",
        "changes",
        "checkpointStep",
        "checkpointTime",
        "earlierSteps",
        "endedRuns",
        "epoch",
        "generation",
        "goodput",
        "lastChange",
        "loss",
        "memoryCopyBytes",
        "memoryCopyStep",
        "memoryCopyTime",
        "predictedStepMilliseconds",
        "repeatedSteps",
        "run",
        "scaling",
        "step",
        "stepMilliseconds",
        "stepsPerSecond",
        "totalSteps",
    }
)
"""What the coordinator says and nothing is decided by before it is written."""


def is_progress(old: Mapping[str, Any], patch: Mapping[str, Any]) -> bool:
    """Whether a patch of the status ``old`` tells of progress only, or says the same conditions in other words.

    Such a one is written now and then; what people wait for is written at once.
    """
    changed = set(patch) - _PROGRESS
    if changed == {"conditions"}:
        return _standing(old.get("conditions")) == _standing(patch["conditions"])
    return not changed


def _standing(conditions: list[dict[str, Any]] | None) -> list[tuple[Any, ...]]:
    return [tuple(condition.get(field) for field in ("type", "status", "reason")) for condition in conditions or ()]
