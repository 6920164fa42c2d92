"""How a job ends, or an attempt at it: each function returns the status that says so, or ``None`` when it is not so.

A job that is to have no workers comes to rest: they stop behind the same step, with a checkpoint, then all pods go.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from virtualflow.protocol.crashes import Crashes
from virtualflow.protocol.http_api import Status, StopCall
from virtualflow.protocol.messages import NonFinite
from virtualflow.protocol.settings import MAX_REASON
from virtualflow.protocol.termination_message import EXIT_EVICTED
from virtualflow.protocol.wording import counted
from virtualflow_operator import reasons
from virtualflow_operator.api import Failures, JobStatus, Pod, Unfit, format_time, parse_time
from virtualflow_operator.jobs import phases
from virtualflow_operator.jobs.actions import FAILED_GRACE, DeleteJob, Draft, EventMessage
from virtualflow_operator.jobs.conditions import amend, training_health
from virtualflow_operator.jobs.coordinators import unheard
from virtualflow_operator.jobs.job_status_builder import build_status, known_step
from virtualflow_operator.jobs.pod_classification import ClassifiedPod
from virtualflow_operator.jobs.scene import JobFacts
from virtualflow_operator.jobs.workers import templates_accepted
from virtualflow_operator.settings import CrashSettings

_DOUBTED_NODES = 8
"""Of the nodes on which a worker was found to be wrong, a job keeps off so many: the latest."""


def completed(facts: JobFacts, draft: Draft) -> JobStatus | None:
    remote = facts.remote
    ended = facts.witnesses
    if remote is not None and remote.phase == "done":
        if facts.finishing or (ended and not any(pod.succeeded for pod in ended)):
            return None
        return phases.complete(build_status(facts, draft.status), facts.job, remote, facts.now)
    ended = [pod for pod in ended if pod.succeeded]
    if not ended or any(worker.pod.live and worker.standing != "absent" for worker in facts.pods.workers):
        return None
    message = ended[0].exit.last_word if ended[0].exit is not None else None
    assert message is not None
    return phases.complete(build_status(facts, draft.status), facts.job, message, facts.now)


def out_of_time(facts: JobFacts, draft: Draft) -> JobStatus | None:
    started, startup = parse_time(draft.status.start_time), facts.spec.elasticity.startup_deadline_seconds
    over = facts.spec.active_deadline_seconds
    if started is None or facts.spec.suspend or (startup is None and over is None):
        return None
    status = build_status(facts, draft.status)
    limit = startup if status.training_time is None else None
    reason, says = reasons.STARTUP_DEADLINE, "had not begun to train {} s after its start (startupDeadlineSeconds)"
    if over is not None and (limit is None or over <= limit):
        limit, reason, says = over, reasons.DEADLINE, "was not done {} s after its start (activeDeadlineSeconds)"
    if limit is None:
        return None
    draft.wake(started + limit)
    if facts.now < started + limit:
        return None
    message, degraded = f"the job {says.format(limit)}", status.condition("Degraded")
    if degraded is not None and degraded.status != "False":
        message += f": {degraded.message}"
    return phases.failed(status, facts.job, reason, message, facts.now)


def note_doubted_nodes(facts: JobFacts, draft: Draft) -> None:
    """Write down where workers ran that were found to be wrong: their successors keep off these nodes."""
    failures = draft.status.failures
    found = (worker.pod.node for worker in facts.pods.workers if worker.convicted and worker.pod.node)
    nodes = tuple(dict.fromkeys((*failures.nodes, *found)))[-_DOUBTED_NODES:]
    if nodes != failures.nodes:
        draft.amend(failures=msgspec.structs.replace(failures, nodes=nodes))


def note_unfit_groups(facts: JobFacts, draft: Draft) -> None:
    """Write down in which groups nothing fits into a worker's memory: no other is made there before that is changed."""
    if facts.faults:
        return
    failures = draft.status.failures
    templates = facts.hashes.groups
    found = (
        Unfit(worker.pod.group, worker.pod.template, worker.reason[:MAX_REASON]) for worker in facts.pods.of("unfit")
    )
    latest = {unfit.group: unfit for unfit in (*failures.unfit, *found)}
    unfit = tuple(unfit for name, unfit in latest.items() if unfit.template == templates.get(name))
    if unfit != failures.unfit:
        draft.amend(failures=msgspec.structs.replace(failures, unfit=unfit))


