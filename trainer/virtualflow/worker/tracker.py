"""What an experiment tracker is told of a training, and what it is to the worker that leads: somewhere to write to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from virtualflow.protocol import messages as m
from virtualflow.protocol.wording import counted

OURS = "virtualflow/"
"""What the names of the library's own numbers begin with."""
WORKERS = f"{OURS}workers"


class Entry(msgspec.Struct, frozen=True):
    """A committed step: the same on all workers, but for what each measures by its own clock."""

    step: int
    epoch: int
    """From 0."""
    at: float
    """Unix time at the worker that has noted it."""
    seconds: float | None
    """What the step took there; ``None``: it has not made the one before."""
    workers: int
    """How many made it."""
    rates: tuple[float, ...]
    """Its learning rates, one for each group of parameters."""
    metrics: dict[str, float]
    """What the script has logged in it and behind it."""
    change: m.Change | None
    """The membership change that came before it, if one did."""

    @property
    def numbers(self) -> dict[str, float]:
        """All of it that is a number, by the names that a tracker shows."""
        alone = len(self.rates) == 1
        numbers = dict(self.metrics)
        for n, rate in enumerate(self.rates):
            numbers[f"{OURS}learning_rate" if alone else f"{OURS}learning_rate/{n}"] = rate
        numbers |= {f"{OURS}epoch": float(self.epoch), WORKERS: float(self.workers)}
        if self.seconds is not None:
            numbers[f"{OURS}step_seconds"] = self.seconds
        if self.change is not None and self.change.pause_ms is not None:
            numbers[f"{OURS}pause_seconds"] = self.change.pause_ms / 1_000
        return numbers

    @property
    def mark(self) -> str | None:
        """The membership change in a sentence."""
        change = self.change
        if change is None:
            return None
        pause = "" if change.pause_ms is None else f", a pause of {change.pause_ms / 1_000:.2f} s"
        repeated = f", {counted(change.repeated_steps, 'step')} repeated" if change.repeated_steps else ""
        return (
            f"{change.cause}: from {change.from_} to {counted(change.to, 'worker')}{pause}{repeated} ({change.reason})"
        )


class NotWritten(Exception):
    """A tracker's store does not take what is written; it may later."""


class Tracker(Protocol):
    """A place where one run is written to, by one worker after the other.

    A worker that comes to lead writes all that it does not know to be there, so it writes again what its predecessor
    has written just before it was lost. A tracker keeps each step once.
    """

    @property
    def fenced(self) -> bool:
        """Whether what a former leader writes late does no harm; if not, only who holds the leader's lease writes."""

    def open(self, run: str, fence: tuple[int, int]) -> None:
        """Begin to write, or go on in another generation.

        Args:
            run: the id of the training.
            fence: of the generation; nobody has written with a higher one.

        Raises:
            NotWritten, OSError: it cannot be done now.
        """

    def write(self, entries: Sequence[Entry]) -> None:
        """Write steps, in their order; they are durable behind it.

        Raises:
            NotWritten, OSError: it cannot be done now; some may be written all the same.
        """

    def close(self) -> None:
        """Let go of what is open; behind it :meth:`open` comes, or nothing."""

    def end(self) -> None:
        """Mark the run as complete, if that can be done; all is written.

        Raises:
            NotWritten, OSError: it cannot be done now.
        """


def pack(entries: Sequence[Entry]) -> Tensor:
    """Entries as a part of the training's state, exact to the bit."""
    return torch.frombuffer(bytearray(msgspec.msgpack.encode(entries)), dtype=torch.uint8)


def unpack(packed: Tensor) -> list[Entry]:
    """What :func:`pack` was given."""
    return msgspec.msgpack.decode(packed.cpu().numpy().tobytes(), type=list[Entry])
