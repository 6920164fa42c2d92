"""Plans of memory: as fast as the best there is, never slower with more memory, never above the budget."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from chains import bytes_over_time, least_of_all, optimum, optimum_of_many, profiles
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tiers import examples, nightly
from virtualflow.errors import ConfigurationError
from virtualflow.memory import Action, Block, Budget, DoesNotFit, Plan, Planner, Profile, parse_bytes, plan
from virtualflow.memory.cuts import Cuts
from virtualflow.memory.search import Pool
from virtualflow.memory.settings import PlannerSettings
from virtualflow.memory.simulation import ChainArrays, least_capacity, schedule

KEEP, SWAP, RECOMPUTE = Action.KEEP, Action.SWAP, Action.RECOMPUTE
SHARES = st.integers(0, 100)
UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)
"""To make a failing example smaller would take minutes here."""
LONGEST = 6 if examples(100) > 100 else 5
"""Blocks of the chains of which all choices are tried: by night some more."""


def same_blocks(count: int, *, saved: int = 100, boundary: int = 10, bandwidth: float = 1e9) -> Profile:
    one = Block("block", 1.0, 2.0, saved, boundary)
    return Profile((one,) * count, bandwidth, bandwidth)


def budget_between(planner: Planner, share: int, host: int | None) -> Budget:
    """Return one between what works at all and what keeps everything."""
    any_size = Budget(1, host)
    least, most = planner.smallest(any_size), planner.keep_bytes(any_size)
    return Budget(max(1, least + max(0, most - least) * share // 100), host)


def actions(found: Plan) -> str:
    return "".join(block.action.value[0] for block in found.blocks)


@settings(max_examples=examples(40), phases=UNSHRUNK)
@given(profiles(8), SHARES, st.sets(st.integers(0, 7)), st.booleans())
def test_no_segment_reaches_over_a_block_that_gets_something_else(
    profile: Profile, share: int, apart: set[int], host: bool
) -> None:
    """What computes again between them is nobody's, so their boundaries stay."""
    blocks = tuple(replace(block, joins=number not in apart) for number, block in enumerate(profile.blocks))
    planner = Planner(replace(profile, blocks=blocks), PlannerSettings(moves=500))
    found = planner.plan(budget_between(planner, share, None if host else 0))
    assert all(found.blocks[number].segment in (None, number) for number in apart if number < len(blocks)), found.blocks


# --- as fast as the best ----------------------------------------------------------------------------------------------


def ratio(profile: Profile, share: int, host_share: int, *, fast: bool = False) -> float:
    """Return by how much a plan is slower than the best of all."""
    chain, planner = ChainArrays(profile), Planner(profile)
    host = chain.host_most * host_share // 100
    budget = budget_between(planner, share, host)
    capacity = budget.device - profile.resident_bytes("device")
    best = (optimum_of_many if fast else optimum)(chain, capacity, host)
    return planner.plan(budget).seconds / best


@pytest.mark.slow
@settings(max_examples=examples(120), phases=UNSHRUNK)
@given(profiles(LONGEST, least=3), SHARES, st.sampled_from([0, 30, 100]))
def test_a_plan_takes_at_most_2_percent_more_than_the_best_of_all(profile: Profile, share: int, host: int) -> None:
    assert 1 - 1e-9 <= ratio(profile, share, host) <= 1.02


@pytest.mark.parametrize(("length", "count"), [(6, 1), nightly(7, 8), nightly(8, 3), nightly(9, 1)])
def test_so_does_one_of_a_longer_chain(length: int, count: int) -> None:
    @settings(max_examples=count, phases=UNSHRUNK)
    @given(profiles(length, length), st.integers(5, 60), st.sampled_from([0, 100]))
    def try_some(profile: Profile, share: int, host: int) -> None:
        assert 1 - 1e-9 <= ratio(profile, share, host, fast=True) <= 1.02

    try_some()


@settings(max_examples=examples(60))
@given(profiles(8), SHARES)
def test_a_plan_is_never_slower_than_treating_all_blocks_alike(profile: Profile, share: int) -> None:
    planner = Planner(profile)
    budget = budget_between(planner, share, None)
    found = planner.plan(budget)
    for action in Action:
        try:
            alike = planner.uniform(action, budget)
        except DoesNotFit:
            continue
        assert found.seconds <= alike.seconds


@pytest.mark.slow
@pytest.mark.parametrize("share", [nightly(10), 50, nightly(90)])
def test_plans_of_a_hundred_blocks_without_the_host_are_near_what_no_plan_can_beat(share: int) -> None:
    planner = Planner(same_blocks(100, saved=1_000, boundary=10))
    budget = budget_between(planner, share, 0)
    # What is kept is in memory at once when the backward pass begins, and the rest is computed a second time.
    bound = 300 + 100 - budget.device // 1_000
    assert bound <= planner.plan(budget).seconds <= 1.02 * bound


