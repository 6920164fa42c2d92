"""How tensors are cut into buckets, which stretches of which sums travel to whom, and how many bytes that is. Pure.

A bucket is a run of tensors of one type that travel together, in the order in which a backward pass finishes them.
Each stretch of it is added up by one worker, to whom the others send their rows of it: a worker has a row for each of
its sums (several, if its range is no node of the tree).

Where backward passes end early (structured partial backpropagation, Kumar et al., arXiv 2111.10672), a row does not
travel where no pass of its virtual nodes gets to, and counts as +0.0 there. All workers know where that is, since the
step and the virtual node decide it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from operator import add, attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from virtualflow.reduction.ownership import Portions
from virtualflow.reduction.tree import Key

Keys = list[list[Key]]
"""For each rank, the tree nodes that it contributes the sums of."""

Reach = tuple[Collection[int], ...]
"""For each of the first places, the virtual nodes that may contribute to it; to places behind these all may."""

Rows = int
"""Some of the sums of all members: bit n is the n-th one, counted from the first member's first."""


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together; sizes and offsets in elements."""

    dtype: torch.dtype
    places: tuple[int, ...]
    offsets: tuple[int, ...]
    """Where each tensor begins, and where the last one ends."""
    piece: int
    """What one worker sums of a row if all sum equally much; rows are padded to as many of these as there are
    workers."""

    @property
    def total(self) -> int:
        """Of a row, without padding."""
        return self.offsets[-1]

    def segments(self, at: int, rows: int, row: int) -> Iterator[tuple[int, int, int]]:
        """Where the ``at``-th tensor stands in a message of ``rows`` rows: (its first element, how many, where).

        The message holds all rows of the first piece, then of the second, and so on.
        """
        begin, end = self.offsets[at : at + 2]
        if rows == 1:  # Pieces of a single row lie one behind the other.
            yield 0, end - begin, begin
            return
        position = begin
        while position < end:
            piece, inside = divmod(position, self.piece)
            stop = min(end, (piece + 1) * self.piece)
            yield position - begin, stop - position, (piece * rows + row) * self.piece + inside
            position = stop


def plan_buckets(
    templates: Sequence[Tensor], places: Sequence[int], size: int, *, alignment: int, limit: int
) -> list[Bucket]:
    """Cut the tensors at ``places``, in that order, into buckets.

    Args:
        places: which of them, in the order in which they will be there.
        alignment: bytes at whose multiples pieces start.
        limit: bytes that a bucket does not exceed, unless a single tensor does.
    """
    buckets: list[Bucket] = []
    groups: dict[torch.dtype, list[int]] = {}
    for place in places:
        groups.setdefault(templates[place].dtype, []).append(place)
    for dtype, members in groups.items():
        unit = unit_of(dtype, alignment)
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


def unit_of(dtype: torch.dtype, alignment: int) -> int:
    """Elements between two places where a stretch may be cut."""
    return max(1, alignment // dtype.itemsize)


def _bucket(dtype: torch.dtype, run: list[int], templates: Sequence[Tensor], size: int, unit: int) -> Bucket:
    offsets = tuple(accumulate((templates[place].numel() for place in run), initial=0))
    return Bucket(dtype, tuple(run), offsets, -(-offsets[-1] // (size * unit)) * unit)


# Who adds up what of a bucket, and of which rows, where not all add up equally much of all rows.


class Part(NamedTuple):
    """A stretch of a bucket's ``at``-th tensor, in elements of it."""

    at: int
    begin: int
    end: int
    keepers: tuple[int, ...]
    """Who needs its sum; the first of them adds it up."""
    rows: Rows
    """Those that contribute to it."""

    @property
    def numel(self) -> int:
        return self.end - self.begin


Parts = list[list[Part]]
"""For each member what it adds up of a bucket; parts of the same rows are neighbours, and so are those of a tensor."""


def rows_of(keys: Keys, reach: Reach | None, places: int) -> list[Rows]:
    """For each of so many places the rows that contribute to it; without ``reach`` all rows do."""
    flat = [range(*key) for of_member in keys for key in of_member]
    known: dict[Collection[int], Rows] = {}
    for nodes in set(reach or ()):
        known[nodes] = sum(1 << row for row, of_row in enumerate(flat) if any(node in nodes for node in of_row))
    of_first = [known[nodes] for nodes in reach or ()]
    return [*of_first, *[all_rows(len(flat))] * (places - len(of_first))]


