"""Who gives whom what of each block, where parameters are divided: pure decisions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from virtualflow.reduction import Row, Shares, Spans, Stretch, difference, holders, intersection, union


class BlockRoutes:
    """What the members of a generation get of one another, the same on all of them.

    Args:
        places: of each block, of its parameters in the row.
        groups: the members that gather blocks from one another, each member in one group.
        hybrid: whether each group has all values among its members, see ``reduction.holders``.
    """

    def __init__(
        self,
        row: Row,
        shares: Shares,
        places: Sequence[Sequence[int]],
        groups: Sequence[Sequence[int]],
        *,
        hybrid: bool,
    ) -> None:
        members = range(shares.members)
        self._row = row
        self._spans = [union([row.span(place) for place in of]) for of in places]
        self._keeping = [shares.kept(rank) for rank in members]
        self._firsts = [shares.first(rank) for rank in members]
        self.holds = holders(groups) if hybrid else [(rank,) for rank in members]
        """For each member those whose shares it has for its group, where their gradients are summed first, too."""
        self._holding = [union(*(self._firsts[first] for first in holds)) for holds in self.holds]
        self.asked, self.told = cache(self._asked), cache(self._told)

    def first(self, rank: int, block: int) -> list[Stretch]:
        """Of which gradients of a block that member makes the sums of all."""
        return self._within(self._firsts[rank], self._spans[block])

    def summed(self, rank: int, block: int) -> list[Stretch]:
        """Of which it makes the sums of its group, by the members that make the sums of all."""
        return [piece for first in self.holds[rank] for piece in self.first(first, block)]

    def _asked(self, giver: int, taker: int, block: int) -> list[Stretch]:
        """What a member gets of another one of its group for a pass: first what that keeps, then what it only holds."""
        lacks = intersection(difference(self._holding[giver], self._keeping[taker]), self._spans[block])
        kept = intersection(lacks, self._keeping[giver])
        held = difference(lacks, kept)
        return self._row.pieces(kept) + [
            piece for first in self.holds[giver] for piece in self._within(held, self._firsts[first])
        ]

    def _told(self, giver: int, taker: int, block: int) -> list[Stretch]:
        """What a member who holds values for its group gets of who keeps them first."""
        return self._within(
            difference(intersection(self._firsts[giver], self._holding[taker]), self._keeping[taker]),
            self._spans[block],
        )

    def _within(self, spans: Spans, span: Spans) -> list[Stretch]:
        return self._row.pieces(intersection(spans, span))
