"""Checksums of what travels: what arrives as something else than what was sent is not used.

TCP's own checksum has 16 bits, and ends where the network card takes over; memory, cards and switches damage data
behind its back (Stone and Partridge, "When the CRC and TCP checksum disagree", SIGCOMM 2000). XXH3 reads at the speed
of memory, so that the sender hashes what it is about to send, and the receiver what it is about to use, while that is
in the caches. It finds faults; it is no guard against somebody who makes them.
"""

from __future__ import annotations

from typing import Any

import torch
import xxhash
from torch import Tensor

from virtualflow.errors import Damaged

SIZE = 8
"""Bytes of a checksum."""


def checksum(stretch: Tensor) -> Tensor:
    """XXH3 of the bytes of a contiguous tensor on the CPU, as uint8 ``[8]``."""
    return torch.frombuffer(bytearray(_digest(stretch)), dtype=torch.uint8)


def verify(stretch: Tensor, expected: Tensor, sender: str) -> None:
    """Compare what has arrived with the checksum that came with it.

    Raises:
        Damaged: it is not what was sent.
    """
    if _digest(stretch) != expected.numpy().tobytes():
        raise Damaged(
            f"{stretch.numel() * stretch.itemsize} bytes from {sender} arrived damaged: their checksum differs; if it "
            "comes again, look at the memory and the network of that machine and of this one"
        )


def _digest(stretch: Tensor) -> bytes:
    raw: Any = (stretch if stretch.dtype is torch.uint8 else stretch.detach().view(-1).view(torch.uint8)).numpy()
    return xxhash.xxh3_64_digest(raw)
