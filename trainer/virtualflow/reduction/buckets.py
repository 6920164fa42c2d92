"""How tensors are cut into buckets, who adds up what of each, and where each element stands in a message. Pure.

A bucket is a run of tensors of one type that travel together, in the order in which a backward pass finishes them, and
to which the same sums contribute. Its elements, one tensor after the other, are cut into a piece for each worker, who
adds it up. A worker has a row for each of its sums (several, if its range is no node of the tree), and a message to
another one holds that one's piece of every row.

Where backward passes end early (structured partial backpropagation, Kumar et al., arXiv 2111.10672), a row does not
travel where no pass of its virtual nodes gets to, and counts as +0.0 there. Step and virtual node decide where that is,
so all workers know it without a word.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from virtualflow.protocol.tree import Key
from virtualflow.reduction.ownership import Portions

Keys = list[list[Key]]
"""For each rank, the tree nodes that it contributes the sums of."""

Reach = tuple[Collection[int], ...]
"""For each of the first places, the virtual nodes that may contribute to it; to places behind these all may."""

Rows = tuple[tuple[int, ...], ...]
"""For each rank, the numbers of those of its sums that contribute."""


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together; sizes and offsets in elements."""

    dtype: torch.dtype
    places: tuple[int, ...]
    offsets: tuple[int, ...]
    total: int
    """Of a row, without padding."""
    edges: tuple[int, ...]
    """Where the piece of each worker begins, and where the last one ends, up to which rows are padded."""
    rows: Rows
    """What contributes to it."""

    @property
    def counts(self) -> tuple[int, ...]:
        """How many rows of it each worker has."""
        return tuple(map(len, self.rows))

    @property
    def pieces(self) -> list[int]:
        """What each worker adds up of a row."""
        return [end - begin for begin, end in pairwise(self.edges)]

    def segments(self, index: int, numel: int, rows: int, row: int) -> Iterator[tuple[int, int, int]]:
        """Where the ``index``-th tensor stands in a message of ``rows`` rows: (its first element, how many, where)."""
        begin, end = self.offsets[index], self.offsets[index] + numel
        if rows == 1:  # Pieces of a single row lie one behind the other.
            yield 0, numel, begin
            return
        at = begin
        while at < end:
            member = bisect_right(self.edges, at) - 1
            first, behind = self.edges[member : member + 2]
            stop = min(end, behind)
            yield at - begin, stop - at, first * rows + (behind - first) * row + at - first
            at = stop


def rows_of(keys: Keys, reach: Reach | None, places: int) -> list[Rows]:
    """For each of so many places what contributes to it; without ``reach`` everything does."""
    everything = tuple(tuple(range(len(of_member))) for of_member in keys)
    known = {
        nodes: tuple(
            tuple(row for row, key in enumerate(of_member) if any(node in nodes for node in range(*key)))
            for of_member in keys
        )
        for nodes in set(reach or ())
    }
    first = [known[nodes] for nodes in reach or ()]
    return [*first, *[everything] * (places - len(first))]


def plan_buckets(
    templates: Sequence[Tensor], places: Sequence[int], rows: Sequence[Rows], *, alignment: int, limit: int
) -> list[Bucket]:
    """Cut the tensors at ``places``, in that order, into buckets of which each worker adds up equally much.

    Args:
        places: which of them, in the order in which they will be there.
        rows: for each of the templates what contributes to it.
        alignment: bytes at whose multiples pieces start.
        limit: bytes that a bucket does not exceed, unless a single tensor does.
    """
    buckets: list[Bucket] = []
    groups: dict[torch.dtype, list[int]] = {}
    for place in places:
        groups.setdefault(templates[place].dtype, []).append(place)
    for dtype, members in groups.items():
        unit = _unit(dtype, alignment)
        run: list[int] = []
        total = 0
        for place in members:
            numel = templates[place].numel()
            if run and ((total + numel) * dtype.itemsize > limit or rows[place] != rows[run[-1]]):
                buckets.append(_bucket(dtype, run, templates, rows[run[-1]], unit))
                run, total = [], 0
            run.append(place)
            total += numel
        buckets.append(_bucket(dtype, run, templates, rows[run[-1]], unit))
    return buckets


