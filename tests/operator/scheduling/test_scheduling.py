"""The scheduling policies, case by case: who gets how many workers, and the sentence that says why."""

from __future__ import annotations

import pytest
from scheduling_cases import BENT, LINEAR, NOW, TOLD, decide, job, running

from virtualflow_operator.scheduling import Capacity, Demand, ScalingCurve

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
    "who has told nothing is not taken for linear": (
        "MaxThroughput",
        ([job("a"), job("b", curve=ScalingCurve(((1, 1.0), (2, 1.8), (4, 3.2), (8, 5.6))))], 16, {"a": 12, "b": 4}),
    ),
    "nor who has told of two workers": (
        "MaxThroughput",
        (
            [
                job("a", curve=ScalingCurve(((1, 1.0), (2, 200.0)))),
                job("b", curve=ScalingCurve(((1, 1.0), (2, 1.8), (4, 3.2), (8, 5.6)))),
            ],
            16,
            {"a": 14, "b": 2},
        ),
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
        "waits, first in the queue, until there is room for 2 workers",
    ),
    "behind another": ("FIFO", [job("b", 1), job("ab", 2), job("a", 3)], 4, "waits behind red/ab"),
    "the namespace is full": (
        "FIFO",
        [job("b", 2), job("a", 4)],
        Capacity(9, limits={"red": 4}),
        "waits until the limit of namespace red has room for 2 workers",
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
