"""A worker of the simulated job: what it knows and has said."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from virtualflow.protocol import messages as m
from virtualflow.protocol.lineage import Lineage
from virtualflow.protocol.versions import PROTOCOL

VIRTUAL_NODES = 4


@dataclass
class Worker:
    """One worker process: what its link knows, and where its training thread stands."""

    name: str
    incarnation: str
    hung: bool = False
    alive: bool = True
    builds: bool = True
    """It takes part in building communicators."""
    connected: bool = False
    reconnect_at: float = 0.0
    over: str | None = None
    ready: bool = False
    draining: bool = False
    deadline: float = 0.0
    has_state: bool = False
    lineage: int = 0
    step: int = 0
    plan: m.Plan | None = None
    """The generation that it is in."""
    claims: Lineage = field(default_factory=Lineage)
    synced: bool = False
    newest: m.Plan | None = None
    newest_at: float = 0.0
    prepared: set[m.Generation] = field(default_factory=set)
    reported: set[m.Generation] = field(default_factory=set)
    awaiting: bool = True
    """It is in no collective and waits for a generation to enter."""
    agreed: m.Plan | None = None
    leaving: bool = False
    guess: float | None = None
    """What a profile says of its device."""
    kept: dict[type, m.FromWorker] = field(default_factory=dict)
    out: deque[m.FromWorker] = field(default_factory=deque)
    inbox: deque[m.ToWorker] = field(default_factory=deque)

    @property
    def runs(self) -> bool:
        return self.alive and not self.hung and self.over is None

    @property
    def generation(self) -> m.Generation:
        return self.plan.generation if self.plan is not None else m.NO_GENERATION

    def say(self, message: m.FromWorker, keep: bool = False) -> None:
        if keep:
            self.kept[type(message)] = message
        if self.connected:
            self.out.append(message)

    def hello(self, now: float) -> m.Hello:
        return m.Hello(
            protocol=PROTOCOL,
            worker=self.name,
            incarnation=self.incarnation,
            address="127.0.0.1",
            pid=1,
            virtual_nodes=VIRTUAL_NODES,
            fingerprint="one machine",
            ready=self.ready,
            draining=self.draining,
            drain_deadline=max(0.0, self.deadline - now) if self.draining else None,
            plan=self.plan if self.has_state else None,
            step=self.step,
            total_steps=None,
            done=False,
            changes=(),
            pace=self.guess,
        )
