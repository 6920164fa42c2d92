"""Whether a process that says Hello may take part in the job, and what the coordinator learns of it."""

from __future__ import annotations

from dataclasses import replace

from virtualflow.coordinator.generations import confirm_end, count_above, declare_lost, learn, note_return, number_above
from virtualflow.coordinator.roster import Contact
from virtualflow.coordinator.settings import HEARTBEATS
from virtualflow.coordinator.snapshot import Worker
from virtualflow.coordinator.state import JobState
from virtualflow.protocol import http_api, lineage
from virtualflow.protocol import messages as m
from virtualflow.protocol.settings import MAX_REASON, MAX_RUNS, MAX_TEXT
from virtualflow.protocol.versions import (
    HelloHeader,
    Speaker,
    explain_mismatch,
    negotiate,
    read_hello_header,
    speaker,
    this_speaker,
)
from virtualflow.protocol.wording import counted


def admit(state: JobState, hello: m.Hello, now: float) -> str | None:
    """Admit a connection; a sentence instead when that process must not take part."""
    us = this_speaker("the coordinator")
    protocol = negotiate(_speaker(hello), us)
    if protocol is not None and _fault_in_own_plan(hello) is None:
        follow_run(state, hello, now)
    refusal = _refuse(state, hello) if protocol is not None else explain_mismatch(_speaker(hello), us)
    if refusal is not None:
        if hello.plan is not None and hello.incarnation not in state.roster.workers:
            # An earlier coordinator may have declared it lost: it was in a generation, and has no part in this job.
            state.roster.note_lost(hello.worker, hello.launch or hello.incarnation, hello.address, refusal)
        return _tell_refusal(state, hello.worker, refusal)
    known = state.roster.workers.get(hello.incarnation)
    if known is not None:
        note_return(state, known, now)
    if fault_in_number(hello.heard) is None:
        number_above(state, hello.heard)
    if hello.plan is not None:
        learn(state, hello.plan, now)
    if fault_in_number(hello.floor) is None:
        count_above(state, hello.floor)
    if hello.plan is None or any(plan.includes(hello.incarnation) for plan in state.newest):
        for namesake in state.roster.namesakes(hello):
            # Whoever runs the workers has given the name, and so the place, to another one.
            former = state.roster.workers.get(namesake)
            if former is not None:
                declare_lost(state, namesake, "another process has taken its name")
            confirm_end(state, namesake if former is None else former.launch_id)
    state.virtual_nodes, state.reproducibility = hello.virtual_nodes, hello.reproducibility
    if hello.plan is not None or not state.trained:
        state.classes = hello.classes  # a joiner of another mind will be refused by the others
    worker = _described(state, hello, known, now)
    # Nobody is compared with a machine whose self-test did not come to pass.
    fingerprint = "" if hello.failing else hello.fingerprint
    contact = Contact(hello.pid, hello.address, fingerprint, hello.device, hello.self_test, memory=hello.memory)
    state.roster.add(worker, contact)
    state.trained = state.trained or hello.plan is not None
    for change in hello.changes:
        state.history.merge_change(change, fresh=False)
    state.history.reached(hello.step)
    state.history.draws_early |= hello.draws_early
    if hello.total_steps is not None:
        state.history.total_steps = hello.total_steps
    _greet(state, hello, worker, known, now, protocol)
    if known is None:
        which = f"process {hello.local_rank} of {hello.local_world_size}, " if hello.launch else ""
        state.tell("worker", f"{hello.worker} connected ({which}pid {hello.pid})")
    state.note_news()
    return None


def refuse_borrowed_name(state: JobState, name: str, certified: str | None) -> str | None:
    """A sentence for a process that goes by another name than that of its certificate; ``None``: it does not.

    Args:
        certified: the certificate's; ``None``: there is none, in plaintext.
    """
    if certified in (None, name):
        return None
    # In its own name: the other one is not to be taken for refused.
    return _tell_refusal(state, certified, f"the certificate is of {certified}, and this process calls itself {name}")


def refuse_unread(state: JobState, data: bytes | str, certified: str | None = None) -> str | None:
    """A sentence for who says a Hello that cannot be read, because it is of a version too far away.

    ``None``: that is not why, and there is nobody to tell.
    """
    hello = read_hello_header(data)
    if hello is not None and certified not in (None, hello.worker):
        return refuse_borrowed_name(state, hello.worker, certified)
    mismatch = explain_mismatch(_speaker(hello), this_speaker("the coordinator")) if hello is not None else None
    return _tell_refusal(state, hello.worker, mismatch) if hello is not None and mismatch is not None else None


