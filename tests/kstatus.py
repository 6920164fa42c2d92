"""What kstatus makes of a custom resource, by which Helm, Flux and others wait: its rules, from cli-utils
``pkg/kstatus/status``, ``checkGenericProperties`` and ``checkReadyCondition``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def kstatus(body: Mapping[str, Any]) -> str:
    """``Current``, ``InProgress``, ``Failed`` or ``Terminating``."""
    metadata, status = body["metadata"], body.get("status") or {}
    if metadata.get("deletionTimestamp"):
        return "Terminating"
    observed = status.get("observedGeneration")
    if "generation" in metadata and observed is not None and observed != metadata["generation"]:
        return "InProgress"
    conditions = status.get("conditions") or []
    for condition in conditions:
        if condition["type"] == "Reconciling" and condition["status"] == "True":
            return "InProgress"
        if condition["type"] == "Stalled" and condition["status"] == "True":
            return "Failed"
    for condition in conditions:
        if condition["type"] == "Ready":
            return "Current" if condition["status"] == "True" else "InProgress"
    return "Current"
