"""Why a job is as it is, in words: its status, its events, and what to do about what is in its way. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from virtualflow.protocol.job_view import ChangeEntry, describe_change, describe_rest, describe_step

ADVICE: Mapping[str, str] = MappingProxyType(
    {
        "BackOff": "read the traceback in the message",
        "InvalidSpec": "correct what the message names",
        "TemplateRejected": "correct the template, or what the message names (a misspelt field, a missing service "
        "account, an admission policy)",
        "NameTaken": "run the command of the message, or choose another name",
        "CreationRefused": "raise the quota, lower `replicas`, or see to the webhook",
        "Unschedulable": "see Pods are Pending",
        "CannotStart": "see CannotStart",
        "WaitingForWorkers": "look at Progressing",
        "CoordinatorUnreachable": "see CoordinatorUnreachable",
        "CoordinatorMisbehaves": "see CoordinatorMisbehaves",
        "TokenRefused": "see TokenRefused",
        "ProtocolMismatch": "see ProtocolMismatch",
        "MetricNotFinite": "lower the learning rate, clip gradients, look at the data; a new job with the same "
        "`checkpoint.directory` goes on from the newest checkpoint",
        "CheckpointNotWritten": "free some space, or what the message names",
        "NoPlanFits": "raise `memory` of the worker group; or make a new job with more virtual nodes",
        "Suspended": "`suspend: false` resumes",
        "Queued": "wait, or see A job waits in its queue",
        "QueueMissing": "make the queue, or correct `queue`",
        "QueueNotReady": "repair the queue",
        "NeverFits": "lower `minReplicas`, or enlarge the queue",
        "WaitsForKueue": "wait, or look at its Workload",
        "EvictedByKueue": "wait: it goes on by itself once Kueue admits it again",
        "KueueNotReady": "what the message names",
        "LimitedByEfficiency": "lower it to have more",
        "LimitedByKueue": "see Grow",
        "BackoffLimitExceeded": "correct the script; make a new job",
        "StartupDeadlineExceeded": "what the message names; make a new job",
        "Deleted": "whoever set the finalizer takes it off",
        "DeadlineExceeded": "make a new job, with the same `checkpoint.directory` to go on",
    }
)
"""What to do about a reason, as ``docs/reference/reasons.md`` has it; \"see\" names a heading of the guides."""

_GOOD: Mapping[str, str] = MappingProxyType(
    {"Ready": "True", "Progressing": "True", "Allocated": "True", "Complete": "True"}
)
"""Conditions that are as one would have them; of all others, ``False`` is."""
_QUIET = frozenset({"NotFinished", "NotSuspended", "Finished", "AsWanted", "Starting", "Scaling", "RollingUpdate"})
_EVENTS = 5
UNSEEN = "no operator has seen it yet"
OVER = ("Complete", "Failed")
"""Phases upon which nothing follows."""


def headline(body: Mapping[str, Any]) -> str:
    """How a job stands, in one line."""
    status = body.get("status") or {}
    if not status.get("phase"):
        return f"{body['metadata']['name']}: {UNSEEN}"
    parts = [f"{body['metadata']['name']}: {status['phase']}"]
    if status.get("workers") and status["phase"] not in OVER:
        parts.append(f"{status['workers']} workers train")
    return ", ".join([*parts, *progress(body)])


def progress(body: Mapping[str, Any]) -> list[str]:
    """Where a training is, or how it has ended, in words."""
    status = body.get("status") or {}
    step, total = status.get("step"), status.get("totalSteps")
    complete = [each["message"] for each in status.get("conditions") or () if each["type"] == "Complete"]
    if complete and status.get("phase") == "Complete":
        return [f"{complete[0][:1].lower()}{complete[0][1:].rstrip('.')}"]
    return [] if step is None else [describe_step(step, total), *describe_rest(step, total, speed(body))]


def speed(body: Mapping[str, Any]) -> float:
    """Steps a second of a job that trains; below 0 for one that does not."""
    status = body.get("status") or {}
    if status.get("phase") != "Running":
        return -1.0
    try:
        return float(status.get("stepsPerSecond") or 0.0)
    except ValueError:
        return 0.0


def explain(body: Mapping[str, Any], events: Sequence[Mapping[str, Any]], now: datetime) -> list[str]:
    """What is the matter with a job, and what would help: lines of text.

    Args:
        body: the job, as the API server has it.
        events: of the job, the latest last; see ``Job.events``.
        now: with a time zone.
    """
    lines = [headline(body)]
    status = body.get("status") or {}
    if not status.get("phase"):
        lines.append("  to do: see Nothing happens")
    for condition in telling(status.get("conditions") or ()):
        lines.append(f"  {condition['type']} {condition['status']}, {condition['reason']}: {condition['message']}")
        if condition["reason"] in ADVICE:
            lines.append(f"    to do: {ADVICE[condition['reason']]}")
    if change := last_change(status):
        lines.append(f"  last change: {change}")
    warnings = [event for event in events if event.get("type") == "Warning"][-_EVENTS:]
    for event in warnings:
        times = f" ({event['count']} times)" if (event.get("count") or 1) > 1 else ""
        lines.append(f"  {age(event.get('time'), now)} ago, {event['reason']}{times}: {event['message']}")
    return lines


def last_change(status: Mapping[str, Any]) -> str:
    """The latest membership change in one line; empty: there was none."""
    change = status.get("lastChange")
    if not change:
        return ""
    size = (change["step"], change["to"], change["from"])
    costs = (change.get("pauseMilliseconds"), change.get("repeatedSteps", 0), change.get("repeatedVirtualNodes", 0))
    return describe_change(ChangeEntry(*size, change.get("cause", ""), change["reason"], *costs))


def telling(conditions: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Conditions that say something that is not plain: what is bad first."""
    told: dict[str, Mapping[str, Any]] = {}  # by message: tools want some of them a second time
    for each in conditions:
        if each["reason"] not in _QUIET or each["status"] == "Unknown":
            told.setdefault(each["message"], each)
    bad = [each for each in told.values() if each["status"] != _GOOD.get(each["type"], "False")]
    good = [
        each for each in told.values() if each not in bad and (each["reason"] in ADVICE or each["type"] == "Allocated")
    ]
    return [*bad, *good]


def age(moment: datetime | str | None, now: datetime) -> str:
    """How long ago something was, as ``kubectl`` has it: ``45s``, ``12m``, ``3h``, ``2d``."""
    if moment is None:
        return "?"
    at = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    seconds = max(0, int((now - (at if at.tzinfo else at.replace(tzinfo=UTC))).total_seconds()))
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