def _speaker(hello: m.Hello | HelloHeader) -> Speaker:
    return speaker(hello.worker, hello.protocol, hello.oldest_protocol, hello.version)


def _tell_refusal(state: JobState, worker: str, reason: str) -> str:
    refused = http_api.Refusal(worker, reason[:MAX_TEXT])
    state.tell("refused", f"{refused.worker} refused: {refused.reason}", refused)
    return refused.reason


def _greet(
    state: JobState, hello: m.Hello, worker: Worker, known: Worker | None, now: float, protocol: int | None
) -> None:
    """Tell a worker what it must know and may have missed."""
    running = state.running is not None and bool(state.running.members)
    limit = state.settings.heartbeat_limit
    heartbeat = min(limit, state.settings.hang_limit or state.settings.hang_floor) / HEARTBEATS
    step, hold = state.history.step, state.hold_in_run
    copy, record, early = state.copy_limit, state.record_interval, state.history.draws_early
    welcome = m.Welcome(running, step, hold, heartbeat, protocol, limit, copy, record, early)
    state.send(hello.incarnation, welcome)
    if worker.draining and not hello.draining:
        seconds = max(0.0, (worker.deadline or now) - now)
        state.send(hello.incarnation, m.Drain(seconds, "asked to"))
    for plan in state.newest:
        # Also the running one: it may have been entered by others while this connection was down.
        concerned = plan.includes(hello.incarnation) or (
            state.running is not None and state.running.includes(hello.incarnation)
        )
        if concerned and plan.generation > (worker.entered or m.NO_GENERATION):
            state.send(hello.incarnation, plan)
            for keys in state.rendezvous.of(plan.generation):
                state.send(hello.incarnation, keys)


def _described(state: JobState, hello: m.Hello, known: Worker | None, now: float) -> Worker:
    """The worker as its Hello and what was known before describe it."""
    siblings = [x for x in state.roster.workers.values() if hello.launch and x.launch == hello.launch]
    draining = hello.draining or any(x.draining for x in (*siblings, *([known] if known else [])))
    told = None if hello.drain_deadline is None else now + hello.drain_deadline
    known_deadlines = (x.deadline for x in (*siblings, *([known] if known else [])))
    deadlines = [deadline for deadline in (told, *known_deadlines) if deadline is not None]
    entered = hello.plan.generation if hello.plan is not None else None
    if known is not None and known.entered is not None:
        entered = max(entered or m.NO_GENERATION, known.entered)
    ready_at = (known.ready_at if known else None) or now
    return Worker(
        hello.worker,
        hello.incarnation,
        last_heard=now,
        entered=entered,
        ready_at=ready_at if hello.ready else None,
        draining=draining,
        deadline=min(deadlines, default=now + state.settings.drain_grace) if draining else None,
        failures=known.failures if known else 0,
        done=bool(known and known.done),
        guess=hello.pace,
        pace=known.pace if known else None,
        capacity=hello.capacity,
        launch=hello.launch,
        local_rank=hello.local_rank,
        local_world_size=hello.local_world_size,
    )


def _refuse(job: JobState, hello: m.Hello) -> str | None:
    """Why the process that says ``hello`` must not take part in ``job``, in one sentence; ``None``: it may."""
    for known_as in dict.fromkeys((hello.incarnation, hello.launch or hello.incarnation)):
        over = job.roster.refusal(known_as)
        if over is not None and not (_went_on_elsewhere(job, hello) and job.roster.is_suspected(known_as)):
            return over
    fault = _fault_among_siblings(job, hello)
    if fault is not None:
        return fault
    early = ahead_of_job(job, hello)
    if early is not None:
        return early
    known = job.roster.workers.get(hello.incarnation)
    if known is not None and known.name != hello.worker:
        return f"this process was called {known.name} before"
    if job.virtual_nodes is not None and hello.virtual_nodes != job.virtual_nodes and _bound(job, hello):
        return (
            f"this worker has {counted(hello.virtual_nodes, 'virtual node')} and the job {job.virtual_nodes}; "
            "their number is fixed for a job's life"
        )
    differing = _other_reproducibility(job, hello) or _foreign_machine(job, hello)
    if differing is not None:
        return differing
    if hello.plan is None:
        return None
    fault = _fault_in_own_plan(hello)
    if fault is not None:
        return f"the generation that this worker names cannot be: {fault}"
    left_behind = job.running is not None and hello.plan.generation < job.running.generation
    if left_behind and not hello.draining and not any(plan.includes(hello.incarnation) for plan in job.newest):
        return f"the job went on in generation {job.running_generation} without this process"
    return None


