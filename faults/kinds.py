"""The faults of a campaign, drawn from a seed. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Part = Literal["line", "process", "coordinator", "storage", "clock"]
"""What a fault befalls; two faults at once befall different parts."""

KINDS: dict[str, tuple[Part, str]] = {
    "cut": ("line", "a worker and all others get nothing of each other"),
    "one-way": ("line", "a worker sends and gets nothing, or gets and cannot send"),
    "flapping": ("line", "a worker is cut off and back, again and again"),
    "loss": ("line", "30 % of a worker's packets are lost"),
    "slow": ("line", "a worker's line carries 1 Mbit/s"),
    "clock": ("clock", "the wall clock of a process jumps by an hour, forward or back"),
    "stop-worker": ("process", "a worker is stopped (SIGSTOP) and goes on"),
    "stop-coordinator": ("coordinator", "the coordinator is stopped (SIGSTOP) and goes on"),
    "kill-worker": ("process", "a worker is killed"),
    "kill-all": ("process", "all workers are killed at once, and others begin from a checkpoint"),
    "kill-coordinator": ("coordinator", "the coordinator is killed, and another one starts"),
    "two-coordinators": ("coordinator", "the coordinator is cut off with one worker, and another starts beside it"),
    "storage-stalls": ("storage", "writing to the checkpoints' volume takes as long as the fault"),
    "storage-full": ("storage", "the checkpoints' volume is full"),
    "storage-read-only": ("storage", "the checkpoints' volume cannot be written to"),
    "storage-eio": ("storage", "writing to the checkpoints' volume fails with EIO"),
    "storage-estale": ("storage", "writing to and listing the checkpoints' volume fails with ESTALE"),
    "late-checkpoint": ("storage", "the leader is cut off in the middle of a checkpoint, and goes on when others have"),
    "hang": ("process", "the training thread of a worker blocks for ever"),
}
CLOCK_JUMP = 3_600.0
SHORTEST, LONGEST = 0.2, 3.5
"""Seconds of a fault: shorter and longer than the heartbeat limit of a campaign's jobs."""


@dataclass(frozen=True)
class Fault:
    """One fault of a job."""

    kind: str
    victim: int
    """Which of the workers that run, counted round,"""
    leader: bool
    """or the one that leads."""
    seconds: float
    """How long it lasts."""
    forward: bool
    """Of a clock; of a line that carries one way only."""
    in_reach: bool
    """Whoever runs the workers can end the victim meanwhile. Else it goes on after the fault, late."""

    @property
    def part(self) -> Part:
        """What it befalls."""
        return KINDS[self.kind][0]


Strike = tuple[Fault, ...]
"""Faults that come at once."""


def draw(seed: int, count: int, kinds: tuple[str, ...], pairs: float = 0.0) -> list[Strike]:
    """The faults of one job, ``count`` in all; each kind comes as often as any other.

    Args:
        seed: says all of it.
        count: how many.
        kinds: which.
        pairs: how likely a second one comes at the same time.
    """
    chance = random.Random(seed)
    bag: list[str] = []
    strikes: list[Strike] = []
    while count:
        if not bag:
            bag = chance.sample(kinds, len(kinds))
        strike: Strike = (_one(chance, bag.pop()),)
        if chance.random() < pairs and count > 1 and bag and KINDS[bag[-1]][0] != strike[0].part:
            strike += (_one(chance, bag.pop()),)
        strikes.append(strike)
        count -= len(strike)
    return strikes


def _one(chance: random.Random, kind: str) -> Fault:
    seconds = chance.uniform(SHORTEST, LONGEST)
    leader, forward, in_reach = (chance.random() < 0.5 for _ in range(3))
    return Fault(kind, chance.randrange(60), leader, seconds, forward, in_reach)
