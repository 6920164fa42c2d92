"""A queue with kinds of device: who gets which, and why."""

from __future__ import annotations

from typing import Any

import pytest
from scheduling_cases import NOW, TOLD, job, running

from virtualflow_operator.scheduling import (
    Capacity,
    Demand,
    DeviceKind,
    KindAllocation,
    KindDemand,
    ScalingCurve,
    decide_by_kind,
    policy,
)
from virtualflow_operator.settings import SchedulingSettings

FAST_AND_SLOW = {"V100": DeviceKind(Capacity(4)), "K80": DeviceKind(Capacity(4))}


def line(speed: float) -> ScalingCurve:
    """Linear scaling, at so many steps per second for a worker."""
    return ScalingCurve(((1, speed), (16, 16 * speed)))


def on(demand: Demand, v100: float, k80: float, **more: Any) -> KindDemand:
    """A job with a speed on each kind; 0: not measured there."""
    speeds = {"V100": v100, "K80": k80}
    return KindDemand(demand, {kind: line(s) if s else ScalingCurve() for kind, s in speeds.items()}, **more)


def decide(
    jobs: list[KindDemand], kinds: dict[str, DeviceKind], told: SchedulingSettings = TOLD, name: str = "ShortestFirst"
) -> dict[str, KindAllocation]:
    found = decide_by_kind(policy(name), NOW, jobs, kinds, told)
    return {key.rpartition("/")[2]: given for key, given in found.items()}


def test_the_job_whom_a_fast_device_helps_most_gets_it() -> None:
    jobs = [
        on(job("picky", 4, steps_left=40_000), 10.0, 1.0, mobility="stays"),
        on(job("easy", 4, steps_left=40_000), 10.0, 8.0, mobility="stays"),
    ]
    found = decide(jobs, FAST_AND_SLOW)
    assert found["picky"].workers == {"V100": 4}
    assert found["easy"].workers == {"K80": 4}


def test_a_job_alone_uses_both_kinds_if_it_may_mix() -> None:
    found = decide([on(job("only", 16, steps_left=40_000), 10.0, 5.0)], FAST_AND_SLOW)
    assert found["only"].workers == {"V100": 4, "K80": 4}
    assert found["only"].home == "V100"
    assert "4 on K80" in found["only"].reason


@pytest.mark.parametrize("mobility", ["stays", "moves"])
def test_a_job_that_may_not_mix_has_one_kind(mobility: Any) -> None:
    found = decide([on(job("only", 16, steps_left=40_000), 10.0, 5.0, mobility=mobility)], FAST_AND_SLOW)
    assert found["only"].workers == {"V100": 4}


def test_a_job_waits_for_a_fast_device_rather_than_stay_on_a_slow_one_for_life() -> None:
    short = on(running("short", 4, 4, minimum=4, steps_left=400), 10.0, 0.1, home="V100", bound=True, mobility="stays")
    new = on(job("new", 4, minimum=4, steps_left=40_000), 10.0, 0.1, mobility="stays")
    found = decide([short, new], FAST_AND_SLOW)
    assert found["new"].workers == {}
    assert found["new"].home == "V100"


def test_a_job_that_may_move_runs_on_a_slow_device_while_it_waits_and_keeps_its_place() -> None:
    short = on(running("short", 4, 4, minimum=4, steps_left=400), 10.0, 0.1, home="V100", bound=True)
    new = on(job("new", 4, minimum=4, steps_left=40_000), 10.0, 0.1)
    first = decide([short, new], FAST_AND_SLOW)["new"]
    assert (first.workers, first.home) == ({"K80": 4}, "V100")
    assert "meanwhile" in first.reason
    waiting = new.given(first, NOW)
    assert waiting.job.waiting(NOW + 50.0) == pytest.approx(NOW + 50.0 - new.job.submitted)
    later = decide([waiting], FAST_AND_SLOW)["new"]
    assert later.workers == {"V100": 4}


