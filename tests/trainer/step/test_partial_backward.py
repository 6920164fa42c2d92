"""How far the backward pass of each virtual node goes: a function of the virtual node and the step, checked early."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import virtualflow as vf
from tiers import examples
from virtualflow.errors import ConfigurationError
from virtualflow.protocol.settings import BackwardSpec, PassClass
from virtualflow.step.partial_backward import WARM_UP, BlockCosts, agreed


@settings(max_examples=examples(100), deadline=None)
@given(classes=st.integers(1, 6), each=st.integers(1, 4), step=st.integers(1, 10**6))
def test_classes_that_rotate_are_equally_frequent_on_each_worker_and_over_time(
    classes: int, each: int, step: int
) -> None:
    fractions = tuple((number + 1) / classes for number in range(classes))
    backward, nodes = vf.PartialBackward(fractions), 3 * each * classes
    for first in range(0, nodes, each * classes):
        worker = range(first, first + each * classes)
        assert Counter(backward.fraction(step, node, nodes) for node in worker) == dict.fromkeys(fractions, each)
    for node in range(nodes):
        over_time = Counter(backward.fraction(step + later, node, nodes) for later in range(classes))
        assert over_time == dict.fromkeys(fractions, 1)


def test_classes_that_do_not_rotate_stay_with_ranges_of_virtual_nodes() -> None:
    backward = vf.PartialBackward(rotate=False)
    for step in (1, 2, 77):
        found = [backward.fraction(step, node, 8) for node in range(8)]
        assert found == [1, 1, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25]


def test_every_so_many_steps_all_passes_are_whole() -> None:
    backward = vf.PartialBackward((0.5, 0.25), full_every=3)
    whole = [step for step in range(1, 10) if all(backward.fraction(step, node, 8) == 1 for node in range(8))]
    assert whole == [3, 6, 9]
    assert all(backward.fraction(step, node, 8) < 1 for step in (1, 2, 4) for node in range(8))


@pytest.mark.parametrize(
    ("backward", "fraction"),
    [
        (vf.PartialBackward((0.5, 1)), 1),
        (vf.PartialBackward((1, 0.5, 0.25), rotate=False), 0.25),
        (vf.PartialBackward((0.5, 0.25), rotate=False, full_every=5), 1),
    ],
    ids=["rotating", "fixed", "fixed, but for some steps"],
)
def test_a_joiner_warms_up_with_the_longest_pass_that_it_will_have_to_run(
    backward: vf.PartialBackward, fraction: float
) -> None:
    assert {backward.fraction(WARM_UP, node, 8) for node in range(8)} == {fraction}


@pytest.mark.parametrize(
    ("fraction", "blocks", "reached"),
    [(1.0, 4, 4), (0.75, 4, 3), (0.25, 4, 1), (0.01, 4, 1), (0.5, 3, 2), (0.25, 3, 1), (0.99, 4, 4), (0.5, 1, 1)],
)
def test_a_fraction_is_the_nearest_number_of_blocks(fraction: float, blocks: int, reached: int) -> None:
    assert BlockCosts((1,) * blocks).reached(fraction) == reached


@given(st.floats(0, 1, exclude_min=True), st.integers(1, 1_000))
def test_blocks_that_are_alike_are_reached_by_their_number(fraction: float, blocks: int) -> None:
    assert BlockCosts((1,) * blocks).reached(fraction) == max(1, math.floor(fraction * blocks + 0.5))


@given(
    st.lists(st.integers(0, 10**15), min_size=1, max_size=12).filter(any), st.integers(1, 10_000).map(lambda n: n / 1e4)
)
def test_no_other_end_of_a_pass_is_nearer_to_its_fraction(work: list[int], fraction: float) -> None:
    costs = BlockCosts(tuple(work))
    off = [abs(sum(work[-reached:]) / sum(work) - fraction) for reached in range(1, len(work) + 1)]
    assert off[costs.reached(fraction) - 1] == pytest.approx(min(off), abs=1e-12)


@pytest.mark.parametrize(
    ("work", "ends", "costs"),
    [
        ((1, 1, 1, 1), [4, 3, 1], [1, 5 / 6, 1 / 2]),
        ((4, 1, 1, 2), [4, 3, 2], [1, 2 / 3, 7 / 12]),
        ((1, 1, 2, 8), [4, 1, 1], [1, 7 / 9, 7 / 9]),
    ],
    ids=["alike", "the first the largest", "the last the largest"],
)
def test_passes_of_uneven_blocks_end_and_cost_by_their_work(
    work: tuple[int, ...], ends: list[int], costs: list[float]
) -> None:
    blocks = BlockCosts(work)
    assert [blocks.reached(fraction) for fraction in (1, 0.67, 0.34)] == ends
    assert [blocks.cost(fraction) for fraction in (1, 0.67, 0.34)] == pytest.approx(costs)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"fractions": ()}, "needs one for each class"),
        ({"fractions": 0.5}, "needs one for each class"),
        ({"fractions": (1, 0)}, "fractions has 0; each must be above 0 and at most 1"),
        ({"fractions": (1, 1.5)}, "fractions has 1.5; each must be"),
        ({"fractions": (1, float("nan"))}, "fractions has nan; each must be"),
        ({"fractions": (1, "half")}, "fractions has 'half'; each must be"),
        ({"fractions": (True,)}, "fractions has True; each must be"),
        ({"fractions": (0.5, 0.25)}, "no fraction is 1, so what is in front .* pass full_every="),
        ({"scale": "median"}, 'scale is \'median\'; it must be "mean" or "sum"'),
        ({"full_every": 0}, "full_every is 0; it must be"),
        ({"full_every": 2.0}, "full_every is 2.0; it must be"),
        ({"of": "flops"}, 'of is \'flops\'; it must be "blocks", "parameters", or an example'),
        ({"of": None}, "of is None; it must be"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_in_a_sentence(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        vf.PartialBackward(**arguments)


def test_virtual_nodes_of_which_none_runs_a_whole_pass_are_refused() -> None:
    backward = vf.PartialBackward((0.25, 1), rotate=False)
    backward.check(2)
    with pytest.raises(ConfigurationError, match="none of the 1 virtual node has the class whose fraction is 1"):
        backward.check(1)
    vf.PartialBackward((0.25, 1)).check(1)
    vf.PartialBackward((0.25, 1), rotate=False, full_every=4).check(1)


@pytest.mark.parametrize(
    ("backward", "classes"),
    [
        pytest.param(vf.PartialBackward((1, 0.25)), (PassClass(0.75, 1.0),), id="rotating: all alike, by and by"),
        pytest.param(
            vf.PartialBackward((1, 0.25), rotate=False), (PassClass(1.0, 1.0), PassClass(0.5, 0.25)), id="fixed"
        ),
        pytest.param(
            vf.PartialBackward((1, 0.25), rotate=False, full_every=2),
            (PassClass(1.0, 1.0), PassClass(0.75, 1.0)),
            id="fixed, but for some steps, which need all memory",
        ),
    ],
)
def test_whoever_assigns_virtual_nodes_knows_what_they_cost(
    backward: vf.PartialBackward, classes: tuple[PassClass, ...]
) -> None:
    assert [(one.cost, one.reach) for one in backward.classes(BlockCosts((1,) * 4))] == [
        (pytest.approx(one.cost), one.reach) for one in classes
    ]


@pytest.mark.parametrize(
    ("fraction", "cost"),
    [
        pytest.param(1, 1.0, id="all"),
        pytest.param(0.67, 0.75, id="without the first one, in which most is computed"),
        pytest.param(0.34, 0.5, id="the last one"),
    ],
)
def test_a_pass_costs_what_was_measured_of_its_blocks(fraction: float, cost: float) -> None:
    costs = BlockCosts((1, 1, 1), [(2e-3, 3e-3), (1e-3, 3e-3), (0.5e-3, 2.5e-3)])
    assert costs.cost(fraction) == pytest.approx(cost)


@given(st.lists(st.tuples(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3)), min_size=1, max_size=9))
def test_no_pass_costs_more_than_a_whole_one(block_seconds: list[tuple[float, float]]) -> None:
    costs = BlockCosts((1,) * len(block_seconds), block_seconds)
    assert costs.cost(1) == 1
    assert all(0 < costs.cost(fraction / 8) <= 1 for fraction in range(1, 8))


TOLD = BackwardSpec((1.0, 0.5), full_every=4)


@pytest.mark.parametrize(
    ("said", "found"),
    [
        pytest.param(None, vf.PartialBackward((1.0, 0.5), full_every=4), id="the script says nothing"),
        pytest.param(
            vf.PartialBackward([1, 0.5], full_every=4, blocks=["a", "b"]),
            vf.PartialBackward((1.0, 0.5), full_every=4, blocks=["a", "b"]),
            id="the same of named blocks",
        ),
        pytest.param(
            vf.PartialBackward([1, 0.5], full_every=4, of="parameters"),
            vf.PartialBackward((1.0, 0.5), full_every=4, of="parameters"),
            id="the same of parameters",
        ),
    ],
)
def test_a_job_says_how_far_backward_passes_go(said: vf.PartialBackward | None, found: vf.PartialBackward) -> None:
    assert agreed(said, TOLD) == found
    assert agreed(said, None) is said


@pytest.mark.parametrize(
    "said",
    [vf.PartialBackward((1, 0.5)), vf.PartialBackward((1, 0.5), full_every=4, scale="sum"), vf.PartialBackward()],
    ids=["no whole steps", "another scale", "other fractions"],
)
def test_script_and_job_must_agree(said: vf.PartialBackward) -> None:
    with pytest.raises(ConfigurationError, match=r"the script says backward=\[.*\] and the job's spec.backward \[.*\]"):
        agreed(said, TOLD)
