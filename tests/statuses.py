"""What a coordinator says of its job, in as few words as possible: for all tests that read it or pretend to be one."""

from __future__ import annotations

from typing import Any

import msgspec

from virtualflow.protocol.http_api import Status, WorkerStatus

_NOTHING = Status(
    phase="waiting",
    incarnation=1,
    generation=0,
    virtual_nodes=8,
    wanted=2,
    minimum=1,
    workers=(),
    lost=(),
    proposed=None,
    proposed_workers=(),
    prepared=False,
    reason="",
    step=0,
    total_steps=None,
    epoch=0,
    metrics={},
    steps_per_second=0.0,
    step_ms=None,
    hold=None,
    last_change=None,
    changes=(),
    changes_total=0,
    repeated_steps=0,
    events=(),
    digest=None,
    optimizer_digest=None,
    error=None,
    traceback=None,
)


def coordinator_status(phase: str = "training", *workers: WorkerStatus, **facts: Any) -> Status:
    """A coordinator's status; ``facts`` are its other fields. One that does not wait has made 40 steps of 100."""
    begun: dict[str, Any] = {"generation": 1, "step": 40, "total_steps": 100} if phase != "waiting" else {}
    return msgspec.structs.replace(_NOTHING, phase=phase, workers=workers, **(begun | facts))
