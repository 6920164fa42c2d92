"""How long a program takes: a prediction from what was measured on the running job.

Latency and bandwidth (the Hockney model: a + b * bytes) of the messages that an exchange is made of, as
this job's own messages have them, checksums included; and the speed at which a worker adds. Pure.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from virtualflow.reduction.program import Layout, Operation, Program, Stage

_NUMBERS = struct.Struct("<4d")


@dataclass(frozen=True)
class Network:
    """What it takes to exchange and to add; seconds, and seconds a byte."""

    latency: float
    """Messages of nothing between all pairs."""
    byte: float
    """Each byte that a worker receives, its checksums included."""
    add_byte: float
    """Each byte that a worker adds."""
    hidden: float = 1.0
    """The share of the time of bytes in which an exchange beside a backward pass takes nothing from it."""

    def beside(self) -> Network:
        """What an exchange beside a backward pass saves, compared with one behind it.

        Latency is not among it: it is what the last bucket costs in any case, and the step headers with it. Nor are
        additions, where they take their time from the backward pass.
        """
        additions = self.add_byte if self.hidden == 1.0 else 0.0
        return replace(self, latency=0.0, byte=self.hidden * self.byte, add_byte=additions)

    def to_bytes(self) -> bytes:
        """32 bytes."""
        return _NUMBERS.pack(*astuple(self))

    @classmethod
    def from_bytes(cls, raw: bytes) -> Network:
        """The inverse of :meth:`to_bytes`."""
        return cls(*_NUMBERS.unpack(raw))


NETWORK_SIZE = _NUMBERS.size
"""Bytes of a :class:`Network`."""


def combine(measured: Sequence[Network]) -> Network:
    """What counts where each worker has measured.

    Of an exchange the shortest time: the others have waited for somebody who came later. Of what a worker does alone
    the longest, and of what it can do beside its work the least: a step waits for the slowest.
    """
    return Network(
        latency=min(one.latency for one in measured),
        byte=min(one.byte for one in measured),
        add_byte=max(one.add_byte for one in measured),
        hidden=min(one.hidden for one in measured),
    )


@dataclass(frozen=True)
class Shape:
    """What a bucket has to carry."""

    size: int
    """Bytes of one sum of the whole bucket."""
    rows: tuple[int, ...]
    """How many sums each worker contributes."""
    delivered: int = 0
    """Bytes of the sums that come to whoever needs most, where they come to their owners only."""

    @property
    def workers(self) -> int:
        """How many there are."""
        return len(self.rows)


def predict(program: Program, shape: Shape, network: Network) -> float:
    """Seconds until the sums are where the update needs them; what follows is the same in all programs."""
    return math.fsum(_seconds(stage, shape, network) for stage in program.stages)  # alike in every version of Python


def _seconds(stage: Stage, shape: Shape, network: Network) -> float:
    workers, size = shape.workers, shape.size
    slice_ = size / workers
    here = slice_ if stage.layout is Layout.SLICED else size
    match stage.operation:
        case Operation.GATHER_SUMS:
            # Blocks are equal: all send as many rows as whoever has most.
            return network.latency + network.byte * max(shape.rows) * size * (workers - 1)
        case Operation.SEND_SLICES:
            every = sum(shape.rows)
            busiest = max(max(rows * (size - slice_), (every - rows) * slice_) for rows in shape.rows)
            return network.latency + network.byte * busiest
        case Operation.ADD:
            return network.add_byte * here * (sum(shape.rows) - 1)
        case Operation.SCALE:
            copied = stage.layout is Layout.SLICED and not stage.fused
            return network.add_byte * here * (2 if copied else 1)
        case Operation.GATHER:
            return network.latency + network.byte * (size - slice_)
        case Operation.DELIVER:
            # A tensor has two owners or more; what is sent is cut out of the slice.
            return network.latency + network.byte * shape.delivered + network.add_byte * slice_
        case _:
            return 0.0
