"""Jobs that share devices in turns: how fast they are predicted to be, and who goes with whom."""

from __future__ import annotations

from collections import Counter
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtualflow_operator.scheduling import Allocation, Demand, RotatingPasses, ScalingCurve
from virtualflow_operator.scheduling.packing import Packing, Phases, pack, share, slowdown_bound
from virtualflow_operator.settings import PackingSettings

SETTINGS = PackingSettings()
HALF, BUSY, BRIEF = Phases(1.0, 1.0), Phases(1.0, 0.0), Phases(0.1, 1.9)

# --- phases -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("jobs", "steps"),
    [
        pytest.param([HALF], [2.0], id="one alone"),
        pytest.param([HALF, HALF], [2.0, 2.0], id="one computes while the other is away"),
        pytest.param([HALF, HALF, HALF], [3.0, 3.0, 3.0], id="more than the device can do"),
        pytest.param([BUSY, BUSY], [2.0, 2.0], id="two that always compute"),
        pytest.param([BUSY, HALF], [1.5, 3.0], id="one waits for the turn under way, the other computes twice a step"),
        pytest.param([Phases(1.0, 3.0), Phases(2.0, 2.0)], [4.0, 4.0], id="unequal ones that fit"),
        pytest.param([BRIEF] * 8, [2.0] * 8, id="eight that hardly compute"),
    ],
)
def test_the_steps_of_jobs_that_share_a_device(jobs: list[Phases], steps: list[float]) -> None:
    assert share(jobs) == pytest.approx(steps, rel=0.03)


ONE_LONG, OTHER_LONG = ((1.5,), (0.5,)), ((0.5,), (1.5,))
BY_TURNS = ((1.5, 0.5), (0.5, 1.5))
"""Two workers, of which one computes for long in each step."""


@pytest.mark.parametrize(
    ("uneven", "step"),
    [
        pytest.param([(), ()], 2.0, id="even"),
        pytest.param([ONE_LONG, ONE_LONG], 3.0, id="the long passes of both on one device"),
        pytest.param([ONE_LONG, OTHER_LONG], 2.0, id="each one's long pass beside the other's short one"),
        pytest.param([BY_TURNS, ()], 2.0, id="where one pass is short, the other job begins early"),
        pytest.param([BY_TURNS, BY_TURNS], 2.0, id="long passes that pass each other by"),
    ],
)
def test_uneven_passes_are_followed_on_all_devices(uneven: list[tuple[tuple[float, ...], ...]], step: float) -> None:
    jobs = [Phases(1.0, 0.0, of) for of in uneven]
    assert share(jobs, [(0, 1)] * 2) == pytest.approx([step] * 2, rel=0.03)


@pytest.mark.parametrize(
    ("costs", "virtual_nodes", "workers", "found"),
    [
        pytest.param((1.0, 0.5), 2, 2, ((4 / 3, 2 / 3), (2 / 3, 4 / 3)), id="a virtual node each"),
        pytest.param((1.0, 0.5), 4, 2, (), id="one of each class: they compute alike"),
        pytest.param((1.0, 0.5), 2, 1, (), id="one worker has them all"),
        pytest.param((1.0,), 3, 2, ((2 / 3,), (4 / 3,)), id="whole passes, and unequal ranges"),
        pytest.param((1.0, 0.0625), 1, 1, ((1.0 / 0.53125, 0.0625 / 0.53125),), id="one that differs by steps"),
    ],
)
def test_what_workers_compute_where_passes_end_early(
    costs: tuple[float, ...], virtual_nodes: int, workers: int, found: tuple[tuple[float, ...], ...]
) -> None:
    work = RotatingPasses(costs, virtual_nodes).work(workers)
    assert [pytest.approx(of) for of in found] == list(work)


