"""Checksums of what travels: what arrives as something else than what was sent is not used.

TCP's own checksum has 16 bits, and ends where the network card takes over; memory, cards and switches damage data
behind its back (Stone and Partridge, "When the CRC and TCP checksum disagree", SIGCOMM 2000). XXH3 reads at the speed
of memory, so that the sender hashes what it is about to send, and the receiver what it is about to use, while that is
in the caches. It finds faults; it is no guard against somebody who makes them.
"""

from __future__ import annotations

import xxhash


def checksum(content: memoryview | bytes) -> int:
    """XXH3 of these bytes, 64 bits."""
    return xxhash.xxh3_64_intdigest(content)