def attempt_failed(facts: JobFacts, draft: Draft) -> JobStatus | None:
    """The coordinator says that the job has failed: all start again, or that was the last attempt.

    So it is with a script that ends in an error after its training: nobody knows what it has still to do.
    """
    remote = facts.remote
    after = _ended_after_training(facts)
    if remote is None or not (remote.phase == "failed" or after):
        return None
    message = after or _explain_failure(remote, [worker for worker in facts.pods.workers if worker.convicted])
    if remote.non_finite is not None and facts.spec.on_non_finite == "Stop":
        return _stopped(facts, draft, remote.non_finite)
    crashed = [worker.pod for worker in facts.pods.of("crashed")]
    crashes = facts.settings.crashes
    failures = count_failed_attempt(
        draft.status.failures, crashed, _made_steps(facts, draft), message, facts.now, crashes
    )
    draft.amend(failures=failures)
    if failures.count > facts.spec.backoff_limit:
        return _give_up(facts, draft, message)
    attempt, health = draft.status.attempt + 1, training_health(draft.status, remote)
    draft.events.append(EventMessage.attempt_failed(attempt, message))
    failures = msgspec.structs.replace(failures, unfit=())  # all of them are tried again
    draft.amend(attempt=attempt, coordinator=None, start_ticket=None, failures=failures)
    draft.wake(facts.now + 0.01)
    status = build_status(facts.without_link(), draft.status)
    status = amend(status, facts.job, facts.now, *health)
    return phases.back_off(status, facts.job, facts.now)


def _made_steps(facts: JobFacts, draft: Draft) -> int:
    remote = facts.remote
    earlier = draft.status.earlier_steps if remote is None else remote.earlier_steps
    return earlier + (known_step(draft.status, remote) or 0)


def _ended_after_training(facts: JobFacts) -> str:
    """How the scripts of all workers ended behind the training, if none did as it should; empty: that is not so."""
    ended = facts.witnesses
    done = facts.remote is not None and facts.remote.phase == "done" and not facts.finishing
    if not (done and ended) or any(pod.succeeded for pod in ended):
        return ""
    last = ended[-1]
    code = last.exit.code if last.exit is not None else 0
    return f"{last.name} ended with exit code {code} after the training was complete, before the end of its script"


def crashed_too_often(facts: JobFacts, draft: Draft) -> JobStatus | None:
    """Put crashed pods, and those that hang or are wrong, into the books; they are deleted once that is written."""
    crashed, refused = facts.pods.of("crashed"), facts.pods.of("refused")
    # One that the coordinator refused or declared lost counts as a crash; one that a kubelet did not let in never does.
    evicted = [worker for worker in refused if worker.pod.exit is not None and worker.pod.exit.code == EXIT_EVICTED]
    # Nor would one that hangs or is wrong ever end otherwise, if each that takes its place is so as well.
    given_up = [worker for worker in facts.pods.workers if worker.counts]
    known = draft.status.failures.counted
    if not crashed and not refused and not given_up and not known:
        return None
    fresh = [worker for worker in crashed if worker.pod.uid not in known]
    fresh_refused = [worker for worker in refused if worker.pod.uid not in known]
    draft.events += [EventMessage.crashed(worker.message) for worker in fresh]
    fresh_given_up = [worker for worker in given_up if worker.pod.uid not in known]
    for worker in (*fresh_refused, *fresh_given_up):
        draft.events.append(
            EventMessage.convicted(worker.message)
            if worker.convicted
            else EventMessage.lost(worker.pod.name, worker.message, worker.pod.node)
        )
    for worker in fresh if facts.spec.on_non_finite == "Stop" else ():
        told = worker.pod.exit.last_word if worker.pod.exit is not None else None
        if told is not None and told.non_finite is not None:
            return _stopped(facts, draft, told.non_finite)
    fresh_evicted = [worker for worker in evicted if worker.pod.uid not in known] + fresh_given_up
    message = next((worker.message for worker in (*fresh, *fresh_evicted)), "")
    pods, crashes = [worker.pod for worker in (*crashed, *evicted, *given_up)], facts.settings.crashes
    failures = count_crash(draft.status.failures, pods, _made_steps(facts, draft), message, facts.now, crashes)
    why = fresh_refused[0].message if fresh_refused else message
    not_let_in = [worker.pod for worker in refused if worker not in evicted]
    failures = count_refusal(failures, pods, not_let_in, why, facts.now, crashes)
    draft.amend(failures=failures)
    limit = facts.spec.backoff_limit
    # A single one may be due to the network, and never ends a job.
    if (fresh and failures.count > limit) or (fresh_evicted and failures.count > max(limit, 1)):
        return _give_up(facts, draft, message)
    return None


def _give_up(facts: JobFacts, draft: Draft, message: str) -> JobStatus:
    count, limit = draft.status.failures.count, facts.spec.backoff_limit
    text = f"it failed {counted(count, 'time')} without progress in between (backoffLimit {limit}): {message}"
    return phases.failed(build_status(facts, draft.status), facts.job, reasons.BACK_OFF_LIMIT, text, facts.now)