def all_rows(count: int) -> Rows:
    return (1 << count) - 1


def share_bucket(bucket: Bucket, portions: Portions, rows: Sequence[Rows], size: int) -> Parts:
    """For each of ``size`` members what it adds up of a bucket if ``portions`` say so.

    Args:
        rows: for each place those that contribute to it; where none does, nobody adds up anything.
    """
    shared: Parts = [[] for _ in range(size)]
    for at, place in enumerate(bucket.places):
        if rows[place]:
            for begin, end, keepers in portions[place]:
                shared[keepers[0]].append(Part(at, begin, end, keepers, rows[place]))
    return _in_order(shared)


def most_delivered(bucket: Bucket, portions: Portions, size: int) -> int:
    """Bytes of a bucket's sums that come to the member that gets most which it has not added up itself."""
    needed = [0] * size
    for place in bucket.places:
        for begin, end, keepers in portions[place]:
            for keeper in keepers[1:]:
                needed[keeper] += end - begin
    return max(needed) * bucket.dtype.itemsize


@dataclass(frozen=True)
class _Run:
    """Neighbouring tensors of a bucket to which the same rows contribute."""

    bucket: int
    first: int
    """The first of these tensors,"""
    behind: int
    """and the first one behind them."""
    rows: Rows
    counts: tuple[int, ...]
    """Of these rows, for each member."""
    numel: int
    itemsize: int


_CHUNKS = 64
"""Into so many pieces a run is cut to be divided among members, or into as many as there are members."""


