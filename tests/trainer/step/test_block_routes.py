"""Who gives whom what of each block: every member gets all values once, and every gradient one place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtualflow.reduction import Row, Stretch, share_row
from virtualflow.step.block_routes import BlockRoutes

BLOCKS = ((0, 3), (1,), (2, 4))


def elements(pieces: Iterable[Stretch]) -> Counter[tuple[int, int]]:
    return Counter((place, at) for place, begin, end in pieces for at in range(begin, end))


@given(
    st.lists(st.integers(0, 40), min_size=5, max_size=5),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 2),
    st.booleans(),
)
def test_each_member_gets_what_it_lacks_once(
    numels: list[int], workers: int, processes: int, copies: int, hybrid: bool
) -> None:
    members = range(workers * processes)
    row = Row(tuple(numels), (4,) * 5, (1,) * 5)
    shares = share_row(row, len(members), copies, 64)
    groups = [tuple(members[worker::workers]) for worker in range(workers)] if hybrid else [tuple(members)]
    routes = BlockRoutes(row, shares, BLOCKS, groups, hybrid=hybrid)
    for block, places in enumerate(BLOCKS):
        whole = Counter((place, at) for place in places for at in range(numels[place]))
        assert sum((elements(routes.first(rank, block)) for rank in members), Counter()) == whole
        for group in groups:
            assert sum((elements(routes.summed(rank, block)) for rank in group), Counter()) == whole
            for taker in group:
                kept = elements(piece for piece in row.pieces(shares.kept(taker)) if piece.place in places)
                givers = [rank for rank in routes.holds[taker] if rank != taker]
                held = sum((elements(routes.told(giver, taker, block)) for giver in givers), Counter())
                mates = [rank for rank in group if rank != taker]
                got = sum((elements(routes.asked(giver, taker, block)) for giver in mates), Counter())
                assert kept + held + got == whole


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_member_alone_asks_for_nothing(hybrid: bool) -> None:
    row = Row((7,), (4,), (1,))
    routes = BlockRoutes(row, share_row(row, 1), [(0,)], [(0,)], hybrid=hybrid)
    assert routes.first(0, 0) == routes.summed(0, 0) == [Stretch(0, 0, 7)]
    assert routes.asked(0, 0, 0) == routes.told(0, 0, 0) == []