def _fault_among_siblings(job: JobState, hello: m.Hello) -> str | None:
    """What is wrong with what a process says of its worker's others, if anything."""
    if bool(hello.launch) != (hello.local_world_size > 1) or hello.local_rank >= hello.local_world_size:
        return (
            f"it says that it is process {hello.local_rank} of {hello.local_world_size} of its worker, started as "
            f"{hello.launch or 'nothing'}, which cannot be; start it by virtualflow run or virtualflow processes"
        )
    for other in job.roster.workers.values() if hello.launch else ():
        alike = (other.name, other.local_world_size) == (hello.worker, hello.local_world_size)
        if other.launch == hello.launch and not (alike or (other.name == hello.worker and not other.known_in_person)):
            return f"the start {hello.launch} that it names is of {other.name}, with {other.local_world_size} processes"
    return None


def _fault_in_own_plan(hello: m.Hello) -> str | None:
    """What is wrong with the generation that a worker says to be in, if anything."""
    if hello.plan is None:
        return None
    fault = fault_in_plan(hello.plan, hello.virtual_nodes)
    if fault is None and hello.plan.rank_of(hello.worker, hello.incarnation) is None:
        fault = "it is no member of it"
    return fault


def fault_in_plan(plan: m.Plan, virtual_nodes: int | None) -> str | None:
    """What is wrong with a generation that somebody says to be in, if anything."""
    fault = fault_in_number(plan.generation)
    if fault is not None:
        return fault
    if not plan.members:
        return "it has no members"
    if len({member.incarnation for member in plan.members}) != len(plan.members):
        return "a member is in it twice"
    if len({(member.launch_id, member.worker) for member in plan.members}) != plan.workers:
        return "two workers in it have one start"
    first = 0
    for member in plan.members:
        if member.first != first or member.last <= member.first:
            return "its virtual nodes are not divided among its members"
        first = member.last
    if virtual_nodes is not None and first != virtual_nodes:
        return f"it is about {counted(first, 'virtual node')}"
    return None


def _went_on_elsewhere(job: JobState, hello: m.Hello) -> bool:
    """Whether that process is in a generation of another coordinator: this one was cut off, not the process."""
    plan = hello.plan
    return (
        plan is not None
        and plan.generation > job.running_generation
        and job.plan_of(plan.generation) is None
        and plan.rank_of(hello.worker, hello.incarnation) is not None
        and fault_in_plan(plan, job.virtual_nodes) is None
    )


def fault_in_number(generation: m.Generation) -> str | None:
    """What is wrong with the number of a generation, if anything."""
    return None if lineage.is_possible(generation) else "no such generation is ever made"


def _bound(job: JobState, hello: m.Hello) -> bool:
    """Whether the job's number of virtual nodes is more than the word of a process that is gone again."""
    return job.trained or any(
        incarnation != hello.incarnation and not job.roster.is_lost(incarnation) for incarnation in job.roster.workers
    )


def _other_reproducibility(job: JobState, hello: m.Hello) -> str | None:
    """A sentence when a worker was started for a job of the other kind."""
    if job.reproducibility in (None, hello.reproducibility) or not _bound(job, hello):
        return None
    return (
        f"{hello.worker} is {hello.reproducibility} and the job {job.reproducibility}; give all workers the same "
        "reproducibility"
    )


def _foreign_machine(job: JobState, hello: m.Hello) -> str | None:
    """A sentence when a worker's machine does not fit those that are there, or would not give the same bits."""
    tested = hello.reproducibility == "bitwise" and not hello.failing
    for incarnation, contact in job.roster.contacts.items():
        # What is cheap first: a thousand workers are each compared with a thousand.
        other_bits = tested and not computes_the_same(hello, contact)
        if contact.fingerprint == "" or (contact.fingerprint == hello.fingerprint and not other_bits):
            continue
        if incarnation == hello.incarnation or job.roster.is_lost(incarnation):
            continue
        if contact.fingerprint != hello.fingerprint:
            return (
                f"{hello.worker} runs [{hello.fingerprint[:MAX_REASON]}] and the job "
                f"[{contact.fingerprint[:MAX_REASON]}]: the results would differ; "
                "use one image, one VIRTUALFLOW_THREADS and one PYTHONHASHSEED for all workers"
            )
        there = contact.device[:MAX_REASON]
        where = f"{hello.worker} runs on [{hello.device[:MAX_REASON]}] and the job on [{there}]"
        if hello.device == contact.device:
            where = f"{hello.worker} and the job both run on [{there}]"
        found = "a self-test gave other bits: the bits of the training would differ"
        if not (hello.self_test and contact.self_test):
            found = (
                "not both could run the self-test, so nobody knows that their bits are equal; the log of the worker "
                "that could not says why"
            )
        return f"{where}, and {found}; use one machine type, or ask for statistical reproducibility"
    return None


