"""Who keeps the optimizer's state of what when it is sharded, and who passes it on: pure decisions.

The parameters stand in a row, one behind the other. The row is cut into runs of about a bucket, and each run into as
many parts as there are workers, of equal cost, whatever the largest parameter is: so each worker adds up about as much
of every bucket as the others, and what it adds up is what it steps. A parameter is cut at multiples of a unit of its
own only, so that slices step to the bits of whole parameters (``step.elementwise``) and no block of a norm is cut
(``norm``). A share has two keepers, who both step it, so that one still has the state when the other is lost; or one,
where memory and messages count for more than what a loss costs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

# Sets of places in a row, as spans: what somebody has of a long row of elements, or lacks. Pure arithmetic.

Span = tuple[int, int]
"""Where a stretch begins and ends, half open; never empty."""
Spans = tuple[Span, ...]
"""Ascending, and apart from one another: two that meet are one."""


def union(*sets: Iterable[Span]) -> Spans:
    """What is in any of them; their spans may be in any order, may overlap or be empty."""
    merged: list[Span] = []
    for begin, end in sorted(span for spans in sets for span in spans):
        if begin == end:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return tuple(merged)


def intersection(left: Spans, right: Spans) -> Spans:
    """What is in both."""
    found, at = [], 0
    for begin, end in left:
        while at < len(right) and right[at][1] <= begin:
            at += 1
        for number in range(at, len(right)):
            other_begin, other_end = right[number]
            if other_begin >= end:
                break
            found.append((max(begin, other_begin), min(end, other_end)))
    return tuple(found)


def difference(left: Spans, right: Spans) -> Spans:
    """What is in the left one only."""
    if not left:
        return ()
    edges = [0, *(edge for span in right for edge in span), max(left[-1][1], right[-1][1] if right else 0)]
    gaps = [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]
    return intersection(left, tuple(gaps))


def covers(spans: Spans, span: Span) -> bool:
    """Whether all of a span is among them."""
    return intersection(spans, (span,)) == (span,)


def refine(*sets: Iterable[Span]) -> Iterator[Span]:
    """The stretches between all places where any of the spans begins or ends, those in none of them as well."""
    edges = sorted({edge for spans in sets for span in spans for edge in span})
    return pairwise(edges)


class Portion(NamedTuple):
    """A stretch of a tensor, in elements of it, and who needs its sum; the first of them adds it up."""

    begin: int
    end: int
    keepers: tuple[int, ...]


Portions = tuple[tuple[Portion, ...], ...]
"""All of each tensor, ascending."""


class Stretch(NamedTuple):
    """A stretch of one parameter, in elements of it."""

    place: int
    begin: int
    end: int


@dataclass(frozen=True)
class Row:
    """Parameters one behind the other; each takes up a place at least, so that one without elements has a keeper, too.

    Args:
        costs: for each, what an element costs whoever keeps it, in bytes; 0 for a parameter that no optimizer steps.
        units: for each, at multiples of how many elements it may be cut; 0: nowhere.
    """

    numels: tuple[int, ...]
    costs: tuple[int, ...]
    units: tuple[int, ...]
    offsets: tuple[int, ...] = ()
    """Where each of them begins, and where the last one ends."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", (0, *accumulate(max(1, numel) for numel in self.numels)))

    @property
    def all(self) -> Spans:
        return union([(0, self.offsets[-1])])

    def span(self, place: int) -> Span:
        return self.offsets[place], self.offsets[place + 1]

    def is_whole(self, piece: Stretch) -> bool:
        return piece == (piece.place, 0, self.numels[piece.place])

    def pieces(self, spans: Spans) -> list[Stretch]:
        found = []
        for begin, end in spans:
            place = bisect_right(self.offsets, begin) - 1
            while place < len(self.numels) and self.offsets[place] < end:
                offset, numel = self.offsets[place], self.numels[place]
                found.append(Stretch(place, max(0, begin - offset), min(numel, end - offset)))
                place += 1
        return found


@dataclass(frozen=True)
class Shares:
    """A row that is cut for the members of a generation."""

    row: Row
    cuts: tuple[tuple[int, ...], ...]
    """For each run of the row, where its parts begin, and where the last one ends.

    From run to run each member's part is the one before: roundings do not add up, and the last part of a run and the
    first of the next are one stretch of one member.
    """
    copies: int = 2
    """How many members keep each share, where there are as many."""

    @property
    def members(self) -> int:
        return len(self.cuts[0]) - 1

    def first(self, rank: int) -> Spans:
        """The share of which that member adds up the gradient, and sends the new values to all."""
        parts = ((run, (rank + number) % self.members) for number, run in enumerate(self.cuts))
        return union((run[part], run[part + 1]) for run, part in parts)

    def kept(self, rank: int) -> Spans:
        """All whose states that member keeps: its share, and with two copies that of the one before it."""
        return union(*(self.first((rank - turn) % self.members) for turn in range(self.copies)))

    def keepers(self, at: int) -> tuple[int, ...]:
        """Who keeps what stands at that place of the row, the first keeper first."""
        number = bisect_right(self.cuts, at, key=lambda run: run[0]) - 1
        return self._keepers(number, bisect_right(self.cuts[number], at) - 1)

    def _keepers(self, run: int, part: int) -> tuple[int, ...]:
        first = part - run
        return tuple((first + turn) % self.members for turn in range(min(self.copies, self.members)))

    @property
    def portions(self) -> Portions:
        """For each parameter who keeps what of it."""
        found: list[list[Portion]] = [[] for _ in self.row.numels]
        for number, run in enumerate(self.cuts):
            for part, span in enumerate(pairwise(run)):
                for place, begin, end in self.row.pieces(union([span])):
                    found[place].append(Portion(begin, end, self._keepers(number, part)))
        return tuple(map(tuple, found))


