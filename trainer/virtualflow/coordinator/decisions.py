"""The membership decision applied to the state of the job, and what workers are told when their part is over.

What is decided, and why, is the pure part: :mod:`virtualflow.coordinator.membership`.
"""

from __future__ import annotations

import logging

from virtualflow.coordinator import hangs, membership
from virtualflow.coordinator.generations import declare_lost, propose, withdraw
from virtualflow.coordinator.roster import Contact
from virtualflow.coordinator.snapshot import Decision
from virtualflow.coordinator.state import JobState
from virtualflow.protocol import messages as m
from virtualflow.protocol.http_api import ENDED
from virtualflow.protocol.settings import MAX_TEXT
from virtualflow.protocol.wording import describe_end

logger = logging.getLogger("virtualflow.coordinator")

_SILENT = 6
"""Heartbeat limits after which a worker is told to be silent whose connection stands: shorter ones may be pauses of a
process that lives."""
_ROUNDS = 8
"""Decisions that may follow from one another at one moment; the rules settle after two or three."""


def decide(state: JobState, now: float) -> float | None:
    """Make the membership decision and apply it; the time at which to come back, if any."""
    wake_at = None
    for _ in range(_ROUNDS):
        _end_build(state, now)
        if state.phase != "failed":  # then all are told to end, and whoever closes its connections is not lost
            _apply_losses(state, now)
        _take_word(state)
        if state.phase in ENDED:
            _dismiss(state)
            break
        decision = membership.decide(now, state.snapshot(), state.settings)
        wake_at = decision.wake_at
        if not _apply(state, decision, now):
            break
    _release(state)
    _relay(state)
    members = {x.incarnation for plan in state.newest for x in plan.members}
    state.roster.prune(members, lambda incarnation: state.roster.contacts[incarnation].waits_for_release)
    silent_at = _note_silence(state, now)
    cluster, settings = state.snapshot(), state.settings
    times = [wake_at, silent_at, membership.next_limit(now, cluster, settings)]
    times.append(membership.build_ends(cluster, settings))
    # A limit that has passed was taken into account above: to wake for it again would be a busy loop.
    return min((t for t in times if t is not None and t > now), default=None)


def _note_silence(state: JobState, now: float) -> float | None:
    """Note who is silent; when the next one would be."""
    patience = _SILENT * state.settings.heartbeat_limit
    silent_at = {i: worker.last_heard + patience for i, worker in state.roster.workers.items() if worker.connected}
    silent = frozenset(i for i, at in silent_at.items() if at <= now)
    if silent != state.silent:
        state.silent = silent
        state.note_news()
    return min((at for at in silent_at.values() if at > now), default=None)


def _end_build(state: JobState, now: float) -> None:
    """Nobody says what has become of the proposed generation: it is not to hold up all others for ever."""
    ends = membership.build_ends(state.snapshot(), state.settings)
    if ends is not None and ends <= now and state.proposed is not None:
        logger.warning("nobody says what has become of generation %s: proposing anew", state.proposed.generation)
        state.broken[state.proposed.generation] = now


def _apply_losses(state: JobState, now: float) -> None:
    """Count failed attempts to connect against those they may be due to, and declare lost whom nobody waits for."""
    suspects = membership.find_suspects(now, state.snapshot(), state.settings)
    if suspects is not None and state.proposed is not None:
        state.failures_counted = state.proposed.generation
        for incarnation in suspects:
            state.roster.update(incarnation, failures=state.roster.workers[incarnation].failures + 1)
    for incarnation, delay in hangs.find_delays(state.snapshot(), state.settings).items():
        contact = state.roster.contacts[incarnation]
        if delay.share >= state.settings.stacks_share and not contact.asked_for_stacks:
            contact.asked_for_stacks = True
            state.send(incarnation, m.ShowStacks())
    lost = membership.find_lost(now, state.snapshot(), state.settings)
    hung = hangs.find_hung(state.snapshot(), state.settings) if lost else {}
    for incarnation, why in lost.items():
        declare_lost(state, incarnation, why, hung=hung.get(incarnation) == why)


def _take_word(state: JobState) -> None:
    """All who may be in a generation are here at one moment: from now on this coordinator knows all generations."""
    if state.ticket is not None and state.unheard == frozenset():
        state.ticket = None
        state.note_news()


def _apply(state: JobState, decision: Decision, now: float) -> bool:
    """Do as decided; whether that may call for a further decision."""
    reason = decision.reason[:MAX_TEXT]
    if reason != state.reason:
        state.reason = reason
        logger.info("%s", state.reason)
        state.note_news()
    if decision.fail:
        state.fail(decision.reason)
    elif decision.over:
        state.trained = state.trained or state.running is not None
        if state.trained or state.proposed is not None:
            # Another coordinator may have handed the training on to workers that this one has never heard of. Or those
            # who were to begin have begun, and it was this coordinator that did not hear of it.
            state.ask_who_may_train()
        state.running = state.history.progress = None
        state.rebuilds, state.waiting_since = 0, now
        withdraw(state)
        state.note_news()
    elif decision.proposal is not None:
        propose(state, decision.proposal, decision.reason, now)
    else:
        return False
    return True


def _dismiss(state: JobState) -> None:
    """The job is over: tell everyone who does not know it."""
    phase, history = state.phase, state.history
    if history.settle():
        state.note_news()
    if phase == "done" and not state.told_done and history.result is not None:
        state.told_done = True
        result = history.result
        state.tell("done", describe_end(result.step, history.total_steps, result.stopped_early))
    text = {"failed": f"the job has failed: {history.error}", "done": "the job is complete"}.get(
        phase, f"the job was stopped: {state.stop}"
    )
    end = m.End(phase == "failed", text[:MAX_TEXT])
    for incarnation, worker in state.roster.workers.items():
        contact = state.roster.contacts[incarnation]
        knows = contact.told_end or (worker.done and phase == "done")
        # Where the job stops, it completes the step at which all leave, and says so.
        leaves = phase == "stopped" and worker.entered is not None and state.running is not None
        if worker.connected and worker.present and not knows and not leaves:
            contact.told_end = True
            state.send(incarnation, end)


def _release(state: JobState) -> None:
    """Let those go who are through, once nobody needs their connections any more."""
    over = state.phase in ("done", "failed")
    for incarnation, contact in state.roster.contacts.items():
        if contact.waits_for_release and (over or _is_relieved(state, incarnation, contact)):
            contact.waits_for_release = False
            state.send(incarnation, m.Release())


def _is_relieved(state: JobState, incarnation: str, contact: Contact) -> bool:
    """Whether all others are in the generation by which that worker left, or a later one, or have left as well."""
    workers, roster = state.roster.workers, state.roster
    if state.running is not None and not state.running.members:
        others = [i for i, worker in workers.items() if worker.entered is not None]
        return all(roster.is_lost(i) or roster.contacts[i].told_end for i in others)
    others = [x.incarnation for x in state.running.members] if state.running is not None else []
    left_by = contact.left_by or m.NO_GENERATION
    return workers[incarnation].left and all(
        roster.is_lost(i) or (workers[i].entered or m.NO_GENERATION) >= left_by for i in others
    )


def _relay(state: JobState) -> None:
    """Tell the members of a generation the keys that came since the last time."""
    plans = {plan.generation: plan for plan in state.newest}
    for keys in state.rendezvous.take():
        for member in plans[keys.generation].members if keys.generation in plans else ():
            state.send(member.incarnation, keys)
