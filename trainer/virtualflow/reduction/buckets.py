"""How the tensors of a reduction are cut into buckets, and where each element stands in a message.

Pure arithmetic. A bucket is a run of tensors of one type that travel together, in the order in which a backward pass
finishes them. Its elements, one tensor after the other, are cut into as many equal pieces as there are workers; worker
r sums piece r. A worker that holds several sums (its range is no node of the tree) sends one row for each, and a
message to a worker holds that worker's piece of every row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together; sizes and offsets in elements."""

    dtype: torch.dtype
    places: tuple[int, ...]
    """Which tensors, in their order within the bucket."""
    offsets: tuple[int, ...]
    """Where each of them begins in a row."""
    total: int
    """Of a row, without padding."""
    piece: int
    """What one worker sums of a row; rows are padded to as many of these as there are workers."""

    def segments(self, index: int, numel: int, rows: int, row: int) -> Iterator[tuple[int, int, int]]:
        """Where the ``index``-th tensor stands in a message of ``rows`` rows: (its first element, how many, where)."""
        begin, end = self.offsets[index], self.offsets[index] + numel
        if rows == 1:  # Pieces of a single row lie one behind the other.
            yield 0, numel, begin
            return
        at = begin
        while at < end:
            piece, inside = divmod(at, self.piece)
            stop = min(end, (piece + 1) * self.piece)
            yield at - begin, stop - at, (piece * rows + row) * self.piece + inside
            at = stop


def plan_buckets(
    templates: Sequence[Tensor], places: Sequence[int], size: int, *, alignment: int, limit: int
) -> list[Bucket]:
    """Cut the tensors at ``places``, in that order, into buckets.

    Args:
        templates: one tensor per place, with its shape and dtype.
        places: which of them, in the order in which they will be there.
        size: how many workers there are.
        alignment: bytes at whose multiples pieces start.
        limit: bytes that a bucket does not exceed, unless a single tensor does.
    """
    buckets: list[Bucket] = []
    groups: dict[torch.dtype, list[int]] = {}
    for place in places:
        groups.setdefault(templates[place].dtype, []).append(place)
    for dtype, members in groups.items():
        unit = max(1, alignment // dtype.itemsize)
        run: list[int] = []
        total = 0
        for place in members:
            numel = templates[place].numel()
            if run and (total + numel) * dtype.itemsize > limit:
                buckets.append(_bucket(dtype, run, templates, size, unit))
                run, total = [], 0
            run.append(place)
            total += numel
        buckets.append(_bucket(dtype, run, templates, size, unit))
    return buckets


@dataclass(frozen=True)
class Delivery:
    """How a worker's piece of a bucket's sums comes to those who need them, and what comes to it; in elements."""

    outward: tuple[tuple[tuple[int, int], ...], ...]
    """For each member, the stretches of the piece that it gets."""
    inward: tuple[int, ...]
    """For each member, how much comes from it. One behind the other, that makes the tensors that this worker needs."""


def plan_delivery(
    bucket: Bucket, templates: Sequence[Tensor], needed_by: Sequence[Sequence[int]], size: int, rank: int
) -> Delivery:
    """What member ``rank`` of ``size`` sends and gets, where not everybody needs all sums.

    Args:
        bucket: of which pieces are summed.
        templates: one tensor per place.
        needed_by: for each place the ranks that need its sum.
        size: of the group.
        rank: of this worker.
    """
    outward: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    inward = [0] * size
    low, high = rank * bucket.piece, (rank + 1) * bucket.piece
    for begin, place in zip(bucket.offsets, bucket.places, strict=True):
        end = begin + templates[place].numel()
        if max(begin, low) < min(end, high):
            for receiver in needed_by[place]:
                outward[receiver].append((max(begin, low) - low, min(end, high) - low))
        if rank in needed_by[place]:
            at = begin
            while at < end:
                source = at // bucket.piece
                stop = min(end, (source + 1) * bucket.piece)
                inward[source] += stop - at
                at = stop
    return Delivery(tuple(map(tuple, outward)), tuple(inward))


def most_delivered(bucket: Bucket, templates: Sequence[Tensor], needed_by: Sequence[Sequence[int]] | None) -> int:
    """Bytes of the bucket's sums that come to the member who needs most of them; ``None``: all need all."""
    if needed_by is None:
        return bucket.total * bucket.dtype.itemsize
    needed: Counter[int] = Counter()
    for place in bucket.places:
        needed.update(dict.fromkeys(needed_by[place], templates[place].numel()))
    return max(needed.values(), default=0) * bucket.dtype.itemsize


def _bucket(dtype: torch.dtype, run: list[int], templates: Sequence[Tensor], size: int, unit: int) -> Bucket:
    offsets, total = [], 0
    for place in run:
        offsets.append(total)
        total += templates[place].numel()
    return Bucket(dtype, tuple(run), tuple(offsets), total, -(-total // (size * unit)) * unit)
