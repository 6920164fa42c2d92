"""What the messages of workers do to the state of the job.

What a worker says is checked against what can be true: a message about a generation that it is no member of, or
that is over, changes nothing.
"""

from __future__ import annotations

import logging
from typing import get_args

from msgspec import structs

from virtualflow.coordinator.admission import fault_in_plan
from virtualflow.coordinator.balance import note_pace
from virtualflow.coordinator.generations import (
    confirm_end,
    declare_lost,
    declare_those_left_behind_lost,
    learn,
    mark_draining,
    note_return,
)
from virtualflow.coordinator.hangs import describe, least_delay
from virtualflow.coordinator.settings import KNOWN_GENERATIONS
from virtualflow.coordinator.snapshot import Worker
from virtualflow.coordinator.state import JobState
from virtualflow.protocol import messages as m
from virtualflow.protocol.http_api import ENDED
from virtualflow.protocol.settings import MAX_TEXT
from virtualflow.protocol.wording import counted

logger = logging.getLogger("virtualflow.coordinator")

_NOTES: dict[str, m.NoteKind] = {kind: kind for kind in get_args(m.NoteKind)}
"""Kinds of notes that this version knows; one of a newer worker is for people to read all the same."""


def handle(state: JobState, incarnation: str, message: m.FromWorker, now: float) -> None:
    """Take one message of an admitted worker; what is stale is ignored."""
    worker = state.roster.workers.get(incarnation)
    if worker is None or worker.gone is not None or not worker.connected:
        return
    note_return(state, worker, now)
    # What it did is no news any more once it says something else.
    state.roster.update(incarnation, last_heard=now, doing=None)
    match message:
        case m.Hello():
            return
        case m.Heartbeat(doing, usage):
            if usage is not None:  # which nothing is decided by
                state.roster.contacts[incarnation].usage = usage
            if not _beats(state, worker, doing):
                return
        case m.Stacks(place, text):
            state.roster.update(incarnation, place=place)
            about = f", {describe(worker.doing)}" if worker.doing is not None else ""
            state.tell("warning", f"{worker.name} makes no progress{about}: {text}"[:MAX_TEXT])
        case m.RenewLease(number):
            state.send(incarnation, m.Lease(number))
            state.note_news()  # it is sent in the turn that follows
            return
        case m.Ready():
            state.roster.update(incarnation, ready_at=worker.ready_at or now)
        case m.Prepared(generation):
            if state.proposed is not None and generation == state.proposed.generation:
                state.prepared.add(incarnation)
        case m.Entered(plan, step, restored):
            _entered(state, incarnation, plan, step, restored, now)
        case m.EnteredTold(generation, step, restored):
            told = state.plan_of(generation)
            if told is not None:
                _entered(state, incarnation, told, step, restored, now)
        case m.Pace():
            _paced(state, worker, message, now)
            return
        case m.Progress():
            _progressed(state, message)
            return
        case m.Resumed(change):
            _settle(state, change.generation)
            state.history.merge_change(change)
        case m.Broken(generation, step, detail):
            if message.contested is not None:
                _contest(state, message.contested)
            if message.convicted is not None:
                _convict(state, worker, generation, message.convicted, detail)
            _broke(state, worker, generation, step, detail, now)
        case m.DrainRequest(reason):
            for other in mark_draining(state, worker, now + state.settings.drain_grace, reason):
                if other != incarnation:
                    state.send(other, m.Drain(state.settings.drain_grace, reason))
        case m.Left(generation, step):
            _left(state, worker, generation, step, now)
        case m.Failed():
            _failed(state, worker, message)
        case m.Done():
            _done(state, worker, message)
        case m.Note(kind, text, None):
            state.tell(_NOTES.get(kind, "info"), text)
        case m.Note(memory=plan):  # its own log has it in words
            state.roster.contacts[incarnation].memory = plan
        case m.Checkpointed(checkpoint):
            former = state.history.take_checkpoint(checkpoint)
            if former is not None:
                text = (
                    f"{worker.name} writes its checkpoints to {checkpoint.directory}, and those before it are in "
                    f"{former}: a restarted job finds only one of them; give all workers one directory, by an absolute "
                    "path or --checkpoint-dir"
                )
                state.tell("warning", text[:MAX_TEXT])
        case m.Publish():
            if any(
                plan.generation == message.generation and _may_publish(plan, worker, message.key)
                for plan in state.newest
            ):
                state.rendezvous.add(incarnation, message)
            return
    state.note_news()


def _may_publish(plan: m.Plan, worker: Worker, key: str) -> bool:
    """Whether a key is a member's to publish: where another one is, only that one says."""
    rank = plan.rank_of(worker.name, worker.incarnation)
    return rank is not None and (key == m.member_key(rank) or not key.startswith(m.MEMBER))