def _stopped(facts: JobFacts, draft: Draft, found: NonFinite) -> JobStatus:
    """It would come to the same if it were tried again."""
    text = f"{found}, and the job is to stop then (onNonFinite)"
    return phases.failed(build_status(facts, draft.status), facts.job, reasons.METRIC_NOT_FINITE, text, facts.now)


def _explain_failure(remote: Status, convicted: Sequence[ClassifiedPod]) -> str:
    message = remote.error or "the workers do not say why"
    for worker in convicted:
        message += f"; {worker.pod.name} ran on node {worker.pod.node}, and the job keeps off that node where it can"
    lines = (remote.traceback or "").rstrip().splitlines()[-12:]
    return "\n".join([message, *lines]) if lines else message


def clear_up(facts: JobFacts, draft: Draft) -> None:
    """A job that is over: let its workers end, take the rest away, and in the end the job itself."""
    finished_at = parse_time(draft.status.completion_time) or facts.now
    grace_ends = finished_at + facts.settings.finish_grace
    patient = draft.status.phase == "Complete" and facts.now < grace_ends
    waited_for = False
    for worker in facts.pods.workers:
        if worker.pod.lingers:
            draft.end_lingering(worker.pod)
        elif not worker.pod.live:
            waited_for = waited_for or (worker.pod.terminating and not worker.pod.finished and patient)
        elif patient and worker.standing in ("training", "draining", "done"):
            waited_for = True
        else:
            draft.delete(worker.pod, "the job is over", "finished", FAILED_GRACE)
    if waited_for:
        draft.wake(grace_ends)
    for pod in facts.pods.stale:
        if not pod.terminating:
            draft.delete(pod, "of an earlier attempt", "attempt")
    for pod in facts.pods.coordinators:
        if not pod.terminating and not waited_for:
            draft.delete(pod, "the job is over", "finished")
    if facts.spec.ttl_seconds_after_finished is not None:
        expires = finished_at + facts.spec.ttl_seconds_after_finished
        draft.wake(expires)
        if facts.now >= expires:
            draft.actions.append(DeleteJob())


# --- a job that is to have no workers ---------------------------------------------------------------------------------


def _patience(facts: JobFacts) -> int:
    """Seconds for the checkpoint, beside those for the step under way."""
    return facts.spec.checkpoint.timeout_seconds if facts.spec.checkpoint is not None else 0


def _with_last_words(facts: JobFacts, status: JobStatus) -> JobStatus:
    """``status`` with the newest checkpoint that workers tell of as they end: the coordinator may not have told it."""
    words = [worker.pod.exit.last_word for worker in facts.pods.workers if worker.pod.exit is not None]
    steps = [word.checkpoint for word in words if word is not None and word.checkpoint is not None]
    newest = max(steps, default=-1)
    if status.checkpoint_step is not None and newest <= status.checkpoint_step:
        return status
    written = format_time(facts.now)
    return status if newest < 0 else msgspec.structs.replace(status, checkpoint_step=newest, checkpoint_time=written)


def _saving(facts: JobFacts, status: JobStatus) -> bool:
    """Whether the workers have stopped, and one of them may still write the checkpoint of the last step."""
    remote = facts.remote
    if facts.spec.checkpoint is None or remote is None or remote.phase != "stopped" or not remote.step:
        return False
    told = remote.checkpoint
    if told is not None and (told.failure is not None or (told.step or 0) >= remote.step):
        return False
    return any(worker.pod.live and worker.standing != "absent" for worker in facts.pods.workers)


def suspend(facts: JobFacts, draft: Draft) -> JobStatus:
    """Stop the training, then take all pods away; the status on the way."""
    live = [worker for worker in facts.pods.workers if worker.pod.live]
    remote, now = facts.remote, facts.now
    # A suspended job is one of which no worker is wanted, and less are wanted since then.
    since = (parse_time(draft.status.scale_down_since) if draft.status.phase == "Suspending" else None) or now
    draft.amend(scale_down_since=format_time(since))
    deadline = since + facts.spec.elasticity.drain_grace_seconds + _patience(facts)
    if live and unheard(facts) and now < deadline:
        # A coordinator that took another's place knows of no training to stop before these have reached it.
        draft.wake(deadline)
        return phases.suspending(build_status(facts, draft.status), facts.job, now)
    in_training = remote is not None and remote.phase in ("training", "evaluating")
    if live and (in_training or _saving(facts, draft.status)) and facts.connected and now < deadline:
        draft.calls.append(StopCall(facts.rest))
        draft.wake(deadline)
        return phases.suspending(build_status(facts, draft.status), facts.job, now)
    for worker in live:
        ends_itself = remote is not None and remote.phase == "stopped" and worker.standing in ("training", "draining")
        if ends_itself and now < deadline:
            draft.wake(deadline)
        else:
            draft.delete(worker.pod, facts.rest, "suspend")
    if any(worker.pod.holds_devices and worker.fate != "lost" for worker in facts.pods.workers):
        return phases.suspending(build_status(facts, draft.status), facts.job, now)
    for pod in (*facts.pods.coordinators, *facts.pods.stale):
        if not pod.terminating:
            draft.delete(pod, facts.rest, "suspend")
    # What would keep it from beginning is said while it waits, not hours later.
    accepted = bool(facts.faults) or templates_accepted(facts, draft)
    status = _with_last_words(facts, build_status(facts, draft.status))
    wait = facts.admitted.wait
    status = phases.suspended(status, facts.job, now) if wait is None else phases.queued(status, facts.job, wait, now)
    if facts.rejection and not accepted:
        return phases.rejected(status, facts.job, facts.rejection, now)
    return phases.creation_refused(status, facts.job, facts.scene.failure, now) if facts.scene.failure else status


