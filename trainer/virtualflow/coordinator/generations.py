"""Generations and their members: proposed, learnt of, withdrawn; drained and declared lost.

What messages, calls and decisions have in common; a function of the state and the time each.
"""

from __future__ import annotations

import logging

from virtualflow.coordinator.balance import arrange, split
from virtualflow.coordinator.settings import APART
from virtualflow.coordinator.snapshot import Proposal, Worker
from virtualflow.coordinator.state import JobState
from virtualflow.protocol import lineage
from virtualflow.protocol import messages as m
from virtualflow.protocol.settings import MAX_REASON, MAX_TEXT, MAX_WORKERS

logger = logging.getLogger("virtualflow.coordinator")


def propose(state: JobState, proposal: Proposal, reason: str, now: float) -> None:
    """Make the next generation, and tell its members and those who leave by it."""
    state.counter += 1
    cluster = state.snapshot()
    members = arrange(cluster, proposal.members)
    ranges = split(cluster, members, state.settings, now) if members else []
    workers, contacts = state.roster.workers, state.roster.contacts
    plan = m.Plan(
        m.Generation(state.incarnation, state.counter),
        proposal.mode,
        tuple(
            m.Member(workers[i].name, i, contacts[i].address, r.start, r.stop, workers[i].launch)
            for i, r in zip(members, ranges, strict=True)
        ),
        tuple(workers[i].name for i in proposal.joiners),
        proposal.cause,
        reason[:MAX_TEXT],
        _known_to_have_ended(state, proposal),
    )
    told = {x.incarnation: None for known in (*state.newest, plan) for x in known.members}
    if proposal.mode == "recovery":
        # A communicator that broke with nobody lost; after a loss the counting begins anew.
        broke = state.proposed if state.proposed and state.proposed.mode == "recovery" else state.running
        same = broke is not None and {x.incarnation for x in broke.members} == set(proposal.members)
        state.rebuilds = state.rebuilds + 1 if same else 0
    state.proposed, state.prepared, state.proposed_at = plan, set(), now
    state.plans.append(plan)
    state.rendezvous.forget_before(state.running_generation)
    for incarnation in told:
        state.send(incarnation, plan)
    state.note_news()


def _known_to_have_ended(state: JobState, proposal: Proposal) -> tuple[str, ...]:
    """Members of generations that workers may have been in, but for those of the new one."""
    known = {x.incarnation: None for plan in (*state.plans, *state.contested.values()) for x in plan.members}
    return tuple(i for i in known if i in state.roster.ended and i not in proposal.members)[-MAX_WORKERS:]


def number_above(state: JobState, generation: m.Generation) -> None:
    """Give higher numbers than that from now on: a worker that was told of it listens to no lower one.

    The clock of an earlier coordinator may have been ahead of this one's. Two coordinators that hear of it at once do
    not take the same number, as they were not started at the same time.
    """
    state.counter = max(state.counter, generation.counter)
    if generation.incarnation > state.incarnation:
        state.incarnation = min(generation.incarnation + 1 + state.incarnation % APART, lineage.LAST_INCARNATION)


def learn(state: JobState, plan: m.Plan, now: float) -> None:
    """A worker is in this generation: it is the running one if it is the newest, and its members exist."""
    number_above(state, plan.generation)
    if plan.generation <= state.running_generation:
        return
    made_elsewhere = state.plan_of(plan.generation) is None
    proposed = state.proposed
    if state.running is None and proposed is not None and plan.generation < proposed.generation:
        # News of the first generation may come after some of its members were to go on without the others.
        members = {member.incarnation for member in plan.members}
        goes_on = not made_elsewhere and all(member.incarnation in members for member in proposed.members)
        if not goes_on:
            withdraw(state)  # an initial start, but there is a training to go on with
    state.running, state.running_since = plan, now
    state.plans.append(plan)
    if state.proposed is not None and state.proposed.generation <= plan.generation:
        state.proposed, state.prepared = None, set()
    for member in plan.members:
        for known in (member.incarnation, member.launch_id) if made_elsewhere else ():
            if state.roster.is_suspected(known):
                # This coordinator was cut off from it; another one was not.
                state.roster.trust_again(known)
        state.roster.add_heard_of(member, now)
    state.broken = {known: since for known, since in state.broken.items() if known >= plan.generation}
    if plan.mode == "planned" and any(state.roster.workers[member.incarnation].stranded for member in plan.members):
        # It could not complete the step after which the others entered: only a recovery calls it away.
        state.broken.setdefault(plan.generation, now)
    if plan.members:
        declare_those_left_behind_lost(state)
    state.note_news()


def count_above(state: JobState, floor: m.Generation) -> None:
    """A worker knows of that generation, from the checkpoint directory perhaps: a first one is numbered above it.

    The clock that this coordinator's numbers begin from may be slow, and nobody left who was in a generation. While one
    is running, the number tells of another lineage, which is not to be overtaken: ``learn`` has what follows from its
    members.
    """
    if state.running is None:
        first = lineage.number_above(floor, 0.0)
        state.counter = max(state.counter, first.counter - 1)
        if floor.incarnation > state.incarnation:
            state.incarnation = first.incarnation


