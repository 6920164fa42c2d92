"""Where a worker's loop takes turns on a device that several jobs share: before it computes, until it exchanges.

So one job computes while the gradients of another are on their way. Samples are loaded, gradients exchanged and updates
applied without a turn, by whichever threads do so anyway. Nobody waits for other workers in a turn: two jobs whose
workers waited for each other so, on two nodes, would wait until a time limit.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from virtualflow.protocol.environment import WorkerEnvironment
from virtualflow.protocol.settings import MAX_NAME
from virtualflow.step import Attempt, StepPart
from virtualflow.transport import Turns
from virtualflow.worker.settings import WorkerSettings
from virtualflow.worker.standalone import AnySession


class DeviceTurns(StepPart):
    """One worker's turns.

    Args:
        excluded: are told how long was waited: these seconds are nobody's speed.
    """

    def __init__(self, turns: Turns, session: AnySession, excluded: Sequence[Callable[[float], None]]) -> None:
        self._turns, self._session, self._excluded = turns, session, excluded

    def before_pass(self, attempt: Attempt) -> None:
        self.take(attempt.number, self._session.check if attempt.number else _wait_on)

    def take(self, step: int, check: Callable[[], object]) -> None:
        """Have the device; returns at once where this worker has it."""
        waited = self._turns.take(step, check)
        for exclude in self._excluded:
            exclude(waited)

    def give_back(self) -> None:
        self._turns.give_back()

    def computed(self, attempt: Attempt) -> None:
        self._turns.give_back()

    def abandon(self) -> None:
        self._turns.give_back()

    def close(self) -> None:
        self._turns.close()


def _wait_on() -> None:
    """Of a joiner that warms up nobody wants anything else."""


def open_turns(
    environment: WorkerEnvironment,
    session: AnySession,
    device: torch.device,
    settings: WorkerSettings,
    excluded: Sequence[Callable[[float], None]],
) -> DeviceTurns | None:
    """A worker's turns, if its environment names a turn server; nothing is connected yet."""
    if environment.turns is None or environment.profile_out is not None:
        return None
    turns = Turns(
        environment.turns,
        _name_job(environment),
        name_device(device),
        settings.turns,
        session.activity,
        lambda text: session.note("warning", text),
    )
    return DeviceTurns(turns, session, excluded)


def _name_job(environment: WorkerEnvironment) -> str:
    """What all workers of a job call it, and of no other: an address may be that of several, in other networks."""
    if environment.coordinator is None:
        return f"alone, process {os.getpid()}"
    token = hashlib.sha256(environment.job.encode()).hexdigest()
    return f"{environment.coordinator} {token[:16]}"[-MAX_NAME:]


def name_device(device: torch.device) -> str:
    """What all processes of a node call a device: one GPU, or the processors that a process may run on."""
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_properties(device).uuid}"
    if device.type == "cpu":
        return f"cpu {_ranges(sorted(os.sched_getaffinity(0)))}"[:MAX_NAME]
    return str(device)


def _ranges(numbers: Sequence[int]) -> str:
    breaks = [n for n, (left, right) in enumerate(pairwise(numbers), 1) if right != left + 1]
    parts = [numbers[begin:end] for begin, end in pairwise([0, *breaks, len(numbers)])]
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
