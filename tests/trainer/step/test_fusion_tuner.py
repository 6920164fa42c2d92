"""How many virtual nodes a statistical job puts together: decided on simulated machines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtualflow.data.sampling import chunks
from virtualflow.device.memory_gauge import MemoryUse
from virtualflow.step.fusion_tuner import ROUNDS, Tuner, widths

ENOUGH = 60
"""Attempts after which every size has been tried."""


@dataclass
class Machine:
    """What an attempt takes on it, by the size of the micro-batch."""

    seconds: Callable[[int], float]
    memory: Callable[[int], int] = lambda width: width
    room: int | None = 10**9
    tried: list[int] = field(default_factory=list)

    def run(self, tuner: Tuner, attempts: int = ENOUGH) -> int:
        for _ in range(attempts):
            self.tried.append(tuner.width)
            usage = None if self.room is None else MemoryUse(self.memory(tuner.width), self.room)
            tuner.observe(self.seconds(tuner.width), usage)
        return tuner.width

    @property
    def order(self) -> list[int]:
        """Sizes in the order in which they were first tried."""
        return list(dict.fromkeys(self.tried))


def launches(width: int) -> float:
    """A device that is far from being busy: it is the number of kernels that counts."""
    return 1.0 / width


def flat(width: int) -> float:
    return 1.0


def caches(width: int) -> float:
    """A CPU whose caches hold the activations of two virtual nodes."""
    return {1: 1.0, 2: 0.7, 4: 0.8, 8: 0.82}[width]


def thrashing(width: int) -> float:
    return {1: 1.0, 2: 1.4}[width]


@pytest.mark.parametrize(
    ("machine", "nodes", "cap", "width", "order"),
    [
        pytest.param(Machine(launches), 8, None, 8, [1, 2, 4, 8], id="the larger the better"),
        pytest.param(Machine(launches), 8, 3, 3, [1, 2, 3], id="up to the cap"),
        pytest.param(Machine(launches), 8, 1, 1, [1], id="a cap of one"),
        pytest.param(Machine(launches), 5, None, 5, [1, 2, 3, 5], id="a range that is no power of two"),
        pytest.param(Machine(launches), 1, None, 1, [1], id="one virtual node"),
        pytest.param(Machine(flat), 8, None, 1, [1, 2, 4, 8], id="no gain is worth no memory"),
        pytest.param(Machine(caches), 8, None, 2, [1, 2, 4, 8], id="the fastest lies between"),
        pytest.param(Machine(thrashing), 8, None, 1, [1, 2], id="what is hopeless is not tried further"),
        pytest.param(Machine(launches, lambda w: 100 * w, 399), 8, None, 2, [1, 2], id="memory for three"),
        pytest.param(Machine(launches, lambda w: 100 * w, 400), 8, None, 4, [1, 2, 4], id="memory for four"),
        pytest.param(
            Machine(launches, lambda w: 700 + 10 * w, 1_420), 8, None, 8, [1, 2, 4, 8], id="most of it does not grow"
        ),
        pytest.param(
            Machine(launches, lambda w: 700 + 10 * w, 1_419), 8, None, 1, [1], id="one point says nothing of the slope"
        ),
        pytest.param(Machine(launches, room=None), 8, None, 8, [1, 2, 4, 8], id="memory that cannot be measured"),
    ],
)
def test_the_size_that_is_chosen(machine: Machine, nodes: int, cap: int | None, width: int, order: list[int]) -> None:
    tuner = Tuner(cap)
    tuner.assign(nodes)
    assert machine.run(tuner) == width
    assert machine.order == order
    assert not tuner.exploring


def test_the_first_attempt_of_a_size_and_a_bad_one_do_not_count() -> None:
    tuner = Tuner(None)
    tuner.assign(2)
    for _ in range(ROUNDS):
        for width, good in ((1, 1.0), (2, 0.5)):
            for seconds in (100.0, good, 70.0, good):
                assert (tuner.width, tuner.exploring) == (width, True)
                tuner.observe(seconds, None)
    assert (tuner.width, tuner.exploring) == (2, False)


def test_a_busy_time_of_the_machine_does_not_decide() -> None:
    tuner = Tuner(None)
    tuner.assign(8)
    machine = Machine(launches)
    while tuner.width < 4:
        machine.run(tuner, 1)
    busy = Machine(lambda width: 10.0 * launches(width))
    while tuner.width == 4:
        busy.run(tuner, 1)
    assert tuner.width < 4  # with a size that looks so bad, larger ones are not tried, until it is measured again
    assert machine.run(tuner) == 8


def test_a_larger_range_is_tried_and_a_smaller_one_keeps_what_is_known() -> None:
    machine = Machine(launches)
    tuner = Tuner(None)
    tuner.assign(4)
    assert machine.run(tuner) == 4
    tuner.assign(2)
    assert (tuner.width, tuner.exploring) == (2, False)
    machine.tried.clear()
    tuner.assign(8)
    assert (tuner.width, tuner.exploring) == (8, True)
    assert machine.run(tuner) == 8
    assert machine.order == [8]


def test_what_is_much_smaller_than_the_best_is_not_tried_after_a_resize() -> None:
    machine = Machine(launches)
    tuner = Tuner(None)
    tuner.assign(16)
    machine.run(tuner)
    machine.tried.clear()
    tuner.assign(13)
    assert machine.run(tuner) == 13
    assert machine.order == [13]


def test_a_model_that_cannot_be_split_is_not_put_together() -> None:
    tuner = Tuner(None)
    tuner.forbid()
    tuner.assign(8)
    assert (tuner.width, tuner.exploring) == (1, False)


def test_it_goes_back_to_one_when_it_turns_out_that_a_model_cannot_be_split() -> None:
    tuner = Tuner(None)
    tuner.assign(8)
    Machine(launches).run(tuner)
    tuner.forbid()
    assert (tuner.width, tuner.exploring) == (1, False)


@given(
    times=st.dictionaries(st.integers(1, 64), st.floats(0.01, 100.0)),
    noise=st.lists(st.floats(0.5, 2.0), min_size=1, max_size=50),
    memory=st.tuples(st.integers(0, 1_000), st.integers(0, 1_000)),
    room=st.one_of(st.none(), st.integers(0, 50_000)),
    ranges=st.lists(st.integers(1, 64), min_size=1, max_size=6),
    cap=st.one_of(st.none(), st.integers(1, 64)),
)
def test_whatever_the_machine_it_settles_within_the_cap_and_the_memory(
    times: dict[int, float],
    noise: list[float],
    memory: tuple[int, int],
    room: int | None,
    ranges: list[int],
    cap: int | None,
) -> None:
    tuner = Tuner(cap)
    constant, slope = memory
    count = 0
    for nodes in ranges:
        tuner.assign(nodes)
        switches = []
        for _ in range(200):
            assert tuner.width <= min(nodes, cap or nodes)
            used = constant + slope * tuner.width
            # One virtual node at a time must fit: nobody can do with less.
            assert tuner.width == 1 or room is None or used <= max(room, 2 * (constant + slope))
            switches.append(tuner.width)
            count += 1
            seconds = times.get(tuner.width, 1.0) * noise[count % len(noise)]
            tuner.observe(seconds, None if room is None else MemoryUse(used, room))
        changes = [a for a, b in pairwise(switches) if a != b]
        # Every size is tried in a few rounds, and then one of them is kept.
        assert len(changes) <= ROUNDS * len(widths(nodes, cap))
        assert not tuner.exploring


@given(first=st.integers(0, 50), nodes=st.integers(1, 200), width=st.integers(1, 250))
def test_chunks_cover_the_range_evenly(first: int, nodes: int, width: int) -> None:
    carried = range(first, first + nodes)
    cut = chunks(carried, width)
    assert [node for chunk in cut for node in chunk] == list(carried)
    lengths = [len(chunk) for chunk in cut]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] <= width
    assert lengths[0] - lengths[-1] <= 1
    assert len(cut) == -(-nodes // width)


@given(nodes=st.integers(1, 300), cap=st.one_of(st.none(), st.integers(1, 300)))
def test_sizes_to_try_are_few_and_real(nodes: int, cap: int | None) -> None:
    tried = widths(nodes, cap)
    assert tried[0] == 1
    assert tried == sorted(set(tried))
    assert tried[-1] <= min(nodes, cap or nodes)
    assert len(tried) <= nodes.bit_length() + 1
    assert all(len(chunks(range(nodes), width)[0]) == width for width in tried)


def test_memory_that_is_measured_in_the_first_attempt_of_a_round_counts() -> None:
    tuner = Tuner(None)
    tuner.assign(2)
    for _ in range(ENOUGH):
        assert tuner.width == 1, "two would take 1,200 of 1,000"
        tuner.observe(1.0, MemoryUse(600, 1_000) if tuner.fresh else None)
    assert not tuner.exploring
