"""Who computes what again after a loss: everything that nobody has, once, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtualflow.coordinator.assignment import assign
from virtualflow.worker.repair import Remains, Repair, count_repeated, plan_repair


@st.composite
def losses(draw: st.DrawFn) -> tuple[int, list[Remains], list[range]]:
    """What the members of a generation have kept that succeeds another one, and what they are assigned."""
    members = draw(st.integers(1, 6))
    virtual_nodes = draw(st.integers(members, 40))
    owner = draw(st.lists(st.integers(-1, members - 1), min_size=virtual_nodes, max_size=virtual_nodes))
    done = draw(st.lists(st.booleans(), min_size=virtual_nodes, max_size=virtual_nodes))
    remains = [
        Remains(
            frozenset(node for node in range(virtual_nodes) if owner[node] == rank and done[node]),
            frozenset(node for node in range(virtual_nodes) if owner[node] == rank and not done[node]),
        )
        for rank in range(members)
    ]
    speeds = draw(st.lists(st.floats(0.1, 10), min_size=members, max_size=members))
    return virtual_nodes, remains, assign(virtual_nodes, speeds)


@given(losses())
def test_every_virtual_node_is_contributed_once_and_what_was_kept_is_not_computed(
    loss: tuple[int, list[Remains], list[range]],
) -> None:
    virtual_nodes, remains, ranges = loss
    repair = plan_repair(remains, ranges)
    if repair is None:
        assert not any(member.kept for member in remains)
        return
    assert sorted(node for holding in repair.holdings for node in holding) == list(range(virtual_nodes))
    for member, holding, computes in zip(remains, repair.holdings, repair.computes, strict=True):
        assert list(holding) == sorted(holding)
        assert list(computes) == sorted(computes)
        assert set(holding) == member.kept | set(computes)
        assert not member.kept & set(computes)
    missing = virtual_nodes - sum(len(member.kept) for member in remains)
    for assigned, computes in zip(ranges, repair.computes, strict=True):
        assert abs(len(computes) - missing * len(assigned) / virtual_nodes) < 1


@given(losses())
def test_what_is_repeated_is_what_nobody_has_and_nobody_alive_was_still_to_do(
    loss: tuple[int, list[Remains], list[range]],
) -> None:
    virtual_nodes, remains, _ = loss
    known = set().union(*(member.kept | member.undone for member in remains))
    assert count_repeated(remains, virtual_nodes) == len(set(range(virtual_nodes)) - known)


@given(losses())
def test_what_a_member_brings_survives_the_wire(loss: tuple[int, list[Remains], list[range]]) -> None:
    virtual_nodes, remains, _ = loss
    blocks = [member.to_bytes(virtual_nodes) for member in remains]
    assert {block.numel() for block in blocks} == {2 * virtual_nodes}
    assert [Remains.from_bytes(block) for block in blocks] == remains


def kept(*nodes: int) -> Remains:
    return Remains(frozenset(nodes))


@pytest.mark.parametrize(
    ("remains", "ranges", "computes"),
    [
        pytest.param(
            [kept(2, 3), kept(4, 5), kept(6, 7)],
            [range(3), range(3, 6), range(6, 8)],
            ((), (0,), (1,)),
            id="the first of four workers is lost: the others share what it had",
        ),
        pytest.param([kept(0, 1), kept()], [range(2), range(2, 4)], ((2,), (3,)), id="another one takes its place"),
        pytest.param([kept(0, 1), kept(2, 3)], [range(2), range(2, 4)], ((), ()), id="nobody is lost"),
    ],
)
def test_the_rest_is_shared(remains: list[Remains], ranges: list[range], computes: tuple[tuple[int, ...], ...]) -> None:
    repair = plan_repair(remains, ranges)
    assert repair is not None
    assert repair.computes == computes


@pytest.mark.parametrize(
    "remains", [[kept(), kept()], [kept(0, 1), kept(1)]], ids=["nobody has kept anything", "two have the same"]
)
def test_all_is_computed_again(remains: list[Remains]) -> None:
    assert plan_repair(remains, [range(2), range(2, 4)]) is None
    assert isinstance(plan_repair([kept(0), kept(3)], [range(2), range(2, 4)]), Repair)
