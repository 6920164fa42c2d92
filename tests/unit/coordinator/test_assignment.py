"""Which worker is assigned which virtual nodes, and the tree in whose shape everything is summed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtualflow.coordinator.assignment import assign, assign_by_cost, assign_by_time, order_members
from virtualflow.protocol.tree import subtrees, tree_sum

SIZES = st.integers(1, 200).flatmap(lambda nodes: st.tuples(st.just(nodes), st.integers(1, nodes)))


@pytest.mark.parametrize(
    ("nodes", "speeds", "counts"),
    [
        pytest.param(8, [1.0], [8], id="one worker has everything"),
        pytest.param(8, [1.0, 1.0], [4, 4], id="equal workers carry the same"),
        pytest.param(8, [1.0, 1.0, 1.0], [3, 3, 2], id="the first carry what does not divide"),
        pytest.param(8, [2.0, 2.0, 2.0], [3, 3, 2], id="only the ratio of the speeds counts"),
        pytest.param(9, [2.0, 1.0], [6, 3], id="twice as fast has twice as much"),
        pytest.param(4, [100.0, 1.0, 1.0, 1.0], [1, 1, 1, 1], id="each has at least one"),
        pytest.param(6, [100.0, 1.0, 1.0], [4, 1, 1], id="the fast one takes the rest"),
    ],
)
def test_ranges_follow_the_speeds(nodes: int, speeds: list[float], counts: list[int]) -> None:
    assert [len(assigned) for assigned in assign(nodes, speeds)] == counts


@pytest.mark.parametrize(
    ("nodes", "speeds", "sentence"),
    [
        pytest.param(8, [], "no worker", id="nobody"),
        pytest.param(2, [1.0, 1.0, 1.0], "cannot share", id="more workers than virtual nodes"),
        pytest.param(8, [1.0, 0.0], "positive", id="one that stands still"),
        pytest.param(8, [1.0, float("nan")], "positive", id="no number"),
    ],
)
def test_what_cannot_be_assigned_is_refused(nodes: int, speeds: list[float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        assign(nodes, speeds)


@given(SIZES.flatmap(lambda s: st.tuples(st.just(s[0]), st.lists(st.floats(0.1, 10), min_size=s[1], max_size=s[1]))))
def test_ranges_are_contiguous_and_cover_every_virtual_node_once(case: tuple[int, list[float]]) -> None:
    nodes, speeds = case
    ranges = assign(nodes, speeds)
    assert [node for assigned in ranges for node in assigned] == list(range(nodes))
    assert all(ranges)


RISING = st.lists(st.lists(st.floats(0.0, 5.0), min_size=16, max_size=16), min_size=1, max_size=5)


@given(RISING, st.integers(0, 11))
def test_no_other_division_is_through_sooner_whatever_each_worker_needs_for_so_many(
    more: list[list[float]], extra: int
) -> None:
    nodes, needed = len(more) + extra, [list(accumulate(each)) for each in more]
    ranges = assign_by_time(nodes, [lambda count, each=each: each[count - 1] for each in needed])
    assert [node for assigned in ranges for node in assigned] == list(range(nodes))
    assert all(ranges)
    cuts = combinations(range(1, nodes), len(more) - 1)
    every = ([stop - start for start, stop in pairwise((0, *cut, nodes))] for cut in cuts)
    best = min(max(each[count - 1] for each, count in zip(needed, counts, strict=True)) for counts in every)
    assert max(each[len(assigned) - 1] for each, assigned in zip(needed, ranges, strict=True)) == best


@given(SIZES)
def test_equal_workers_differ_by_at_most_one(case: tuple[int, int]) -> None:
    counts = [len(assigned) for assigned in assign(case[0], [1.0] * case[1])]
    assert max(counts) - min(counts) <= 1


SPEEDS = st.floats(0.2, 5) | st.sampled_from([1e-6, 1.0, 1.0, 2.0, 1e6])


@given(st.integers(2, 14).flatmap(lambda n: st.tuples(st.just(n), st.lists(SPEEDS, min_size=2, max_size=4))))
def test_no_other_division_is_faster(case: tuple[int, list[float]]) -> None:
    nodes, speeds = case
    if len(speeds) > nodes:
        return
    slowest = max(len(assigned) / speed for assigned, speed in zip(assign(nodes, speeds), speeds, strict=True))

    def best(left: int, rest: list[float]) -> float:
        if len(rest) == 1:
            return left / rest[0]
        return min(max(own / rest[0], best(left - own, rest[1:])) for own in range(1, left - len(rest) + 2))

    assert slowest <= best(nodes, speeds) * (1 + 1e-12)


@given(st.integers(2, 12).flatmap(lambda n: st.tuples(st.just(n), st.lists(SPEEDS, min_size=2, max_size=5))))
def test_each_virtual_node_goes_to_whoever_is_through_with_it_first(case: tuple[int, list[float]]) -> None:
    nodes, speeds = case
    if len(speeds) > nodes or len(set(speeds)) == 1:
        return
    counts = [1] * len(speeds)
    for _ in range(nodes - len(speeds)):
        counts[min(range(len(speeds)), key=lambda index: ((counts[index] + 1) / speeds[index], index))] += 1
    assert [len(assigned) for assigned in assign(nodes, speeds)] == counts


def test_many_virtual_nodes_on_many_workers_are_divided_at_once() -> None:
    speeds = [1.0 + (index % 7) for index in range(4_096)]
    counts = [len(assigned) for assigned in assign(65_536, speeds)]
    assert sum(counts) == 65_536
    assert all(counts[index] <= counts[index + 1] for index in range(6))


@given(st.lists(st.integers(0, 50), unique=True), st.sets(st.integers(0, 50)))
def test_survivors_keep_their_order_and_joiners_follow(former: list[int], target: set[int]) -> None:
    current = {str(worker): place for place, worker in enumerate(former)}
    ordered = order_members(current, {str(worker): (str(worker), 0) for worker in target})
    stay = [str(worker) for worker in former if worker in target]
    assert ordered[: len(stay)] == stay
    assert sorted(ordered) == sorted(str(worker) for worker in target)


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(0, n))))
def test_subtrees_cover_a_range_with_few_nodes_of_the_tree(case: tuple[int, int, int]) -> None:
    nodes, first, last = case
    assigned = range(min(first, last), max(first, last))
    found = subtrees(nodes, assigned)
    assert [node for part in found for node in part] == list(assigned)
    assert len(found) <= max(1, 2 * nodes.bit_length())


@given(SIZES, st.randoms(use_true_random=False))
def test_the_shape_of_a_sum_does_not_depend_on_who_is_assigned_what(case: tuple[int, int], random: object) -> None:
    nodes, workers = case

    def add(left: str, right: str) -> str:
        return f"({left}{right})"

    def summed(count: int) -> str:
        parts = {}
        for assigned in assign(nodes, [1.0] * count):
            for part in subtrees(nodes, assigned):
                leaves = {(node, node + 1): f"{node}." for node in part}
                middle = {**leaves}
                parts[part.start, part.stop] = _within(nodes, part, middle, add)
        return tree_sum(nodes, parts, add)

    assert summed(workers) == summed(1)


def _within(nodes: int, part: range, leaves: dict[tuple[int, int], str], add: object) -> str:
    def total(left: int, right: int) -> str:
        if right - left == 1:
            return leaves[left, right]
        middle = (left + right) // 2
        return add(total(left, middle), total(middle, right))  # type: ignore[operator]

    return total(part.start, part.stop)


def test_a_sum_that_misses_a_part_is_refused() -> None:
    with pytest.raises(ValueError, match="virtual node 3"):
        tree_sum(4, {(0, 2): 1, (2, 3): 1}, lambda left, right: left + right)


# --- virtual nodes that cost more or less -----------------------------------------------------------------------------


def slowest(costs: list[float], speeds: list[float], ranges: Sequence[range]) -> float:
    return max(sum(costs[node] for node in nodes) / speed for nodes, speed in zip(ranges, speeds, strict=True))


def every_division(nodes: int, workers: int) -> Iterator[list[range]]:
    """All contiguous ones in which each worker has at least one."""
    for cuts in combinations(range(1, nodes), workers - 1):
        yield [range(start, stop) for start, stop in pairwise((0, *cuts, nodes))]


@st.composite
def costly(draw: st.DrawFn) -> tuple[list[float], list[float], list[int]]:
    costs = draw(st.lists(st.sampled_from([0.25, 0.5, 0.75, 1.0]), min_size=1, max_size=9))
    workers = draw(st.integers(1, min(4, len(costs))))
    speeds = draw(st.lists(st.floats(0.2, 5), min_size=workers, max_size=workers))
    earliest = sorted(draw(st.lists(st.integers(0, len(costs)), min_size=workers, max_size=workers)))
    return costs, speeds, earliest


@given(costly())
def test_no_division_by_cost_that_is_allowed_is_faster(case: tuple[list[float], list[float], list[int]]) -> None:
    costs, speeds, earliest = case
    nodes, workers = len(costs), len(speeds)
    ranges = assign_by_cost([0.0, *accumulate(costs)], speeds, earliest)
    assert [node for assigned in ranges for node in assigned] == list(range(nodes))
    bounds = [0, *(min(one, nodes - workers + rank) for rank, one in enumerate(earliest) if rank)]
    allowed = [
        division
        for division in every_division(nodes, workers)
        if all(assigned.start >= bound for assigned, bound in zip(division, bounds, strict=True))
    ]
    assert ranges in allowed
    fastest = min(slowest(costs, speeds, division) for division in allowed)
    assert slowest(costs, speeds, ranges) == pytest.approx(fastest)
