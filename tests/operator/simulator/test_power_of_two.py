"""The VirtualFlow authors' rule of sharing: hand-made queues, what always holds of it, and their own logs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import scheduling_recorded as benchmark
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from random_queues import NOW, apply, complaint, queues
from scheduling_cases import job, running

from tiers import examples
from virtualflow_operator.scheduling import Capacity, Demand
from virtualflow_operator.settings import SchedulingSettings
from virtualflow_operator.simulator.power_of_two import power_of_two_share

TOLD = SchedulingSettings()
ROOT = Path(__file__).parents[3]


def share(jobs: list[Demand], units: int) -> dict[str, int]:
    found = power_of_two_share(NOW, jobs, Capacity(units), TOLD)
    return {name.rpartition("/")[2]: given.workers for name, given in found.items()}


def reason(jobs: list[Demand], units: int, name: str) -> str:
    return power_of_two_share(NOW, jobs, Capacity(units), TOLD)[f"red/{name}"].reason


@pytest.mark.parametrize(
    ("jobs", "units", "sizes"),
    [
        pytest.param([job("a", 8)], 8, {"a": 8}, id="alone: what it asks for"),
        pytest.param([job("a", 8)], 7, {"a": 4}, id="alone: the largest power of two that there is"),
        pytest.param([job("a", 3), job("b", 8)], 8, {"a": 3, "b": 4}, id="who is content leaves the rest to others"),
        pytest.param([job("a", 8), job("b", 8), job("c", 8)], 8, {"a": 4, "b": 2, "c": 2}, id="the rest doubles one"),
        pytest.param(
            [job("a", 8, weight=1.0), job("b", 8, weight=5.0)], 8, {"a": 4, "b": 4}, id="by weight, then doubled twice"
        ),
        pytest.param(
            [running("a", 4, 8, weight=10.0), *(job(name, 8) for name in "bcde")],
            8,
            {"a": 4, "b": 1, "c": 1, "d": 1, "e": 1},
            id="halved where shares of less than one worker are rounded up",
        ),
        pytest.param([job("a", 4, units=2), job("b", 4)], 8, {"a": 2, "b": 4}, id="shares are of units"),
        pytest.param(
            [running("a", 4, 4, priority=5, weight=5.0), job("b", 4, priority=1), job("c", 1, priority=1)],
            4,
            {"a": 4, "b": 0, "c": 0},
            id="nobody of a higher priority gives way, and there is no backfill",
        ),
        pytest.param(
            [running("a", 4, 4, priority=1), job("b", 4, priority=5, weight=5.0)],
            4,
            {"a": 2, "b": 2},
            id="a lower priority gives way",
        ),
        pytest.param(
            [running("a", 2, 2, minimum=2), running("b", 2, 2, minimum=2, priority=1)],
            3,
            {"a": 0, "b": 2},
            id="lost capacity: the lower priority goes back to the queue",
        ),
    ],
)
def test_sizes_are_as_one_would_compute_them(jobs: list[Demand], units: int, sizes: dict[str, int]) -> None:
    assert share(jobs, units) == sizes


def test_who_waits_is_told_why() -> None:
    jobs = [running("a", 4, 4, priority=5), job("b", 4), job("c", 1), job("d", 9, minimum=9)]
    assert reason(jobs, 4, "b") == "waits, first in the queue, until red/a need not give way to it"
    assert reason(jobs, 4, "c") == "waits behind red/b"
    assert reason(jobs, 4, "d").startswith("cannot run: its minimum of 9 workers")
    assert reason([running("a", 2, 2, minimum=2), job("b", 3, minimum=3)], 4, "b").endswith("room for its minimum")


def test_a_light_job_waits_for_as_long_as_heavier_ones_come() -> None:
    """What our own policies do not do: they bound every wait (see test_scheduling_always)."""
    light = job("z", 4)
    jobs = [light]
    for turn in range(50):
        jobs = [light, running("a", 4, 4, priority=5, weight=5.0, since=NOW + turn)]
        found = power_of_two_share(NOW + turn, jobs, Capacity(4), TOLD)
        assert found["red/z"].workers == 0


plain = queues().map(
    lambda queue: ([replace(job, minimum_on_demand=False) for job in queue[0]], replace(queue[1], limits={}))
)
Queue = tuple[list[Demand], Capacity]
few = hypothesis_settings(max_examples=examples(50))


@few
@given(queue=plain)
def test_capacity_minimums_and_maximums_hold_and_sizes_are_powers_of_two_or_fixed(queue: Queue) -> None:
    jobs, capacity = queue
    found = power_of_two_share(NOW, jobs, capacity, TOLD)
    assert complaint(jobs, found, capacity) == ""
    for demand in jobs:
        workers = found[demand.name].workers
        doubled = [demand.minimum * 2**power for power in range(5)]
        assert workers.bit_count() <= 1 or workers == demand.fixed or workers in doubled


@few
@given(queue=plain, random=st.randoms())
def test_the_order_of_the_jobs_does_not_matter(queue: Queue, random) -> None:
    jobs, capacity = queue
    shuffled = list(jobs)
    random.shuffle(shuffled)
    assert power_of_two_share(NOW, jobs, capacity, TOLD) == power_of_two_share(NOW, shuffled, capacity, TOLD)


@few
@given(queue=plain)
def test_nothing_changes_when_nothing_changed(queue: Queue) -> None:
    jobs, capacity = queue
    first = power_of_two_share(NOW, jobs, capacity, TOLD)
    again = power_of_two_share(NOW, apply(jobs, first, NOW), capacity, TOLD)
    assert {name: given.workers for name, given in again.items()} == {
        name: given.workers for name, given in first.items()
    }


@few
@given(queue=plain)
def test_everybody_who_can_runs_as_jobs_end(queue: Queue) -> None:
    jobs, capacity = queue
    jobs = [replace(job, allocated=0, since=None) for job in jobs]
    ran: set[str] = set()
    for turn in range(len(jobs) + 1):
        jobs = apply(jobs, power_of_two_share(NOW + turn, jobs, capacity, TOLD), NOW + turn)
        active = [job for job in jobs if job.allocated]
        ran |= {job.name for job in active}
        if active:
            jobs.remove(active[0])
    assert all(job.name in ran or job.minimum * job.units > capacity.total for job in queue[0])


def test_two_jobs_of_one_name_are_an_error() -> None:
    with pytest.raises(ValueError, match="two jobs are called red/a"):
        share([job("a"), job("a")], 4)


# --- their logs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log", benchmark.LOGS, ids=lambda log: log.trace)
def test_every_decision_of_the_log_comes_out_of_the_rule(log: benchmark.Log) -> None:
    for logged, ours in benchmark.decided(log):
        assert ours == logged


def test_the_simulator_reproduces_the_logs() -> None:
    found = {(row.log, row.played): row for row in benchmark.rows()}
    for log in benchmark.LOGS:
        row = found[log.trace, "speeds and start-ups of this log"]
        assert abs(row.off_median) < 0.03
        assert abs(row.off_makespan) < 0.03
        assert max(abs(off) for off in row.off_jobs) < 0.03


def test_the_figures_of_the_document_are_what_comes_out() -> None:
    document = (ROOT / "docs" / "explanation" / "simulator.md").read_text()
    told = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in document.splitlines()
        if re.match(r"\| (20|three) jobs, ", line)
    ]
    found = [
        [f"{row.median_completion:,.0f} s ({100 * row.off_median:+.1f} %)", f"{100 * row.off_makespan:+.1f} %"]
        for row in benchmark.rows()
    ]
    assert [cells[1:2] + cells[3:4] for cells in told] == found
