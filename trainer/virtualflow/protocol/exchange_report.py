"""How the gradients of a step travelled and why, as a worker writes it down for ``virtualflow explain``."""

from __future__ import annotations

from pathlib import Path

import msgspec

from virtualflow.atomic_file import write_whole
from virtualflow.errors import VirtualFlowError


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


class ExchangeReport(msgspec.Struct, frozen=True, rename="camel"):
    step: int
    rows: list[int]
    """How many sums each worker contributed."""
    measured: bool
    """Whether the numbers of the network are this job's own."""
    network: dict[str, float]
    """Seconds, seconds a byte, and the share of these that is hidden beside a backward pass."""
    buckets: list[BucketReport]


def write_report(path: Path, report: ExchangeReport) -> None:
    write_whole(path, msgspec.json.encode(report))


def read_report(path: Path) -> ExchangeReport:
    try:
        return msgspec.json.decode(path.read_bytes(), type=ExchangeReport)
    except (OSError, msgspec.DecodeError) as error:
        raise VirtualFlowError(f"{path} holds no report of an exchange: {error}") from error
