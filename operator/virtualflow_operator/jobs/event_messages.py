"""Events of a job in words: what a person would want to know, once. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from virtualflow.protocol.messages import Change
from virtualflow.protocol.wording import counted
from virtualflow_operator import reasons
from virtualflow_operator.api import ConditionType, JobStatus
from virtualflow_operator.jobs.actions import EventMessage

_AMISS: tuple[ConditionType, ...] = ("NonFinite", "CheckpointFailed", "DoesNotFit")
"""Conditions that are bad news as they become true."""


def lost(worker: str, why: str, node: str = "") -> EventMessage:
    """A worker is lost; its node is named where the next one had better not go, too."""
    where = f" on node {node}" if node else ""
    return EventMessage(reasons.LOST, f"{worker}{where} is lost: {why}", warning=True)


def convicted(why: str) -> EventMessage:
    """A worker was found to be wrong; ``why`` names it and its node."""
    return EventMessage(reasons.CONVICTED, f"{why}; the job keeps off that node where it can", warning=True)


def draining(workers: Iterable[str], why: str) -> EventMessage:
    """Workers are relieved."""
    return EventMessage(reasons.DRAINING, f"draining {_listed(workers)}: {why}")


def created(workers: Iterable[str]) -> EventMessage:
    """Workers were made."""
    return EventMessage(reasons.CREATED, f"created {_listed(workers)}")


def crashed(why: str) -> EventMessage:
    """A worker ended in the user's code."""
    return EventMessage(reasons.CRASHED, why, warning=True)


def attempt_failed(attempt: int, why: str) -> EventMessage:
    """All workers start again; attempts are counted from 1."""
    return EventMessage(reasons.CRASHED, f"attempt {attempt} failed: {why}", warning=True)


def coordinator_replaced() -> EventMessage:
    """The job's coordinator is lost."""
    return EventMessage(reasons.COORDINATOR_LOST, "the coordinator is replaced; training goes on without it meanwhile")


def messages_of_change(old: JobStatus, new: JobStatus, changes: Sequence[Change]) -> list[EventMessage]:
    """What a person would want to know of the way from one status to the next."""
    found = [_of_change(change) for change in changes if change.cause != "start"]
    if new.phase == "Running" and old.phase != "Running" and not changes:
        again = f", from step {new.step}" if old.attempt or (old.step or 0) > 0 else ""
        found.append(
            EventMessage(reasons.TRAINING, f"training with {counted(max(new.ready_replicas, 1), 'worker')}{again}")
        )
    # A coordinator that remembers the training tells of a change; generations of one that does not begin from 1. One
    # that learns of it from a worker may hear of the step before the latest first.
    if (new.step or 0) < (old.step or 0) - 1 and new.generation <= old.generation:
        found.append(EventMessage(reasons.RESTARTED, _began_again(old, new), warning=True))
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
        count = counted(given.workers, "worker") if given.workers else "no workers"
        found.append(EventMessage(name, f"the queue {given.queue} gives it {count}: {given.reason}"))
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
    obstacles = (
        reasons.INVALID_SPEC,
        reasons.TEMPLATE_REJECTED,
        reasons.CREATION_REFUSED,
        reasons.UNSCHEDULABLE,
        reasons.CANNOT_START,
    )
    limits = (reasons.EFFICIENT, reasons.LIMITED_BY_KUEUE)
    if after is not None and after.reason in limits and (before is None or before.reason != after.reason):
        found.append(EventMessage(after.reason, after.message))
    if after is not None and after.reason in obstacles and (before is None or before.reason != after.reason):
        found.append(EventMessage(after.reason, after.message, warning=True))
    return found


def _from_where(status: JobStatus) -> str:
    if status.checkpoint_step is None:
        return f"resuming from step {status.step or 0} or the checkpoint before it"
    return f"resuming from the checkpoint of step {status.checkpoint_step}"


def _began_again(old: JobStatus, new: JobStatus) -> str:
    """The step has fallen, and no coordinator is left that could tell of it."""
    lost = f"no worker and no coordinator is left that had step {old.step}"
    saved = new.checkpoint_step
    if saved is None:
        again = _repeated(old.step or 0)
        return f"began anew from the first step: {lost}, and there is no checkpoint; {again} repeated"
    if saved > (new.step or 0):
        return f"started again from a checkpoint before that of step {saved}, which cannot be used: {lost}"
    return f"started again from step {saved}: {lost}; {_repeated((old.step or 0) - saved)} repeated"


def _of_change(change: Change) -> EventMessage:
    pause = "" if change.pause_ms is None else f", pause {_duration(change.pause_ms)}"
    moved = f"{change.from_} to {counted(change.to, 'worker')} at step {change.step}{pause}: {change.reason}"
    if change.cause in ("lost", "broken"):
        return EventMessage(reasons.RECOVERED, f"recovered, {moved}; {_repeated_by(change)}", warning=True)
    if change.cause == "restart":
        again = f"started again from step {max(0, change.step - 1)} with {counted(change.to, 'worker')}"
        return EventMessage(reasons.RESTARTED, f"{again}: {change.reason}; {_repeated_by(change)}", warning=True)
    if change.cause == "rebalance":
        return EventMessage(reasons.REBALANCED, f"virtual nodes moved at step {change.step}{pause}: {change.reason}")
    return EventMessage(reasons.RESIZED, f"resized from {moved}")


def _duration(milliseconds: float) -> str:
    return f"{milliseconds / 1000:.2f} s" if milliseconds >= 1000 else f"{milliseconds:.0f} ms"


def _repeated_by(change: Change) -> str:
    again = change.repeated_virtual_nodes
    computed = f", {counted(again, 'virtual node')} computed again" if again else ""
    return f"{_repeated(change.repeated_steps)} repeated{computed}"


def _repeated(steps: int) -> str:
    return counted(steps, "step") if steps else "no step"


def _listed(names: Iterable[str]) -> str:
    """Names as a sentence has them, however many there are."""
    shown = list(names)
    if len(shown) > 8:
        shown = [*shown[:7], f"{len(shown) - 7} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)
