"""One decision about one job: what is there, what should be, and what to do next. Pure and level-triggered.

The same arguments give the same plan, every action may be repeated, and nothing is remembered but in the job's status.
The first rule that applies says how the job stands; each rule is a function in a module of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from virtualflow.protocol.job_view import describe_change, describe_new_beginning
from virtualflow.protocol.messages import Change
from virtualflow.protocol.wording import PLAINTEXT, counted
from virtualflow_operator import reasons
from virtualflow_operator.api import ConditionType, JobStatus, format_time, parse_time
from virtualflow_operator.constants import MANAGER
from virtualflow_operator.jobs import endings, identities, manifests, phases
from virtualflow_operator.jobs.actions import Draft, EventMessage, JobPlan
from virtualflow_operator.jobs.admission import describe_allocation, with_allocation
from virtualflow_operator.jobs.conditions import with_kstatus
from virtualflow_operator.jobs.coordinators import keep_coordinator, tell_scale, tell_who_may_train
from virtualflow_operator.jobs.endings import suspend
from virtualflow_operator.jobs.job_status_builder import build_status, fresh_changes
from virtualflow_operator.jobs.scene import JobFacts, Scene, gather_facts
from virtualflow_operator.jobs.workers import (
    delete_ended,
    delete_former_attempts,
    keep_workers,
    look_into_pods,
    tell_losses,
    templates_accepted,
)
from virtualflow_operator.settings import OperatorSettings


def reconcile(scene: Scene, now: float, settings: OperatorSettings) -> JobPlan:
    """Decide about a job at ``now`` (Unix seconds)."""
    if scene.job.spec.managed_by not in (None, "", MANAGER):
        return JobPlan(scene.job.status)
    facts = gather_facts(scene, now, settings)
    admitted, old = facts.admitted, scene.job.status
    if admitted.allocation is not old.allocation:
        old = msgspec.structs.replace(old, allocation=admitted.allocation)
    draft = Draft(facts.job, old)
    status = _decide(facts, draft)
    scene.admission.keep(scene.job, admitted, scene.pods, draft, status, sound=not facts.faults, now=now)
    status = with_allocation(status, facts.job, admitted, now)
    waits = admitted.wait is not None and admitted.allocation is not None
    return _plan(facts, draft, with_kstatus(status, facts.job, now, waits=waits))


def _plan(facts: JobFacts, draft: Draft, status: JobStatus) -> JobPlan:
    old = facts.scene.job.status
    changes = fresh_changes(old, status, facts.remote)
    return JobPlan(
        status=msgspec.structs.replace(status, observed_generation=facts.job.generation),
        calls=tuple(draft.calls),
        written_calls=tuple(draft.written_calls),
        recoveries=frozenset(draft.recoveries),
        actions=tuple(draft.actions),
        events=(*draft.events, *events_of_change(old, status, changes)),
        action_events=tuple(draft.events),
        changes=tuple(changes),
        wake_at=min((wake for wake in draft.wakes if wake > facts.now), default=None),
        workers_wanted=0 if status.finished else facts.spec.desired,
    )


def _decide(facts: JobFacts, draft: Draft) -> JobStatus:
    """Apply the rules in their order; the job's next status."""
    # A job that is over is cleared up, and nothing else happens to it.
    if draft.status.finished:
        endings.clear_up(facts, draft)
        return draft.status

    # The coordinator hears whom it loses, whatever else is the matter.
    tell_who_may_train(facts, draft)
    tell_losses(facts, draft)
    delete_ended(facts, draft)
    identities.issue_identities(facts, draft)

    # A worker that was wrong is most likely so because of its machine.
    endings.note_doubted_nodes(facts, draft)

    # What did not fit into a worker's memory will not fit into the next one's of the same group.
    endings.note_unfit_groups(facts, draft)

    # The training is complete, the job failed too often or took too long, or all start again after a wait.
    ended = (
        endings.completed(facts, draft)
        or endings.out_of_time(facts, draft)
        or endings.attempt_failed(facts, draft)
        or endings.crashed_too_often(facts, draft)
    )
    if ended is not None:
        return ended

    # A specification that makes no sense changes nothing that runs; to suspend it is possible all the same.
    faults = "; ".join(facts.faults)
    without_workers = facts.admitted.wait is not None and not facts.pods.workers
    evicted = facts.admitted.reason == reasons.EVICTED_BY_KUEUE
    if faults and not facts.scene.job.spec.suspend and not without_workers and not evicted:
        draft.wake(parse_time(draft.status.failures.retry_time))
        return phases.invalid(build_status(facts, draft.status), facts.job, faults, facts.now)

    refusal = identities.refuse_plaintext(facts)
    if refusal and not facts.spec.suspend:
        return phases.not_allowed(build_status(facts, draft.status), facts.job, refusal, facts.now)

    _fix_for_life(facts, draft)

    # Suspended, or without workers by its queue's decision.
    if facts.spec.suspend:
        status = suspend(facts, draft)
        return phases.invalid(status, facts.job, faults, facts.now) if faults else status

    return _run(facts, draft)


def _fix_for_life(facts: JobFacts, draft: Draft) -> None:
    """Write down what a job keeps for life, and since when it runs."""
    status, spec = draft.status, facts.spec
    draft.amend(
        virtual_nodes=status.virtual_nodes or spec.virtual_nodes,
        reproducibility=status.reproducibility or spec.reproducibility,
        selector=manifests.selector(facts.job),
        start_time=status.start_time or (None if spec.suspend else format_time(facts.now)),
        plaintext=status.plaintext if spec.suspend else identities.in_plaintext(facts),
    )


