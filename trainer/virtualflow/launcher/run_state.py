"""What a runner knows and has decided; everything else it looks up anew whenever something happens."""

from __future__ import annotations

from dataclasses import dataclass, field

from virtualflow.launcher.shutdown import Shutdown
from virtualflow.protocol.http_api import Status


@dataclass
class RunState:
    """The state of one job's runner."""

    wanted: int
    """Workers that the job is to have."""
    status: Status | None = None
    """The latest one of a living coordinator."""
    shutdown: Shutdown | None = None
    """Set once the job is ending."""
    interrupts: int = 0
    """Signals that asked this process to end."""
    dead_coordinators: set[int] = field(default_factory=set)
    """Incarnations whose statuses no longer count."""
    elders: int = 0
    """So many workers had been started when the last coordinator before the present one had ended: they may be in a
    generation that this one does not know."""
    awaited: tuple[int, float] | None = None
    """The number of workers that the coordinator was told, and until when its status may still say another."""

    def forget_coordinator(self) -> None:
        """The coordinator is dead or dying: what it last said no longer holds."""
        if self.status is not None:
            self.dead_coordinators.add(self.status.incarnation)
        if self.status is None or self.status.phase != "done":  # what is done stays done, whoever has told it
            self.status = None

    def follow_wanted(self, now: float) -> bool:
        """Take over the number of workers from the status; whether it is another one."""
        if self.status is None:
            return False
        if self.awaited is not None:
            workers, until = self.awaited
            if self.status.wanted != workers and now < until:
                return False
            self.awaited = None
        changed = self.status.wanted != self.wanted
        self.wanted = self.status.wanted
        return changed