def _unit(dtype: torch.dtype, alignment: int) -> int:
    """At multiples of how many elements pieces start."""
    return max(1, alignment // dtype.itemsize)


def _bucket(dtype: torch.dtype, run: list[int], templates: Sequence[Tensor], rows: Rows, unit: int) -> Bucket:
    offsets, total = [], 0
    for place in run:
        offsets.append(total)
        total += templates[place].numel()
    piece = -(-total // (len(rows) * unit)) * unit
    edges = tuple(piece * rank for rank in range(len(rows) + 1))
    return Bucket(dtype, tuple(run), tuple(offsets), total, edges, rows)


# Who adds up what, where not all rows travel.

_ENDLESS = 1 << 62


def divide_sums(buckets: Sequence[Bucket], sums: Sequence[int], alignment: int) -> list[Bucket]:
    """Let whoever has most rows of a bucket add it up, so that few bytes travel; the buckets with those pieces.

    Every sum has to come to everybody, and a row travels unless its worker adds it up. But nobody is to send or to
    receive more for that than the busiest does where all rows travel, so that no step is the slower for it.

    Args:
        sums: how many each worker has, whether they contribute or not.
        alignment: bytes at whose multiples pieces start.
    """
    loads = _Loads(buckets, sums)
    divided = list(buckets)
    # Where there is least choice first.
    for index in sorted(range(len(buckets)), key=lambda index: _choice(buckets[index].counts)):
        bucket = buckets[index]
        unit, counts = _unit(bucket.dtype, alignment), bucket.counts
        pieces, left, rows = [0] * len(counts), -(-bucket.total // unit), sum(counts)
        for count in sorted(set(counts), reverse=True):
            if not left:
                break
            members = [rank for rank, own in enumerate(counts) if own == count]
            rooms = [loads.room(rank, count, rows, unit * bucket.dtype.itemsize) for rank in members]
            for rank, taken in zip(members, level(rooms, left), strict=True):
                pieces[rank], left = taken, left - taken
        share, extra = divmod(left, len(pieces))  # where nobody may do more
        pieces = [unit * (piece + share + (rank < extra)) for rank, piece in enumerate(pieces)]
        divided[index] = replace(bucket, edges=tuple(accumulate(pieces, initial=0)))
        for rank, (piece, own) in enumerate(zip(pieces, counts, strict=True)):
            loads.add(rank, own, rows, piece * bucket.dtype.itemsize)
    return max(divided, list(buckets), key=_stays)


def _stays(buckets: Sequence[Bucket]) -> int:
    """Bytes of rows that do not travel, since their worker adds them up."""
    return sum(
        own * piece * bucket.dtype.itemsize
        for bucket in buckets
        for own, piece in zip(bucket.counts, bucket.pieces, strict=True)
    )


class _Loads:
    """Bytes that each worker sends and receives for some buckets, as far as it is known who adds up what of them."""

    def __init__(self, buckets: Sequence[Bucket], sums: Sequence[int]) -> None:
        self._size = size = len(sums)
        everything, own = 0, [0] * size
        for bucket in buckets:
            moved = bucket.total * bucket.dtype.itemsize
            everything += moved
            own = [before + moved * count for before, count in zip(own, bucket.counts, strict=True)]
        # At first as if somebody else added up everything.
        self._sent, self._received = own, [everything] * size
        self._most = everything * (size - 1) * (max(sums) + 1), everything * (sum(sums) - min(sums) + size - 1)
        """What the busiest sends and receives where all rows travel, times the number of workers."""

    def room(self, rank: int, own: int, rows: int, unit: int) -> int:
        """How many units (of so many bytes) of a bucket's sum a worker can add up and be no busier than the busiest.

        Args:
            own: how many rows of it this worker has.
            rows: how many all have.
        """
        room = _ENDLESS
        loads = self._sent[rank], self._received[rank]
        for most, load, rate in zip(self._most, loads, self._rates(own, rows), strict=True):
            if rate > 0:
                room = min(room, max(0, most - self._size * load) // (self._size * rate * unit))
        return room

    def add(self, rank: int, own: int, rows: int, added: int) -> None:
        """A worker adds up so many bytes of a bucket's sum."""
        sent, received = self._rates(own, rows)
        self._sent[rank] += sent * added
        self._received[rank] += received * added

    def _rates(self, own: int, rows: int) -> tuple[int, int]:
        """How many more bytes a worker sends and receives for each byte of a sum that it adds up itself."""
        return self._size - 1 - own, rows - own - 1


def _choice(counts: Sequence[int]) -> int:
    """How many have most rows."""
    return counts.count(max(counts))


def level(rooms: Sequence[int], amount: int) -> list[int]:
    """What each takes of an amount, at most as much as it has room for, so that the most room that is left is least."""
    order = sorted(range(len(rooms)), key=lambda number: rooms[number], reverse=True)
    amount = min(amount, sum(rooms))
    taken, together = [0] * len(rooms), 0
    for count, number in enumerate(order, 1):
        together += rooms[number]
        following = rooms[order[count]] if count < len(order) else 0
        if together - count * following >= amount:
            left, extra = divmod(together - amount, count)
            for turn, chosen in enumerate(order[:count]):
                taken[chosen] = rooms[chosen] - left - (turn < extra)
            break
    return taken


# Who adds up what of a sharded optimizer's gradients.


class BucketPart(NamedTuple):
    """A stretch of a bucket's ``at``-th tensor, in elements of it, and who needs its sum."""

    at: int
    begin: int
    end: int
    keepers: tuple[int, ...]

    @property
    def numel(self) -> int:
        return self.end - self.begin


def share_bucket(bucket: Bucket, portions: Portions, size: int) -> list[list[BucketPart]]:
    """For each of ``size`` members what it adds up of a bucket whose sums do not come to all, in the bucket's order."""
    shared: list[list[BucketPart]] = [[] for _ in range(size)]
    for at, place in enumerate(bucket.places):
        for begin, end, keepers in portions[place]:
            shared[keepers[0]].append(BucketPart(at, begin, end, keepers))
    return shared


def most_delivered(bucket: Bucket, portions: Portions, size: int) -> int:
    """Bytes of a bucket's sums that come to the member that gets most which it has not added up itself."""
    needed = [0] * size
    for parts in share_bucket(bucket, portions, size):
        for part in parts:
            for keeper in part.keepers[1:]:
                needed[keeper] += part.numel
    return max(needed) * bucket.dtype.itemsize
