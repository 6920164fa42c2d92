"""What was measured is remembered once, and says how far a job is worth growing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes import accepted, body, remote, seen, worker

from virtualflow.protocol.http_api import Status
from virtualflow_operator.api.job import Measured
from virtualflow_operator.api.objects import read_job
from virtualflow_operator.jobs.scaling_history import MAX_MEASURED, efficient_limit, remember
from virtualflow_operator.queues.past_jobs import curve_of, phases_of
from virtualflow_operator.scheduling.packing import Phases

JOB = read_job(accepted(body(virtualNodes=64)))


def says(workers: int, step_ms: float | None, phase: str = "training", **facts: Any) -> Status:
    """A coordinator's status with so many workers that carry something, and one that only waits."""
    pods = [worker(JOB, ordinal) for ordinal in range(workers + 1)]
    training = [seen(pod, "training", index, index + 1) for index, pod in enumerate(pods[:workers])]
    waiting = msgspec.structs.replace(seen(pods[workers], "ready", 0, 1), first=0, last=0)
    return msgspec.structs.replace(remote(phase, *training, waiting), step_ms=step_ms, **facts)


PODS = {worker(JOB, ordinal).name: "" for ordinal in range(9)}
"""The kind of device of each pod, where none are told apart."""


def measured(**points: float) -> tuple[Measured, ...]:
    """``_2=3.5``: 3.5 steps a second with 2 workers."""
    return tuple(Measured(int(key[1:]), f"{speed:g}") for key, speed in points.items())


def test_each_number_of_workers_is_remembered_the_latest_first() -> None:
    known: tuple[Measured, ...] = ()
    for workers, milliseconds in ((2, 500.0), (4, 250.0), (2, 480.0)):
        known = remember(known, says(workers, milliseconds), PODS)
    assert known == measured(_2=2, _4=4), "480 ms are not worth a change of 500 ms"


def test_a_figure_moves_the_known_speed_halfway() -> None:
    speeds, known = [], measured(_2=2, _4=4)
    for _ in range(6):
        known = remember(known, says(2, 31.25), PODS)
        speeds.append(float(known[0].steps_per_second))
    assert speeds == pytest.approx([8, 16, 22.63, 26.91, 29.34, 29.34], rel=1e-3), "towards 32"
    assert known[1:] == measured(_4=4)


def test_workers_without_a_pod_are_not_believed() -> None:
    claimed = says(4, 10.0)
    assert remember((), claimed, dict(list(PODS.items())[:3])) == ()
    again = msgspec.structs.replace(claimed, workers=claimed.workers[:1] * 4)
    assert [point.workers for point in remember((), again, PODS)] == [1], "a pod is one worker"


def test_for_how_much_of_a_step_workers_compute_is_remembered_with_it() -> None:
    known = remember((), says(2, 100.0), PODS)
    assert known == (Measured(2, "10"),)
    known = remember(known, says(2, 102.0, computing_ms=60.0), PODS)
    assert known == (Measured(2, "9.901", computing_milliseconds="60"),)
    assert remember(known, says(2, 102.0, computing_ms=63.0), PODS) == known, "3 ms are not worth a change"
    assert remember(known, says(2, 102.0), PODS) == known, "paces are not known for a while after a change"
    assert remember(known, says(2, 50.0), PODS)[0].computing_milliseconds == "60"
    assert remember(known, says(2, 102.0, computing_ms=30.0), PODS)[0].computing_milliseconds == "30"


PHASES = {
    "computing is measured": ((Measured(2, "10", "", "60"),), 2, Phases(0.06, 0.04)),
    "on another number of workers": ((Measured(2, "10", "", "60"), Measured(4, "16")), 4, Phases(0.03, 0.0325)),
    "the latest counts": ((Measured(4, "16", "", "40"), Measured(2, "10", "", "60")), 4, Phases(0.04, 0.0225)),
    "two numbers of workers, and no computing": (measured(_1=10, _4=20), 4, Phases(0.025, 0.025)),
    "it always computes": ((Measured(2, "10", "", "100"),), 2, Phases(0.1, 0.0)),
    "a lone worker's own speed does not count beside it": (
        (Measured(2, "10", "", "60"), Measured(1, "2")), 2, Phases(0.06, 0.04)
    ),
}  # fmt: skip


@pytest.mark.parametrize(("known", "workers", "phases"), PHASES.values(), ids=PHASES.keys())
def test_phases_follow_from_what_is_known(known: tuple[Measured, ...], workers: int, phases: Phases) -> None:
    found = Phases.at(phases_of(known), workers)
    assert (found.compute, found.away) == pytest.approx((phases.compute, phases.away), abs=1e-9)


