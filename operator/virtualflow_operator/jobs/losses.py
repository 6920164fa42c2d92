"""Workers that will be lost, or are: the coordinator is told, and what is left of them is deleted.

Losses that are announced become drains, those that have happened are told at once, so that the others need not wait
for a heartbeat.
"""

from __future__ import annotations

from collections.abc import Iterable

from virtualflow.protocol.http_api import DrainCall, GoneCall
from virtualflow.protocol.settings import MAX_REASON
from virtualflow_operator.api import Standing
from virtualflow_operator.jobs import event_messages
from virtualflow_operator.jobs.actions import FAILED_GRACE, Draft
from virtualflow_operator.jobs.pod_classification import LEFT, ClassifiedPod, has_left
from virtualflow_operator.jobs.scene import Facts

_RELIEVED: tuple[Standing, ...] = ("starting", "ready", "training")
"""Workers that may need to be told that they will be taken away."""
_PRESENT: tuple[Standing, ...] = ("starting", "ready", "training", "draining", "silent")
"""Workers that the coordinator counts on, or waits for."""
_POD_GONE = "its pod does not exist any more"


def tell_losses(facts: Facts, draft: Draft) -> None:
    """Tell the coordinator whom it has lost and whom it will lose."""
    if not facts.connected:
        return
    for worker in facts.pods.of("lost", "left", "crashed", "disrupted", "refused", "unfit"):
        if worker.standing in _PRESENT:
            draft.calls.append(GoneCall(worker.pod.name, worker.incarnation or None, worker.reason[:MAX_REASON]))
            if worker.fate != "left" and worker.standing in ("training", "draining"):
                draft.recoveries.add(worker.incarnation)
            if worker.fate != "left":
                draft.events.append(event_messages.lost(worker.pod.name, worker.reason))
    _tell_deleted(facts, draft)
    _confirm_ends(facts, draft)
    drain(facts, draft, ((worker, worker.reason) for worker in facts.pods.of("leaving", "announced")))


def _tell_deleted(facts: Facts, draft: Draft) -> None:
    """Workers that the coordinator counts on, and whose pods do not exist any more."""
    names = {pod.name for pod in facts.scene.pods}
    # The coordinator's word that one has left may come later than the news that its pod is deleted.
    left = {(pod.name, pod.ip) for pod in facts.scene.former if has_left(pod)}
    for known in facts.remote.workers if facts.remote is not None else ():
        if known.worker in names or known.state not in _PRESENT:
            continue
        if (known.worker, known.address) in left:
            draft.calls.append(GoneCall(known.worker, known.incarnation, LEFT))
        else:  # it was deleted by force
            draft.calls.append(GoneCall(known.worker, known.incarnation, _POD_GONE))
            if known.state in ("training", "draining"):
                draft.recoveries.add(known.incarnation)
            draft.events.append(event_messages.lost(known.worker, _POD_GONE))


def _confirm_ends(facts: Facts, draft: Draft) -> None:
    """Confirm the ends of workers that the coordinator has declared lost: survivors that are no majority wait for it.

    It is enough that the deletion of the pod is recorded: this operator is the only one who confirms, and it never
    confirms the end of those who are left.
    """
    declared = [lost for lost in facts.remote.lost if not lost.ended] if facts.remote is not None else []
    there = {(worker.pod.name, worker.pod.ip): worker for worker in facts.pods.workers}
    for lost in declared:
        worker = there.get((lost.worker, lost.address))
        if worker is None or worker.pod.finished or worker.pod.terminating or worker.fate == "lost":
            draft.calls.append(GoneCall(lost.worker, lost.incarnation, lost.reason))


def drain(facts: Facts, draft: Draft, leaving: Iterable[tuple[ClassifiedPod, str]]) -> None:
    """Tell the coordinator that it will lose these workers, each with the reason, unless it knows."""
    if not facts.connected:
        return
    told: dict[str, list[ClassifiedPod]] = {}
    for worker, reason in leaving:
        if worker.standing in _RELIEVED:
            told.setdefault(reason, []).append(worker)
    # One call for all that leave for one reason: they leave by one change.
    for reason, workers in told.items():
        graces = [worker.pod.deleting_at - facts.now for worker in workers if worker.pod.deleting_at is not None]
        deadline = min(graces, default=float(facts.spec.elasticity.drain_grace_seconds))
        names = tuple(worker.pod.name for worker in workers)
        draft.calls.append(DrainCall(names, max(deadline, 0.0), reason[:MAX_REASON]))
        draft.events.append(event_messages.draining(names, reason))


def delete_ended(facts: Facts, draft: Draft) -> None:
    """Delete the pods of workers that have ended, or that the job goes on without."""
    for worker in facts.pods.of("announced"):
        draft.delete(worker.pod, worker.reason, "drain")
    for worker in facts.pods.of("lost", "declared-lost"):
        counted = not worker.counts or worker.pod.uid in draft.status.failures.counted
        if counted and not worker.pod.terminating:
            draft.delete(worker.pod, worker.reason, "lost", FAILED_GRACE)
    for worker in facts.pods.of("left", "disrupted", "crashed", "refused", "unfit"):
        counted = worker.fate not in ("crashed", "refused") or worker.pod.uid in draft.status.failures.counted
        if counted and not worker.pod.terminating and not worker.saw_the_end:
            draft.delete(worker.pod, worker.reason, worker.fate)
