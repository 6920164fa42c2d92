"""Orders of summation: the shape of the tree, or one sum a worker, added in the order of the ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from virtualflow.coordinator.assignment import assign
from virtualflow.protocol.tree import subtrees
from virtualflow.reduction.accumulation import choose_summation


@given(virtual_nodes=st.integers(1, 40), workers=st.integers(1, 8))
def test_parts_cover_all_virtual_nodes_and_are_summed_once(virtual_nodes: int, workers: int) -> None:
    ranges = assign(virtual_nodes, [1.0] * min(workers, virtual_nodes))
    canonical, by_worker = choose_summation(virtual_nodes, "bitwise"), choose_summation(virtual_nodes, "statistical")
    whole = [(n.start, n.stop) for assigned in ranges for n in subtrees(virtual_nodes, assigned)]
    assert [key for assigned in ranges for key in canonical.parts_of(assigned)] == whole
    assert [by_worker.parts_of(assigned) for assigned in ranges] == [[(one.start, one.stop)] for one in ranges]
    for summation in (canonical, by_worker):
        keys = [key for assigned in ranges for key in summation.parts_of(assigned)]
        parts = {key: list(range(*key)) for key in reversed(keys)}
        assert summation.add_up(parts, lambda a, b: a + b) == list(range(virtual_nodes))


def test_the_order_is_that_of_the_ranks_whatever_the_shape_of_the_tree() -> None:
    parts = {(5, 8): "c", (0, 3): "a", (3, 5): "b"}
    assert choose_summation(8, "statistical").add_up(parts, lambda a, b: f"({a}{b})") == "((ab)c)"


def test_a_contribution_of_weight_one_is_a_virtual_node_or_all_of_a_worker() -> None:
    assert [choose_summation(8, kind).unit(5, 3) for kind in ("bitwise", "statistical")] == [5, 15]