@pytest.mark.parametrize(
    "known", [(), measured(_2=10), (Measured(1, "10", "", "60"),), (Measured(2, "10", "", "much"),)]
)
def test_phases_that_nobody_measured_are_not_made_up(known: tuple[Measured, ...]) -> None:
    assert len(phases_of(known).points) < 2


@pytest.mark.parametrize(
    "status",
    [
        None,
        says(2, None),
        says(2, 100.0, "waiting"),
        says(2, 100.0, proposed=7),
        says(0, 100.0),
    ],
    ids=["no coordinator", "not measured yet", "nobody trains", "about to change", "nobody carries anything"],
)
def test_what_says_nothing_of_a_settled_membership_is_left_alone(status: Status | None) -> None:
    known = measured(_3=7)
    assert remember(known, status, PODS) == known


def test_what_was_measured_on_a_kind_of_device_is_true_of_it_alone() -> None:
    def on(*kinds: str) -> dict[str, str]:
        return {worker(JOB, ordinal).name: kind for ordinal, kind in enumerate((*kinds, "slow"))}

    known = remember((), says(2, 500.0), on("slow", "slow"))
    known = remember(known, says(2, 100.0), on("fast", "fast"))
    assert known == (Measured(2, "10", "fast"), Measured(2, "2", "slow"))
    assert remember(known, says(2, 300.0), on("fast", "slow")) == known, "a mix is true of neither"
    assert remember(known, says(2, 300.0), on("fast")) == known, "of one worker nobody knows where it is"
    assert curve_of(known, "fast").speed(2) == 10
    assert not curve_of(known).measured
    poor = (*known, Measured(4, "10.1", "fast"))
    assert (efficient_limit(poor, 50, 8, "fast"), efficient_limit(poor, 50, 8, "slow")) == (3, 8)


@given(st.lists(st.tuples(st.integers(1, 200), st.floats(0.1, 1e6)), max_size=90))
def test_the_memory_is_bounded_and_rests_when_nothing_is_new(history: list[tuple[int, float]]) -> None:
    known: tuple[Measured, ...] = ()
    base = says(1, 1.0)
    names = {f"pod-{number}": "" for number in range(200)}
    carrying = tuple(msgspec.structs.replace(base.workers[0], worker=name) for name in names)
    for workers, milliseconds in history:
        status = msgspec.structs.replace(base, workers=carrying[:workers], step_ms=milliseconds)
        for _ in range(10):
            known = remember(known, status, names)
        assert known[0].workers == workers
        assert remember(known, status, names) == known
    assert len(known) <= MAX_MEASURED
    assert len({point.workers for point in known}) == len(known)


def test_the_curve_takes_what_was_measured_and_nothing_else() -> None:
    curve = curve_of((*measured(_1=10, _2=18), Measured(3, "fast"), Measured(4, "inf")))
    assert curve.points == ((1, 10.0), (2, 18.0))


LIMITS = {
    "no limit is asked for": (measured(_1=10, _8=11), 0, 8),
    "nothing is measured": ((), 50, 8),
    "one number tells nothing of another": (measured(_4=10), 50, 8),
    "every worker brings enough": (measured(_1=10, _2=19, _4=36), 50, 8),
    "the next worker brought too little": (measured(_1=10, _2=19, _3=20), 50, 2),
    "exactly enough": (measured(_1=10, _2=15), 50, 8),
    "a growth by several was not worth it: halfway is tried": (measured(_2=20, _8=26), 50, 5),
    "and was worth it: halfway between it and the rest": (measured(_2=20, _5=40, _8=44), 50, 6),
    "and the last worthwhile one is found": (measured(_2=20, _5=40, _6=43, _8=44), 50, 5),
    "slower with more": (measured(_1=10, _2=9), 10, 1),
    "never below the smallest known": (measured(_4=10, _5=9), 90, 4),
}


@pytest.mark.parametrize(("known", "percent", "limit"), LIMITS.values(), ids=LIMITS.keys())
def test_a_job_grows_as_far_as_each_worker_brings_enough(known: tuple[Measured, ...], percent: int, limit: int) -> None:
    assert efficient_limit(known, percent, 8) == limit
    assert efficient_limit(tuple(reversed(known)), percent, 8) == limit


@given(st.integers(1, 100), st.integers(1, 64), st.integers(1, 100))
def test_the_search_ends_at_the_last_worker_that_brings_enough(knee: int, most: int, percent: int) -> None:
    """Speed is linear up to a knee and constant behind it; the job always runs with as many as it is allowed."""
    known: dict[int, Measured] = {1: Measured(1, "10")}
    for _ in range(12):
        limit = efficient_limit(tuple(known.values()), percent, most)
        if limit in known:
            break
        known[limit] = Measured(limit, f"{10 * min(limit, knee)}")
    assert limit in known, "it settles in a logarithmic number of resizes"
    assert limit <= most
    if knee >= most:
        assert limit == most
    elif percent == 100:
        assert limit == knee
