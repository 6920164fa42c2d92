"""Which devices share the virtual nodes, how, and which of them bring nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtualflow.coordinator.assignment import assign
from virtualflow.errors import ConfigurationError
from virtualflow.memory import DeviceType, Interconnect, advise, costs, divide
from virtualflow.memory.devices import WORTH


def device(name: str, count: int, *seconds: float, **fused: float) -> DeviceType:
    """Return one with the seconds of one virtual node, and by keyword of more that are fused (``two=1.5``)."""
    widths = {"two": 2, "four": 4, "eight": 8}
    return DeviceType(name, count, {1: seconds[0]} | {widths[width]: each for width, each in fused.items()})


@st.composite
def devices(draw: st.DrawFn) -> list[DeviceType]:
    found = []
    for index in range(draw(st.integers(1, 3))):
        one = draw(st.integers(1, 40)) / 10
        fused = {1: one}
        if draw(st.booleans()):
            fused[2] = one * draw(st.sampled_from([1.1, 1.5, 2.0]))
            fused[4] = fused[2] * draw(st.sampled_from([1.1, 1.5, 2.0]))
        found.append(DeviceType(f"type {index}", draw(st.integers(1, 2)), fused))
    return found


def shortest(virtual_nodes: int, kinds: list[DeviceType]) -> float:
    """Return the step of the best of all divisions."""
    tables = [costs(kind, virtual_nodes) for kind in kinds for _ in range(kind.count)]
    cuts = combinations_with_replacement(range(virtual_nodes + 1), len(tables) - 1)
    steps = []
    for cut in cuts:
        given = [b - a for a, b in zip((0, *cut), (*cut, virtual_nodes), strict=True)]
        if min(given) > 0:
            steps.append(max(table[each] for table, each in zip(tables, given, strict=True)))
    return min(steps)


@given(devices(), st.integers(6, 9))
def test_no_division_has_a_shorter_step(kinds: list[DeviceType], virtual_nodes: int) -> None:
    found = divide(virtual_nodes, kinds)
    assert found.seconds == shortest(virtual_nodes, kinds)
    given = [each for share in found.shares for each in share.virtual_nodes]
    assert sum(given) == virtual_nodes
    assert min(given) > 0
    assert [len(share.virtual_nodes) for share in found.shares] == [kind.count for kind in kinds]


@given(st.lists(st.integers(1, 50).map(lambda tenths: tenths / 10), min_size=1, max_size=5), st.integers(5, 100))
def test_where_nothing_is_fused_it_is_as_good_as_the_coordinators(paces: list[float], virtual_nodes: int) -> None:
    assigned = assign(virtual_nodes, [1 / pace for pace in paces])
    step = max(len(nodes) * pace for nodes, pace in zip(assigned, paces, strict=True))
    found = divide(virtual_nodes, [device(str(index), 1, pace) for index, pace in enumerate(paces)])
    assert found.seconds == pytest.approx(step)


@given(devices(), st.integers(1, 40))
def test_more_virtual_nodes_never_take_less_time(kinds: list[DeviceType], virtual_nodes: int) -> None:
    for kind in kinds:
        table = costs(kind, virtual_nodes)
        assert table == sorted(table)
        assert len(table) == virtual_nodes + 1


@pytest.mark.parametrize(
    ("kind", "virtual_nodes", "seconds"),
    [
        pytest.param(device("a", 1, 1.0), 5, 5.0, id="one after the other"),
        pytest.param(device("a", 1, 1.0, two=1.2), 4, 2.4, id="in pairs"),
        pytest.param(device("a", 1, 1.0, two=1.2), 5, 3.4, id="in pairs, and one alone"),
        pytest.param(device("a", 1, 1.0, four=2.5), 3, 2.0, id="three at once are on the line between"),
        pytest.param(device("a", 1, 1.0, four=2.5), 5, 3.5, id="three and two, as a worker cuts them"),
        pytest.param(device("a", 1, 1.0, two=2.5), 4, 4.0, id="where fusing does not pay nothing is fused"),
    ],
)
def test_what_virtual_nodes_cost(kind: DeviceType, virtual_nodes: int, seconds: float) -> None:
    assert costs(kind, virtual_nodes)[virtual_nodes] == pytest.approx(seconds)


def test_a_device_that_fuses_gets_more() -> None:
    found = divide(8, [device("plain", 1, 1.0), device("fusing", 1, 1.0, two=1.1, four=1.3)])
    assert [share.virtual_nodes for share in found.shares] == [(2,), (6,)]
    assert [share.fused for share in found.shares] == [1, 4]
    assert found.seconds == pytest.approx(2.4)


@given(devices(), st.integers(6, 30))
def test_what_is_asked_for_is_as_fast_as_anything_with_the_same_devices(
    kinds: list[DeviceType], virtual_nodes: int
) -> None:
    found = advise(virtual_nodes, kinds)
    slack = 1 + WORTH
    assert found.everything is not None
    for other in (found.everything, *found.alone):
        assert found.best.seconds <= other.seconds * slack
    assert found.best.devices <= sum(kind.count for kind in kinds)


@pytest.mark.parametrize(
    ("virtual_nodes", "kinds", "counts", "sentence"),
    [
        pytest.param(
            8, [device("fast", 2, 1.0), device("slow", 2, 2.0)], {"fast": 2, "slow": 2}, "1.33 times", id="all help"
        ),
        pytest.param(
            8, [device("fast", 2, 1.0), device("slow", 2, 9.0)], {"fast": 2}, "2 slow would not", id="too slow to help"
        ),
        pytest.param(
            4, [device("one", 3, 1.0)], {"one": 2}, "1 one would not", id="a third would not shorten the longest share"
        ),
        pytest.param(2, [device("one", 8, 1.0)], {"one": 2}, "6 one would not", id="more devices than virtual nodes"),
    ],
)
def test_devices_that_bring_nothing_are_left_out(
    virtual_nodes: int, kinds: list[DeviceType], counts: dict[str, int], sentence: str
) -> None:
    found = advise(virtual_nodes, kinds)
    assert {share.name: len(share.virtual_nodes) for share in found.best.shares} == counts
    assert sentence in found.reason


def test_what_a_step_takes_beside_its_micro_batches_counts_once_on_each_device() -> None:
    quick, slow = device("quick", 1, 1.0), replace(device("slow", 1, 1.0), beside=4.0)
    found = divide(8, [quick, slow])
    assert [share.virtual_nodes for share in found.shares] == [(6,), (2,)]
    assert found.seconds == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("given", "sums"),
    [
        pytest.param([8], 0.0, id="alone nothing travels"),
        pytest.param([4, 4], 1.0, id="half of a sum out, and half back"),
        pytest.param([2, 2, 2, 2], 1.5, id="three quarters out, and back"),
        pytest.param([5, 3], 1.5, id="of a range that is no node of the tree two sums"),
    ],
)
def test_an_exchange_takes_as_long_as_the_bytes_of_the_worker_that_moves_the_most(
    given: list[int], sums: float
) -> None:
    assert Interconnect(1_000, 500).seconds(given) == pytest.approx(2 * sums)


def test_a_worker_that_sums_in_its_own_order_sends_one_sum_whatever_its_range() -> None:
    assert Interconnect(1_000, 500, by_tree=False).seconds([5, 3]) == Interconnect(1_000, 500).seconds([4, 4])


def test_a_device_that_brings_less_than_its_exchange_takes_is_left_out() -> None:
    kinds = [device("one", 2, 1.0)]
    assert advise(8, kinds).best.devices == 2
    slow = advise(8, kinds, Interconnect(1_000, 200))
    assert (slow.best.devices, slow.best.seconds, slow.best.exchange) == (1, 8.0, 0.0)
    assert slow.everything is not None
    assert (slow.everything.seconds, slow.everything.exchange) == (9.0, 5.0)


def test_of_many_devices_not_every_set_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("virtualflow.memory.devices.COMBINATIONS", 300)
    kinds = [device(name, 200, seconds) for name, seconds in (("a", 1.0), ("b", 1.5), ("c", 2.0))]
    found = advise(1_000, kinds)
    assert found.everything is not None
    assert found.best.seconds <= found.everything.seconds * 1.01


def test_with_more_devices_than_virtual_nodes_not_all_can_be_used() -> None:
    assert advise(3, [device("a", 4, 1.0)]).everything is None


@pytest.mark.parametrize(
    ("attempt", "sentence"),
    [
        pytest.param(lambda: divide(2, [device("a", 3, 1.0)]), "3 devices cannot share 2 virtual nodes", id="too many"),
        pytest.param(lambda: advise(2, []), "at least one type", id="none"),
        pytest.param(lambda: device("a", 0, 1.0), "at least one device", id="none of a type"),
        pytest.param(lambda: DeviceType("a", 1, {2: 1.0}), "one virtual node", id="not measured alone"),
    ],
)
def test_what_makes_no_sense_is_said(attempt: object, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        attempt()  # type: ignore[operator]
