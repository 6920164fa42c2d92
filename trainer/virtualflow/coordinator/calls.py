"""What calls over HTTP do to the state of the job: those of whoever starts its workers and signals it."""

from __future__ import annotations

from virtualflow.coordinator.generations import confirm_end, declare_lost, mark_draining, withdraw
from virtualflow.coordinator.roster import UnknownWorker
from virtualflow.coordinator.state import JobState
from virtualflow.protocol import http_api
from virtualflow.protocol import messages as m
from virtualflow.protocol.http_api import ENDED
from virtualflow.protocol.wording import counted


def carry_out(state: JobState, call: http_api.Call, now: float) -> str:
    """Do what a call says; the answer is one sentence. To make a call again does no harm.

    Raises:
        UnknownWorker: none of the job's workers bears the name (and incarnation) that the call is about.
    """
    match call:
        case http_api.DrainCall():
            return _drain(state, call, now)
        case http_api.GoneCall():
            return _gone(state, call)
        case http_api.ScaleCall():
            return _scale(state, call)
        case http_api.HoldCall(step):
            return _hold(state, step)
        case http_api.StopCall(reason):
            return _stop(state, reason)
        case http_api.FailCall(reason):
            if state.phase not in ENDED:
                state.fail(reason)
            return f"the job has failed: {state.history.error}" if state.failed else f"the job is {state.phase} already"
        case http_api.BeginCall():
            return _begin(state, call)


def _drain(state: JobState, call: http_api.DrainCall, now: float) -> str:
    found = [state.roster.named(name) for name in call.workers]
    seconds = state.settings.drain_grace if call.deadline is None else call.deadline
    for worker in found:
        for incarnation in mark_draining(state, worker, now + seconds, call.reason):
            state.send(incarnation, m.Drain(seconds, call.reason))
    return f"{', '.join(call.workers)} will leave within {seconds:g} s"


def _gone(state: JobState, call: http_api.GoneCall) -> str:
    roster = state.roster
    try:
        worker = roster.named(call.worker, call.incarnation)
    except UnknownWorker:
        if not roster.was_here(call.worker, call.incarnation):
            if call.incarnation is not None and call.incarnation not in roster.workers:
                # A coordinator that has just started may hear of the generation that it was in later than this.
                roster.remember_over(call.worker, call.incarnation, call.reason)
                confirm_end(state, call.incarnation)
            raise
        if call.incarnation is not None:
            confirm_end(state, call.incarnation)
        return f"{call.worker} is gone already"
    declare_lost(state, worker.incarnation, call.reason)
    confirm_end(state, worker.launch_id)
    return f"{worker.name} is gone: {call.reason}"


def _scale(state: JobState, call: http_api.ScaleCall) -> str:
    if call.workers != state.wanted:
        why = f" ({call.reason})" if call.reason else ""
        state.tell("scale", f"{counted(call.workers, 'worker')} wanted instead of {state.wanted}{why}")
    state.wanted = call.workers
    if call.reason != state.wanted_reason:
        state.wanted_reason = call.reason
        state.note_news()
    if call.minimum is not None and call.minimum != state.minimum:
        state.minimum = call.minimum
        state.note_news()
    return f"{counted(call.workers, 'worker')} wanted"


def _hold(state: JobState, step: int | None) -> str:
    state.hold = step
    for incarnation in state.roster.workers:
        state.send(incarnation, m.Hold(state.hold_in_run))
    state.note_news()
    return "nothing is held" if step is None else f"no step after {step} starts"


def _stop(state: JobState, reason: str) -> str:
    """All workers leave at the same step; before the first one they end at once."""
    if state.stop is None:
        state.stop = reason
        state.tell("stop", f"stopping: {reason}")
        if state.running is None:
            withdraw(state)
    return f"stopping: {reason}"


def _begin(state: JobState, call: http_api.BeginCall) -> str:
    if call.ticket != state.ticket:
        return "nothing waits for that word: it is about another coordinator, or was given already"
    state.others = call.others
    return f"{counted(len(call.others), 'worker')} may be in a generation that is not known here"