@pytest.mark.slow
def test_the_search_of_a_hundred_blocks_tries_no_more_than_it_may() -> None:
    chosen = PlannerSettings(moves=5_000)
    pool = Pool(ChainArrays(same_blocks(100)), chosen)
    beginning = Pool(ChainArrays(same_blocks(100)), PlannerSettings(moves=0))
    # One plan at each size of memory is tried in any case.
    assert len(pool._choices) - len(beginning._choices) <= chosen.moves / 100 + 3 * chosen.rungs


@settings(max_examples=examples(30))
@given(profiles(5), SHARES)
def test_one_profile_has_one_plan(profile: Profile, share: int) -> None:
    budget = budget_between(Planner(profile), share, None)
    assert plan(profile, budget) == plan(profile, budget)


# --- more memory ------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(60))
@given(profiles(7, skips=3), st.lists(SHARES, min_size=2, max_size=6), st.lists(SHARES, min_size=2, max_size=4))
def test_more_memory_never_gives_a_slower_plan(profile: Profile, shares: list[int], hosts: list[int]) -> None:
    planner, most = Planner(profile), ChainArrays(profile).host_most
    budgets = [budget_between(planner, share, 0).device for share in sorted(shares)]
    # Two choices that take equally long may differ in the last bits of a sum.
    times = [[round(planner.plan(Budget(d, most * h // 100)).seconds, 9) for d in budgets] for h in sorted(hosts)]
    for row in times:
        assert row == sorted(row, reverse=True)
    for column in zip(*times, strict=True):
        assert list(column) == sorted(column, reverse=True)


@given(profiles(6, skips=3), SHARES, st.sampled_from([0, 40, 100]), st.sampled_from(["device", "host"]))
def test_the_timelines_peak_is_what_tensors_take_one_by_one_and_the_plans_within_the_budget(
    profile: Profile, share: int, host: int, optimizer: str
) -> None:
    planner, swapped = Planner(profile), ChainArrays(profile).host_most * host // 100
    device = budget_between(planner, share, swapped).device
    budget = Budget(device, swapped + profile.optimizer_bytes, optimizer)  # type: ignore[arg-type]
    found = planner.plan(budget)
    resident = profile.resident_bytes(budget.optimizer)
    assert resident + max(bytes_over_time(profile, found)) == found.timeline.peak <= found.peak_bytes <= budget.device
    assert found.host_bytes <= budget.host


# --- what does not fit ------------------------------------------------------------------------------------------------


@given(profiles(5), st.sampled_from([0, 30, 100]))
def test_a_budget_that_is_too_small_is_told_the_smallest_that_works(profile: Profile, share: int) -> None:
    host = ChainArrays(profile).host_most * share // 100
    planner = Planner(profile)
    smallest = planner.smallest(Budget(1, host))
    assert planner.plan(Budget(max(1, smallest), host)).peak_bytes <= max(1, smallest)
    if smallest > 1:
        with pytest.raises(DoesNotFit, match="the smallest budget that works is") as refused:
            planner.plan(Budget(smallest - 1, host))
        assert refused.value.smallest == smallest


@given(profiles(5))
def test_with_and_without_the_host_no_choice_at_all_needs_less_than_the_smallest_budget(profile: Profile) -> None:
    chain, resident = ChainArrays(profile), profile.resident_bytes("device")
    planner = Planner(profile)
    for host in (0, chain.host_most):
        assert planner.smallest(Budget(1, host)) == resident + least_of_all(chain, host)


@given(profiles(5))
def test_without_the_host_the_cuts_into_segments_that_need_least_are_found_directly(profile: Profile) -> None:
    chain = ChainArrays(profile)
    assert least_capacity(chain, Cuts(chain, 1).least()) == least_of_all(chain, 0)


@given(profiles(7, skips=3), SHARES)
def test_a_cut_that_is_found_fits_also_beside_skips(profile: Profile, share: int) -> None:
    chain = ChainArrays(profile)
    cuts = Cuts(chain, 100)
    least, most = least_capacity(chain, cuts.least()), least_capacity(chain, bytes(chain.length))
    capacity = least + max(0, most - least) * share // 100
    found = cuts.fastest(capacity, math.inf)
    assert found is None or least_capacity(chain, found) <= capacity


@given(profiles(5), SHARES)
def test_the_fastest_cut_is_the_fastest_of_all_without_the_host(profile: Profile, share: int) -> None:
    chain = ChainArrays(profile)
    cuts = Cuts(chain, 100)
    least, most = least_capacity(chain, cuts.least()), least_capacity(chain, bytes(chain.length))
    capacity = least + max(0, most - least) * share // 100
    found = cuts.fastest(capacity, math.inf)
    assert found is not None
    seconds = schedule(chain, found, capacity)
    assert seconds is not None
    assert seconds.seconds == pytest.approx(optimum(chain, capacity, 0))


def test_the_size_that_a_refusal_names_works() -> None:
    profile = same_blocks(7, saved=123_456_789, boundary=7_654_321)
    with pytest.raises(DoesNotFit) as refused:
        plan(profile, Budget(1 << 20, 0))
    named, with_host, host = re.findall(r"[\d.]+ [MG]iB", str(refused.value))[1:]
    assert plan(profile, Budget(parse_bytes(named), 0))
    assert plan(profile, Budget(parse_bytes(with_host), parse_bytes(host)))
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("budget", "sentence"),
    [
        pytest.param(Budget(10_000, 10, "host"), "the optimizer's state takes 40 B", id="the optimizer's state"),
        pytest.param(Budget(10_000, 90, "host"), "what is swapped takes 330 B and the optimizer's", id="both"),
        pytest.param(Budget(200, None), "to swap every block takes 270 B", id="the device"),
    ],
)
def test_what_everything_swapped_needs_is_said(budget: Budget, sentence: str) -> None:
    three = same_blocks(3)
    profile = Profile(three.blocks, 1.0, 1.0, optimizer_bytes=40, fixed_bytes=100)
    with pytest.raises(DoesNotFit, match=sentence):
        Planner(profile).uniform(SWAP, budget)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: Budget(0), id="no memory"),
        pytest.param(lambda: Budget(1, -1), id="less than none of the host's"),
        pytest.param(lambda: Profile((), 1.0, 1.0), id="no block"),
        pytest.param(lambda: Profile((Block("b", 1.0, 1.0, 1, 1),), 0.0, 1.0), id="no copies"),
        pytest.param(lambda: Profile((Block("b", 1.0, 1.0, 1, 1),), 1.0, math.nan), id="no number"),
        pytest.param(lambda: Block("b", 0.0, 1.0, 1, 1), id="no time"),
        pytest.param(lambda: Block("b", 1.0, math.inf, 1, 1), id="for ever"),
        pytest.param(lambda: Block("b", 1.0, 1.0, 1, 1, overhead_seconds=-0.1), id="less than no overhead"),
        pytest.param(lambda: Block("b", 1.0, 1.0, -1, 1), id="fewer than no bytes"),
    ],
)
def test_what_makes_no_sense_is_refused(make: object) -> None:
    with pytest.raises(ConfigurationError):
        make()  # type: ignore[operator]


# --- what plans look like ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "budget", "expected", "seconds"),
    [
        pytest.param(same_blocks(4), Budget(1_000), "kkkk", 12.0, id="what fits is kept"),
        pytest.param(same_blocks(4), Budget(360, 0), "rkkk", 13.0, id="without the host one is recomputed"),
        pytest.param(same_blocks(4), Budget(250, 0), "rrkk", 14.0, id="or two"),
        pytest.param(same_blocks(4), Budget(150, 0), "rrrk", 15.0, id="or all but the last"),
        pytest.param(same_blocks(4), Budget(360), "skkk", 12.0, id="a fast copy costs nothing"),
        pytest.param(same_blocks(4, bandwidth=1.0), Budget(360), "rkkk", 13.0, id="a slow one does"),
    ],
)
def test_blocks_that_are_alike(profile: Profile, budget: Budget, expected: str, seconds: float) -> None:
    found = plan(profile, budget)
    assert sorted(actions(found)) == sorted(expected)
    assert found.seconds == pytest.approx(seconds, rel=1e-6)


