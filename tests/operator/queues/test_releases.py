"""What a policy wants is carried out step by step: never beyond the capacity, and nobody loses a minimum on the way."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiers import examples
from virtualflow_operator.queues.releases import find_stuck, release
from virtualflow_operator.scheduling import Demand, KindAllocation, KindDemand

Workers = Mapping[str, int]


def job(name: str, has: Workers, minimum: int = 1, units: int = 1, home: str | None = None) -> KindDemand:
    """A job with so many workers of each kind, the first of which is its own."""
    own = next(iter(has), "") if home is None else home
    demand = Demand(name, "ml", 0.0, 64, minimum=minimum, units=units, allocated=has.get(own, 0))
    return KindDemand(demand, {}, "mixes", own, {kind: count for kind, count in has.items() if kind != own})


def wants(workers: Workers, home: str | None = None) -> KindAllocation:
    return KindAllocation(dict(workers), next(iter(workers), "") if home is None else home, "so it is")


CASES: dict[str, tuple[KindDemand, Workers, Workers, Workers, Workers, str]] = {
    # what it has; what is wanted; what is held of each kind; what there is; what is given; its kind then
    "a move into free room": (job("a", {"old": 4}), {"new": 4}, {"old": 4}, {"old": 4, "new": 4}, {"new": 4}, "new"),
    "a move into room for some": (
        job("a", {"old": 4}, minimum=2),
        {"new": 4},
        {"old": 4},
        {"old": 4, "new": 2},
        {"new": 2},
        "new",
    ),
    "a move without room keeps the minimum": (
        job("a", {"old": 4}, minimum=2),
        {"new": 4},
        {"old": 4},
        {"old": 4, "new": 1},
        {"old": 2},
        "old",
    ),
    "lent ones come beside its own": (
        job("a", {"own": 2}),
        {"own": 2, "other": 2},
        {"own": 2},
        {"own": 2, "other": 1},
        {"own": 2, "other": 1},
        "own",
    ),
    "lent ones are taken back": (
        job("a", {"own": 2, "other": 3}),
        {"own": 2},
        {"own": 2, "other": 3},
        {"own": 2, "other": 3},
        {"own": 2},
        "own",
    ),
    "home from where it was lent to": (
        job("a", {"other": 2}, home="own"),
        {"own": 3},
        {"other": 2},
        {"own": 0, "other": 2},
        {"other": 1},
        "own",
    ),
    "a suspension": (job("a", {"old": 4}), {}, {"old": 4}, {"old": 4}, {}, ""),
    "no room for a minimum": (job("a", {}, minimum=2), {"new": 2}, {}, {"new": 1}, {}, "new"),
}


@pytest.mark.parametrize(("has", "wanted", "held", "there", "found", "home"), CASES.values(), ids=CASES.keys())
def test_what_is_given_at_once(
    has: KindDemand, wanted: Workers, held: Workers, there: Workers, found: Workers, home: str
) -> None:
    given = release({"a": wants(wanted)}, [has], {"a": held}, there)["a"]
    assert (dict(given.workers), given.home) == (dict(found), home)


def test_who_waits_for_another_kind_is_told_so() -> None:
    has = job("a", {"old": 4})
    wanted = wants({"new": 4})
    given = release({"a": wanted}, [has], {"a": {"old": 4}}, {"old": 4, "new": 0})["a"]
    assert given.reason == "4 workers on new as soon as those of others have left: so it is"


def test_who_would_wait_for_each_others_place_for_ever_is_found_wherever_they_are_on_the_way() -> None:
    full = {"old": 4, "new": 4}
    swap = {"a": wants({"new": 4}), "b": wants({"old": 4})}
    for minimum, stuck in ((2, set()), (3, {"a", "b"})):  # half of it is enough to begin there
        for has in (4, minimum):
            pair = [job("a", {"old": has}, minimum), job("b", {"new": has}, minimum)]
            assert find_stuck(swap, pair, full) == stuck
    assert find_stuck({"a": swap["a"]}, [job("a", {"old": 4})], {"old": 4, "new": 0}) == {"a"}


KINDS = ("fast", "slow")


@st.composite
def moments(
    draw: st.DrawFn, kinds: tuple[str, ...]
) -> tuple[list[KindDemand], dict[str, Workers], dict[str, KindAllocation], Workers]:
    """Jobs, how many workers each still has, what a policy wants within the capacity, and the capacity."""
    total = {kind: draw(st.integers(0, 24)) for kind in kinds}
    free = dict(total)
    demands: list[KindDemand] = []
    held: dict[str, Workers] = {}
    wanted: dict[str, KindAllocation] = {}
    for index in range(draw(st.integers(1, 6))):
        units, least, name = draw(st.integers(1, 3)), draw(st.integers(1, 3)), f"ml/{index}"
        has = {kind: draw(st.integers(0, 6)) for kind in draw(st.permutations(kinds))}
        has = {kind: count for kind, count in has.items() if count}
        demands.append(job(name, has, least, units))
        held[name] = {kind: draw(st.integers(0, 8)) for kind in kinds}
        want = {kind: draw(st.integers(0, min(6, free[kind] // units))) for kind in draw(st.permutations(kinds))}
        want = {kind: count for kind, count in want.items() if count}
        if sum(want.values()) < least:
            want = {}
        for kind, count in want.items():
            free[kind] -= count * units
        wanted[name] = wants(want)
    return demands, held, wanted, total


def load(demands: list[KindDemand], given: Mapping[str, Workers], held: Mapping[str, Workers], kind: str) -> int:
    return sum(d.job.units * max(given[d.job.name].get(kind, 0), held[d.job.name].get(kind, 0)) for d in demands)


def with_workers(demand: KindDemand, workers: Workers) -> KindDemand:
    return job(demand.job.name, workers, demand.job.minimum, demand.job.units)


@settings(max_examples=examples(200))
@given(moments(KINDS))
def test_capacity_is_never_exceeded_and_nobody_loses_a_minimum_on_the_way(
    moment: tuple[list[KindDemand], dict[str, Workers], dict[str, KindAllocation], Workers],
) -> None:
    demands, held, wanted, total = moment
    for _ in range(2 * len(demands) + 2):
        given = {name: dict(found.workers) for name, found in release(wanted, demands, held, total).items()}
        kept = {d.job.name: {k: min(n, given[d.job.name].get(k, 0)) for k, n in d.workers.items()} for d in demands}
        for kind in KINDS:
            assert load(demands, given, held, kind) <= max(total[kind], load(demands, kept, held, kind))
        for d in demands:
            before, now = d.total, sum(given[d.job.name].values())
            assert not wanted[d.job.name].workers or now >= min(before, d.job.minimum)
            assert all(
                count <= max(d.workers.get(kind, 0), wanted[d.job.name].workers.get(kind, 0))
                for kind, count in given[d.job.name].items()
            )
        demands = [with_workers(d, given[d.job.name]) for d in demands]
        held = dict(given)  # those who were to leave have left
    again = release(wanted, demands, held, total)
    for demand in demands:
        assert dict(again[demand.job.name].workers) == demand.workers, "it has come to rest"
    if all(demand.workers.keys() <= wanted[demand.job.name].workers.keys() for demand in demands):
        # Nobody waits to go to another kind, so nobody waits in a circle.
        assert all(demand.workers == wanted[demand.job.name].workers for demand in demands)


@given(moments(("",)))
def test_with_one_kind_giving_ends_at_what_was_wanted(
    moment: tuple[list[KindDemand], dict[str, Workers], dict[str, KindAllocation], Workers],
) -> None:
    demands, held, wanted, total = moment
    for _ in range(len(demands) + 2):
        given = release(wanted, demands, held, total)
        for demand in demands:
            found, before = sum(given[demand.job.name].workers.values()), demand.total
            low, high = sorted((before, sum(wanted[demand.job.name].workers.values())))
            assert low <= found <= high
        demands = [with_workers(demand, given[demand.job.name].workers) for demand in demands]
        held = {d.job.name: d.workers for d in demands}
    assert {d.job.name: d.workers for d in demands} == {name: dict(found.workers) for name, found in wanted.items()}