def _run(facts: JobFacts, draft: Draft) -> JobStatus:
    """A coordinator, its service, and as many workers as the job is to have."""
    delete_former_attempts(facts, draft)
    if facts.admitted.still:
        return build_status(facts, draft.status)
    if facts.orphans and draft.status.coordinator is None:
        return phases.name_taken(build_status(facts, draft.status), facts.job, facts.now)
    accepted = templates_accepted(facts, draft)
    if draft.status.template_hash is None:
        return build_status(facts, draft.status)

    retry_at = parse_time(draft.status.failures.retry_time)
    waiting = retry_at is not None and facts.now < retry_at
    if waiting:
        draft.wake(retry_at)
        if not any(worker.pod.live for worker in facts.pods.workers):
            return build_status(facts, draft.status)

    keep_coordinator(facts, draft, accepted=accepted)
    tell_scale(facts, draft)
    look_into_pods(facts, draft)
    for worker in facts.pods.workers:
        if worker.pod.live and worker.pod.unschedulable_since is not None:
            draft.wake(worker.pod.unschedulable_since + facts.settings.unschedulable_patience)

    # What runs goes on as it is; with templates that are refused, what is lost meanwhile cannot be replaced.
    plan = keep_workers(facts, draft, waiting=waiting) if accepted and not facts.finishing else None
    status = build_status(facts, draft.status, plan)
    return phases.finishing(status, facts.job, facts.now) if facts.finishing else status


# --- events of what has changed ---------------------------------------------------------------------------------------

_AMISS: tuple[ConditionType, ...] = ("NonFinite", "CheckpointFailed", "DoesNotFit")
"""Conditions that are bad news as they become true."""
_OBSTACLES = (
    reasons.INVALID_SPEC,
    reasons.PLAINTEXT_NOT_ALLOWED,
    reasons.TEMPLATE_REJECTED,
    reasons.CREATION_REFUSED,
    reasons.UNSCHEDULABLE,
    reasons.CANNOT_START,
)
"""Reasons of ``Progressing`` that keep a job from training."""
_CAUSES = {
    "lost": reasons.RECOVERED,
    "broken": reasons.RECOVERED,
    "restart": reasons.RESTARTED,
    "rebalance": reasons.REBALANCED,
}


def events_of_change(old: JobStatus, new: JobStatus, changes: Sequence[Change]) -> list[EventMessage]:
    found = [_of_change(change) for change in changes if change.cause != "start"]
    if new.phase == "Running" and old.phase != "Running" and not changes:
        again = f", from step {new.step}" if old.attempt or (old.step or 0) > 0 else ""
        found.append(
            EventMessage(reasons.TRAINING, f"training with {counted(max(new.ready_replicas, 1), 'worker')}{again}")
        )
    # A coordinator that remembers the training tells of a change; generations of one that does not begin from 1. One
    # that learns of it from a worker may hear of the step before the latest first.
    if (new.step or 0) < (old.step or 0) - 1 and new.generation <= old.generation:
        again = describe_new_beginning(old.step or 0, new.step or 0, new.checkpoint_step)
        found.append(EventMessage(reasons.RESTARTED, again, warning=True))
    if new.plaintext and not old.plaintext and old.coordinator is None:
        told = f"the job's connections are in plaintext: {PLAINTEXT}"
        found.append(EventMessage(reasons.PLAINTEXT, told, warning=True))
    if new.phase == "Suspended" and old.phase != "Suspended":
        condition = new.condition("Suspended")
        found.append(
            EventMessage(
                reasons.SUSPENDED, f"suspended at step {new.step or 0}. {condition.message if condition else ''}"
            )
        )
    if old.phase == "Suspended" and new.phase == "Pending":
        found.append(EventMessage(reasons.RESUMED, _from_where(new)))
    given, before_given = new.allocation, old.allocation
    if given is not None and (
        before_given is None or (before_given.workers, before_given.host) != (given.workers, given.host)
    ):
        name = reasons.IN_TURNS if given.host else reasons.ALLOCATED if given.workers else reasons.QUEUED
        found.append(EventMessage(name, describe_allocation(given)))
    if new.phase == "Complete" and old.phase != "Complete":
        condition, digest = new.condition("Complete"), f"; digest {new.digest}" if new.digest else ""
        assert condition is not None
        said = condition.message.rstrip(".")
        found.append(EventMessage(reasons.COMPLETE, f"{said[0].lower()}{said[1:]}{digest}"))
    if new.phase == "Failed" and old.phase != "Failed":
        condition = new.condition("Failed")
        assert condition is not None
        found.append(EventMessage(condition.reason, condition.message, warning=True))
    for condition in filter(None, map(new.condition, _AMISS)):
        former = old.condition(condition.type)  # type: ignore[arg-type]  # it is one of these
        if condition.status == "True" and (former is None or former.status != "True"):
            found.append(EventMessage(condition.reason, condition.message, warning=True))
    before, after = old.condition("Progressing"), new.condition("Progressing")
    if after is not None and (before is None or before.reason != after.reason):
        if after.reason in (reasons.EFFICIENT, reasons.LIMITED_BY_KUEUE):
            found.append(EventMessage(after.reason, after.message))
        elif after.reason in _OBSTACLES:
            found.append(EventMessage(after.reason, after.message, warning=True))
    return found


def _from_where(status: JobStatus) -> str:
    if status.checkpoint_step is None:
        return f"resuming from step {status.step or 0} or the checkpoint before it"
    return f"resuming from the checkpoint of step {status.checkpoint_step}"


def _of_change(change: Change) -> EventMessage:
    reason = _CAUSES.get(change.cause, reasons.RESIZED)
    return EventMessage(reason, describe_change(change), warning=reason in (reasons.RECOVERED, reasons.RESTARTED))