def computes_the_same(one: m.Hello | Contact, other: m.Hello | Contact) -> bool:
    """Whether two workers compute the same bits, as far as their self-tests tell.

    Equal digests admit different devices, and different digests refuse what looks like the same one. Without a
    self-test, the names of the devices decide.
    """
    return one.self_test == other.self_test and (bool(one.self_test) or one.device == other.device)


# --- the runs of a script ---------------------------------------------------------------------------------------------
#
# A script may train more than once (pretrain, then finetune; folds; a sweep). The members of a run reach its end
# together and go on to the next one by themselves, so a worker that says Hello from a later run brings the job there.
# One that begins anew begins with the script's first run, and hears that it is over.


def follow_run(state: JobState, hello: m.Hello, now: float) -> None:
    """Go on to the run that a worker is in, if the one before it is over or nobody here knows of any."""
    if hello.run <= state.run or state.failed:
        return
    unknown = state.running is None and not state.trained
    if state.phase == "done" or unknown or hello.plan is not None:
        _begin_run(state, hello, now)


def run_over(state: JobState, hello: m.Hello) -> m.RunOver | None:
    """What to tell a worker whose run is over; ``None``: it is in the job's run, or ahead of it."""
    if hello.run >= state.run:
        return None
    return m.RunOver(state.run, next((result for result in state.runs if result.run == hello.run), None))


def describe_run_over(told: m.RunOver) -> str:
    """The same in words, for a worker that knows of one run only."""
    return f"this run of the script is over, and the job is in run {told.current}"


def ahead_of_job(state: JobState, hello: m.Hello) -> str | None:
    """Why a worker cannot be in a later run than the job, in one sentence; ``None``: it is not."""
    if hello.run <= state.run or state.failed:
        return None
    return (
        f"{hello.worker} is in run {hello.run} of its script, and the job still in run {state.run}: all workers must "
        "go through the same with vf.elastic(...) blocks, in the same order"
    )


def _begin_run(state: JobState, hello: m.Hello, now: float) -> None:
    """Forget all that was about the run before, but for what it has ended with."""
    history, result = state.history, state.history.result
    known = {run.run: run for run in hello.runs} | {run.run: run for run in state.runs}
    if result is not None:
        known[state.run] = m.RunResult(
            state.run, result.step, history.total_steps, result.digest, result.metrics, result.stopped_early
        )
    known = {number: run for number, run in known.items() if number < hello.run}
    state.runs = tuple(known[number] for number in sorted(known))[-MAX_RUNS:]
    # Of runs that nobody remembers any more, the steps were counted while they were.
    state.earlier_steps = max(state.earlier_steps + (result.step if result is not None else 0), _steps_of_runs(state))
    state.run = hello.run
    state.virtual_nodes = state.reproducibility = None
    state.classes = ()
    state.running = state.proposed = None
    state.prepared = set()
    state.plans.clear()
    state.withdrawn.clear()
    state.broken, state.contested = {}, {}
    state.settled = state.failures_counted = m.NO_GENERATION
    state.rebuilds, state.waiting_since = 0, now
    state.trained = state.told_done = False
    state.memory_copy = None
    history.begin_run()
    for incarnation, worker in list(state.roster.workers.items()):
        if worker.connected and not worker.done and incarnation != hello.incarnation:
            # It waits to join a run that is over.
            state.send(incarnation, m.RunOver(state.run, None))
        if worker.done or worker.connected:
            del state.roster.workers[incarnation], state.roster.contacts[incarnation]
        else:
            state.roster.workers[incarnation] = replace(worker, entered=None, stranded=False, ready_at=None)
    before = next((run for run in state.runs if run.run == state.run - 1), None)
    ended = f"; run {before.run} ended after {before.step} steps, digest {before.digest}" if before is not None else ""
    state.tell("run", f"run {state.run} of the script begins{ended}")


def _steps_of_runs(state: JobState) -> int:
    return sum(run.step for run in state.runs)
