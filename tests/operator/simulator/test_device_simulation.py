"""Traces with kinds of device: files, hand-computed ends, and what knowing the devices brings."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from benchmarks import scheduling_devices as benchmark
from benchmarks.device_traces import AUTHORS_DEVICES, GAVEL_DEVICES, authors, gavel, make

from virtualflow.errors import ConfigurationError
from virtualflow_operator.scheduling import POLICIES, DeviceKind, KindAllocation, KindDemand
from virtualflow_operator.settings import SchedulingSettings
from virtualflow_operator.simulator.command import main
from virtualflow_operator.simulator.device_simulation import Aware, Unaware, simulate_devices
from virtualflow_operator.simulator.simulation import PolicyError, ResizeCost
from virtualflow_operator.simulator.trace import Event, GoneEvent, JobEvent, JobTrace, NodeEvent, check, read, write

SCHEDULING = SchedulingSettings()
FREE = ResizeCost(0.0)
PRICED = ResizeCost(6.0, 1.0)
TRACE = """\
event,time,name,steps,throughput,max,units,kind,price,spot,mobility
node,0,new,,,,2,V100,2.5,,
node,0,old,,,,4,K80,,true,
job,1,first,100,V100=1:10 2:18; K80=1:1 4:3.5,4,,,,,stays
job,2,second,50,K80=1:1,,,,,,
"""


def given(folder: Path, text: str, name: str = "kinds.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def trace(*events: Event) -> JobTrace:
    return check((("here", event) for event in events), "here")


def job(name: str, steps: int, v100: float, k80: float, most: int = 4, **more: object) -> JobEvent:
    """A job that scales linearly on both kinds."""
    kinds = {"V100": {n: n * v100 for n in (1, most)}, "K80": {n: n * k80 for n in (1, most)}}
    return JobEvent(0.0, name, steps, kinds=kinds, max=most, **more)  # type: ignore[arg-type]


def node(kind: str, units: int, time: float = 0.0, price: float = 1.0) -> NodeEvent:
    return NodeEvent(time, kind.lower(), units, kind=kind, price=price)


def ends(played: JobTrace, cost: ResizeCost = FREE, policy: str = "ShortestFirst") -> dict[str, float | None]:
    found = simulate_devices(played, Aware(POLICIES[policy]), cost, SCHEDULING).result
    return {outcome.job.name: outcome.finished for outcome in found.outcomes}


def test_a_trace_with_kinds_is_read_and_written(tmp_path: Path) -> None:
    found = read(given(tmp_path, TRACE))
    first, second = found.jobs
    assert first.kinds == {"V100": {1: 10.0, 2: 18.0}, "K80": {1: 1.0, 4: 3.5}}
    assert (first.mobility, second.mobility, second.maximum) == ("stays", "mixes", 1)
    assert first.speed(3, "K80") == pytest.approx(1 + 2 / 3 * 2.5)
    assert found.events[0] == NodeEvent(0.0, "new", 2, kind="V100", price=2.5)
    write(found, tmp_path / "again.csv")
    assert read(tmp_path / "again.csv") == found
    text = msgspec.json.encode(found).decode()
    assert read(given(tmp_path, text, "kinds.json")) == found


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (TRACE.replace("K80,,true", ",,true"), "some devices have kinds and others have none"),
        (TRACE.replace("K80=1:1,", "1:1,"), "some devices have kinds and others have none"),
        (TRACE.replace("; K80=", "; V100="), "name each kind of device once"),
        (TRACE.replace("2.5", "0"), "price=0, rating=1: give numbers above 0"),
        (TRACE.replace("stays", "flies"), "mobility=flies: give mixes, moves or stays"),
        (TRACE.replace("V100=1:10 2:18", "V100=2:18 1:10"), "ascending numbers of workers"),
    ],
)
def test_a_trace_with_kinds_that_makes_no_sense_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        main([str(given(tmp_path, text))])


def test_a_mix_is_as_fast_as_its_parts_together() -> None:
    assert ends(trace(node("V100", 2), node("K80", 2), job("a", 220, 10.0, 1.0))) == {"a": 10.0}
    assert ends(trace(node("V100", 2), node("K80", 2), job("a", 220, 10.0, 1.0, mobility="moves"))) == {"a": 11.0}


def test_a_move_costs_a_start_in_which_nothing_is_done() -> None:
    """On K80s until 100 (94 steps, 6 s for the start), then 6 s again, then 206 steps at 10."""
    played = trace(node("K80", 1), node("V100", 1, 100.0), job("a", 300, 10.0, 1.0, 1, mobility="moves"))
    assert ends(played, PRICED)["a"] == pytest.approx(100 + 6 + 206 / 10)
    stays = trace(node("K80", 1), node("V100", 1, 100.0), job("a", 300, 10.0, 1.0, 1, mobility="stays"))
    assert ends(stays, PRICED)["a"] == pytest.approx(6 + 300)


def test_a_job_that_keeps_workers_of_one_kind_goes_on_when_the_other_is_gone() -> None:
    played = trace(node("V100", 1), node("K80", 1), job("a", 220, 10.0, 1.0, 2), GoneEvent(10.0, "k80"))
    assert ends(played)["a"] == pytest.approx(10 + 110 / 10)
    assert ends(played, PRICED)["a"] == pytest.approx(11 + (220 - 4 * 11) / 10)


def test_money_is_counted_by_kind() -> None:
    played = trace(node("V100", 1, price=3.0), node("K80", 1), job("a", 110, 10.0, 1.0, 2))
    found = simulate_devices(played, Aware(POLICIES["ShortestFirst"]), FREE, SCHEDULING)
    assert found.spent == pytest.approx(10 * 3.0 + 10 * 1.0)
    assert found.unit_seconds == {"V100": pytest.approx(10.0), "K80": pytest.approx(10.0)}


def test_a_policy_that_learns_uses_a_kind_on_which_a_job_has_not_run() -> None:
    """100 steps on a K80, then 11 a second together with a V100 of which nobody knows how fast it is."""
    played = trace(node("K80", 1), node("V100", 1, 100.0), job("a", 320, 10.0, 1.0, 2))
    found = simulate_devices(played, Aware(POLICIES["ShortestFirst"]), FREE, SCHEDULING, knowledge="seen")
    assert [outcome.finished for outcome in found.result.outcomes] == [pytest.approx(100 + 220 / 11)]


class Wrong:
    """Gives out what it must not."""

    def __init__(self, workers: Mapping[str, int]) -> None:
        self._workers = workers

    def decide(
        self, now: float, demands: Sequence[KindDemand], kinds: Mapping[str, DeviceKind], settings: SchedulingSettings
    ) -> dict[str, KindAllocation]:
        del now, kinds, settings
        return {demand.job.name: KindAllocation(self._workers, "K80", "so") for demand in demands}

    def again(self, now: float, demands: Sequence[KindDemand], settings: SchedulingSettings) -> float | None:
        del now, demands, settings
        return None


@pytest.mark.parametrize(
    ("workers", "sentence"),
    [
        ({"K80": 5}, "given 5 workers, not 1 to 4"),
        ({"K80": 3}, "3 units of K80 were given out"),
        ({"K80": 1, "V100": 1}, "workers of 2 kinds"),
    ],
)
def test_a_decision_that_cannot_be_is_not_believed(workers: dict[str, int], sentence: str) -> None:
    played = trace(node("V100", 2), node("K80", 2), job("a", 100, 1.0, 1.0, mobility="moves"))
    with pytest.raises(PolicyError, match=sentence):
        simulate_devices(played, Wrong(workers), FREE, SCHEDULING)


@pytest.mark.parametrize("mobility", ["mixes", "stays"])
@pytest.mark.parametrize("policy", ["ShortestFirst", "FIFO"])
def test_every_job_ends_whoever_decides(policy: str, mobility: str) -> None:
    played = make(gavel(), GAVEL_DEVICES, seed=3, jobs=12, load=1.5, mobility=mobility)  # type: ignore[arg-type]
    for decider in (Aware(POLICIES[policy], elastic=policy != "FIFO"), Unaware(POLICIES[policy], seed=3)):
        assert not simulate_devices(played, decider, PRICED, SCHEDULING).result.unfinished


def test_the_command_plays_a_trace_with_kinds(tmp_path: Path) -> None:
    path = str(given(tmp_path, TRACE))
    assert main([path, "--json", str(tmp_path / "aware.json")]) == 0
    assert main([path, "--one-pool", "--json", str(tmp_path / "pool.json")]) == 0
    aware, pool = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("aware", "pool"))
    assert set(aware) == set(pool) == set(POLICIES)
    assert aware["ShortestFirst"]["mean_completion"] <= pool["ShortestFirst"]["mean_completion"]
    with pytest.raises(ConfigurationError, match="kinds of device; leave out --capacity and --restart"):
        main([path, "--restart", "--capacity", "4"])
    plain = given(tmp_path, "event,time,name,units,steps,throughput\nnode,0,n,1,,\njob,0,a,,5,1:1\n", "plain.csv")
    with pytest.raises(ConfigurationError, match="has no kinds of device; leave out --one-pool"):
        main([str(plain), "--one-pool"])


def test_the_published_throughputs_are_what_they_were_published_as() -> None:
    assert len(gavel()) == 26
    assert gavel()["ResNet-50 (batch size 128)"]["K80"] == {1: 0.3472}
    assert set(GAVEL_DEVICES) == {kind for speeds in gavel().values() for kind in speeds}
    assert all(set(speeds) == set(AUTHORS_DEVICES) for speeds in authors().values())
    transformer = authors()["Transformer on WMT"]
    assert transformer["2080 Ti"][1] > transformer["V100"][1] > transformer["P100"][1] > transformer["K80"][1]


def test_knowing_the_devices_shortens_what_was_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seeds of the benchmark's 20, with fewer jobs."""
    monkeypatch.setattr(benchmark, "JOBS", 15)
    (row,) = benchmark.compare("Gavel's table", 1.2, "stays", seeds=2)
    assert min(row.by_seed) > -0.02
    assert row.shorter[1] > 0.1
