"""Who owns which share of an optimizer, what goes where when members change, and how sums come to their owners."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from virtualflow.reduction.buckets import plan_buckets, plan_delivery
from virtualflow.reduction.ownership import Move, lost, owned_by, plan_hand_over, plan_moves, plan_owners

SIZES = st.lists(st.integers(0, 1_000), min_size=1, max_size=30)
MEMBERS = st.integers(1, 9)


@pytest.mark.parametrize(
    ("sizes", "members", "wanted"),
    [
        pytest.param([4, 8], 1, ((0,), (0,)), id="alone"),
        pytest.param([4, 8], 2, ((1, 0), (0, 1)), id="two keep everything"),
        pytest.param([9, 3, 3, 3], 3, ((0, 1), (1, 2), (2, 0), (1, 2)), id="the largest first"),
        pytest.param([5], 3, ((0, 1),), id="fewer parameters than members"),
    ],
)
def test_parameters_are_shared_out(sizes: list[int], members: int, wanted: Any) -> None:
    assert plan_owners(sizes, members) == wanted


@given(SIZES, MEMBERS)
def test_everything_has_two_owners_and_shares_are_equal_but_for_one_parameter(sizes: list[int], members: int) -> None:
    owners = plan_owners(sizes, members)
    assert all(len(set(ranks)) == min(2, members) for ranks in owners)
    loads = [
        sum(size for size, ranks in zip(sizes, owners, strict=True) if ranks[0] == rank) for rank in range(members)
    ]
    assert max(loads) - min(loads) <= max(sizes)


@given(SIZES, MEMBERS, MEMBERS, st.data())
def test_after_the_moves_everybody_has_what_it_wants(sizes: list[int], before: int, after: int, data: Any) -> None:
    old, new = plan_owners(sizes, before), plan_owners(sizes, after)
    # Of the old members one may be lost; the others are in the new generation, at any rank that there is room for.
    survivors = data.draw(st.permutations(range(before)).map(lambda ranks: ranks[: max(1, before - 1)]))[:after]
    have = [owned_by(survivors[rank], old) if rank < len(survivors) else frozenset() for rank in range(after)]
    want = [owned_by(rank, new) for rank in range(after)]
    missing = set(lost(have, len(sizes)))
    got = [set(places) for places in have]
    for move in plan_moves(have, want, sizes):
        assert move.place in have[move.donor]
        assert move.place not in got[move.receiver]
        got[move.receiver].add(move.place)
    assert all(got[rank] == have[rank] | (want[rank] - missing) for rank in range(after))
    if len(survivors) >= before - 1 and before > 1:
        assert not missing, "one may be lost"


def test_donors_send_about_as_much_as_one_another() -> None:
    have, want = [{0, 1, 2, 3}, {0, 1, 2, 3}, set()], [set(), set(), {0, 1, 2, 3}]
    assert plan_moves(have, want, [4, 4, 1, 1]) == [Move(0, 2, 0), Move(1, 2, 1), Move(0, 2, 2), Move(1, 2, 3)]


@given(SIZES, MEMBERS, st.data())
def test_two_who_stay_have_everything_before_the_others_leave(sizes: list[int], members: int, data: Any) -> None:
    owners = plan_owners(sizes, members)
    stay = data.draw(st.sets(st.integers(0, members - 1), min_size=1).map(sorted))
    places = st.lists(st.sampled_from(stay), max_size=2, unique=True).map(tuple)
    coming = tuple(data.draw(st.lists(places, min_size=len(sizes), max_size=len(sizes))))
    have = [set(owned_by(rank, owners)) for rank in range(members)]
    for rank, wanted in enumerate(plan_hand_over(owners, coming, stay, members)):
        assert rank in stay or not wanted
        assert not have[rank] & set(wanted), "nobody gets what it has"
        have[rank] |= set(wanted)
    for place in range(len(sizes)):
        assert sum(place in have[rank] for rank in stay) >= min(2, len(stay))


def test_what_is_handed_over_goes_to_the_owners_to_come() -> None:
    owners, coming = ((1, 2), (0, 1), (3, 0)), ((3, 0), (3,), ())
    assert plan_hand_over(owners, coming, [0, 3], 4) == [[0], [], [], [0, 1]]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 5), st.integers(1, 200))
def test_each_owner_gets_all_of_its_tensors_in_their_order(numels: list[int], size: int, limit: int) -> None:
    templates = [torch.empty(numel) for numel in numels]
    owners = plan_owners(numels, size)
    for bucket in plan_buckets(templates, range(len(numels)), size, alignment=4, limit=limit):
        row = torch.arange(size * bucket.piece)
        plans = [plan_delivery(bucket, templates, owners, size, rank) for rank in range(size)]
        for rank, plan in enumerate(plans):
            came = [
                row[source * bucket.piece + begin : source * bucket.piece + end]
                for source in range(size)
                for begin, end in plans[source].outward[rank]
            ]
            wanted = [
                row[offset : offset + numels[place]]
                for place, offset in zip(bucket.places, bucket.offsets, strict=True)
                if rank in owners[place]
            ]
            assert torch.equal(torch.cat([*came, row[:0]]), torch.cat([*wanted, row[:0]]))
            assert plan.inward == tuple(sum(e - b for b, e in plans[source].outward[rank]) for source in range(size))