def share_row(row: Row, members: int, copies: int = 2, run: int | None = None) -> Shares:
    """Cut a row so that all shares cost the same, as near as its units allow.

    Args:
        run: what a run costs, about; ``None``: the row is one.
    """
    weights = [0, *accumulate(numel * cost for numel, cost in zip(row.numels, row.costs, strict=True))]
    runs = 1 if run is None else max(1, weights[-1] // run)
    cuts = [0]
    for number in range(1, runs * members):
        target = weights[-1] * number // (runs * members)
        place = min(bisect_right(weights, target), len(row.numels)) - 1
        within = (target - weights[place]) // max(1, row.costs[place])
        cuts.append(max(cuts[-1], row.offsets[place] + _nearest_cut(within, row.numels[place], row.units[place])))
    cuts.append(row.offsets[-1])
    return Shares(row, tuple(tuple(cuts[at : at + members + 1]) for at in range(0, runs * members, members)), copies)


def _nearest_cut(wanted: int, numel: int, unit: int) -> int:
    """The place nearest to the one wanted where a parameter may be cut, or one of its ends."""
    below = wanted // unit * unit if unit else 0
    above = min(numel, below + unit) if unit else numel
    if wanted - below < above - wanted:
        return below
    return max(1, above) if above == numel else above


def holders(groups: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Whose shares each member holds for its group, so that each group has all among its members.

    A member holds its own share, and those of the members of other groups that have the same place in these.

    Args:
        groups: members that hold shares for one another, each member in one group.

    Returns:
        For each member those whose shares it holds, ascending.
    """
    place_of = {rank: place for group in groups for place, rank in enumerate(group)}
    held: list[tuple[int, ...]] = [()] * len(place_of)
    for group in groups:
        for place, rank in enumerate(group):
            held[rank] = tuple(other for other in sorted(place_of) if place_of[other] % len(group) == place)
    return held


@dataclass(frozen=True)
class Move:
    """One member passes what stands in a stretch of the row on to another."""

    donor: int
    receiver: int
    span: Span


def lost(have: Sequence[Spans], row: Row) -> Spans:
    """Of what no member has what is asked for."""
    return difference(row.all, union(*have))


def plan_moves(have: Sequence[Spans], want: Sequence[Spans]) -> list[Move]:
    """Who passes what on, so that each member has what it wants; the same on all members.

    Each donor sends about as much as the others.

    Args:
        have: what each member has; what nobody has is not moved.
    """
    edges = sorted({edge for spans in (*have, *want) for span in spans for edge in span})
    numbers = {edge: number for number, edge in enumerate(edges)}
    donors: list[list[int]] = [[] for _ in edges]
    """Who has the stretch that begins at an edge."""
    for rank, spans in enumerate(have):
        for begin, end in spans:
            for number in range(numbers[begin], numbers[end]):
                donors[number].append(rank)
    sent = [0] * len(have)
    moves = []
    for receiver, wanted in enumerate(want):
        for begin, end in difference(wanted, have[receiver]):
            for number in range(numbers[begin], numbers[end]):
                if donors[number]:
                    span = edges[number], edges[number + 1]
                    donor = min(donors[number], key=lambda rank: (sent[rank], rank))
                    sent[donor] += span[1] - span[0]
                    moves.append(Move(donor, receiver, span))
    return moves


def plan_hand_over(
    running: Shares, coming: Shares, old_ranks: Sequence[int | None], stay: Sequence[int]
) -> list[Spans]:
    """What each member has to get before others leave, so that as many who stay have every state as keep it.

    One who stays may be lost before the coming generation stands, when those who leave are gone already.

    Args:
        coming: those of the one to come; who keeps a stretch in it is preferred.
        old_ranks: which rank each member of that has in the one that ends; ``None`` for one that joins.
        stay: ranks of the members that stay; at least one.
    """
    want: list[list[Span]] = [[] for _ in range(running.members)]
    for number, span in enumerate(_stretches(running, coming)):
        have = [rank for rank in running.keepers(span[0]) if rank in stay]
        preferred = [old for rank in coming.keepers(span[0]) if (old := old_ranks[rank]) in stay and old is not None]
        for rank in [*preferred, *(stay[(number + turn) % len(stay)] for turn in range(len(stay)))]:
            if len(have) >= min(running.copies, len(stay)):
                break
            if rank not in have:
                have.append(rank)
                want[rank].append(span)
    return [union(spans) for spans in want]


def _stretches(*shares: Shares) -> Iterator[Span]:
    return refine(*(each.first(rank) for each in shares for rank in range(each.members)))
