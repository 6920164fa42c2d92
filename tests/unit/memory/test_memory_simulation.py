"""A virtual node in time: three resources, each doing one thing at a time, in an order that the memory allows."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from chains import every_choice, is_valid, profiles
from hypothesis import given
from hypothesis import strategies as st

from virtualflow.memory import Block, Profile, Timeline
from virtualflow.memory.search import bound
from virtualflow.memory.simulation import (
    JOIN,
    KEEP,
    RECOMPUTE,
    REFETCH,
    SWAP,
    Actions,
    ChainArrays,
    least_capacity,
    most_backward,
    schedule,
    timeline,
)


def choices(profile: Profile) -> st.SearchStrategy[Actions]:
    return st.sampled_from(list(every_choice(len(profile.blocks))))


CASES = profiles(4, skips=2).flatmap(lambda profile: st.tuples(st.just(profile), choices(profile), st.integers(0, 120)))


def times(profile: Profile, actions: Actions, capacity: int) -> Timeline:
    chain = ChainArrays(profile)
    found = schedule(chain, actions, capacity)
    assert found is not None
    return timeline(chain, actions, found, 0)


def capacity_of(profile: Profile, actions: Actions, share: int) -> int:
    chain = ChainArrays(profile)
    least, most = least_capacity(chain, actions), least_capacity(chain, bytes(chain.length))
    return least + max(0, most - least) * share // 100


@given(CASES)
def test_every_resource_does_one_thing_at_a_time_and_everything_in_order(case: tuple[Profile, Actions, int]) -> None:
    profile, actions, share = case
    found = times(profile, actions, capacity_of(profile, actions, share))
    for resource in ("compute", "copy-out", "copy-in"):
        busy = [span for span in found.spans if span.resource == resource]
        assert all(one.end <= two.start for one, two in pairwise(busy))
    spans = {(span.kind, span.block): span for span in found.spans}
    for block, action in enumerate(actions):
        forward, backward = spans["forward", block], spans["backward", block]
        again, out, back = (spans.get((kind, block)) for kind in ("recompute", "swap-out", "swap-in"))
        assert forward.end <= backward.start
        assert (again is not None) == (action >= RECOMPUTE)
        assert (out is not None) == (back is not None) == (action in (SWAP, REFETCH))
        if again is not None:
            assert forward.end <= again.start
            assert again.end <= backward.start
        if out is not None and back is not None:
            assert forward.end <= out.start
            assert max(span.end for span in found.spans if span.kind == "swap-out") <= back.start
            assert back.end <= (backward if again is None else again).start


@given(CASES)
def test_a_choice_works_with_the_least_that_it_needs_and_with_no_byte_less(case: tuple[Profile, Actions, int]) -> None:
    profile, actions, _ = case
    chain = ChainArrays(profile)
    least = least_capacity(chain, actions)
    assert times(profile, actions, least).peak <= least
    assert schedule(chain, actions, least - 1) is None


@given(CASES, st.sampled_from([0.1, 1.0, 10.0, 1e6]))
def test_a_schedule_takes_no_more_than_was_foretold_however_fast_copies_are(
    case: tuple[Profile, Actions, int], faster: float
) -> None:
    profile, actions, share = case
    capacity = capacity_of(profile, actions, share)
    found = schedule(ChainArrays(profile), actions, capacity)
    assert found is not None
    peak = max(
        timeline(ChainArrays(profile), actions, found, 0).peak, most_backward(ChainArrays(profile), actions, found)
    )
    assert peak <= capacity
    speeds = {"out_bytes_per_second": profile.out_bytes_per_second * faster}
    other = replace(profile, in_bytes_per_second=profile.in_bytes_per_second * faster, **speeds)
    followed = schedule(ChainArrays(other), actions, peak)
    assert followed is not None
    points = [[(back.block, back.operation) for back in each.back] for each in (found, followed)]
    assert points[0] == points[1], "copies back are issued at the same operations, so it is the same plan"
    assert timeline(ChainArrays(other), actions, followed, 0).peak <= peak


@given(CASES, st.integers(0, 120))
def test_a_choice_is_never_slower_with_more_memory(case: tuple[Profile, Actions, int], other: int) -> None:
    profile, actions, share = case
    low, high = (capacity_of(profile, actions, each) for each in sorted((share, other)))
    assert times(profile, actions, high).seconds <= times(profile, actions, low).seconds


@given(CASES)
def test_no_choice_is_faster_than_its_bound(case: tuple[Profile, Actions, int]) -> None:
    profile, actions, _ = case
    chain = ChainArrays(profile)
    assert bound(chain, actions) <= times(profile, actions, 10**9).seconds + 1e-9


@given(CASES)
def test_a_schedule_that_is_given_up_for_a_limit_would_not_have_met_it(case: tuple[Profile, Actions, int]) -> None:
    profile, actions, share = case
    chain, capacity = ChainArrays(profile), capacity_of(profile, actions, share)
    whole = schedule(chain, actions, capacity)
    assert whole is not None
    for limit in (whole.seconds / 2, whole.seconds, whole.seconds * 1.5):
        assert schedule(chain, actions, capacity, limit) is not None or whole.seconds >= limit


def test_the_copies_of_one_block_by_hand() -> None:
    # 3 blocks of 1 s forward and 2 s backward; block 0 saves 100 bytes, which take 1 s out and 2 s back.
    profile = Profile(tuple(Block(f"{index}", 1.0, 2.0, 100, 0) for index in range(3)), 100.0, 50.0)
    found = times(profile, bytes([SWAP, KEEP, KEEP]), 300)
    spans = {(span.kind, span.block): (span.start, span.end) for span in found.spans}
    assert spans["swap-out", 0] == (1.0, 2.0)
    assert spans["swap-in", 0] == (3.0, 5.0)  # all fits, so that it is issued when the backward pass begins
    assert spans["backward", 0] == (7.0, 9.0)
    tight = times(profile, bytes([SWAP, KEEP, KEEP]), 200)
    assert {(span.kind, span.block): (span.start, span.end) for span in tight.spans}["swap-in", 0] == (5.0, 7.0)
    assert tight.memory == ((0.0, 100), (1.0, 200), (7.0, 100), (9.0, 0))
    assert tight.busy("copy-in") == 2.0


def test_the_forward_pass_waits_for_a_copy_that_frees_its_memory() -> None:
    profile = Profile(tuple(Block(f"{index}", 1.0, 2.0, 100, 0) for index in range(2)), 20.0, 1e9)
    found = times(profile, bytes([SWAP, RECOMPUTE]), 100)
    starts = {(span.kind, span.block): span.start for span in found.spans}
    assert starts["forward", 1] == 6.0  # when 100 bytes are out: for a moment it needs as much as if it were kept
    assert starts["recompute", 1] == 7.0


@pytest.mark.parametrize(
    ("actions", "valid"),
    [
        pytest.param([RECOMPUTE, JOIN, JOIN], True, id="a segment"),
        pytest.param([REFETCH, JOIN], True, id="one whose boundary is swapped"),
        pytest.param([JOIN], False, id="nothing before"),
        pytest.param([SWAP, JOIN], False, id="nothing to join"),
        pytest.param([KEEP, RECOMPUTE, KEEP, JOIN], False, id="parted"),
    ],
)
def test_a_block_joins_only_what_is_recomputed(actions: list[int], valid: bool) -> None:
    assert is_valid(bytes(actions)) is valid
