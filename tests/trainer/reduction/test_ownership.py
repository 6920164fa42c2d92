"""Who keeps which share of an optimizer, what goes where when members change, and how sums come to their owners."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from virtualflow.reduction.buckets import plan_buckets, share_bucket
from virtualflow.reduction.ownership import (
    Move,
    Row,
    Shares,
    Spans,
    Stretch,
    covers,
    difference,
    holders,
    intersection,
    lost,
    plan_hand_over,
    plan_moves,
    refine,
    share_row,
    union,
)

MEMBERS, COPIES = st.integers(1, 7), st.integers(1, 2)
RUNS = st.sampled_from([None, 40, 200])
SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted).map(tuple), max_size=6).map(union)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """Parameters of which some are empty, some cost nothing, and some may not be cut."""
    parameters = st.tuples(st.integers(0, 90), st.sampled_from([0, 2, 4]), st.sampled_from([0, 4, 16]))
    return Row(*map(tuple, zip(*draw(st.lists(parameters, min_size=1, max_size=8)), strict=True)))  # type: ignore[arg-type]


def places(spans: Spans) -> set[int]:
    return {place for begin, end in spans for place in range(begin, end)}


# --- spans ------------------------------------------------------------------------------------------------------------


@given(SPANS, SPANS)
def test_spans_are_sets_of_places(left: Any, right: Any) -> None:
    for found, wanted in [
        (union(left, right), places(left) | places(right)),
        (intersection(left, right), places(left) & places(right)),
        (difference(left, right), places(left) - places(right)),
    ]:
        assert places(found) == wanted
        assert found == union(found), "ascending, apart, and none is empty"
    for span in refine(left, right):
        for spans in (left, right):
            inside = places((span,)) <= places(spans)
            assert covers(spans, span) == inside
            assert inside or not places((span,)) & places(spans), "no edge is within a stretch"


# --- shares -----------------------------------------------------------------------------------------------------------


def loads(shares: Shares) -> list[int]:
    """What each member's own share costs."""
    row = shares.row
    return [
        sum((piece.end - piece.begin) * row.costs[piece.place] for piece in row.pieces(shares.first(rank)))
        for rank in range(shares.members)
    ]


@pytest.mark.parametrize(
    ("numels", "unit", "members", "wanted"),
    [
        pytest.param((4, 8), 4, 1, [[(0, 0, 4), (1, 0, 8)]], id="alone"),
        pytest.param((3, 18), 4, 2, [[(0, 0, 3), (1, 0, 8)], [(1, 8, 18)]], id="the largest is cut"),
        pytest.param((3, 18), 0, 2, [[(0, 0, 3)], [(1, 0, 18)]], id="one that may not be cut"),
        pytest.param((5,), 8, 3, [[], [(0, 0, 5)], []], id="fewer units than members"),
        pytest.param((2, 0, 2), 4, 2, [[(0, 0, 2), (1, 0, 0)], [(2, 0, 2)]], id="one without elements"),
    ],
)
def test_a_row_is_shared_out(numels: tuple[int, ...], unit: int, members: int, wanted: Any) -> None:
    row = Row(numels, (4,) * len(numels), (unit,) * len(numels))
    shares = share_row(row, members)
    assert [row.pieces(shares.first(rank)) for rank in range(members)] == wanted


@given(rows(), MEMBERS, COPIES, RUNS)
def test_every_place_has_its_keepers_and_no_unit_is_cut(row: Row, members: int, copies: int, run: int | None) -> None:
    shares = share_row(row, members, copies, run)
    kept = [places(shares.kept(rank)) for rank in range(members)]
    for at in range(row.offsets[-1]):
        keepers = shares.keepers(at)
        assert len(set(keepers)) == min(copies, members)
        assert set(keepers) == {rank for rank in range(members) if at in kept[rank]}
        assert at in places(shares.first(keepers[0]))
    firsts = [row.pieces(shares.first(rank)) for rank in range(members)]
    assert all(pieces == sorted(pieces) for pieces in firsts)
    for place, begin, end in [piece for pieces in firsts for piece in pieces]:
        numel, unit = row.numels[place], row.units[place]
        assert (begin, end) == (0, numel) or (unit and begin % unit == 0 and (end % unit == 0 or end == numel))
    for rank in range(members):
        told = [
            (row.offsets[place] + begin, row.offsets[place] + max(end, begin + (not row.numels[place])))
            for place, portions in enumerate(shares.portions)
            for begin, end, keepers in portions
            if rank in keepers
        ]
        assert union(told) == shares.kept(rank)


@given(rows(), MEMBERS)
def test_shares_cost_the_same_but_for_what_may_not_be_cut(row: Row, members: int) -> None:
    costs = loads(share_row(row, members))
    coarsest = max(cost * (unit or numel) for numel, cost, unit in zip(row.numels, row.costs, row.units, strict=True))
    assert all(abs(cost - sum(costs) / members) <= coarsest + 4 for cost in costs)


@pytest.mark.parametrize("members", [2, 3, 4, 7, 16])
def test_one_dominant_parameter_is_shared_out_within_five_percent(members: int) -> None:
    numels = (512, 50_000 * 512, 512 * 512, 512, 512 * 512, 512)
    shares = share_row(Row(numels, (4,) * len(numels), (4_096,) * len(numels)), members)
    costs = loads(shares)
    assert max(costs) <= 1.05 * sum(costs) / members
    kept = [sum(end - begin for begin, end in shares.kept(rank)) for rank in range(members)]
    assert max(kept) <= 1.05 * sum(numels) * min(2, members) / members