def divide_sums(buckets: Sequence[Bucket], rows: Sequence[Rows], counts: Sequence[int], alignment: int) -> list[Parts]:
    """For each bucket who adds up what of it, where all need all sums, so that few bytes travel.

    Every sum has to come to everybody. Before that, a row travels unless its worker adds it up: so whoever has most
    rows of a stretch does. But nobody is to send or to receive more for that than the busiest would if all added up
    equally much, so that the step is not the slower for it.

    Args:
        rows: for each place those that contribute to it; where none does, nobody adds up anything.
        counts: of all rows, for each member.
        alignment: bytes at whose multiples a stretch is cut.
    """
    size = len(counts)
    runs = [run for index, bucket in enumerate(buckets) for run in _find_runs(index, bucket, rows, counts)]
    limits = _busiest(runs, size)
    # What each sends, receives and adds: at first as if somebody else added up everything.
    loads = [(sum(_bytes(run) * run.counts[rank] for run in runs), sum(map(_bytes, runs)), 0) for rank in range(size)]
    taken: dict[_Run, list[int]] = {}
    for run in sorted(runs, key=_choice):  # where there is least choice first
        unit = unit_of(buckets[run.bucket].dtype, alignment)
        chunk = -(-run.numel // (max(_CHUNKS, size) * unit)) * unit
        taken[run] = [0] * size
        for begin in range(0, run.numel, max(1, chunk)):
            elements = min(chunk, run.numel - begin)
            best, loads[best] = _choose(run, elements * run.itemsize, loads, limits)
            taken[run][best] += elements
    shared: list[Parts] = [[[] for _ in range(size)] for _ in buckets]
    for run in runs:
        offsets = buckets[run.bucket].offsets
        edges = [*accumulate(taken[run], initial=offsets[run.first])]
        for rank, (begin, end) in enumerate(pairwise(edges)):
            keepers = (rank, *(other for other in range(size) if other != rank))
            for at in range(run.first, run.behind):
                first, last = max(begin, offsets[at]), min(end, offsets[at + 1])
                if first < last:
                    of_tensor = first - offsets[at], last - offsets[at]
                elif rank == 0 and offsets[at] == offsets[at + 1]:
                    of_tensor = 0, 0  # a sum without elements is one, too
                else:
                    continue
                shared[run.bucket][rank].append(Part(at, *of_tensor, keepers, run.rows))
    return [_in_order(parts) for parts in shared]


Load = tuple[int, int, int]
"""What a member sends, receives and adds; bytes."""


def _find_runs(index: int, bucket: Bucket, rows: Sequence[Rows], counts: Sequence[int]) -> Iterator[_Run]:
    members = [all_rows(count) << before for count, before in zip(counts, accumulate(counts, initial=0), strict=False)]
    first = 0
    for of_run, tensors in groupby(rows[place] for place in bucket.places):
        behind = first + len(list(tensors))
        numel = bucket.offsets[behind] - bucket.offsets[first]
        if of_run:
            shares = tuple((of_run & own).bit_count() for own in members)
            yield _Run(index, first, behind, of_run, shares, numel, bucket.dtype.itemsize)
        first = behind


def _bytes(run: _Run) -> int:
    return run.numel * run.itemsize


def _busiest(runs: Sequence[_Run], size: int) -> tuple[int, int]:
    """``size`` times the most that anybody sends, and receives, if all add up equally much of each run."""
    sent = [sum(_bytes(run) * (size - 1) * (run.counts[rank] + 1) for run in runs) for rank in range(size)]
    received = [
        sum(_bytes(run) * (run.rows.bit_count() - run.counts[rank] + size - 1) for run in runs) for rank in range(size)
    ]
    return max(sent), max(received)


def _choice(run: _Run) -> int:
    """How many members have most rows of a run."""
    return run.counts.count(max(run.counts))


def _choose(run: _Run, moved: int, loads: Sequence[Load], limits: tuple[int, int]) -> tuple[int, Load]:
    """Who is to add up so many bytes of a run, and that member's load then."""
    size, rows, best = len(loads), run.rows.bit_count(), None
    for rank, load in enumerate(loads):
        own = run.counts[rank]
        more = moved * (size - 1 - own), moved * (rows - own - 1), moved * rows
        sent, received, added = after = tuple(map(add, load, more))
        over = (more[0] > 0 and size * sent > limits[0]) or (more[1] > 0 and size * received > limits[1])
        cost = (over, -own, sent + received, added, rank)
        if best is None or cost < best[0]:
            best = cost, rank, after
    assert best is not None
    return best[1:]


def _in_order(shared: Parts) -> Parts:
    for parts in shared:
        parts.sort(key=attrgetter("rows"))
    return shared


# What that comes to.


def place_rows(parts: Sequence[Part], rows: range) -> tuple[dict[tuple[int, int], int], int]:
    """A message that brings ``rows`` of a worker to who adds up ``parts``; in elements.

    Returns:
        Where the stretch of each row and of each of the parts begins that it contributes to, and how long it is.
    """
    places, end = {}, 0
    for row in rows:
        for number, part in enumerate(parts):
            if part.rows >> row & 1:
                places[row, number] = end
                end += part.numel
    return places, end


def numbered_rows(counts: Sequence[int]) -> list[range]:
    """For each member its rows, of so many for each."""
    return [range(begin, end) for begin, end in pairwise(accumulate(counts, initial=0))]


def bytes_moved(bucket: Bucket, counts: Sequence[int], parts: Parts | None, *, gathered: bool) -> list[tuple[int, int]]:
    """What each member sends of a bucket to all others together, and receives from them; the bytes of tensors alone.

    Args:
        counts: of rows, for each member.
        parts: who adds up what; ``None``: all equally much of all rows.
        gathered: whether all rows come to all instead.
    """
    others, itemsize = len(counts) - 1, bucket.dtype.itemsize
    if gathered:  # blocks are equal, also of who has fewer sums
        moved = [(others * max(counts) * bucket.total,) * 2] * len(counts)
    elif parts is None:
        moved = [(others * (own + 1) * bucket.piece, (sum(counts) - own + others) * bucket.piece) for own in counts]
    else:
        sent, received = [0] * len(counts), [0] * len(counts)
        for owner, own in enumerate(parts):
            for rank, rows in enumerate(numbered_rows(counts)):
                if rank != owner:
                    length = place_rows(own, rows)[1]
                    sent[rank] += length
                    received[owner] += length
            for part in own:
                sent[owner] += part.numel * (len(part.keepers) - 1)
                for keeper in part.keepers[1:]:
                    received[keeper] += part.numel
        moved = list(zip(sent, received, strict=True))
    return [(sent * itemsize, received * itemsize) for sent, received in moved]
