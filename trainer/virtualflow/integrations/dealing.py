"""Files dealt to the shards of an epoch: whole ones as far as they can be dealt evenly, and stripes of the rest."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """What a shard has of a file: each ``step``-th sample from the ``offset``-th on."""

    file: int
    offset: int
    step: int


def deal(files: int, index: int, count: int) -> list[Part]:
    """What shard ``index`` of ``count`` has of ``files`` files."""
    whole, rest = files - files % count, files % count
    parts = [Part(file, 0, 1) for file in range(index, whole, count)]
    if rest:
        file = index % rest
        parts.append(Part(whole + file, index // rest, (count - file - 1) // rest + 1))
    return parts
