"""Every default of the reduction, once.

Durations are seconds and sizes are bytes unless a name says otherwise.
"""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from virtualflow._arguments import checked_class

Algorithm = Literal["auto", "gather", "reduce-scatter"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
"""What an expert may ask for."""
Backend = Literal["gloo", "nccl"]
BACKENDS: tuple[Backend | None, ...] = (None, *get_args(Backend))
_OVERLAPS: tuple[bool | None, ...] = (None, True, False)
MAX_BUCKET = 1 << 40
"""The largest bucket that can be asked for."""


@checked_class("vf.Exchange")
@dataclass(frozen=True)
class Exchange:
    """How gradients travel between workers, for those who know better than what is measured.

    None of it changes a bit of the result, and it may be another one in every run. Where workers of one job ask for
    different things, the first one's wish holds for all.
    """

    algorithm: Algorithm = "auto"
    """``"reduce-scatter"``: each worker adds up a slice and returns it; ``"gather"``: all get everything and add it up
    themselves, in one trip; ``"auto"``: for each bucket whichever is predicted to be faster."""
    bucket_bytes: int | None = None
    """Gradients travel in messages of at most so many bytes; ``None``: as ``ReductionSettings.bucket`` says."""
    overlap: bool | None = None
    """Whether the exchange begins beside the backward pass wherever that is legal; ``None``: where that saves more than
    it costs."""
    backend: Backend | None = None
    """By what buckets travel between workers: ``None``: the library's own connections; ``"gloo"`` or ``"nccl"``:
    torch's, in jobs in plaintext only, without checksums. NCCL is there to be tried: it has never been run."""

    def to_number(self) -> int:
        """As a whole number, for the others."""
        number = BACKENDS.index(self.backend) * (MAX_BUCKET + 1) + (self.bucket_bytes or 0)
        number = number * len(ALGORITHMS) + ALGORITHMS.index(self.algorithm)
        return number * len(_OVERLAPS) + _OVERLAPS.index(self.overlap)

    @classmethod
    def from_number(cls, number: int) -> Exchange:
        """The inverse of :meth:`to_number`."""
        number, overlap = divmod(number, len(_OVERLAPS))
        number, algorithm = divmod(number, len(ALGORITHMS))
        backend, size = divmod(number, MAX_BUCKET + 1)
        return cls(ALGORITHMS[algorithm], size or None, _OVERLAPS[overlap], BACKENDS[backend])


_NUMBERS = struct.Struct("<4d")
NETWORK_SIZE = _NUMBERS.size
"""Bytes of a :class:`Network`."""


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
        return cls(*_NUMBERS.unpack(raw))


@dataclass(frozen=True)
class ProbeSettings:
    """How latency and bandwidth are measured when a worker joins."""

    rounds: int = 3
    """Each message is timed so often, and the shortest time counts: others only add to it."""
    small: int = 64
    """Bytes that show the latency."""
    large: int = 1 << 20
    """Bytes that show the bandwidth: a millisecond at 10 Gbit/s, well above what latency varies by."""
    added: int = 1 << 22
    """Bytes that are added: more than what stays in a core's cache, as gradients do not."""
    worthwhile: int = 1 << 20
    """Where all sums of all workers have fewer bytes than that, nothing is measured: when a worker joins, all wait for
    it as long as several such steps take, and no way to travel is better by much."""


@dataclass(frozen=True)
class ReductionSettings:
    """How gradients travel. None of it changes a bit of the result, except ``norm_block``."""

    exchange: Exchange = field(default_factory=Exchange)
    """What an expert wants instead of what is measured."""
    alignment: int = 16
    """Every segment of a message starts at a multiple of this many bytes."""
    bucket: int = 8 << 20
    """Gradients travel in messages of at most so many bytes."""
    one_by_one: int = 1 << 16
    """Gradients of at least so many bytes on average are added up and sent one by one while the backward pass still
    runs. A call for each smaller one costs more than it saves."""
    sums_on_device: int = 2
    """Sums of a worker that wait on its device for their other half, at most; each takes as much memory as the
    gradients. The others wait in host memory,"""
    scratch: Path | None = None
    """or, on a CPU, in files of this directory; ``None``: in its memory, all of them,"""
    offload_from: int = 16 << 20
    """if a sum has at least so many bytes. Of smaller ones all stay: log2(virtual nodes) of them are no burden, and to
    move them took a fifth of the step of a small model on an H100."""
    fetch_ahead: int = 64 << 20
    """Bytes of such sums that are brought back before they are needed."""
    overlap_from: float = 8e-4
    """An exchange that is predicted to save less beside the backward pass begins behind the step headers: to begin it
    early costs as much."""
    most_gathered: int = 8 << 20
    """No bucket is gathered whole by choice whose sums of all workers take more: slices need a worker's part of it."""
    network: Network = field(default_factory=lambda: Network(latency=1e-4, byte=5e-10, add_byte=2e-10))
    """What is assumed where nothing was measured: about a loopback."""
    probe: ProbeSettings = field(default_factory=ProbeSettings)
    close_wait: float = 0.05
    """How long the end of a run waits for the thread that exchanges."""
    norm_block: int = 4_096
    """Elements of a gradient whose norm is one number of those that a clipped gradient's is made of. The same in all
    workers: it is part of what defines the bits of a job that clips by norm."""
