"""What a pod's spec asks for beyond the restricted Pod Security Standard, for the pods that this project ships.

A cluster's admission knows the whole standard, and the end-to-end tests run under it; this is what these pods set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def beyond_restricted(spec: Mapping[str, Any]) -> list[str]:
    """Return what the restricted standard would refuse of a pod's spec, by its path."""
    found = [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    found += [
        f"volumes: {volume['name']}"
        for volume in spec.get("volumes") or ()
        if not set(volume) - {"name"} <= {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
    ]
    common = spec.get("securityContext") or {}
    for kind in ("initContainers", "containers"):
        for container in spec.get(kind) or ():
            own = container.get("securityContext") or {}
            both = {**common, **own}
            demands = {
                "runAsNonRoot": both.get("runAsNonRoot") is True and both.get("runAsUser") != 0,
                "seccompProfile": (both.get("seccompProfile") or {}).get("type") in {"RuntimeDefault", "Localhost"},
                "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False and not own.get("privileged"),
                "capabilities": (own.get("capabilities") or {}) == {"drop": ["ALL"]},
                "ports": not any(port.get("hostPort") for port in container.get("ports") or ()),
            }
            found += [f"{container['name']}: {name}" for name, met in demands.items() if not met]
    return found