def test_blocks_that_save_little_beside_their_boundary_are_recomputed_in_segments() -> None:
    found = plan(same_blocks(6, saved=1, boundary=100), Budget(520, 0))
    assert max(block - treated.segment for block, treated in enumerate(found.blocks) if treated.segment is not None) > 0


def test_a_boundary_may_be_swapped_where_what_is_saved_is_recomputed() -> None:
    found = plan(same_blocks(8, saved=400, boundary=40, bandwidth=60.0), Budget(620))
    fetched = [block for block in found.blocks if block.action is RECOMPUTE and block.prefetch is not None]
    assert fetched
    assert all(block.prefetch.kind == "recompute" for block in fetched if block.prefetch is not None)


def test_what_is_recomputed_is_what_has_least_overhead() -> None:
    dear = Block("dear", 1.0, 2.0, 100, 10, overhead_seconds=0.5)
    cheap = replace(dear, overhead_seconds=0.25)
    found = plan(Profile((dear, cheap, dear, cheap, dear), 1e9, 1e9), Budget(360, 0))
    assert actions(found) == "krkrk"
    assert found.seconds == pytest.approx(15 + 2 * 1.25)
    assert "2 recomputed, for 16.7% more computing (3.3% overhead) and 0.0% of waiting" in found.reason


def test_the_reason_tells_what_the_plan_costs() -> None:
    assert plan(same_blocks(4), Budget(1_000)).reason == "everything fits"
    assert "2 recomputed, for 16.7% more computing and 0.0% of waiting" in plan(same_blocks(4), Budget(250, 0)).reason
