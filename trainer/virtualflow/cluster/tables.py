"""Jobs at a glance: a row each, as ``kubectl get`` would print them, and as the page of all jobs shows them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from virtualflow.cluster.explanation import ADVICE, OVER, UNSEEN, age, last_change, progress, speed, telling
from virtualflow.protocol.job_view import describe_share, describe_wanted
from virtualflow.protocol.messages import Base

COLUMNS = ("NAME", "PHASE", "WORKERS", "STEP", "STEPS/S", "LOSS", "GOODPUT", "CHANGES", "REPEATED", "AGE", "QUEUE")
LONGEST = 400
"""Characters of a sentence in a row; ``kubectl vf why`` has all of it."""


def job_rows(bodies: Sequence[Mapping[str, Any]], now: datetime, *, namespaces: bool = False) -> list[list[str]]:
    """The header and a row for each job: those that train first, the fastest first, then the others by name.

    Args:
        bodies: jobs, as the API server has them.
        now: with a time zone.
        namespaces: whether to name them.
    """
    shown = sorted(bodies, key=lambda body: (-speed(body), body["metadata"]["namespace"], body["metadata"]["name"]))
    rows = [list(COLUMNS), *(_row(body, now) for body in shown)]
    if namespaces:
        names = ["NAMESPACE", *(body["metadata"]["namespace"] for body in shown)]
        rows = [[name, *row] for name, row in zip(names, rows, strict=True)]
    return rows


def _row(body: Mapping[str, Any], now: datetime) -> list[str]:
    status, metadata = body.get("status") or {}, body["metadata"]
    step, total = status.get("step"), status.get("totalSteps")
    made = "" if step is None else str(step) if total is None else f"{step}/{total}"
    running = status.get("phase") == "Running"
    return [
        metadata["name"],
        status.get("phase") or "Pending",
        status.get("workers") or "",
        made,
        str(status.get("stepsPerSecond") or "") if running else "",
        str(status.get("loss") or ""),
        _goodput(status),
        str(status.get("changes", 0)),
        str(status.get("repeatedSteps", 0)),
        age(metadata.get("creationTimestamp"), now),
        str((body.get("spec") or {}).get("queue") or ""),
    ]


class JobLine(Base, frozen=True, tag=False):
    """A job in a list of jobs, in words."""

    namespace: str
    name: str
    phase: str
    progress: str
    done: float | None
    """Which part of its steps, between 0 and 1; ``None``: not known."""
    goodput: str
    workers: str
    queue: str
    """And why it gives the job so much, or nothing."""
    why: str
    """What is in the job's way; empty: nothing."""
    advice: str
    change: str
    over: bool
    page: bool
    """Whether a coordinator is known, which serves its live page."""


def job_line(body: Mapping[str, Any]) -> JobLine:
    """A job as the page of all jobs shows it.

    Args:
        body: the job, as the API server has it.
    """
    status, spec, metadata = body.get("status") or {}, body.get("spec") or {}, body["metadata"]
    phase, step, total = status.get("phase") or "Pending", status.get("step"), status.get("totalSteps")
    over = phase in OVER
    allocation = status.get("allocation") or {}
    queue = str(allocation.get("queue") or spec.get("queue") or "")
    granted = "" if over else _short(allocation.get("reason") or "")
    told = [each for each in telling(status.get("conditions") or ()) if each["type"] not in ("Allocated", "Complete")]
    amiss = told[0] if told else {"message": "" if status.get("phase") else UNSEEN, "reason": ""}
    why = _short(amiss["message"])
    training, _, wanted = (status.get("workers") or f"0/{spec.get('replicas', 1)}").partition("/")
    return JobLine(
        namespace=str(metadata["namespace"]),
        name=str(metadata["name"]),
        phase=phase,
        progress=", ".join(progress(body)),
        done=min(1.0, step / total) if step is not None and total else None,
        goodput=_goodput(status),
        workers="" if over else describe_wanted(int(training), int(wanted)),
        queue=f"{queue}: {granted}" if granted and granted not in why else queue,
        why=why,
        advice=ADVICE.get(amiss["reason"], ""),
        change=last_change(status),
        over=over,
        page=bool(status.get("coordinator")) and not over,
    )


def _goodput(status: Mapping[str, Any]) -> str:
    return describe_share(float(status["goodput"])) if status.get("goodput") else ""


def _short(sentence: str) -> str:
    """The first line, and the last one, with which a traceback says what it was."""
    lines = [line.strip() for line in sentence.strip().splitlines()]
    text = " … ".join(dict.fromkeys((lines[0], lines[-1]))) if lines else ""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