def withdraw(state: JobState) -> None:
    """Nobody has entered the proposed generation, and nobody is to."""
    if state.proposed is not None:
        state.withdrawn.append(state.proposed.generation)
        state.proposed, state.prepared = None, set()
        state.note_news()


def mark_draining(state: JobState, worker: Worker, deadline: float, reason: str) -> list[str]:
    """Note that a worker will be taken away at ``deadline``, with all its processes; to which of them that is news."""
    processes = [process for process in state.roster.siblings(worker) if process.present]
    if not any(process.draining for process in processes):
        state.tell("drain", f"{worker.name} drains: {reason}")
    news = [x.incarnation for x in processes if not (x.draining and x.deadline is not None and x.deadline <= deadline)]
    for incarnation in news:
        state.roster.update(incarnation, draining=True, deadline=deadline)
    return news


def declare_lost(state: JobState, incarnation: str, why: str, *, does_not_fit: bool = False, **blame: bool) -> None:
    """No generation counts on that worker any more, with all its processes, and it must not come back; ``why`` is the
    end of a sentence.

    ``does_not_fit`` and ``blame`` are what ``LostWorker`` tells of it.
    """
    worker, roster = state.roster.workers[incarnation], state.roster
    if not worker.present:
        return
    processes = [x for x in roster.siblings(worker) if x.present and not x.done] or [worker]
    for process in processes:
        roster.update(process.incarnation, gone=why[:MAX_REASON])
    if worker.launch:
        roster.remember_over(worker.name, worker.launch, why)  # for those of its processes that have not come yet
    if any(not process.done for process in processes):
        address = roster.contacts[incarnation].address
        roster.note_lost(worker.name, worker.launch_id, address, why, does_not_fit=does_not_fit, **blame)
        state.tell("lost", f"{worker.name} {'refused' if does_not_fit else 'lost'}: {why}")
    for process in processes:
        state.send(process.incarnation, m.Refuse(f"declared lost: {why}"[:MAX_TEXT]))
    state.note_news()


def confirm_end(state: JobState, ended: str) -> None:
    """A process has ended, or a worker with all its processes, by its own word or that of whoever runs it: nobody need
    wait for it.
    """
    roster = state.roster
    known = [*state.plans, *state.contested.values()]
    of_it = [x.incarnation for x in roster.workers.values() if x.launch == ended]
    of_it += [x.incarnation for plan in known for x in plan.members if x.launch == ended]
    news = [roster.note_ended(incarnation) for incarnation in (*of_it, ended)]
    worker = roster.workers.get(ended)
    if worker is not None and worker.launch:
        processes = roster.siblings(worker)
        if len(processes) == worker.local_world_size and all(x.incarnation in roster.ended for x in processes):
            news.append(roster.note_ended(worker.launch))
    if any(news):
        state.note_news()


def declare_those_left_behind_lost(state: JobState) -> None:
    """What is said to whoever comes later holds for those who came before: the job went on without them.

    An earlier coordinator declared them lost and they have not heard of it; their state may be of another training. Or
    they were to leave, and lack the step after which the others went on: nobody calls them any more.
    """
    running = state.running_generation
    members = {x.incarnation for plan in state.newest for x in plan.members}
    for incarnation, worker in list(state.roster.workers.items()):
        behind = worker.entered is not None and worker.entered < running
        leaves = worker.draining and not worker.stranded
        awaited = leaves or worker.through or incarnation in members
        if behind and not awaited:
            declare_lost(state, incarnation, f"the job went on in generation {running} without this process")


# --- the coordinator's own absence: where nobody reached it, the silence is not the workers' --------------------------


def note_return(state: JobState, worker: Worker, now: float) -> None:
    """That worker is about to be heard of: if nobody who trains was for long, nobody's silence in that time counts."""
    quiet = state.settings.heartbeat_limit / 2
    if worker.connected and now - worker.last_heard < quiet:
        return  # nearly always, at once
    if worker.incarnation in state.silent:
        state.silent -= {worker.incarnation}
        state.note_news()
    cluster = state.snapshot()
    if worker not in cluster.training:
        return
    if now - cluster.heard_at >= quiet:
        logger.info("nobody who trains was heard of for %.1f s", now - cluster.heard_at)
        excuse(state, now - cluster.heard_at, now)
        state.note_news()
    elif cluster.isolated:
        state.excused_at = now
    elif not worker.connected and cluster.may_return(worker, state.settings.reconnect_grace):
        state.returned_at = now


def excuse(state: JobState, seconds: float, now: float) -> None:
    """The coordinator itself did not run, or was cut off, for so long: nobody's silence in that time counts."""
    state.excused_at = now
    state.history.series.miss()
    state.roster.shift(seconds, now)
    state.broken = {generation: min(now, since + seconds) for generation, since in state.broken.items()}
    state.proposed_at = min(now, state.proposed_at + seconds)