# --- the books of crashes ---------------------------------------------------------------------------------------------
#
# ``virtualflow.protocol.crashes`` says what a crash counts for, and how long is waited after it. A worker that the
# coordinator refused or declared lost (exit code 75), or that hangs or was found to be wrong, counts as one;
# disruptions never come here.


def uncounted(failures: Failures, crashed: Collection[Pod]) -> list[Pod]:
    return [pod for pod in crashed if pod.uid not in failures.counted]


def count_crash(
    failures: Failures, crashed: Collection[Pod], step: int, message: str, now: float, settings: CrashSettings
) -> Failures:
    """Put these crashed pods into the books.

    Args:
        crashed: all crashed pods that still exist; the counted ones stay in the books as long as they do.
    """
    uids = tuple(sorted({*failures.counted, *(pod.uid for pod in crashed)}))
    if not _of_another_round(failures, crashed):
        return msgspec.structs.replace(failures, counted=uids)
    # The first of a streak is replaced at once, as the kubelet restarts a container.
    return _count(failures, step, message, now, settings, uids, at_once=1)


def count_refusal(
    failures: Failures,
    crashed: Collection[Pod],
    refused: Collection[Pod],
    message: str,
    now: float,
    settings: CrashSettings,
) -> Failures:
    """Put workers into the books that a kubelet has refused.

    That is nobody's crash, but one that is refused again and again is waited for longer and longer.

    Args:
        refused: all refused ones that still exist.
    """
    uids = tuple(sorted(pod.uid for pod in (*crashed, *refused) if pod.uid in failures.counted or pod in refused))
    if not uncounted(failures, refused):
        return msgspec.structs.replace(failures, counted=uids)
    counted = _count(failures, failures.step, message, now, settings, uids, at_once=1)
    return msgspec.structs.replace(counted, count=failures.count)


def count_failed_attempt(
    failures: Failures, crashed: Collection[Pod], step: int, message: str, now: float, settings: CrashSettings
) -> Failures:
    """The job as a whole has failed: all workers start again after a wait.

    A failure whose worker was counted as a crashed pod already is not counted twice.
    """
    raised = [pod for pod in crashed if pod.exit and pod.exit.last_word and pod.exit.last_word.kind == "failed"]
    if raised and not _of_another_round(failures, raised):
        waiting = _read(failures).waiting(now, settings.waits)
        return _write(failures, waiting, message, ())
    return _count(failures, step, message, now, settings, (), at_once=0)


def _of_another_round(failures: Failures, crashed: Collection[Pod]) -> bool:
    """Whether one of these is in no book and was made after the last crash that is."""
    return _read(failures).begins_round(pod.created for pod in uncounted(failures, crashed))


def _count(
    failures: Failures,
    step: int,
    message: str,
    now: float,
    settings: CrashSettings,
    uids: tuple[str, ...],
    at_once: int,
) -> Failures:
    return _write(failures, _read(failures).after(step, now, settings.waits, at_once=at_once), message, uids)


def _read(failures: Failures) -> Crashes:
    last, retry = parse_time(failures.last_time), parse_time(failures.retry_time)
    return Crashes(failures.count, failures.streak, failures.step, last, retry)


def _write(failures: Failures, crashes: Crashes, message: str, uids: tuple[str, ...]) -> Failures:
    return msgspec.structs.replace(
        failures,
        count=crashes.count,
        streak=crashes.streak,
        step=crashes.step,
        last_time=None if crashes.last is None else format_time(crashes.last),
        retry_time=None if crashes.retry is None else format_time(crashes.retry),
        message=message,
        counted=uids,
    )
