"""On which nodes a simulation's workers would be: hand-computed fleets, what always holds, and the published shape."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks import consolidation as benchmark
from benchmarks.nodes import Nodes, Placement, Use, use
from benchmarks.traces.generate import philly
from hypothesis import given
from hypothesis import strategies as st

from virtualflow_operator.scheduling import POLICIES
from virtualflow_operator.settings import SchedulingSettings
from virtualflow_operator.simulator.outcome import Outcome, Result
from virtualflow_operator.simulator.simulation import ResizeCost, simulate
from virtualflow_operator.simulator.trace import JobEvent

ROOT = Path(__file__).parents[3]
TWO = Nodes(units=2, idle=10.0)


def outcome(name: str, *changes: tuple[float, int], units: int = 1) -> Outcome:
    job = JobEvent(changes[0][0], name, 1, {1: 1.0}, units=units)
    return Outcome(job, changes[0][0], changes[-1][0], 0.0, 0.0, 0, 0, changes, "")


def used(placement: Placement, *outcomes: Outcome, nodes: Nodes = TWO) -> Use:
    return use(Result(outcomes, (), 0), nodes, placement)


APART = (outcome("a", (0, 1), (100, 0)), outcome("b", (0, 2), (20, 1), (100, 0)), outcome("c", (0, 1), (50, 0)))
"""Two nodes are full until 20; then three workers are left until 50, and two until 100."""


@pytest.mark.parametrize(
    ("placement", "found"),
    [
        # b is on both nodes, beside a and beside c; the one beside c came last, and leaves first.
        pytest.param("spread", Use(110 + 60, 2 * 50 + 50, 2, 4, 0), id="spread"),
        # The one beside a leaves, as none is emptier: b and c are together, then a and b apart.
        pytest.param("gather", Use(110 + 110, 2 * 50 + 50, 2, 4, 0), id="gather"),
        pytest.param("move", Use(110 + 60, 2 * 50 + 50, 2, 4, 1), id="move: a joins b at 50, its node goes at 60"),
    ],
)
def test_nodes_are_there_for_as_long_as_one_would_compute(placement: Placement, found: Use) -> None:
    assert used(placement, *APART) == found


COMES = (outcome("a", (0, 2), (100, 0)), outcome("b", (0, 1), (100, 0)), outcome("c", (20, 1), (25, 0)))


def test_who_comes_is_gathered_or_spread_over_the_nodes_that_are_there() -> None:
    """a and b leave one unit of two nodes. A third node is there since d, and empty, when c comes."""
    third = outcome("d", (0, 2), (15, 0))
    assert used("spread", *COMES, third).node_seconds == 110 + 110 + (25 + 10)  # c is on the third, which stays for it
    assert used("gather", *COMES, third).node_seconds == 110 + 110 + (15 + 10)


def test_who_leaves_does_so_from_the_emptiest_node_when_gathered() -> None:
    shrinks = (outcome("a", (0, 1), (5, 0)), outcome("b", (0, 3), (20, 2), (100, 0)))
    assert used("spread", *shrinks).node_seconds == 110 + 110
    assert used("gather", *shrinks).node_seconds == 110 + 30


def test_a_worker_that_needs_several_units_needs_them_on_one_node() -> None:
    jobs = (outcome("a", (0, 2), (100, 0), units=2), outcome("b", (0, 1), (100, 0)))
    assert used("gather", *jobs, nodes=Nodes(units=3)).most == 2
    with pytest.raises(ValueError, match="needs more than the 1 units of a node"):
        used("gather", *jobs, nodes=Nodes(units=1))


changes = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 5)), min_size=1, max_size=6, unique_by=lambda at: at[0]
)


@given(st.lists(changes, min_size=1, max_size=6), st.sampled_from(["spread", "gather", "move"]))
def test_no_placement_beats_the_least_and_none_needs_a_node_a_worker(
    drawn: list[list[tuple[int, int]]], placement: Placement
) -> None:
    jobs = [
        outcome(f"j{index}", *((float(at), workers) for at, workers in sorted(one)), (400.0, 0))
        for index, one in enumerate(drawn)
    ]
    nodes = Nodes(units=3, idle=10.0)
    found = used(placement, *jobs, nodes=nodes)
    work = sum(
        workers * (end - at)
        for job in jobs
        for (at, workers), (end, _) in zip(job.changes, job.changes[1:], strict=False)
    )
    assert work / nodes.units - 1e-6 <= found.least <= found.node_seconds + 1e-6
    assert found.node_seconds <= work + nodes.idle * sum(workers for job in jobs for _, workers in job.changes)
    assert found.moves == 0 or placement == "move"


@pytest.mark.slow
def test_the_figures_of_the_document_are_what_comes_out() -> None:
    """And gathering saves node hours, moving more, and nothing more than there is to save."""
    document = (ROOT / "docs" / "explanation" / "simulator.md").read_text()
    told = re.findall(
        r"^\| (always there|spread|gather|move|at best) \|[^|]*\| ([\d,]+) \|", document, flags=re.MULTILINE
    )
    trace = philly().on(benchmark.FLEETS[0] * benchmark.NODE.units)
    result = simulate(trace, POLICIES["WeightedFairShare"], ResizeCost(6.0, 0.5), SchedulingSettings())
    rows = benchmark.rows(result, benchmark.FLEETS[0], benchmark.IDLE_WATTS)
    assert told == [(row.placement, f"{row.node_hours:,.0f}") for row in rows]
    hours = [row.node_hours for row in rows]
    assert hours == sorted(hours, reverse=True)
