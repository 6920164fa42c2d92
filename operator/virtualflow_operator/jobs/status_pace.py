"""How soon a job's status is to be written: what people wait for at once, progress now and then. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PROGRESS = frozenset(
    {
        "assignment",
        "changes",
        "checkpointStep",
        "checkpointTime",
        "earlierSteps",
        "endedRuns",
        "epoch",
        "generation",
        "lastChange",
        "loss",
        "memoryCopyBytes",
        "memoryCopyStep",
        "memoryCopyTime",
        "predictedStepMilliseconds",
        "repeatedSteps",
        "run",
        "scaling",
        "step",
        "stepMilliseconds",
        "stepsPerSecond",
        "totalSteps",
    }
)
"""What the coordinator says and nothing is decided by before it is written."""


def is_progress(old: Mapping[str, Any], patch: Mapping[str, Any]) -> bool:
    """Whether a patch of the status ``old`` tells of progress only, or says the same conditions in other words."""
    changed = set(patch) - _PROGRESS
    if changed == {"conditions"}:
        return _standing(old.get("conditions")) == _standing(patch["conditions"])
    return not changed


def _standing(conditions: list[dict[str, Any]] | None) -> list[tuple[Any, ...]]:
    return [tuple(condition.get(field) for field in ("type", "status", "reason")) for condition in conditions or ()]