def disconnect(state: JobState, incarnation: str, now: float) -> None:
    """A worker's connection closed; whether that means anything is for the membership decision."""
    worker = state.roster.workers.get(incarnation)
    if worker is not None and worker.connected:
        state.roster.update(incarnation, connected=False, disconnected_at=now)
        state.note_news()


def _beats(state: JobState, worker: Worker, doing: m.Doing | None) -> bool:
    """Take note of what a training thread does; whether a decision may be due to that."""
    comes_on = doing is None or doing.waits or doing.seconds < least_delay(state.settings)
    if comes_on and state.roster.contacts[worker.incarnation].asked_for_stacks:
        state.roster.contacts[worker.incarnation].asked_for_stacks = False
        state.roster.update(worker.incarnation, place="")
    state.roster.update(worker.incarnation, doing=doing)
    return not comes_on


def _entered(state: JobState, incarnation: str, told: m.Plan, step: int, restored: bool, now: float) -> None:
    known = state.plan_of(told.generation)
    if known is None and fault_in_plan(told, state.virtual_nodes) is not None:
        return
    plan = known or told
    if not plan.includes(incarnation):
        return
    if plan.generation in state.withdrawn:
        # It began anew just when one that has the state of the training came back.
        declare_lost(state, incarnation, f"generation {plan.generation}, which it entered, was withdrawn")
        return
    entered = state.roster.workers[incarnation].entered or m.NO_GENERATION
    state.roster.update(incarnation, entered=max(entered, plan.generation), stranded=False, failures=0)
    if plan.generation < state.running_generation:
        return
    first, begins = state.running is None, len(plan.joiners) == len(plan.members)
    fresh = plan.generation > state.running_generation
    learn(state, plan, now)
    if fresh and plan.generation.incarnation == state.incarnation:
        state.history.began = state.history.wall if state.history.began is None else state.history.began
        state.tell("generation", f"generation {plan.generation}: {counted(plan.workers, 'worker')} ({plan.reason})")
    if fresh and restored and first:
        state.tell("restored", f"resumed from the checkpoint of step {step}")
    if fresh and begins:
        state.history.began_at(step)
    else:
        state.history.reached(step)
    state.trained = True


def _progressed(state: JobState, progress: m.Progress) -> None:
    if progress.generation < state.running_generation:
        return
    state.note_non_finite(progress.non_finite)
    news = state.history.is_news(progress)
    members, history = state.running.workers if state.running is not None else 0, state.history
    history.series.add(progress.step, progress.steps_per_second, members, progress.metrics, history.wall)
    if history.take_progress(progress):
        _settle(state, progress.generation)
        state.rebuilds = 0
    if state.history.settle(progress) or news:
        state.note_news()
    else:
        state.version += 1


def _paced(state: JobState, worker: Worker, pace: m.Pace, now: float) -> None:
    if worker.entered is None or pace.generation > worker.entered or not pace.low <= pace.median <= pace.high:
        return
    if worker.pace is None or pace.generation >= worker.pace.generation:
        times = note_pace(state.snapshot(), worker, pace, now)
        state.roster.update(worker.incarnation, pace=pace, times=times)
        state.version += 1


def _broke(state: JobState, worker: Worker, generation: m.Generation, step: int, detail: str, now: float) -> None:
    running = state.running
    if running is not None and not running.members and worker.entered is not None:
        # The others have left at the end of a step that it could not complete.
        declare_lost(state, worker.incarnation, f"it could not leave with the others: {detail}")
        return
    if generation == worker.entered:
        state.roster.update(worker.incarnation, stranded=True)
        if running is not None:
            declare_those_left_behind_lost(state)
        if running is not None and running.mode == "planned" and running.includes(worker.incarnation):
            generation = max(generation, state.running_generation)
    if generation < state.running_generation or generation in state.broken:
        return
    plan = state.plan_of(generation)
    if plan is not None and not plan.includes(worker.incarnation):
        return
    if plan is None and len(state.broken) >= KNOWN_GENERATIONS:
        return  # of generations that nobody has told of yet, some are enough
    state.broken[generation] = now
    logger.info("%s: generation %s broke at step %d: %s", worker.name, generation, step, detail)


def _settle(state: JobState, generation: m.Generation) -> None:
    """A step of that generation is complete, so all of its members know that it counts."""
    if generation <= state.running_generation:
        state.settled = max(state.settled, generation)
        state.contested = {number: plan for number, plan in state.contested.items() if number > generation}


def _contest(state: JobState, plan: m.Plan) -> None:
    """A worker knows of a generation without a majority of which no other counts.

    It may be the newest that is settled: the running one has been entered, and may not count for all that.
    """
    if plan.generation >= state.settled and len(state.contested) < KNOWN_GENERATIONS:
        state.contested[plan.generation] = plan


