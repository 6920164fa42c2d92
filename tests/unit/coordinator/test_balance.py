"""Who is assigned how much, and when a training is worth interrupting for another split."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtualflow.coordinator.assignment import assign
from virtualflow.coordinator.balance import (
    KNOWN_FIRST,
    arrange,
    better_split,
    gain,
    note_pace,
    predicted_computing,
    predicted_step,
    slow_workers,
    split,
)
from virtualflow.coordinator.membership import decide
from virtualflow.coordinator.settings import MembershipSettings
from virtualflow.coordinator.snapshot import Cluster, Worker
from virtualflow.protocol.messages import Generation, Member, Pace, Plan
from virtualflow.protocol.settings import PassClass
from virtualflow.worker.pace import quartiles

NOW = 1_000.0
SETTINGS = MembershipSettings()
GENERATION = Generation(7, 3)


def pace(median: float, low: float | None = None, high: float | None = None, rest: float = 0.0, of: int = 3) -> Pace:
    return Pace(Generation(7, of), median, low or median, high or median, rest, 10)


def training(counts: list[int], paces: list[Pace | None], **facts: object) -> Cluster:
    """Members carry ``counts`` virtual nodes and were measured at ``paces``."""
    first, members, workers = 0, [], {}
    for number, (count, measured) in enumerate(zip(counts, paces, strict=True)):
        name = f"w{number}"
        members.append(Member(name, name, "h", first, first + count))
        workers[name] = Worker(name, name, last_heard=NOW, entered=GENERATION, ready_at=NOW - 60, pace=measured)
        first += count
    running = Plan(GENERATION, "planned", tuple(members), (), "start", "")
    usual = Cluster(first, len(counts), NOW - 300, workers, running=running, running_since=NOW - 60, trained=True)
    return dataclasses.replace(usual, **facts)  # type: ignore[arg-type]


def counts_of(ranges: list[range]) -> list[int]:
    return [len(assigned) for assigned in ranges]


SPLITS = [
    pytest.param([4, 4], [None, None], [4, 4], id="nobody was measured"),
    pytest.param([4, 4], [pace(0.01), pace(0.03)], [6, 2], id="a third of the speed, a third of the load"),
    pytest.param([6, 2], [pace(0.01), pace(0.01)], [4, 4], id="equal again"),
    pytest.param([4, 4], [pace(0.01), None], [4, 4], id="one of which nothing is known is as fast as the others"),
    pytest.param([32, 32], [pace(0.010), pace(0.011)], [32, 32], id="an even split where that is about as good"),
    pytest.param([32, 32], [pace(0.010), pace(0.015)], [38, 26], id="an exact one where it is not"),
    pytest.param([4, 4], [pace(0.001, rest=1.0), pace(0.003, rest=1.0)], [4, 4], id="synchronizing takes all the time"),
    pytest.param([1, 1], [pace(0.001), pace(9.0)], [1, 1], id="each has at least one"),
    pytest.param([4, 4], [pace(0.01, of=1), pace(0.03, of=2)], [6, 2], id="also as measured in former generations"),
]


@pytest.mark.parametrize(("present", "paces", "wanted"), SPLITS)
def test_the_split_follows_the_paces(present: list[int], paces: list[Pace | None], wanted: list[int]) -> None:
    cluster = training(present, paces)
    assert counts_of(split(cluster, list(cluster.workers), SETTINGS, NOW)) == wanted


def test_a_profile_counts_until_there_are_measurements() -> None:
    cluster = training([4, 4], [None, None])
    workers = {name: dataclasses.replace(one, guess=0.01) for name, one in cluster.workers.items()}
    workers["w1"] = dataclasses.replace(workers["w1"], guess=0.03)
    assert counts_of(split(dataclasses.replace(cluster, workers=workers), ["w0", "w1"], SETTINGS, NOW)) == [6, 2]
    workers["w1"] = dataclasses.replace(workers["w1"], pace=pace(0.01))
    assert counts_of(split(dataclasses.replace(cluster, workers=workers), ["w0", "w1"], SETTINGS, NOW)) == [4, 4]


def test_at_a_gain_of_one_every_split_is_even() -> None:
    cluster = training([4, 4], [pace(0.01), pace(1.0)])
    never = dataclasses.replace(SETTINGS, rebalance_gain=1.0)
    assert counts_of(split(cluster, list(cluster.workers), never, NOW)) == [4, 4]
    assert better_split(cluster, never, NOW) is None


def test_a_step_is_predicted_from_its_slowest_worker_and_the_rest() -> None:
    cluster = training([6, 2], [pace(0.010, rest=0.004), pace(0.020, rest=0.030)])
    assert predicted_step(cluster) == pytest.approx(0.064)
    assert predicted_computing(cluster) == pytest.approx(0.060), "which computes for so much of it"
    unknown = training([6, 2], [pace(0.010), None])
    assert (predicted_step(unknown), predicted_computing(unknown)) == (None, None)


REBALANCE = [
    pytest.param(training([4, 4], [pace(0.03), pace(0.01)]), True, id="a straggler loses load"),
    pytest.param(training([2, 6], [pace(0.01), pace(0.01)]), True, id="and gets it back"),
    pytest.param(training([6, 2], [pace(0.01), pace(0.03)]), False, id="it is as it should be"),
    pytest.param(training([4, 4], [pace(0.010), pace(0.012)]), False, id="no whole virtual node is worth moving"),
    pytest.param(training([4, 4], [pace(0.03), None]), False, id="one is not measured"),
    pytest.param(training([4, 4], [pace(0.03), pace(0.01, of=2)]), False, id="one not in this generation"),
    pytest.param(training([8], [pace(0.03)]), False, id="nobody to take it"),
    pytest.param(training([1, 1], [pace(0.03), pace(0.01)]), False, id="nothing to give"),
    pytest.param(
        training([4, 4], [pace(0.03, low=0.011), pace(0.01)]), False, id="the slow one may be as fast as the other"
    ),
    pytest.param(
        training([4, 4], [pace(0.03), pace(0.01, high=0.029)]), False, id="the fast one may be as slow as the other"
    ),
    pytest.param(training([4, 4], [pace(0.03, low=0.026), pace(0.01, high=0.013)]), True, id="both sure enough"),
    pytest.param(training([4, 4], [pace(0.03, rest=2.0), pace(0.01, rest=2.0)]), False, id="little of a step to gain"),
]


@pytest.mark.parametrize(("cluster", "worth"), REBALANCE)
def test_another_split_must_be_worth_it(cluster: Cluster, worth: bool) -> None:
    reason = better_split(cluster, SETTINGS, NOW)
    assert (reason is not None) is worth
    decision = decide(NOW, cluster, SETTINGS)
    assert (decision.proposal is not None) is worth
    if decision.proposal is not None:
        assert decision.reason == reason
        assert (decision.proposal.mode, decision.proposal.cause) == ("planned", "rebalance")
        assert decision.proposal.members == tuple(cluster.workers)
        assert decision.proposal.joiners == ()


def test_the_reason_says_who_is_waited_for_and_what_is_gained() -> None:
    reason = better_split(training([4, 4], [pace(0.03, rest=0.002), pace(0.01, rest=0.09)]), SETTINGS, NOW)
    assert reason == (
        "w0 needs 30 ms for each of its 4 virtual nodes and the others wait for it: "
        "with 2, a step takes 62 ms instead of 122"
    )


UNEVEN = [pace(0.03), pace(0.01)]


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param({"running_since": NOW - 0.5}, id="the last change was a moment ago"),
        pytest.param({"evaluating": True}, id="the job evaluates"),
        pytest.param({"stop": "enough"}, id="it is to stop"),
        pytest.param({"broken": {GENERATION: NOW}}, id="a collective broke"),
    ],
)
def test_other_things_go_before(facts: dict[str, object]) -> None:
    decision = decide(NOW, training([4, 4], UNEVEN, **facts), SETTINGS)
    assert decision.proposal is None or decision.proposal.cause != "rebalance"


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param({"draining": True, "deadline": NOW + 30}, id="one drains"),
        pytest.param({"connected": False, "disconnected_at": NOW}, id="one is out of reach"),
        pytest.param({"entered": Generation(7, 2)}, id="one has yet to enter"),
        pytest.param({"done": True}, id="one has seen the end"),
        pytest.param({"gone": "killed"}, id="one is lost"),
    ],
)
def test_a_member_that_is_not_quite_there_goes_before(facts: dict[str, object]) -> None:
    cluster = training([4, 4], UNEVEN)
    workers = {**cluster.workers, "w1": dataclasses.replace(cluster.workers["w1"], **facts)}
    decision = decide(NOW, dataclasses.replace(cluster, workers=workers), SETTINGS)
    assert decision.proposal is None or decision.proposal.cause != "rebalance"


def test_a_split_that_is_too_young_is_looked_at_again_in_time() -> None:
    since = NOW - SETTINGS.rebalance_interval / 2
    cluster = training([4, 4], UNEVEN, running_since=since)
    decision = decide(NOW, cluster, SETTINGS)
    assert decision.wake_at == since + SETTINGS.rebalance_interval
    later = decide(decision.wake_at, with_sign_of_life(cluster, decision.wake_at), SETTINGS)
    assert later.proposal is not None


def with_sign_of_life(cluster: Cluster, now: float) -> Cluster:
    workers = {name: dataclasses.replace(one, last_heard=now) for name, one in cluster.workers.items()}
    return dataclasses.replace(cluster, workers=workers)


def pending_rebalance(**facts: object) -> Cluster:
    cluster = training([4, 4], UNEVEN)
    assert cluster.running is not None
    members = (Member("w0", "w0", "h", 0, 2), Member("w1", "w1", "h", 2, 8))
    proposed = Plan(Generation(7, 4), "planned", members, (), "rebalance", "w0 is slow")
    return dataclasses.replace(cluster, proposed=proposed, proposed_at=NOW - 1, **facts)  # type: ignore[arg-type]


def test_a_rebalance_under_way_is_left_alone_also_when_it_is_not_needed_any_more() -> None:
    cluster = pending_rebalance()
    assert decide(NOW, cluster, SETTINGS).proposal is None
    workers = {name: dataclasses.replace(one, pace=pace(0.01)) for name, one in cluster.workers.items()}
    assert decide(NOW, dataclasses.replace(cluster, workers=workers), SETTINGS).proposal is None


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        pytest.param("join", "join", id="a joiner"),
        pytest.param("drain", "drain", id="a drain"),
        pytest.param("loss", "lost", id="a loss"),
    ],
)
def test_a_rebalance_under_way_gives_way(change: str, cause: str) -> None:
    cluster = pending_rebalance()
    workers = dict(cluster.workers)
    if change == "join":
        workers["w2"] = Worker("w2", "w2", last_heard=NOW, ready_at=NOW)
    else:
        fact = {"draining": True, "deadline": NOW + 30} if change == "drain" else {"gone": "killed"}
        workers["w1"] = dataclasses.replace(workers["w1"], **fact)  # type: ignore[arg-type]
    ended = frozenset(["w1"] if change == "loss" else [])
    decision = decide(NOW, dataclasses.replace(cluster, workers=workers, ended=ended), SETTINGS)
    assert decision.proposal is not None
    assert decision.proposal.cause == cause


def test_a_rebalance_that_cannot_be_built_is_tried_again_after_a_while() -> None:
    cluster = pending_rebalance(broken={Generation(7, 4): NOW})
    waiting = decide(NOW, cluster, SETTINGS)
    assert (waiting.proposal, waiting.wake_at) == (None, NOW + SETTINGS.reconnect_grace)
    decision = decide(NOW + SETTINGS.reconnect_grace, cluster, SETTINGS)
    assert decision.proposal is not None
    assert (decision.proposal.cause, decision.proposal.members) == ("rebalance", ("w0", "w1"))
    assert decision.reason == "w0 is slow"


# --- whatever the paces are -------------------------------------------------------------------------------------------

PACES = st.lists(st.floats(0.001, 1.0), min_size=2, max_size=5)


@given(PACES, st.integers(0, 60), st.floats(0.0, 0.5))
def test_a_split_is_never_more_than_the_threshold_from_the_best(paces: list[float], more: int, rest: float) -> None:
    virtual_nodes = len(paces) + more
    even = assign(virtual_nodes, [1.0] * len(paces))
    cluster = training(counts_of(even), [pace(seconds, rest=rest) for seconds in paces])
    chosen = split(cluster, list(cluster.workers), SETTINGS, NOW)
    best = assign(virtual_nodes, [1.0 / seconds for seconds in paces])

    def step(ranges: list[range]) -> float:
        return max(len(assigned) * seconds for assigned, seconds in zip(ranges, paces, strict=True))

    assert gain(step(chosen), step(best), rest) < SETTINGS.rebalance_gain + 1e-9
    assert [node for assigned in chosen for node in assigned] == list(range(virtual_nodes))


@given(PACES, st.integers(0, 60), st.data())
def test_after_one_rebalance_the_same_paces_ask_for_no_other(
    paces: list[float], more: int, data: st.DataObject
) -> None:
    virtual_nodes = len(paces) + more
    guesses = data.draw(st.lists(st.floats(0.001, 1.0), min_size=len(paces), max_size=len(paces)))
    present = counts_of(assign(virtual_nodes, guesses))
    spread = data.draw(st.floats(0.0, 0.4))
    measured: list[Pace | None] = [pace(p, p * (1 - spread), p * (1 + spread)) for p in paces]
    cluster = training(present, measured)
    if better_split(cluster, SETTINGS, NOW) is None:
        return
    moved = training(counts_of(split(cluster, list(cluster.workers), SETTINGS, NOW)), measured)
    assert better_split(moved, SETTINGS, NOW) is None


def noisy(seed: int, median: float, noise: float, samples: int = 10) -> Pace:
    """What is measured at a worker whose steps vary, with one in ten taking up to three times as long."""
    source = random.Random(seed)
    values = [
        median * source.uniform(1 - noise, 1 + noise) * (source.uniform(1, 3) if source.random() < 0.1 else 1)
        for _ in range(samples)
    ]
    low, middle, high = quartiles(values)
    return Pace(GENERATION, middle, low, high, 0.002, samples)


@pytest.mark.parametrize("virtual_nodes", [8, 64])
def test_a_steady_noisy_pair_is_left_alone(virtual_nodes: int) -> None:
    half = virtual_nodes // 2
    for seed in range(500):
        cluster = training([half, half], [noisy(2 * seed, 0.01, 0.25), noisy(2 * seed + 1, 0.01, 0.25)])
        assert better_split(cluster, SETTINGS, NOW) is None


def test_a_noisy_pair_with_a_real_straggler_is_not() -> None:
    """A window with too many outliers keeps quiet; the next one has others."""
    spoken = 0
    for seed in range(200):
        cluster = training([4, 4], [noisy(2 * seed, 0.03, 0.25), noisy(2 * seed + 1, 0.01, 0.25)])
        spoken += better_split(cluster, SETTINGS, NOW) is not None
    assert spoken >= 190


# --- what a worker has measured under other loads ---------------------------------------------------------------------


def measured(cluster: Cluster, seconds: Callable[[int, int], float], now: float = NOW) -> Cluster:
    """Each member has told its pace under its present load; ``seconds`` are those of a worker for so many."""
    assert cluster.running is not None
    workers = dict(cluster.workers)
    for number, member in enumerate(cluster.running.members):
        worker, count = workers[member.incarnation], len(member.virtual_nodes)
        told = pace(seconds(number, count) / count, rest=0.004)
        workers[member.incarnation] = dataclasses.replace(
            worker, pace=told, times=note_pace(cluster, worker, told, now)
        )
    return dataclasses.replace(cluster, workers=workers)


def moved(cluster: Cluster, counts: list[int]) -> Cluster:
    """The next split, under which nobody has been measured yet."""
    return dataclasses.replace(cluster, running=training(counts, [None] * len(counts)).running)


def settle(cluster: Cluster, seconds: Callable[[int, int], float], most: int) -> list[list[int]]:
    """The splits that follow one another until none is better, ``most`` of them at most."""
    found: list[list[int]] = []
    while len(found) < most:
        cluster = measured(cluster, seconds)
        if better_split(cluster, SETTINGS, NOW) is None:
            return found
        found.append(counts_of(split(cluster, list(cluster.workers), SETTINGS, NOW)))
        cluster = moved(cluster, found[-1])
    raise AssertionError(f"it does not come to rest: {found}")


def quota(number: int, count: int) -> float:
    """The second and the third of five are as fast as the others for two virtual nodes, and then stand still."""
    return 0.01 * count + (0.06 * (count - 2) if number in (1, 2) and count > 2 else 0.0)


def test_workers_with_a_quota_do_not_pass_the_load_to_each_other_for_ever() -> None:
    splits = settle(training([4, 3, 3, 3, 3], [None] * 5), quota, most=4)
    assert max(quota(number, count) for number, count in enumerate(splits[-1])) == pytest.approx(0.04)


def test_a_worker_that_is_faster_than_before_gets_its_load_back_at_once() -> None:
    def slow(number: int, count: int) -> float:
        return (0.01, 0.03)[number] * count

    cluster = measured(training([4, 4], [None, None]), slow)
    cluster = measured(moved(cluster, [6, 2]), slow)
    assert better_split(cluster, SETTINGS, NOW) is None
    cluster = measured(cluster, lambda number, count: 0.01 * count)
    assert better_split(cluster, SETTINGS, NOW) is not None
    assert counts_of(split(cluster, ["w0", "w1"], SETTINGS, NOW)) == [4, 4]


def test_what_was_measured_long_ago_is_tried_again() -> None:
    cluster = measured(training([2, 2], [None, None]), lambda number, count: (0.01, 0.05)[number] * count)
    cluster = measured(moved(cluster, [3, 1]), lambda number, count: 0.01 * count, now=NOW + 1)
    assert better_split(cluster, SETTINGS, NOW + 1) is None
    assert better_split(cluster, SETTINGS, NOW + KNOWN_FIRST + 0.1) is not None


def test_a_load_that_proves_bad_again_is_tried_ever_less_often() -> None:
    """One worker is fast for one virtual node only, which looks as if it were fast again."""

    def seconds(number: int, count: int) -> float:
        return (0.01, 0.01 if count == 1 else 0.05)[number] * count

    cluster, now, waits = training([2, 2], [None, None]), NOW, []
    for _ in range(7):
        cluster = measured(cluster, seconds, now)
        cluster = measured(moved(cluster, [3, 1]), seconds, now)
        waits.append(next(s for s in range(100) if better_split(cluster, SETTINGS, now + s) is not None))
        now += waits[-1]
        cluster = moved(cluster, [2, 2])
    assert waits == [4, 16, 60, 60, 60, 60, 60]


def test_a_pace_of_another_generation_says_nothing_of_the_present_load() -> None:
    cluster = training([4, 4], [None, None])
    assert note_pace(cluster, cluster.workers["w0"], pace(0.01, of=2), NOW) == ()


@given(
    st.lists(st.tuples(st.floats(0.001, 0.1), st.floats(0.0, 0.1), st.integers(1, 16)), min_size=2, max_size=5),
    st.integers(0, 11),
)
def test_with_any_quotas_the_splits_come_to_rest(quotas: list[tuple[float, float, int]], extra: int) -> None:
    def seconds(number: int, count: int) -> float:
        each, more, free = quotas[number]
        return each * count + more * max(0, count - free)

    even = counts_of(assign(len(quotas) + extra, [1.0] * len(quotas)))
    settle(training(even, [None] * len(quotas)), seconds, most=16)


@pytest.mark.parametrize(
    ("paces", "slow"),
    [
        pytest.param([pace(0.01), pace(0.025), pace(0.01)], {"w1": 2.5}, id="one of three"),
        pytest.param([pace(0.01), pace(0.02)], {"w1": 2.0}, id="the slower one of two"),
        pytest.param([pace(0.01), pace(0.02), pace(0.03), pace(0.01)], {"w1": 2.0, "w2": 3.0}, id="two of four"),
        pytest.param([pace(0.010), pace(0.011)], {}, id="as good as even"),
        pytest.param([pace(0.01), pace(0.02, low=0.0105)], {}, id="only most of the time"),
        pytest.param([pace(0.01, high=0.019), pace(0.02)], {}, id="where the others are now and then, too"),
        pytest.param([pace(0.02), None], {}, id="nobody else is known"),
        pytest.param([None, None], {}, id="nobody is"),
    ],
)
def test_a_worker_is_slow_if_it_clearly_takes_longer_than_usual(
    paces: list[Pace | None], slow: dict[str, float]
) -> None:
    assert slow_workers(training([4] * len(paces), paces)) == pytest.approx(slow)


@pytest.mark.parametrize("workers", [2, 8, 64])
def test_in_an_even_noisy_job_nobody_is_slow(workers: int) -> None:
    """But for one measurement of 10,000 that has too many outliers."""
    marked = 0
    for seed in range(50):
        paces = [noisy(seed * workers + number, 0.01, 0.25) for number in range(workers)]
        marked += len(slow_workers(training([2] * workers, list(paces))))
    assert marked <= workers // 64


# --- backward passes that end early -----------------------------------------------------------------------------------

HALVES = (PassClass(1.0, 1.0), PassClass(0.5, 0.25))
"""The first half of the virtual nodes run whole passes, the others short ones at half the cost."""


def with_memory(cluster: Cluster, *sizes: int | None) -> Cluster:
    workers = {
        name: dataclasses.replace(one, capacity=size)
        for (name, one), size in zip(cluster.workers.items(), sizes, strict=True)
    }
    return dataclasses.replace(cluster, workers=workers)


@pytest.mark.parametrize(
    ("classes", "paces", "wanted"),
    [
        pytest.param((), [0.01, 0.01], [8, 8], id="all are whole"),
        pytest.param((PassClass(0.75, 1.0),), [0.01, 0.01], [8, 8], id="classes rotate"),
        pytest.param(HALVES, [0.01, 0.01], [6, 10], id="twelve whole ones' worth"),
        pytest.param(HALVES, [0.01, 0.02], [8, 8], id="the slow one has the short passes"),
        pytest.param(HALVES, [0.02, 0.01], [4, 12], id="the slow one has a few of the long ones"),
        pytest.param(HALVES, [None, None], [6, 10], id="nobody was measured"),
    ],
)
def test_a_virtual_node_counts_for_what_its_pass_costs(
    classes: tuple[PassClass, ...], paces: list[float | None], wanted: list[int]
) -> None:
    cluster = training([8, 8], [None if one is None else pace(one) for one in paces], classes=classes)
    assert counts_of(split(cluster, ["w0", "w1"], SETTINGS, NOW)) == wanted


@pytest.mark.parametrize(
    ("sizes", "order", "wanted"),
    [
        pytest.param([16, 16], "w0 w1", [6, 10], id="alike"),
        pytest.param([None, None], "w0 w1", [6, 10], id="nobody says"),
        pytest.param([16, 4], "w0 w1", [8, 8], id="a quarter of the memory is enough for the short passes alone"),
        pytest.param([4, 16], "w1 w0", [8, 8], id="the larger one goes first"),
        pytest.param([16, 3], "w0 w1", [15, 1], id="not even for these: as few as possible"),
        pytest.param([None, 4], "w0 w1", [6, 10], id="one of which nobody says it may have as much"),
    ],
)
def test_a_worker_with_little_memory_has_short_passes_only(
    sizes: list[int | None], order: str, wanted: list[int]
) -> None:
    cluster = with_memory(training([8, 8], [pace(0.01), pace(0.01)], classes=HALVES), *sizes)
    members = arrange(cluster, ["w0", "w1"])
    assert " ".join(members) == order
    assert counts_of(split(cluster, members, SETTINGS, NOW)) == wanted


@pytest.mark.parametrize(
    "classes", [(), (PassClass(0.75, 1.0),), (PassClass(1.0, 1.0), PassClass(0.5, 1.0)), HALVES[::-1]],
    ids=["all are whole", "classes rotate", "all are whole in some steps", "the longest passes are the last ones"],
)  # fmt: skip
def test_memory_decides_nothing_where_no_class_saves_any_for_life(classes: tuple[PassClass, ...]) -> None:
    cluster = with_memory(training([8, 8], [None, None], classes=classes), 4, 16)
    assert arrange(cluster, ["w0", "w1"]) == ("w0", "w1")


def test_a_split_by_cost_is_kept_and_predicted() -> None:
    cluster = training([6, 10], [pace(0.01, rest=0.002), pace(0.01, rest=0.002)], classes=HALVES)
    assert better_split(cluster, SETTINGS, NOW) is None
    assert predicted_step(cluster) == pytest.approx(0.062)
    even = dataclasses.replace(training([8, 8], [pace(0.01), pace(0.01)]), classes=HALVES)
    reason = better_split(even, SETTINGS, NOW)
    assert reason == (
        "w0 needs 10 ms for each of its 8 virtual nodes and the others wait for it: with 6, a step takes 60 ms instead "
        "of 80"
    )
