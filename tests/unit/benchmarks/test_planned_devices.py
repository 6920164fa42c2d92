"""Which mixes of devices are measured, and beside which splits."""

from __future__ import annotations

from benchmarks.planned_devices import LEAST, MIXES, MOST, mixes, neighbours


def test_mixes_are_the_same_each_time_and_fit_into_the_machine() -> None:
    found = list(mixes(MIXES))
    assert found == list(mixes(MIXES))
    assert len(set(found)) == MIXES
    assert {len(mix) for mix in found} == {2, 3, 4, 5}
    assert all(LEAST <= sum(mix) <= MOST + 1e-9 and len(set(mix)) > 1 for mix in found)


def test_a_neighbour_has_one_virtual_node_elsewhere_and_the_best_comes_first() -> None:
    """Nobody is left without any, and of two workers that are alike, 3 and 4 is the same as 4 and 3."""
    found = neighbours([4, 3, 1], [1.0, 1.0, 3.0], [0.5, 0.0, 0.5])
    assert found == [([5, 2, 1], 5.5), ([3, 3, 2], 6.5), ([4, 2, 2], 6.5)]
