"""Every default of the device, once.

Durations are seconds and sizes are bytes unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemorySettings:
    """How much memory a worker may use."""

    device_share: float = 0.85
    """The share of an accelerator's memory that may be used; optimizer and fragmentation need the rest."""
    machine_share: float = 0.5
    """The share of the memory left on a machine that a worker may grow into: other workers grow, too."""
    kept: int = 128 << 20
    """Freed memory that a worker on the CPU keeps across a change of the members, at most."""