@given(st.lists(st.floats(0.1, 1.0), min_size=1, max_size=4).map(tuple), st.integers(1, 12), st.integers(1, 6))
def test_workers_compute_once_the_mean_on_average(costs: tuple[float, ...], virtual_nodes: int, workers: int) -> None:
    work = RotatingPasses(costs, virtual_nodes).work(workers)
    assert all(len(of) == len(costs) for of in work)
    if work:
        assert fmean(one for of in work for one in of) == pytest.approx(1.0)


uneven = st.lists(st.floats(0.3, 2.0), min_size=2, max_size=2).map(tuple)
phases = st.builds(
    Phases,
    st.floats(0.01, 10.0),
    st.floats(0.0, 10.0),
    st.just(()) | st.lists(uneven, min_size=1, max_size=1).map(tuple),
)


@given(st.lists(phases, min_size=1, max_size=4))
def test_nobody_waits_for_more_than_a_turn_of_everybody_else(jobs: list[Phases]) -> None:
    steps = share(jobs)
    for n, (job, step) in enumerate(zip(jobs, steps, strict=True)):
        assert job.step * (1 - 1e-9) <= step <= slowdown_bound(jobs, n) * job.step * (1 + 1e-9)
    computing = sum(
        job.compute * fmean(job.uneven[0] if job.uneven else (1.0,)) / step
        for job, step in zip(jobs, steps, strict=True)
    )
    assert computing <= 1.1, "a device does not compute more than all the time, but for the edges of what is counted"


def test_jobs_of_very_unequal_steps_are_predicted_in_time() -> None:
    short, long = Phases(1e-6, 1e-6), Phases(1e3, 1e3)
    steps = share([short, long])
    assert steps[1] <= slowdown_bound([short, long], 1) * long.step


@pytest.mark.parametrize(
    ("points", "workers", "found"),
    [
        pytest.param([(1, 1.0), (4, 2.0)], 4, Phases(0.25, 0.25), id="half of linear scaling: half of the step"),
        pytest.param([(1, 1.0), (4, 4.0)], 4, Phases(0.25, 0.0), id="linear scaling: it always computes"),
        pytest.param([(1, 1.0), (4, 2.0)], 1, Phases(1.0, 0.0), id="alone it always computes"),
    ],
)
def test_phases_follow_from_a_curve(points: list[tuple[int, float]], workers: int, found: Phases) -> None:
    assert Phases.at(ScalingCurve.of(points), workers) == found


# --- who goes with whom -----------------------------------------------------------------------------------------------


def job(name: str, away: float, workers: int = 2, maximum: int = 2, submitted: float = 0.0, units: int = 1) -> Demand:
    """A job whose devices are idle for that part of a step, on two workers."""
    curve = ScalingCurve.of([(1, 1.0), (2, 2.0 * (1 - away))])
    return Demand(name, "n", submitted, maximum, 2, units=units, allocated=workers, curve=curve)


def packed(running: list[Demand], waiting: list[Demand], most: int = 2, **settings: float) -> Packing:
    given = {one.name: Allocation(one.allocated, "") for one in running} | {
        one.name: Allocation(0, "") for one in waiting
    }
    return pack([*running, *waiting], given, most, PackingSettings(**settings))  # type: ignore[arg-type]


TABLE = [
    pytest.param([job("a", 0.5)], [job("b", 0.5, 0)], 2, {"b": "a"}, id="two that fit"),
    pytest.param([job("a", 0.0)], [job("b", 0.0, 0)], 2, {}, id="two that always compute"),
    pytest.param([job("a", 0.5)], [job("b", 0.5, 0)], 1, {}, id="no packing"),
    pytest.param([job("a", 0.5)], [job("b", 0.5, 0), job("c", 0.5, 0)], 2, {"b": "a"}, id="two on a device at most"),
    pytest.param([job("a", 0.49)], [job("b", 0.49, 0), job("c", 0.49, 0)], 3, {"b": "a"}, id="a third slows all down"),
    pytest.param(
        [job("a", 0.5)], [job("b", 0.5, 0, submitted=2.0), job("c", 0.5, 0, submitted=1.0)], 2, {"c": "a"}, id="by age"
    ),
    pytest.param([job("a", 0.5, 4)], [job("b", 0.5, 0), job("c", 0.5, 0)], 2, {"b": "a", "c": "a"}, id="side by side"),
    pytest.param([job("a", 0.5, 4, 4)], [job("b", 0.5, 0, units=2)], 2, {}, id="workers of another size"),
    pytest.param([job("a", 0.4), job("b", 0.9)], [job("c", 0.45, 0)], 2, {"c": "b"}, id="where it gains most"),
]


