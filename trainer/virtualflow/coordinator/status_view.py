"""The status of a job as it is shown to people: ``GET /v1/status`` and the messages of ``GET /v1/watch``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from virtualflow.coordinator.balance import known_pace, predicted_computing, predicted_step, slow_workers
from virtualflow.coordinator.settings import BRIEF_CHANGES, BRIEF_RUNS
from virtualflow.coordinator.snapshot import Processes, Worker
from virtualflow.coordinator.state import JobState
from virtualflow.protocol import http_api
from virtualflow.protocol.messages import Usage
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
            _worker(job, processes, assigned, slow, brief)
            for processes in cluster.by_worker(i for i, worker in job.roster.workers.items() if worker.present)
        ),
        lost=job.roster.listed_lost,
        proposed=proposed.generation.counter if proposed else None,
        proposed_workers=tuple(dict.fromkeys(x.launch_id for x in proposed.members)) if proposed and not brief else (),
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
    plans = [(member, job.roster.contacts[member.incarnation].memory) for member in members]
    budgets = [(member, plan) for member, plan in plans if plan is not None]
    offloading = [(member, plan.reason) for member, plan in budgets if plan.swapped + plan.recomputed > 0]
    without = {member.launch_id for member, plan in budgets if not plan.reason}
    planned = {member.launch_id for member, _ in budgets} - without
    worker, words = (offloading[0][0].worker, offloading[0][1]) if offloading else ("", "")
    return http_api.MemoryReport(
        len({member.launch_id for member, _ in budgets}),
        len(planned),
        len({member.launch_id for member, _ in offloading}),
        worker,
        words,
    )


_WORST: tuple[http_api.WorkerState, ...] = ("silent", "draining", "starting", "ready", "training", "done")
"""States of a worker's processes: its own is the first of these that one of them has."""


def _worker(
    job: JobState, of_it: Processes, assigned: Mapping[str, range], slow: Mapping[str, float], brief: bool
) -> http_api.WorkerStatus:
    processes = sorted(of_it, key=lambda worker: worker.local_rank)
    first, contacts = processes[0], [job.roster.contacts[worker.incarnation] for worker in processes]
    ranges = [assigned.get(worker.incarnation, range(0)) for worker in processes]
    parts = [part for part in ranges if part] or [range(0)]
    states = {_state(job, worker, part) for worker, part in zip(processes, ranges, strict=True)}
    if len(processes) < first.local_world_size:
        states.add("starting")
    paces = [] if brief else [pace for worker in processes if (pace := known_pace(worker)) is not None]
    usages = [] if brief else [contact.usage for contact in contacts if contact.usage is not None]
    several = tuple(
        http_api.ProcessStatus(worker.local_rank, contact.pid, part.start, part.stop)
        for worker, contact, part in zip(processes, contacts, ranges, strict=True)
    )
    return http_api.WorkerStatus(
        first.name,
        first.launch_id,
        contacts[0].address,
        contacts[0].pid,
        next(state for state in _WORST if state in states),
        min(part.start for part in parts),
        max(part.stop for part in parts),
        1_000 * max(paces) if paces else None,
        any(contact.crashed for contact in contacts),
        max((slow[worker.incarnation] for worker in processes if worker.incarnation in slow), default=None),
        _together(usages),
        several if first.launch else (),
    )


def _state(job: JobState, worker: Worker, assigned: range) -> http_api.WorkerState:
    if worker.done:
        return "done"
    if not worker.connected or worker.incarnation in job.silent:
        return "silent"
    if worker.draining:
        return "draining"
    if assigned:
        return "training"
    return "ready" if worker.ready_at is not None else "starting"


def _together(usages: Sequence[Usage]) -> Usage | None:
    """What all processes of a worker take and make; a figure that one of them lacks is not known."""
    if len(usages) <= 1:
        return usages[0] if usages else None
    shares = [usage.device_share for usage in usages]
    return Usage(
        sum(usage.processors for usage in usages),
        _sum(usage.samples for usage in usages),
        _sum(usage.memory for usage in usages),
        _sum(usage.device_memory for usage in usages),
        None if None in shares else sum(share or 0.0 for share in shares) / len(shares),
    )


Figure = TypeVar("Figure", int, float)


def _sum(figures: Iterable[Figure | None]) -> Figure | None:
    known = list(figures)
    return None if None in known else sum(figure for figure in known if figure is not None)
