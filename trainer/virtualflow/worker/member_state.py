"""Where a worker stands in its job, in one place, and for how long it may take that for granted.

A worker that is stopped, or cut off, does not notice; others go on without it. What shows that it has its place is an
exchange with the other members of its generation, if there are any, or the coordinator's answer. Each counts from the
moment before it was begun: by the end, the others may have gone on. The leader's lease is made of that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from virtualflow.protocol import messages as m
from virtualflow.protocol.lineage import Lineage
from virtualflow.protocol.settings import PassClass, Reproducibility
from virtualflow.worker.repair import Repair


def awake_and_asleep() -> float:
    """Seconds of a clock that also goes on while the machine is suspended, where there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


class HeldLease:
    """When this worker was last shown to have its place. Only the training thread uses it."""

    def __init__(self, clock: Callable[[], float] = awake_and_asleep) -> None:
        self._clock = clock
        self._began = self._shown = float("-inf")
        self._final = False

    def begin(self) -> None:
        self._began = self._clock()

    def renew(self) -> None:
        self._shown = self._began

    def keep(self) -> None:
        """All have agreed that the training is over: nobody takes this worker's place any more."""
        self._final = True

    def holds(self, seconds: float) -> bool:
        """Whether it was shown within the last ``seconds``, or is so for ever."""
        return self._final or self._clock() - self._shown < seconds


@dataclass
class MemberState:
    """Where this worker stands in its job. Only the training thread writes it; the link's thread makes Hello of it."""

    virtual_nodes: int
    fingerprint: str
    run: int = 1
    """Which run of the script this is."""
    runs: tuple[m.RunResult, ...] = ()
    """What those before it have ended with."""
    reproducibility: Reproducibility = "bitwise"
    device: str = ""
    self_test: str = ""
    pace: float | None = None
    """Seconds per virtual node with a whole pass, by a profile of this device."""
    classes: tuple[PassClass, ...] = ()
    """How far backward passes go, of equally large parts of all virtual nodes; none: all are whole."""
    capacity: int | None = None
    """Bytes of this device's memory for the training; ``None``: nobody says."""
    memory: m.MemoryPlan | None = None
    """What becomes of activations; ``None``: this worker has no budget of memory to plan within."""
    total_steps: int | None = None
    running: bool = False
    """Whether the job ran already when this worker was connected."""
    draws_early: bool = False
    """Whether the script is known to draw random numbers before the micro-batches of a step."""
    ready: bool = False
    failing: bool = False
    """Whether this worker has failed before it was connected, and connects to say so."""
    convicted: bool = False
    """Whether all have seen that this worker came to wrong gradients."""
    has_state: bool = False
    done: bool = False
    step: int = 0
    plan: m.Plan | None = None
    floor: m.Generation = m.NO_GENERATION
    """The highest fencing number in the checkpoint directory when this worker began: others may be above it by now."""
    lineage: Lineage = field(default_factory=Lineage)
    """The generations that count, or may."""
    lease: HeldLease = field(default_factory=HeldLease)
    """Whether it may take for granted that it is a member still."""
    assigned: Sequence[int] = range(0)
    ranges: tuple[Sequence[int], ...] = ()
    """Those of all members, in the order of their ranks: stretches, unless they are dealt (``reduction.deal``)."""
    rank: int = 0
    """Its place among them."""
    workers: int = 1
    """Whose processes all members are."""
    repair: Repair | None = None
    """Who contributes what to the coming step, if some of it was kept from an aborted attempt."""
    drain_reason: str | None = None
    """Why this worker has asked to leave, if it has."""
    drain_until: float = 0.0
    changes: dict[m.Generation, m.Change] = field(default_factory=dict)
    """Shared with the training's state: joiners bring on what happened before them."""
    room: tuple[int, ...] = ()
    """Sizes in bytes of the large tensors that a joiner has to make memory for."""

    @property
    def holdings(self) -> Sequence[Sequence[int]]:
        return self.ranges if self.repair is None else self.repair.holdings

    @property
    def computes(self) -> Sequence[int]:
        return self.assigned if self.repair is None else self.repair.computes[self.rank]

    @property
    def leader(self) -> bool:
        """Whether virtual node 0 is assigned to this worker."""
        return 0 in self.assigned
