"""Sums worker by worker: every worker contributes one, and they are added in the order of the ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from virtualflow.assignment import assign, subtrees
from virtualflow.summation import add_up, parts_of


@given(virtual_nodes=st.integers(1, 40), workers=st.integers(1, 8), canonical=st.booleans())
def test_parts_cover_all_virtual_nodes_and_are_summed_once(virtual_nodes: int, workers: int, canonical: bool) -> None:
    ranges = assign(virtual_nodes, [1.0] * min(workers, virtual_nodes))
    keys = [key for carried in ranges for key in parts_of(virtual_nodes, carried, canonical)]
    if canonical:
        assert keys == [(n.start, n.stop) for carried in ranges for n in subtrees(virtual_nodes, carried)]
    else:
        assert keys == [(carried.start, carried.stop) for carried in ranges]
    parts = {key: list(range(*key)) for key in reversed(keys)}
    assert add_up(virtual_nodes, parts, lambda a, b: a + b, canonical) == list(range(virtual_nodes))


def test_the_order_is_that_of_the_ranks_whatever_the_shape_of_the_tree() -> None:
    parts = {(5, 8): "c", (0, 3): "a", (3, 5): "b"}
    assert add_up(8, parts, lambda a, b: f"({a}{b})", canonical=False) == "((ab)c)"
