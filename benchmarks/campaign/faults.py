"""The faults of a campaign, drawn from a seed. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

KINDS = {
    "cut": "a worker and all others get nothing of each other",
    "one-way": "a worker sends and gets nothing",
    "flapping": "a worker is cut off and back every half second",
    "loss": "30 % of a worker's packets are lost",
    "slow": "a worker's line carries 1 Mbit/s",
    "clock": "the wall clock of a process jumps by an hour, forward or back",
    "stop-worker": "a worker is stopped (SIGSTOP) and goes on",
    "stop-coordinator": "the coordinator is stopped (SIGSTOP) and goes on",
    "kill-worker": "a worker is killed",
    "kill-coordinator": "the coordinator is killed, and another one starts",
    "two-coordinators": "a worker is cut off together with the coordinator, and another one starts on the other side",
    "storage-stalls": "writing to the checkpoints' volume takes as long as the fault",
    "storage-full": "the checkpoints' volume is full",
    "storage-read-only": "the checkpoints' volume cannot be written to",
    "storage-eio": "syncing a file fails with EIO",
    "storage-estale": "syncing a file fails with ESTALE",
    "hang": "the training thread of a worker blocks for ever",
}
HANGS = "hang"
CLOCK_JUMP = 3_600.0


@dataclass(frozen=True)
class Fault:
    """One fault of a job."""

    kind: str
    victim: int
    """Which of the workers that run, counted round."""
    seconds: float
    """How long it lasts."""
    forward: bool
    """Of a clock."""


def draw(seed: int, count: int, kinds: tuple[str, ...]) -> list[Fault]:
    """The faults of one job; each kind comes as often as any other."""
    chance = random.Random(seed)
    bag: list[str] = []
    faults = []
    for _ in range(count):
        if not bag:
            bag = chance.sample(kinds, len(kinds))
        faults.append(Fault(bag.pop(), chance.randrange(60), chance.uniform(0.3, 5.0), chance.random() < 0.5))
    return faults
