"""The status of a job as it is shown to people: ``GET /v1/status`` and the messages of ``GET /v1/watch``."""

from __future__ import annotations

from virtualflow.coordinator.balance import known_pace, predicted_computing, predicted_step, slow_workers
from virtualflow.coordinator.settings import BRIEF_CHANGES, BRIEF_RUNS
from virtualflow.coordinator.state import JobState
from virtualflow.protocol import http_api
from virtualflow.protocol.settings import MAX_LISTED
from virtualflow.protocol.versions import this_speaker
from virtualflow.protocol.wording import describe_end


def describe(job: JobState, brief: bool = False) -> http_api.Status:
    """All that may be known about ``job`` from outside.

    ``brief``: what the operator needs: no events and paces, of changes only the latest, of metrics the loss and the one
    that was not finite. That of 4,096 workers is below a megabyte, which is all that the operator reads.
    """
    history, progress = job.history, job.history.progress
    changes, events = history.ordered_changes(), tuple(history.events)
    cluster = job.snapshot()
    phase, predicted, computing = job.phase, predicted_step(cluster), predicted_computing(cluster)
    proposed = job.proposed if phase not in http_api.ENDED else None
    metrics = result.metrics if (result := history.result) else progress.metrics if progress else {}
    if brief:
        found = history.non_finite.metric if history.non_finite is not None else "loss"
        metrics = {name: value for name, value in metrics.items() if name in ("loss", found)}
    contacts = [] if brief else [job.roster.contacts[i] for i, worker in job.roster.workers.items() if worker.present]
    slow = {} if brief else slow_workers(cluster)
    us = this_speaker("the coordinator")
    assigned = {x.incarnation: x.virtual_nodes for x in job.running.members} if job.running else {}
    return http_api.Status(
        phase=phase,
        incarnation=job.incarnation,
        generation=job.running_generation.counter,
        virtual_nodes=job.virtual_nodes,
        reproducibility=job.reproducibility,
        wanted=job.wanted,
        minimum=job.minimum,
        workers=tuple(
            _worker(job, i, assigned.get(i, range(0)), slow.get(i), brief)
            for i, worker in job.roster.workers.items()
            if worker.present
        ),
        lost=job.roster.listed_lost,
        proposed=proposed.generation.counter if proposed else None,
        proposed_workers=tuple(member.incarnation for member in proposed.members) if proposed and not brief else (),
        prepared=proposed is not None and job.is_prepared,
        reason=_reason(job, phase),
        step=history.step,
        total_steps=history.total_steps,
        epoch=progress.epoch if progress else 0,
        metrics=metrics,
        steps_per_second=progress.steps_per_second if progress else 0.0,
        step_ms=result.step_ms if result else progress.step_ms if progress else None,
        hold=job.hold,
        last_change=changes[-1] if changes else None,
        changes=changes[-BRIEF_CHANGES:] if brief else changes,
        changes_total=history.changes_total,
        repeated_steps=history.repeated_steps,
        events=() if brief else events,
        digest=result.digest if result else None,
        optimizer_digest=result.optimizer_digest if result else None,
        error=history.error,
        traceback=history.traceback,
        predicted_step_ms=None if predicted is None else 1_000 * predicted,
        computing_ms=None if computing is None else 1_000 * computing,
        protocol=us.newest,
        oldest_protocol=us.oldest,
        version=us.version,
        non_finite=history.non_finite,
        checkpoint=history.checkpoint,
        fingerprint=next((contact.fingerprint for contact in contacts if contact.fingerprint), ""),
        devices=tuple(sorted({contact.device for contact in contacts if contact.device})[:MAX_LISTED]),
        memory_copy=job.memory_copy,
        start_ticket=job.ticket,
        memory=_memory(job),
        does_not_fit=history.does_not_fit,
        wanted_reason=job.wanted_reason,
        worker_seconds=history.goodput.own,
        goodput=history.goodput.total.share,
        run=job.run,
        runs=job.runs[-BRIEF_RUNS:] if brief else job.runs,
        earlier_steps=job.earlier_steps,
        stopped_early=result is not None and result.stopped_early,
        began=history.began,
        plaintext=job.plaintext,
    )


def _reason(job: JobState, phase: http_api.Phase) -> str:
    """The membership decision in force; of a job that is over, how it has ended, unless its error says that."""
    if phase not in http_api.ENDED:
        return job.reason
    if phase == "stopped":
        return job.stop or ""
    result = job.history.result
    if phase == "failed" or result is None:
        return ""
    return describe_end(result.step, job.history.total_steps, result.stopped_early)


def _memory(job: JobState) -> http_api.MemoryReport | None:
    """What becomes of activations, once all members have said so: a new coordinator does not know it of some yet."""
    members = job.running.members if job.running is not None else ()
    known = job.roster.workers
    if not members or not all(x.incarnation in known and known[x.incarnation].known_in_person for x in members):
        return None
    plans = [(member.worker, job.roster.contacts[member.incarnation].memory) for member in members]
    budgets = [(worker, plan) for worker, plan in plans if plan is not None]
    offloading = [(worker, plan.reason) for worker, plan in budgets if plan.swapped + plan.recomputed > 0]
    planned = sum(1 for _, plan in budgets if plan.reason)
    worker, words = offloading[0] if offloading else ("", "")
    return http_api.MemoryReport(len(budgets), planned, len(offloading), worker, words)


def _worker(
    job: JobState, incarnation: str, assigned: range, slowness: float | None, brief: bool
) -> http_api.WorkerStatus:
    worker, contact = job.roster.workers[incarnation], job.roster.contacts[incarnation]
    state: http_api.WorkerState = "starting"
    if worker.done:
        state = "done"
    elif not worker.connected or incarnation in job.silent:
        state = "silent"
    elif worker.draining:
        state = "draining"
    elif assigned:
        state = "training"
    elif worker.ready_at is not None:
        state = "ready"
    pace = None if brief else known_pace(worker)
    return http_api.WorkerStatus(
        worker.name,
        incarnation,
        contact.address,
        contact.pid,
        state,
        assigned.start,
        assigned.stop,
        None if pace is None else 1_000 * pace,
        contact.crashed,
        slowness,
        None if brief else contact.usage,
    )