@pytest.mark.parametrize("members", [3, 24, 100])
def test_roundings_of_many_runs_do_not_add_up(members: int) -> None:
    numels, run = (1 << 24,) * 16, 8 << 20
    costs = loads(share_row(Row(numels, (4,) * len(numels), (4_096,) * len(numels)), members, 1, run))
    assert max(abs(cost - sum(costs) / members) for cost in costs) <= 4 * 4_096


# --- moves ------------------------------------------------------------------------------------------------------------


@given(rows(), MEMBERS, MEMBERS, RUNS, st.data())
def test_after_the_moves_everybody_has_what_it_wants(
    row: Row, before: int, after: int, run: int | None, data: Any
) -> None:
    old, new = share_row(row, before, run=run), share_row(row, after, run=run)
    # Of the old members one may be lost; the others are in the new generation, at any rank that there is room for.
    survivors = data.draw(st.permutations(range(before)).map(lambda ranks: ranks[: max(1, before - 1)]))[:after]
    have = [old.kept(survivors[rank]) if rank < len(survivors) else () for rank in range(after)]
    want = [new.kept(rank) for rank in range(after)]
    missing = lost(have, row)
    got = list(have)
    for move in plan_moves(have, want):
        assert covers(have[move.donor], move.span)
        assert not intersection(got[move.receiver], (move.span,))
        got[move.receiver] = union(got[move.receiver], [move.span])
    assert got == [union(have[rank], difference(want[rank], missing)) for rank in range(after)]
    if len(survivors) >= before - 1 and before > 1:
        assert not missing, "one may be lost"


def test_donors_send_about_as_much_as_one_another() -> None:
    have: list[Spans] = [((0, 8),), ((0, 4), (4, 8)), ()]
    want: list[Spans] = [(), (), ((0, 8),)]
    assert plan_moves(have, want) == [Move(0, 2, (0, 4)), Move(1, 2, (4, 8))]


@given(rows(), MEMBERS, COPIES, RUNS, st.data())
def test_those_who_stay_have_everything_before_the_others_leave(
    row: Row, members: int, copies: int, run: int | None, data: Any
) -> None:
    running = share_row(row, members, copies, run)
    stay = data.draw(st.sets(st.integers(0, members - 1), min_size=1).map(sorted))
    joiners = data.draw(st.integers(0, 3))
    old_ranks = data.draw(st.permutations([*stay, *[None] * joiners]))
    have = [running.kept(rank) for rank in range(members)]
    coming = share_row(row, len(old_ranks), copies, run)
    for rank, wanted in enumerate(plan_hand_over(running, coming, old_ranks, stay)):
        assert rank in stay or not wanted
        assert not intersection(have[rank], wanted), "nobody gets what it has"
        have[rank] = union(have[rank], wanted)
    for at in range(row.offsets[-1]):
        assert sum(at in places(have[rank]) for rank in stay) >= min(copies, len(stay))


def test_what_is_handed_over_goes_to_the_keepers_to_come() -> None:
    row = Row((16,), (4,), (4,))
    running, coming = share_row(row, 4), share_row(row, 2)
    assert plan_hand_over(running, coming, [3, 0], [0, 3]) == [((4, 12),), (), (), ((0, 8),)]
    assert row.pieces(((2, 6),)) == [Stretch(0, 2, 6)]


# --- gradients --------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 5), st.integers(1, 200), COPIES, RUNS)
def test_of_each_bucket_everything_is_added_up_once_by_who_keeps_it(
    numels: list[int], size: int, limit: int, copies: int, run: int | None
) -> None:
    templates = [torch.empty(numel) for numel in numels]
    row = Row(tuple(numels), (4,) * len(numels), (4,) * len(numels))
    shares, rows = share_row(row, size, copies, run), [((0,),) * size] * len(numels)
    added = [
        Stretch(bucket.places[part.at], part.begin, part.end)
        for bucket in plan_buckets(templates, range(len(numels)), rows, alignment=4, limit=limit)
        for rank, parts in enumerate(share_bucket(bucket, shares.portions, size))
        for part in parts
        if part.keepers == shares.keepers(row.offsets[bucket.places[part.at]] + part.begin) and part.keepers[0] == rank
    ]
    for place, numel in enumerate(numels):
        pieces = sorted(piece for piece in added if piece.place == place)
        assert [piece.begin for piece in pieces] == [0, *(piece.end for piece in pieces[:-1])]
        assert pieces[-1].end == numel


@pytest.mark.parametrize("members", [2, 3, 5])
def test_each_worker_adds_up_as_much_of_every_bucket_as_the_others(members: int) -> None:
    numels = (512, 3_000_000, 512 * 512, 512, 2_000_000, *[300_000] * 12)
    templates = [torch.empty(()).expand(numel) for numel in numels]
    run = 1 << 20
    portions = share_row(Row(numels, (4,) * len(numels), (4_096,) * len(numels)), members, 1, run).portions
    rows = [((0,),) * members] * len(numels)
    for bucket in plan_buckets(templates, range(len(numels))[::-1], rows, alignment=16, limit=4 * run):
        lengths = [sum(part.numel for part in parts) for parts in share_bucket(bucket, portions, members)]
        assert max(lengths) - min(lengths) <= run // 4 + 4_096


# --- who holds shares for others of its group -------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 4), st.randoms(use_true_random=False))
def test_each_group_holds_all_shares_once_and_each_member_its_own(groups: int, size: int, draw: random.Random) -> None:
    ranks = list(range(groups * size))
    draw.shuffle(ranks)
    divided = [tuple(sorted(ranks[number::groups])) for number in range(groups)]
    held = holders(divided)
    for group in divided:
        assert sorted(first for rank in group for first in held[rank]) == list(range(groups * size))
    assert all(rank in first for rank, first in enumerate(held))


def test_groups_of_different_sizes_hold_all_as_well() -> None:
    assert holders([(0, 2), (1,)]) == [(0, 1), (0, 1, 2), (2,)]
