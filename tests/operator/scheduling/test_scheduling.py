"""The scheduling policies, case by case: who gets how many workers, and the sentence that says why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from virtualflow.errors import ConfigurationError
from virtualflow_operator.scheduling import POLICIES, Allocation, Capacity, Demand, ScalingCurve, next_change, policy
from virtualflow_operator.settings import SchedulingSettings

NOW = 1_000.0
TOLD = SchedulingSettings(starvation_bound=600.0, turn=300.0)
LINEAR = ScalingCurve(((1, 1.0), (16, 16.0)))
BENT = ScalingCurve(((1, 1.0), (2, 1.9), (4, 2.9), (8, 3.1)))
"""The third and fourth worker bring half of what the first did, the others a twentieth."""


def job(name: str, maximum: int = 16, **more: Any) -> Demand:
    """A job of namespace ``red``, unless its name has another."""
    namespace, _, short = name.rpartition("/")
    given = {"namespace": namespace or "red", "submitted": NOW - 100.0 + ord(short[0]) / 100, **more}
    return Demand(f"{given['namespace']}/{short}", maximum=maximum, **given)


def running(name: str, allocated: int, maximum: int = 16, **more: Any) -> Demand:
    """One that has been running for long."""
    return job(name, maximum, **{"allocated": allocated, "since": NOW - 5_000.0, "submitted": NOW - 5_000.0, **more})


def decide(name: str, jobs: list[Demand], capacity: Capacity | int, now: float = NOW) -> dict[str, Allocation]:
    """What the policy says, by the names within the namespace."""
    capacity = Capacity(capacity) if isinstance(capacity, int) else capacity
    return {key.rpartition("/")[2]: given for key, given in policy(name)(now, jobs, capacity, TOLD).items()}


Case = tuple[list[Demand], Capacity | int, dict[str, int]]

FIXED: dict[str, tuple[str, Case]] = {
    "the oldest first": ("FIFO", ([job("b", 4), job("a", 4), job("c", 4)], 8, {"a": 4, "b": 4, "c": 0})),
    "nobody passes one that does not fit": (
        "FIFO",
        ([job("a", 6), job("b", 4), job("c", 1)], 8, {"a": 6, "b": 0, "c": 0}),
    ),
    "a namespace's limit holds back its own jobs only": (
        "FIFO",
        (
            [job("a", 3), job("b", 3), job("c", 1), job("green/d", 4)],
            Capacity(16, limits={"red": 4}),
            {"a": 3, "b": 0, "c": 0, "d": 4},
        ),
    ),
    "who runs is not stopped": ("Priority", ([running("z", 6, 6), job("a", 4, priority=9)], 8, {"z": 6, "a": 0})),
    "the size asked for, not the maximum": (
        "FIFO",
        ([job("a", 8, requested=3), job("b", 8, requested=5)], 8, {"a": 3, "b": 5}),
    ),
    "a size beyond the queue is the queue": ("FIFO", ([job("a", 99), job("b", 1)], 8, {"a": 8, "b": 0})),
    "lost capacity shrinks the last": ("FIFO", ([running("a", 4, 4), job("b", 4, allocated=4)], 6, {"a": 4, "b": 2})),
    "and grows back before another starts": (
        "FIFO",
        ([running("a", 2, 4), job("b", 4), job("c", 1)], 6, {"a": 4, "b": 0, "c": 0}),
    ),
    "the highest priority first": ("Priority", ([job("a", 4), job("b", 4, priority=1)], 4, {"a": 0, "b": 4})),
    "of equal priorities the oldest": ("Priority", ([job("b", 4), job("a", 4)], 4, {"a": 4, "b": 0})),
    "age counts as priority": (
        "Priority",
        (
            [job("a", 4, submitted=NOW - 2.5 * TOLD.aging), job("b", 4, priority=2), job("c", 4, priority=3)],
            8,
            {"a": 4, "b": 0, "c": 4},
        ),
    ),
}

SHARED: dict[str, tuple[str, Case]] = {
    "one job takes all that it can": ("WeightedFairShare", ([job("a", 12)], 16, {"a": 12})),
    "shares follow weights": (
        "WeightedFairShare",
        ([job("a", weight=5.0), job("b", weight=10.0), job("c", weight=1.0)], 16, {"a": 5, "b": 10, "c": 1}),
    ),
    "what one cannot use goes to the others": (
        "WeightedFairShare",
        ([job("a", 2, weight=10.0), job("b"), job("c")], 16, {"a": 2, "b": 7, "c": 7}),
    ),
    "nor can what its namespace may not have": (
        "WeightedFairShare",
        (
            [job("a", weight=10.0), job("green/b"), job("green/c")],
            Capacity(16, limits={"red": 4}),
            {"a": 4, "b": 6, "c": 6},
        ),
    ),
    "minimums come first": (
        "WeightedFairShare",
        ([job("a", minimum=6), job("b", weight=10.0), job("c", weight=10.0)], 16, {"a": 6, "b": 5, "c": 5}),
    ),
    "shares are units, not workers": ("WeightedFairShare", ([job("a", units=3), job("b")], 12, {"a": 2, "b": 6})),
    "units that are too few for one go to another": (
        "WeightedFairShare",
        ([job("a", units=4), job("b")], 14, {"a": 1, "b": 10}),
    ),
    "an arrival shrinks who runs": ("WeightedFairShare", ([running("a", 16), job("b")], 16, {"a": 8, "b": 8})),
    "who has the odd worker keeps it": ("WeightedFairShare", ([running("b", 3), running("a", 2)], 5, {"a": 2, "b": 3})),
    "who runs keeps its minimum, the newcomer waits": (
        "WeightedFairShare",
        ([running("a", 8, minimum=6), job("b", minimum=4, weight=9.0)], 8, {"a": 8, "b": 0}),
    ),
    "a higher priority needs its minimum, the youngest gives way": (
        "WeightedFairShare",
        ([running("a", 8, minimum=6), running("c", 2), job("b", minimum=4, priority=1)], 10, {"a": 6, "b": 4, "c": 0}),
    ),
    "who runs goes before who has come before it": (
        "WeightedFairShare",
        (
            [job("a", minimum=3, submitted=NOW - 9_000.0, since=NOW - 9.0), running("b", 4, minimum=3)],
            4,
            {"a": 0, "b": 4},
        ),
    ),
    "of those that wait, the oldest begins": (
        "WeightedFairShare",
        ([job("a", minimum=3, submitted=NOW - 1.0), job("b", minimum=3, submitted=NOW - 9.0)], 4, {"a": 0, "b": 4}),
    ),
    "growth waits a little after a change": ("WeightedFairShare", ([running("a", 4, resized=NOW - 1.0)], 16, {"a": 4})),
    "but not for ever": ("WeightedFairShare", ([running("a", 4, resized=NOW - TOLD.hold)], 16, {"a": 16})),
    "and a shrink never waits": ("WeightedFairShare", ([running("a", 4, resized=NOW), job("b")], 4, {"a": 2, "b": 2})),
    "minimums on on-demand capacity": (
        "WeightedFairShare",
        (
            [job("a", minimum=3, minimum_on_demand=True), job("b", minimum=3, minimum_on_demand=True)],
            Capacity(4, spot=8),
            {"a": 12, "b": 0},
        ),
    ),
    "the shortest gets what it can use, the next the rest": (
        "ShortestFirst",
        (
            [job("a", curve=LINEAR, steps_left=9_000), job("b", 12, curve=LINEAR, steps_left=100)],
            16,
            {"a": 4, "b": 12},
        ),
    ),
    "a longer one waits until there is room": (
        "ShortestFirst",
        ([job("a", curve=LINEAR, steps_left=9_000), job("b", curve=LINEAR, steps_left=100)], 16, {"a": 0, "b": 16}),
    ),
    "but keeps its minimum if it runs": (
        "ShortestFirst",
        (
            [running("a", 16, curve=LINEAR, steps_left=9_000), job("b", curve=LINEAR, steps_left=100)],
            16,
            {"a": 1, "b": 15},
        ),
    ),
    "unless a shorter one's minimum has no other room": (
        "ShortestFirst",
        (
            [
                running("a", 8, minimum=5, curve=LINEAR, steps_left=9_000),
                job("b", minimum=4, curve=LINEAR, steps_left=100),
            ],
            8,
            {"a": 0, "b": 8},
        ),
    ),
    "and nobody is stopped for the growth of another": (
        "ShortestFirst",
        (
            [
                running("a", 1, curve=LINEAR, steps_left=10),
                job("b", minimum=4, curve=LINEAR, steps_left=100),
                running("c", 7, minimum=5, curve=LINEAR, steps_left=9_000),
            ],
            8,
            {"a": 4, "b": 4, "c": 0},
        ),
    ),
    "who has waited for too long has its turn beside shorter ones": (
        "ShortestFirst",
        (
            [
                running("a", 4, curve=LINEAR, steps_left=10),
                job("b", curve=LINEAR, steps_left=9_000, submitted=NOW - TOLD.starvation_bound),
            ],
            4,
            {"a": 3, "b": 1},
        ),
    ),
    "who is not yet measured begins with its minimum": (
        "ShortestFirst",
        ([running("a", 4, curve=LINEAR, steps_left=10), job("b", steps_left=9_000)], 4, {"a": 3, "b": 1}),
    ),
    "a little shorter is not short enough": (
        "ShortestFirst",
        (
            [
                running("a", 8, minimum=5, curve=LINEAR, steps_left=9_000),
                job("b", minimum=5, curve=LINEAR, steps_left=8_900),
            ],
            8,
            {"a": 8, "b": 0},
        ),
    ),
    "workers that bring little go to the next": (
        "ShortestFirst",
        ([job("a", curve=LINEAR, steps_left=9_000), job("b", curve=BENT, steps_left=100)], 16, {"a": 12, "b": 4}),
    ),
    "unless nobody else can use them": ("ShortestFirst", ([job("a", 8, curve=BENT, steps_left=100)], 16, {"a": 8})),
    "the number of steps alone is no length": (
        "ShortestFirst",
        (
            [
                job("a", 1, curve=ScalingCurve(((1, 10.0),)), steps_left=900),
                job("b", 1, curve=ScalingCurve(((1, 1.0),)), steps_left=100),
            ],
            1,
            {"a": 1, "b": 0},
        ),
    ),
    "who is not yet measured is not stopped": (
        "ShortestFirst",
        (
            [running("a", 4, 4, minimum=4, steps_left=9_000), job("b", 4, minimum=4, curve=LINEAR, steps_left=1)],
            4,
            {"a": 4, "b": 0},
        ),
    ),
    "who does not know its end is the longest": (
        "ShortestFirst",
        (
            [running("a", 4, 4, minimum=4, curve=LINEAR), job("b", 4, minimum=4, curve=LINEAR, steps_left=9_000)],
            4,
            {"a": 0, "b": 4},
        ),
    ),
    "workers go where they bring most": (
        "MaxThroughput",
        ([job("a", curve=BENT), job("b", curve=LINEAR)], 16, {"a": 1, "b": 15}),
    ),
    "by weight": ("MaxThroughput", ([job("a", curve=BENT, weight=3.0), job("b", curve=LINEAR)], 16, {"a": 4, "b": 12})),
    "equal gains are spread": ("MaxThroughput", ([job("a"), job("b")], 16, {"a": 8, "b": 8})),
    "a gain that is hardly larger moves no worker": (
        "MaxThroughput",
        (
            [
                running("a", 10, curve=ScalingCurve(((1, 1.0), (16, 15.0)))),
                running("b", 6, curve=ScalingCurve(((1, 1.0), (16, 14.8)))),
            ],
            16,
            {"a": 10, "b": 6},
        ),
    ),
    "nor does it stop anybody": (
        "MaxThroughput",
        ([running("a", 4, 4, minimum=4), job("b", 4, minimum=4, weight=1.05)], 4, {"a": 4, "b": 0}),
    ),
    "one that is clearly larger does": (
        "MaxThroughput",
        ([running("a", 4, 4, minimum=4), job("b", 4, minimum=4, weight=1.2)], 4, {"a": 0, "b": 4}),
    ),
    "no worker that brings nothing": (
        "MaxThroughput",
        ([job("a", curve=ScalingCurve(((1, 1.0), (2, 2.0), (4, 2.0))))], 16, {"a": 2}),
    ),
    "a knapsack of unequal workers": (
        # Gains per unit say: the second of b first (0.9), and then one unit is left for nobody.
        "MaxThroughput",
        (
            [
                job("a", 2, units=2, curve=ScalingCurve(((1, 1.0), (2, 1.8)))),
                job("c", 2, units=2, curve=ScalingCurve(((1, 1.0), (2, 1.8)))),
                job("b", 2, units=3, curve=ScalingCurve(((1, 1.0), (2, 1.9)))),
            ],
            11,
            {"a": 2, "b": 1, "c": 2},
        ),
    ),
}


@pytest.mark.parametrize(
    ("name", "case"), [pytest.param(*case, id=title) for title, case in {**FIXED, **SHARED}.items()]
)
def test_who_gets_how_many_workers(name: str, case: Case) -> None:
    jobs, capacity, expected = case
    assert {key: given.workers for key, given in decide(name, jobs, capacity).items()} == expected


REASONS: dict[str, tuple[str, list[Demand], Capacity | int, str]] = {
    "first in a full queue": (
        "FIFO",
        [job("b", 2), job("a", 4)],
        4,
        "waits, first in the queue, until 2 workers are free",
    ),
    "behind another": ("FIFO", [job("b", 1), job("ab", 2), job("a", 3)], 4, "waits behind red/ab"),
    "the namespace is full": (
        "FIFO",
        [job("b", 2), job("a", 4)],
        Capacity(9, limits={"red": 4}),
        "waits until 2 workers fit into the limit of namespace red",
    ),
    "more than the queue": (
        "WeightedFairShare",
        [job("b", minimum=5, units=2)],
        8,
        "cannot run: its minimum of 5 workers needs 10 units and the capacity of the queue is 8 units; "
        "lower the minimum or raise that",
    ),
    "more than the namespace's limit": (
        "FIFO",
        [job("b", minimum=5)],
        Capacity(8, limits={"red": 4}),
        "cannot run: its minimum of 5 workers needs 5 units and the limit of namespace red is 4 units; "
        "lower the minimum or raise that",
    ),
    "more than there is on demand": (
        "MaxThroughput",
        [job("b", minimum=5, minimum_on_demand=True)],
        Capacity(4, spot=9),
        "cannot run: its minimum of 5 workers needs 5 units and the on-demand capacity of the queue is 4 units; "
        "lower the minimum or raise that",
    ),
    "a share": (
        "WeightedFairShare",
        [job("b", weight=2.0), job("a", weight=4.0)],
        16,
        "has its share by weight 2: 5.3 workers",
    ),
    "a minimum": (
        "WeightedFairShare",
        [job("b", minimum=3), job("a", weight=9.0)],
        16,
        "has its minimum: its share by weight 1 is not more",
    ),
    "no room for a minimum": (
        "WeightedFairShare",
        [job("b", minimum=3), running("a", 2, minimum=2)],
        4,
        "waits: its minimum of 3 does not fit in the queue beside the minimums of jobs that go first",
    ),
    "shorter jobs": (
        "ShortestFirst",
        [job("b", curve=LINEAR, steps_left=9_000), job("a", curve=LINEAR, steps_left=100)],
        16,
        "waits: shorter jobs use what is free",
    ),
    "others gain more": (
        "MaxThroughput",
        [job("b", curve=BENT), job("a", weight=9.0)],
        16,
        "has its minimum: other jobs gain more from what is free",
    ),
}


@pytest.mark.parametrize(("name", "jobs", "capacity", "reason"), REASONS.values(), ids=REASONS)
def test_why(name: str, jobs: list[Demand], capacity: Capacity | int, reason: str) -> None:
    assert decide(name, jobs, capacity)["b"].reason == reason


ELASTIC = ("WeightedFairShare", "ShortestFirst", "MaxThroughput")


@pytest.mark.parametrize("name", ELASTIC)
def test_who_has_waited_for_long_gets_a_turn_and_keeps_it_for_its_time(name: str) -> None:
    favoured = running("a", 4, minimum=3, weight=9.0, priority=9, curve=LINEAR, steps_left=1)
    jobs = [favoured, job("b", minimum=3, submitted=NOW)]
    late = NOW + TOLD.starvation_bound
    assert decide(name, jobs, 4, late - 1)["b"].workers == 0
    found = decide(name, jobs, 4, late)
    assert (found["a"].workers, found["b"].workers) == (0, 4)
    jobs = [each.given(found[each.name.rpartition("/")[2]].workers, late) for each in jobs]
    assert next_change(late, jobs, TOLD) == late + TOLD.hold
    assert decide(name, jobs, 4, late + TOLD.turn - 1)["b"].workers == 4
    if name != "MaxThroughput":  # which knows no priority, and prefers whom it need not stop
        assert decide(name, jobs, 4, late + TOLD.turn)["a"].workers == 4


@pytest.mark.parametrize("name", ELASTIC)
def test_turns_take_half_of_a_full_queue(name: str) -> None:
    favoured = [running(letter, 1, 1, weight=9.0, priority=9, curve=LINEAR, steps_left=1) for letter in "abcd"]
    waiting = [job(letter, 1, submitted=NOW - TOLD.starvation_bound) for letter in "wxyz"]
    found = decide(name, [*favoured, *waiting], 4)
    assert [found[letter].workers for letter in "wxyz"] == [1, 1, 0, 0]
    assert sum(found[letter].workers for letter in "abcd") == 2
    assert found["y"].reason.startswith("waits: its minimum of 1 does not fit in the queue")
    assert found["z"].reason == "waits behind red/y, which has waited for longer"


def test_a_large_job_that_waits_for_its_turn_is_not_overtaken_by_small_ones() -> None:
    turning = running("a", 2, minimum=2, waited=TOLD.starvation_bound, since=NOW - 10.0, resized=NOW - 10.0)
    large = job("l", minimum=4, submitted=NOW - 900.0)
    small = job("s", minimum=1, submitted=NOW - 800.0)
    found = decide("WeightedFairShare", [turning, large, small], 5)
    assert (found["l"].workers, found["s"].workers) == (0, 0)
    assert found["s"].reason == "waits behind red/l, which has waited for longer"
    after = NOW + TOLD.turn
    assert decide("WeightedFairShare", [turning, large, small], 5, after)["l"].workers == 4


def test_every_policy_has_the_name_that_a_queue_gives() -> None:
    assert list(POLICIES) == ["FIFO", "Priority", "WeightedFairShare", "ShortestFirst", "MaxThroughput"]
    assert all(policy(name) is found for name, found in POLICIES.items())


def test_an_unknown_policy_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigurationError, match="no policy 'Lottery'; give one of FIFO, Priority, WeightedFairShare,"):
        policy("Lottery")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        pytest.param({"weight": 0.0}, "weight above 0", id="no weight"),
        pytest.param({"weight": float("nan")}, "weight above 0", id="a weight that is no number"),
        pytest.param({"minimum": 0}, "1 <= minimum <= maximum", id="no minimum"),
        pytest.param({"minimum": 17}, "1 <= minimum <= maximum", id="a minimum above the maximum"),
        pytest.param({"requested": 17}, "ask for 1 to 16 workers", id="a size above the maximum"),
        pytest.param({"units": 0}, "units are 1 or more", id="workers that use nothing"),
    ],
)
def test_a_job_that_makes_no_sense_is_refused(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        job("a", **wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"turn": 0.0},
        {"starvation_bound": -1.0},
        {"margin": 1.0},
        {"turn_share": 1.1},
        {"efficiency": 2.0},
        {"hold": -1.0},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        replace(TOLD, **wrong)


def test_a_job_remembers_how_long_it_waited_and_since_when_it_runs() -> None:
    waiting = job("a", submitted=NOW)
    started = waiting.given(4, NOW + 50.0)
    assert (started.since, started.resized, started.waited) == (NOW + 50.0, NOW + 50.0, 50.0)
    grown = started.given(6, NOW + 70.0)
    assert (grown.since, grown.resized, grown.waited) == (NOW + 50.0, NOW + 70.0, 50.0)
    assert grown.given(6, NOW + 80.0) is grown
    stopped = grown.given(0, NOW + 90.0)
    assert (stopped.waiting(NOW + 100.0), grown.waiting(NOW + 100.0)) == (10.0, 0.0)


def test_the_next_change_is_the_first_moment_that_matters() -> None:
    jobs = [
        job("a", submitted=NOW),
        running("b", 1, resized=NOW - 1.0),
        running("c", 1, waited=700.0, since=NOW - 299.0),
    ]
    assert next_change(NOW, jobs, TOLD) == NOW + 1.0
    assert next_change(NOW + 1.0, jobs, TOLD) == NOW + 4.0
    assert next_change(NOW + 4.0, jobs, TOLD) == NOW + 600.0
    assert next_change(NOW + 600.0, jobs, TOLD) is None