def test_a_job_that_has_begun_and_stays_is_not_moved_though_it_would_be_faster() -> None:
    begun = on(running("begun", 2, 4, steps_left=40_000), 100.0, 1.0, mobility="stays", home="K80", bound=True)
    assert decide([begun], FAST_AND_SLOW)["begun"].workers == {"K80": 4}


def test_what_is_not_measured_is_assumed_as_for_other_jobs_and_said() -> None:
    jobs = [
        on(job("known", 1, steps_left=1_000), 10.0, 2.5, mobility="stays"),
        on(job("new", 4, steps_left=400_000), 0.0, 8.0, mobility="stays", home="V100"),
    ]
    found = decide(jobs, FAST_AND_SLOW)
    assert "its speed on V100 is assumed, 4 times that on K80" in found["new"].reason
    ratings = {"V100": DeviceKind(Capacity(4), rating=6.0), "K80": DeviceKind(Capacity(4))}
    assert "assumed, 6 times that on K80" in decide(jobs[1:], ratings)["new"].reason


def test_a_price_counts_as_much_as_it_is_told_to() -> None:
    kinds = {
        "V100": DeviceKind(Capacity(0, 4), price=10.0),
        "K80": DeviceKind(Capacity(0, 4), price=10.0, spot_price=1.0),
    }
    jobs = [on(job("only", 4, steps_left=40_000), 10.0, 5.0, mobility="stays")]
    assert decide(jobs, kinds)["only"].home == "V100"
    assert decide(jobs, kinds, SchedulingSettings(thrift=1.0))["only"].home == "K80"


def test_a_minimum_on_demand_is_kept_on_the_kind_that_has_it() -> None:
    kinds = {"V100": DeviceKind(Capacity(0, 4)), "K80": DeviceKind(Capacity(2, 2))}
    found = decide([on(job("only", 2, minimum=2, minimum_on_demand=True), 10.0, 1.0)], kinds)["only"]
    assert (found.workers, found.on_demand) == ({"K80": 2}, 2)


def test_a_job_of_kinds_that_the_queue_has_not_is_told_so_and_keeps_its_own() -> None:
    begun = on(running("begun", 2), 1.0, 1.0, mobility="stays", home="K80", bound=True)
    found = decide([begun], {"V100": DeviceKind(Capacity(4))})["begun"]
    assert (found.workers, found.home) == ({}, "K80")
    assert "(K80)" in found.reason
    assert begun.given(found, NOW).job.allocated == 0


@pytest.mark.parametrize("rating", [0.0, -1.0, float("nan")])
def test_a_kind_has_a_rating_and_prices_above_0(rating: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        DeviceKind(Capacity(1), rating=rating)


def test_two_jobs_of_one_name_and_no_kinds_are_errors() -> None:
    demand = on(job("a"), 1.0, 1.0)
    with pytest.raises(ValueError, match="two jobs are called red/a"):
        decide([demand, demand], FAST_AND_SLOW)
    with pytest.raises(ValueError, match="at least one kind"):
        decide([demand], {})


def test_fixed_sizes_give_no_turn_so_a_long_wait_binds_nobody_to_a_kind() -> None:
    """Found by hypothesis: the second job seemed to have a turn, was suspended for the first, and moved only then."""
    told = SchedulingSettings(starvation_bound=60.0, margin=0.0)
    kinds = {kind: DeviceKind(Capacity(0, 4)) for kind in ("P100", "K80")}
    curves = {kind: ScalingCurve() for kind in kinds}
    jobs = [
        KindDemand(job("a", 1, units=4, allocated=1), curves, "stays", "K80", bound=True),
        KindDemand(job("b", 1, units=4, allocated=1, waited=60.0), curves, "moves", "K80", bound=True),
    ]
    first = decide_by_kind(policy("FIFO"), NOW, jobs, kinds, told, elastic=False)
    after = [demand.given(first[demand.job.name], NOW) for demand in jobs]
    assert decide_by_kind(policy("FIFO"), NOW, after, kinds, told, elastic=False) == first
