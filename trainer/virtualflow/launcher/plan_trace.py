"""A plan's virtual node as a Chrome trace: what computes and copies when, and the memory over it. Pure.

The format is the "Trace Event Format" of the Chromium project, which chrome://tracing and https://ui.perfetto.dev open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from virtualflow.memory import Fit
from virtualflow.protocol.wording import counted

_ROWS = {"compute": 1, "copy-out": 2, "copy-in": 3}
_MICROSECONDS = 1e6


def trace_of(device: str, fit: Fit, names: Sequence[str]) -> dict[str, Any]:
    """The trace of one number of virtual nodes, as an object of JSON.

    Args:
        device: its name.
        fit: with a plan.
        names: of the blocks.
    """
    plan = fit.plan
    assert plan is not None
    events: list[dict[str, Any]] = [
        _named("process_name", 0, f"{device}: one of {counted(fit.virtual_nodes, 'virtual node')}")
    ]
    events += [_named("thread_name", row, resource) for resource, row in _ROWS.items()]
    events += [
        {
            "name": f"{span.kind} {names[span.block]}",
            "cat": span.kind,
            "ph": "X",
            "pid": 0,
            "tid": _ROWS[span.resource],
            "ts": span.start * _MICROSECONDS,
            "dur": (span.end - span.start) * _MICROSECONDS,
        }
        for span in plan.timeline.spans
    ]
    events += [
        {"name": "memory", "ph": "C", "pid": 0, "ts": moment * _MICROSECONDS, "args": {"bytes": used}}
        for moment, used in plan.timeline.memory
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, row: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 0, "tid": row, "args": {"name": name}}
