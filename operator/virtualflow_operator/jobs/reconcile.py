"""One decision about one job: what is there, what should be, and what to do next. Pure and level-triggered.

The same arguments give the same plan, every action may be repeated, and nothing is remembered but in the job's status.
The first rule that applies says how the job stands; each rule is a function in a module of its own.
"""

from __future__ import annotations

import msgspec

from virtualflow_operator import reasons
from virtualflow_operator.api import JobStatus, format_time, parse_time
from virtualflow_operator.constants import MANAGER
from virtualflow_operator.jobs import endings, identities, manifests, phases
from virtualflow_operator.jobs.actions import Draft, JobPlan
from virtualflow_operator.jobs.admission import with_allocation
from virtualflow_operator.jobs.conditions import with_kstatus
from virtualflow_operator.jobs.coordinators import keep_coordinator, tell_scale, tell_who_may_train
from virtualflow_operator.jobs.endings import suspend
from virtualflow_operator.jobs.event_messages import messages_of_change
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
        events=(*draft.events, *messages_of_change(old, status, changes)),
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
