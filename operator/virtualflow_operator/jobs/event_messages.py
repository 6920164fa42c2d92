"""Events of a job in words: what a person would want to know, once. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from virtualflow.protocol.job_view import describe_change, describe_new_beginning
from virtualflow.protocol.messages import Change
from virtualflow.protocol.wording import PLAINTEXT, counted
from virtualflow_operator import reasons
from virtualflow_operator.api import ConditionType, JobStatus
from virtualflow_operator.jobs.actions import EventMessage
from virtualflow_operator.jobs.admission import describe_allocation

_AMISS: tuple[ConditionType, ...] = ("NonFinite", "CheckpointFailed", "DoesNotFit")
"""Conditions that are bad news as they become true."""
_OBSTACLES = (
    reasons.INVALID_SPEC,
    reasons.PLAINTEXT_NOT_ALLOWED,
    reasons.TEMPLATE_REJECTED,
    reasons.CREATION_REFUSED,
    reasons.UNSCHEDULABLE,
    reasons.CANNOT_START,
)
"""Reasons of ``Progressing`` that keep a job from training."""
_CAUSES = {
    "lost": reasons.RECOVERED,
    "broken": reasons.RECOVERED,
    "restart": reasons.RESTARTED,
    "rebalance": reasons.REBALANCED,
}


def lost(worker: str, why: str, node: str = "") -> EventMessage:
    """A worker is lost; its node is named where the next one had better not go, too."""
    where = f" on node {node}" if node else ""
    return EventMessage(reasons.LOST, f"{worker}{where} is lost: {why}", warning=True)


def convicted(why: str) -> EventMessage:
    """A worker was found to be wrong; ``why`` names it and its node."""
    return EventMessage(reasons.CONVICTED, f"{why}; the job keeps off that node where it can", warning=True)


def draining(workers: Iterable[str], why: str) -> EventMessage:
    return EventMessage(reasons.DRAINING, f"draining {_listed(workers)}: {why}")


def created(workers: Iterable[str]) -> EventMessage:
    return EventMessage(reasons.CREATED, f"created {_listed(workers)}")


def crashed(why: str) -> EventMessage:
    return EventMessage(reasons.CRASHED, why, warning=True)


def attempt_failed(attempt: int, why: str) -> EventMessage:
    """All workers start again; attempts are counted from 1."""
    return EventMessage(reasons.CRASHED, f"attempt {attempt} failed: {why}", warning=True)


def coordinator_replaced() -> EventMessage:
    return EventMessage(reasons.COORDINATOR_LOST, "the coordinator is replaced; training goes on without it meanwhile")


def messages_of_change(old: JobStatus, new: JobStatus, changes: Sequence[Change]) -> list[EventMessage]:
    found = [_of_change(change) for change in changes if change.cause != "start"]
    if new.phase == "Running" and old.phase != "Running" and not changes:
        again = f", from step {new.step}" if old.attempt or (old.step or 0) > 0 else ""
        found.append(
            EventMessage(reasons.TRAINING, f"training with {counted(max(new.ready_replicas, 1), 'worker')}{again}")
        )
    # A coordinator that remembers the training tells of a change; generations of one that does not begin from 1. One
    # that learns of it from a worker may hear of the step before the latest first.
    if (new.step or 0) < (old.step or 0) - 1 and new.generation <= old.generation:
        again = describe_new_beginning(old.step or 0, new.step or 0, new.checkpoint_step)
        found.append(EventMessage(reasons.RESTARTED, again, warning=True))
    if new.plaintext and not old.plaintext and old.coordinator is None:
        told = f"the job's connections are in plaintext: {PLAINTEXT}"
        found.append(EventMessage(reasons.PLAINTEXT, told, warning=True))
    if new.phase == "Suspended" and old.phase != "Suspended":
        condition = new.condition("Suspended")
        found.append(
            EventMessage(
                reasons.SUSPENDED, f"suspended at step {new.step or 0}. {condition.message if condition else ''}"
            )
        )
    if old.phase == "Suspended" and new.phase == "Pending":
        found.append(EventMessage(reasons.RESUMED, _from_where(new)))
    given, before_given = new.allocation, old.allocation
    if given is not None and (
        before_given is None or (before_given.workers, before_given.host) != (given.workers, given.host)
    ):
        name = reasons.IN_TURNS if given.host else reasons.ALLOCATED if given.workers else reasons.QUEUED
        found.append(EventMessage(name, describe_allocation(given)))
    if new.phase == "Complete" and old.phase != "Complete":
        condition, digest = new.condition("Complete"), f"; digest {new.digest}" if new.digest else ""
        assert condition is not None
        said = condition.message.rstrip(".")
        found.append(EventMessage(reasons.COMPLETE, f"{said[0].lower()}{said[1:]}{digest}"))
    if new.phase == "Failed" and old.phase != "Failed":
        condition = new.condition("Failed")
        assert condition is not None
        found.append(EventMessage(condition.reason, condition.message, warning=True))
    for condition in filter(None, map(new.condition, _AMISS)):
        former = old.condition(condition.type)  # type: ignore[arg-type]  # it is one of these
        if condition.status == "True" and (former is None or former.status != "True"):
            found.append(EventMessage(condition.reason, condition.message, warning=True))
    before, after = old.condition("Progressing"), new.condition("Progressing")
    if after is not None and (before is None or before.reason != after.reason):
        if after.reason in (reasons.EFFICIENT, reasons.LIMITED_BY_KUEUE):
            found.append(EventMessage(after.reason, after.message))
        elif after.reason in _OBSTACLES:
            found.append(EventMessage(after.reason, after.message, warning=True))
    return found


def _from_where(status: JobStatus) -> str:
    if status.checkpoint_step is None:
        return f"resuming from step {status.step or 0} or the checkpoint before it"
    return f"resuming from the checkpoint of step {status.checkpoint_step}"


def _of_change(change: Change) -> EventMessage:
    reason = _CAUSES.get(change.cause, reasons.RESIZED)
    return EventMessage(reason, describe_change(change), warning=reason in (reasons.RECOVERED, reasons.RESTARTED))


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    if len(shown) > 8:
        shown = [*shown[:7], f"{len(shown) - 7} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)