@pytest.mark.parametrize(("running", "waiting", "most", "hosts"), TABLE)
def test_who_goes_with_whom(running: list[Demand], waiting: list[Demand], most: int, hosts: dict[str, str]) -> None:
    assert {name: seat.host for name, seat in packed(running, waiting, most).seats.items()} == hosts


def test_a_job_of_unknown_phases_is_not_packed() -> None:
    unknown = Demand("b", "n", 0.0, 2, 2)
    assert not packed([job("a", 0.5)], [unknown]).seats
    assert not packed([Demand("a", "n", 0.0, 2, 2, allocated=2)], [job("b", 0.5, 0)]).seats


def test_a_seat_says_what_becomes_of_the_job() -> None:
    (seat,) = packed([job("a", 0.5)], [job("b", 0.5, 0)]).seats.values()
    assert (seat.workers, seat.reason) == (2, "computes in turns with a until devices are free")


@st.composite
def queues(draw: st.DrawFn) -> tuple[list[Demand], dict[str, Allocation]]:
    """Some jobs that run and some that wait, whose devices idle for any part of a step."""
    demands, allocations = [], {}
    for n in range(draw(st.integers(2, 9))):
        minimum = draw(st.integers(1, 3))
        maximum = minimum + draw(st.integers(0, 4))
        running, speed, away = (
            n < 2 or draw(st.booleans()),
            draw(st.sampled_from([0.9, 1.0, 1.3, 3.0])),
            draw(st.sampled_from([0.0, 0.4, 0.5, 0.6, 0.8])),
        )
        points = [(1, speed), (maximum, speed * max(1.0, maximum * (1 - away)))]
        workers = draw(st.integers(minimum, maximum)) if running else 0
        name, units = f"job-{n}", draw(st.sampled_from([1, 1, 1, 2]))
        curve = ScalingCurve.of(dict(points).items())
        demands.append(Demand(name, "n", float(n % 3), maximum, minimum, units=units, allocated=workers, curve=curve))
        allocations[name] = Allocation(workers, "")
    return demands, allocations


@given(queues(), st.sampled_from([2, 1, 3, 4]), st.sampled_from([1.5, 1.0, 1.2, 3.0]))
def test_what_holds_of_every_packing(
    queue: tuple[list[Demand], dict[str, Allocation]], most: int, slowest: float
) -> None:
    demands, decision = queue
    settings = PackingSettings(max_slowdown=slowest)
    found = pack(demands, decision, most, settings)
    by_name = {demand.name: demand for demand in demands}
    on_host: Counter[str] = Counter()
    for name, seat in found.seats.items():
        lodger, host = by_name[name], decision[seat.host].workers
        assert not decision[name].workers, "whoever has devices of its own keeps them"
        assert lodger.minimum <= seat.workers <= min(lodger.maximum, host)
        assert lodger.units == by_name[seat.host].units
        on_host[seat.host] += seat.workers
    for host, workers in on_host.items():
        assert workers <= (most - 1) * decision[host].workers, "no device serves more jobs than it may"
    assert all(1.0 <= slowdown <= slowest + 1e-9 for slowdown in found.slowdowns.values())
    hosts = {name: seat.host for name, seat in found.seats.items()}
    again = pack(demands, decision, most, settings, hosts)
    assert again.seats.items() >= found.seats.items(), "whoever is a lodger stays where it is"
    assert pack(demands[::-1], decision, most, settings).seats == found.seats, "the order of jobs does not matter"
