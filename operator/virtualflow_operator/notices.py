"""The events that a change of a job's status is worth: what a person would want to know, once. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from virtualflow.messages import Change
from virtualflow_operator import reasons
from virtualflow_operator.job_status import JobStatus
from virtualflow_operator.plan import Notice


def notices_of(old: JobStatus, new: JobStatus, changes: Sequence[Change]) -> list[Notice]:
    """What a person would want to know of the way from one status to the next."""
    found = [_of_change(change) for change in changes if change.cause != "start"]
    if new.phase == "Running" and old.phase != "Running" and not changes:
        again = f", from step {new.step}" if old.attempt or (old.step or 0) > 0 else ""
        found.append(Notice(reasons.TRAINING, f"training with {_workers(max(new.ready_replicas, 1))}{again}"))
    if new.phase == "Suspended" and old.phase != "Suspended":
        condition = new.condition("Suspended")
        found.append(
            Notice(reasons.SUSPENDED, f"suspended at step {new.step or 0}. {condition.message if condition else ''}")
        )
    if old.phase == "Suspended" and new.phase == "Pending":
        found.append(Notice(reasons.RESUMED, f"resuming from step {new.step or 0} or the checkpoint before it"))
    given, before_given = new.allocation, old.allocation
    if given is not None and (before_given is None or before_given.workers != given.workers):
        name = reasons.ALLOCATED if given.workers else reasons.QUEUED
        count = _workers(given.workers) if given.workers else "no workers"
        found.append(Notice(name, f"the queue {given.queue} gives it {count}: {given.reason}"))
    if new.phase == "Complete" and old.phase != "Complete":
        digest = f"; digest {new.digest}" if new.digest else ""
        found.append(Notice(reasons.COMPLETE, f"training complete after {new.step} steps{digest}"))
    if new.phase == "Failed" and old.phase != "Failed":
        condition = new.condition("Failed")
        assert condition is not None
        found.append(Notice(condition.reason, condition.message, warning=True))
    before, after = old.condition("Progressing"), new.condition("Progressing")
    obstacles = (
        reasons.INVALID_SPEC,
        reasons.TEMPLATE_REJECTED,
        reasons.CREATION_REFUSED,
        reasons.UNSCHEDULABLE,
        reasons.CANNOT_START,
    )
    if after is not None and after.reason == reasons.EFFICIENT and (before is None or before.reason != after.reason):
        found.append(Notice(after.reason, after.message))
    if after is not None and after.reason in obstacles and (before is None or before.reason != after.reason):
        found.append(Notice(after.reason, after.message, warning=True))
    return found


def _of_change(change: Change) -> Notice:
    pause = "" if change.pause_ms is None else f", pause {_duration(change.pause_ms)}"
    moved = f"{change.from_} to {_workers(change.to)} at step {change.step}{pause}: {change.reason}"
    if change.cause in ("lost", "broken"):
        return Notice(
            reasons.RECOVERED, f"recovered, {moved}; {_repeated(change.repeated_steps)} repeated", warning=True
        )
    if change.cause == "restart":
        again = f"started again from step {max(0, change.step - 1)} with {_workers(change.to)}"
        return Notice(
            reasons.RESTARTED, f"{again}: {change.reason}; {_repeated(change.repeated_steps)} repeated", warning=True
        )
    if change.cause == "rebalance":
        return Notice(reasons.REBALANCED, f"virtual nodes moved at step {change.step}{pause}: {change.reason}")
    return Notice(reasons.RESIZED, f"resized from {moved}")


def _duration(milliseconds: float) -> str:
    return f"{milliseconds / 1000:.2f} s" if milliseconds >= 1000 else f"{milliseconds:.0f} ms"


def _repeated(steps: int) -> str:
    return "no step" if not steps else "1 step" if steps == 1 else f"{steps} steps"


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"
