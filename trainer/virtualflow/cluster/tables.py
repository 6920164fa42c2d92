"""Jobs at a glance: a row each, as ``kubectl get`` would print them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from virtualflow.cluster.explanation import age, speed

COLUMNS = ("NAME", "PHASE", "WORKERS", "STEP", "STEPS/S", "LOSS", "CHANGES", "REPEATED", "AGE", "QUEUE")


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
    progress = "" if step is None else str(step) if total is None else f"{step}/{total}"
    running = status.get("phase") == "Running"
    return [
        metadata["name"],
        status.get("phase") or "Pending",
        status.get("workers") or "",
        progress,
        str(status.get("stepsPerSecond") or "") if running else "",
        str(status.get("loss") or ""),
        str(status.get("changes", 0)),
        str(status.get("repeatedSteps", 0)),
        age(metadata.get("creationTimestamp"), now),
        str((body.get("spec") or {}).get("queue") or ""),
    ]