def _convict(state: JobState, worker: Worker, generation: m.Generation, convicted: str, detail: str) -> None:
    """A member came to wrong gradients, as all of its generation have seen: nobody counts on it any more.

    That stays true if others have gone on from that generation since, because they had lost somebody else.
    """
    plan = state.plan_of(generation)
    members = plan is not None and plan.includes(worker.incarnation) and plan.includes(convicted)
    if members and convicted in state.roster.workers:
        declare_lost(state, convicted, detail, convicted=True)


def _failed(state: JobState, worker: Worker, failed: m.Failed) -> None:
    """The job has failed; or it goes on without a worker whose memory is too small, or whose machine had a fault, as
    long as there is another one.

    After a fault another one must know as much of the training. If none is left, all have met it, as they do what is in
    the data or in the script.
    """
    state.roster.contacts[worker.incarnation].crashed = True
    state.note_non_finite(failed.non_finite)
    _note_odd(state, worker, failed.odd)
    if state.phase in ENDED:
        return
    others = [
        other
        for other in state.roster.workers.values()
        if other.launch_id != worker.launch_id and other.present and not other.through
    ]
    if failed.machine_fault and any(other.may_have_state or not worker.may_have_state for other in others):
        declare_lost(state, worker.incarnation, failed.error, machine_fault=True)
        confirm_end(state, worker.incarnation)
        return
    if failed.does_not_fit:
        if others:
            declare_lost(state, worker.incarnation, failed.error, does_not_fit=True)
            confirm_end(state, worker.incarnation)
            return
        address = state.roster.contacts[worker.incarnation].address
        state.roster.note_lost(worker.name, worker.launch_id, address, failed.error, does_not_fit=True)
    state.history.does_not_fit = failed.does_not_fit
    where = f" in step {failed.step}" if failed.step else ""
    state.fail(failed.error, failed.traceback, event=f"{worker.name} failed{where}: {failed.error}")


def _note_odd(state: JobState, worker: Worker, odd: tuple[str, ...]) -> None:
    """These members hold another state than most, as all have seen: whoever runs them is told whose machines to doubt.

    Nobody is declared lost for that: the job is over.
    """
    running, known = state.running, state.roster
    if running is None or not running.includes(worker.incarnation):
        return
    for incarnation in odd:
        if running.includes(incarnation) and incarnation in known.workers:
            member, address = known.workers[incarnation], known.contacts[incarnation].address
            known.note_lost(
                member.name, member.launch_id, address, "its state is not that of most others", convicted=True
            )


def _left(state: JobState, worker: Worker, generation: m.Generation, step: int, now: float) -> None:
    plan = state.plan_of(generation)
    # Only a member of the running generation sees the others go on without it. A worker of a generation that this
    # coordinator did not know has said so in its Hello, which made that one the running one.
    sees_others = worker.entered is not None and worker.entered == state.running_generation
    known = plan is not None and generation not in state.withdrawn and not plan.includes(worker.incarnation)
    if plan is not None and known and sees_others:
        learn(state, plan, now)
    contact = state.roster.contacts[worker.incarnation]
    contact.waits_for_release, contact.left_by = True, generation
    if not worker.left:
        state.roster.update(worker.incarnation, left=True, deserted=generation == m.NO_GENERATION)
        confirm_end(state, worker.incarnation)
        if worker.entered is not None:
            state.history.step = max(state.history.step, step)
        if all(x.left for x in state.roster.siblings(worker) if x.incarnation != worker.incarnation):
            state.tell("left", f"{worker.name} left after step {step}")


def _done(state: JobState, worker: Worker, done: m.Done) -> None:
    state.note_non_finite(done.non_finite)
    state.roster.update(worker.incarnation, done=True)
    state.roster.contacts[worker.incarnation].waits_for_release = True
    result = state.history.result
    bits_count = state.reproducibility != "statistical"  # other devices round their own updates differently
    if result is not None and done.digest != result.digest and bits_count and not state.failed:
        state.fail(
            f"{worker.name} ended with weights {done.digest[:12]} and another worker with {result.digest[:12]}: "
            "either code of the script ran on some workers only (under run.leader, for example) and changed the model "
            "or drew random numbers, or these machines compute differently (see docs/explanation/determinism.md)"
        )
        return
    state.history.step = done.step
    if done.step > state.history.series.last_step:  # nobody was there to hear of it when the step was made
        members = state.running.workers if state.running is not None else 0
        state.history.series.add(done.step, 0.0, members, done.metrics, state.history.wall)
    if result is None or done.timed_steps > result.timed_steps:
        state.history.result = done
    if result is not None and not (result.optimizer_digest and done.optimizer_digest):
        # Of a sharded optimizer, one worker has seen the whole.
        whole = result.optimizer_digest or done.optimizer_digest
        state.history.result = structs.replace(state.history.result or done, optimizer_digest=whole)
