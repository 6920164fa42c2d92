"""How the gradients of a step travelled, why, and what that took, as a worker writes it down for
``virtualflow explain``.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from virtualflow.atomic_file import write_whole
from virtualflow.errors import VirtualFlowError


class Traffic(msgspec.Struct, frozen=True, rename="camel"):
    """What a worker has exchanged with the others in a step, medians over some: bytes without heads and tags."""

    sent: int
    received: int
    planned_sent: int
    """By the schedule."""
    planned_received: int
    seconds: float
    """From setting out until the sums were there: with the wait for workers that set out later."""
    exposed: float
    """Of these, while the training waited. The others are hidden beside the backward pass, and what follows it."""


class BucketReport(msgspec.Struct, frozen=True, rename="camel"):
    tensors: list[str]
    """Names of the parameters and buffers in it."""
    bytes: int
    """Of one sum of all of them."""
    dtype: str
    program: str
    """The stages that were carried out."""
    way: str
    """``gather`` or ``reduce-scatter``."""
    overlapped: bool
    """It began beside the backward pass."""
    reason: str
    """Why this way."""
    predicted: dict[str, float]
    """For each way: the seconds that it is predicted to take."""
    refused: dict[str, str]
    """What would be faster and is not done, each with the reason."""
    traffic: Traffic


class ExchangeReport(msgspec.Struct, frozen=True, rename="camel"):
    step: int
    worker: str
    """Whose bytes and times these are."""
    steps: int
    """How many the medians are over, up to this one: those of one schedule."""
    rows: list[int]
    """How many sums each worker contributed."""
    measured: bool
    """Whether the numbers of the network are this job's own."""
    network: dict[str, float]
    """Seconds, seconds a byte, and the share of these that is hidden beside a backward pass."""
    buckets: list[BucketReport]
    traffic: Traffic
    """Of all buckets."""
    beside: tuple[int, int]
    """Bytes sent and received for the rest of a step: headers, and new values of a sharded optimizer."""
    sent: list[int]
    """Bytes of gradients that each worker sends, by the schedule,"""
    sent_if_whole: list[int]
    """and if no backward pass ended early."""


def write_report(path: Path, report: ExchangeReport) -> None:
    write_whole(path, msgspec.json.encode(report))


def read_report(path: Path) -> ExchangeReport:
    try:
        return msgspec.json.decode(path.read_bytes(), type=ExchangeReport)
    except (OSError, msgspec.DecodeError) as error:
        raise VirtualFlowError(f"{path} holds no report of an exchange: {error}") from error
