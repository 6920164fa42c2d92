"""The whole operator process while the API server misbehaves: jobs become what they should, nothing twice."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
from fake_api import Fault
from stage import NAMESPACE, SECONDS, Stage, play, staged

from virtualflow_operator.constants import COORDINATOR, WORKER
from virtualflow_operator.k8s.client import JOBS, NODES, PODS, SERVICES
from virtualflow_operator.settings import ApiSettings

NAMES = ("digits", "letters")
STATUS = "virtualflowjobs/status"

STORMS = {
    "every answer is 500": [Fault(code=500, times=None, seconds=1.0)],
    "every answer is 503 with a wish": [Fault(code=503, retry_after=1, times=None, seconds=1.0)],
    "too many requests": [Fault(code=429, retry_after=1, times=None, seconds=1.0)],
    "slow calls": [Fault(delay=2.0, times=None, seconds=0.5)],
    "calls that are never answered": [Fault(delay=30.0, verb="create", times=3), Fault(delay=30.0, resource=STATUS)],
    "conflicts": [Fault(code=409, verb="patch", resource=STATUS, times=12)],
    "statuses that cannot be written": [Fault(code=500, verb="patch", resource=STATUS, times=None, seconds=1.0)],
    "cut connections": [Fault(cut=True, times=None, seconds=1.0)],
    "carried out without an answer": [Fault(cut=True, after=True, method="POST", times=12)],
    "carried out and said to have failed": [
        Fault(code=500, after=True, method="POST", times=12),
        Fault(code=504, after=True, method="PATCH", times=6),
        Fault(code=504, after=True, method="DELETE", times=4),
    ],
    "watches that are too old": [Fault(code=410, verb="watch", times=None, seconds=1.0)],
    "watches that are too new": [Fault(code=504, verb="watch", times=None, seconds=1.0)],
    "watches that end at once": [Fault(end=True, verb="watch", times=None, seconds=1.0)],
    "forbidden for a while": [Fault(code=403, method="POST", times=None, seconds=1.0)],
}


def inject(stage: Stage, storm: list[Fault]) -> None:
    """Let a storm begin, again if need be."""
    for fault in storm:
        fault.hits = 0
        stage.server.inject(fault)
    if any(fault.verb == "watch" for fault in storm):
        stage.server.drop_watches()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, BaseException | None]:
    """What became of each storm; every one has a cluster and an operator of its own, and all take place at once."""

    async def one(storm: list[Fault]) -> None:
        async with staged(tmp_path_factory.mktemp("storm")) as stage, asyncio.timeout(200.0):
            await weather(stage, storm)

    async def every() -> list[BaseException | None]:
        return await asyncio.gather(*(one(storm) for storm in STORMS.values()), return_exceptions=True)

    return dict(zip(STORMS, asyncio.run(every()), strict=True))


async def weather(stage: Stage, storm: list[Fault]) -> None:
    """Make jobs while a storm begins, and change them and kill workers while it comes back."""
    patience = 1.0 if any(fault.delay > 10 for fault in storm) else 4.0
    # All storms take place at once, and may share two processors.
    stage.start(api=ApiSettings(request_timeout=patience), template_retry=1.0, coordinator_patience=SECONDS)
    await stage.watching()
    inject(stage, storm)
    since = len(stage.server.requests)
    for name in NAMES:
        stage.apply(name)
    for name in NAMES:
        await stage.until(lambda name=name: stage.trains(name))
    assert stage.made_twice() == set()
    assert stage.made.total() == 6
    stage.server.heal()
    inject(stage, storm)
    for name in NAMES:
        stage.change(name, replicas=3)
        stage.server.remove(PODS, NAMESPACE, f"{name}-w-0")
    for name in NAMES:
        await stage.until(lambda name=name: stage.trains(name, 3))
        assert stage.most[WORKER, name] == 3
        assert stage.most[COORDINATOR, name] == 1
    asked = [r for r in stage.server.requests[since:] if r.resource != "leases"]
    assert len(asked) < 300, "no hot loop"
    stage.server.heal()
    for name in NAMES:
        stage.delete(name)
    await stage.until(lambda: all(stage.nothing_left(name) for name in NAMES))


@pytest.mark.slow
@pytest.mark.parametrize("storm", STORMS)
def test_through_a_storm_jobs_become_what_they_should_and_nothing_twice(
    outcomes: dict[str, BaseException | None], storm: str
) -> None:
    outcome = outcomes[storm]
    if outcome is not None:
        raise outcome


@pytest.mark.slow
def test_a_storm_that_does_not_end_is_met_with_patience(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start(queue__backoff_first=0.2, queue__backoff_most=60.0)
        await stage.watching()
        fault = stage.server.inject(Fault(code=500, verb="create", resource="services", times=None))
        stage.apply("digits")
        await stage.until(lambda: fault.hits >= 4)
        tries = [r.time for r in stage.server.requests if r.resource == "services" and r.verb == "create"]
        waits = [later - earlier for earlier, later in itertools.pairwise(tries)]
        # A busy machine makes any of them longer, and none shorter.
        assert all(wait > 0.19 * 2**n for n, wait in enumerate(waits)), waits
        stage.server.heal()
        await stage.until(lambda: stage.trains("digits"))

    play(tmp_path, story)


def test_news_are_looked_at_at_once_however_long_a_wait_has_become(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start(queue__backoff_first=600.0, queue__backoff_most=600.0)
        await stage.watching()
        fault = stage.server.inject(Fault(code=500, verb="create", resource="services", times=None))
        stage.apply("digits")
        await stage.until(lambda: fault.hits)
        stage.server.heal()
        await stage.quiet()
        assert not stage.pods("digits")
        stage.change("digits", backoffLimit=9)
        await stage.until(lambda: stage.trains("digits"))

    play(tmp_path, story)


@pytest.mark.slow
def test_watches_that_are_dropped_miss_nothing(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start()
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        await stage.watching()
        for replicas in (3, 1, 2):
            assert stage.server.drop_watches() == 5
            stage.change("digits", replicas=replicas)
            await stage.until(lambda replicas=replicas: stage.trains("digits", replicas))
            await stage.watching()

    play(tmp_path, story)


@pytest.mark.slow
def test_deletions_that_no_watch_told_of_are_healed_within_seconds(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start()
        # Their coordinators never answer: nobody but the API server can tell of what is missing.
        stage.kubelet.mute |= {"digits", "letters"}
        for name in NAMES:
            stage.apply(name)
        for name in NAMES:
            await stage.until(lambda name=name: len(stage.workers(name)) == 2 and len(stage.pods(name)) == 3)
        await stage.until(lambda: all(stage.server.watches(kind) for kind in (JOBS, PODS, SERVICES, NODES)))
        # A second after the start the operator takes new watches for its first ones.
        await asyncio.sleep(2.0)
        gate = asyncio.Event()
        stage.server.inject(Fault(verb="watch", times=None, gate=gate))
        stage.server.inject(Fault(verb="list", times=None, gate=gate))
        stage.server.drop_watches()
        before = {pod["metadata"]["uid"] for pod in stage.pods("digits")}
        for pod in stage.pods("digits"):
            stage.server.remove(PODS, NAMESPACE, pod["metadata"]["name"], 0)
        stage.server.remove(SERVICES, NAMESPACE, "digits-coordinator")
        stage.delete("letters")
        stage.server.expire()
        stage.server.heal()
        await stage.until(lambda: len(stage.workers("digits")) == 2 and len(stage.pods("digits")) == 3)
        await stage.until(lambda: stage.server.find(SERVICES, NAMESPACE, "digits-coordinator"))
        assert not before & {pod["metadata"]["uid"] for pod in stage.pods("digits")}
        stage.apply("letters")
        await stage.until(lambda: len(stage.workers("letters")) == 2)

    play(tmp_path, story)


@pytest.mark.parametrize("taken", [False, True], ids=["free", "taken"])
def test_a_deleted_service_comes_back_at_the_address_that_workers_call(tmp_path: Path, taken: bool) -> None:
    async def story(stage: Stage) -> None:
        stage.start()
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        (former,) = stage.server.all(SERVICES, NAMESPACE)
        if taken:
            said = "provided IP is already allocated"
            stage.server.inject(Fault(code=422, message=said, verb="create", resource="services"))
        stage.server.remove(SERVICES, NAMESPACE, "digits-coordinator")
        await stage.until(lambda: stage.server.all(SERVICES, NAMESPACE))
        (made,) = stage.server.all(SERVICES, NAMESPACE)
        assert (made["spec"]["clusterIP"] == former["spec"]["clusterIP"]) is not taken

    play(tmp_path, story)


@pytest.mark.slow
def test_what_goes_with_its_job_is_not_made_anew_if_pods_are_heard_of_first(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start()
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        await stage.quiet()  # also new watches a second after the start
        gate = asyncio.Event()
        stage.server.inject(Fault(verb="watch", resource="virtualflowjobs", times=None, gate=gate))
        stage.server.inject(Fault(verb="list", resource="virtualflowjobs", times=None, gate=gate))
        stage.server.drop_watches(JOBS)
        stage.delete("digits")
        await stage.until(lambda: stage.nothing_left("digits"))
        await stage.quiet()
        assert stage.made.total() == 3, stage.made
        assert stage.server.count("create", "services") == 1
        stage.server.heal()
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))

    play(tmp_path, story)


@pytest.mark.slow
def test_a_job_that_is_deleted_while_its_operator_begins_is_not_made_anew(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        former = stage.start()
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        former.kill()
        gate = asyncio.Event()
        listing = Fault(verb="list", resource="pods", times=None, gate=gate)
        stage.server.inject(listing)
        await stage.replace(former)
        await stage.until(lambda: listing.hits)
        stage.delete("digits")
        for pod in stage.pods("digits"):
            stage.server.remove(PODS, NAMESPACE, pod["metadata"]["name"], 0)
        await stage.until(lambda: stage.nothing_left("digits"))
        gate.set()
        await stage.watching()
        await stage.quiet()
        assert stage.made.total() == 3, stage.made
        assert stage.server.count("create", "services") == 1

    play(tmp_path, story)


@pytest.mark.slow
def test_an_outage_of_the_api_server_costs_the_training_nothing(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        process = stage.start()
        for name in NAMES:
            stage.apply(name)
        for name in NAMES:
            await stage.until(lambda name=name: stage.trains(name))
        training = stage.kubelet.training(NAMESPACE, "digits")
        await stage.server.stop()
        step = training.step
        stage.server.modify(JOBS, NAMESPACE, "digits", {"spec": {"replicas": 3}})
        stage.server.remove(PODS, NAMESPACE, "letters-w-1", 0)
        await asyncio.sleep(3.0)  # connections are refused for so long
        await stage.until(lambda: training.step > step + 20)
        since = len(stage.server.requests)
        await stage.server.start()
        await stage.until(lambda: stage.trains("digits", 3) and stage.trains("letters"))
        assert process.exit_code is None
        assert len(stage.server.requests) - since < 120
        assert stage.most[WORKER, "digits"] == 3
        assert stage.most[WORKER, "letters"] == 2
        assert stage.status("digits").get("repeatedSteps", 0) == 0

    play(tmp_path, story)


@pytest.mark.slow
def test_an_operator_that_finds_no_api_server_waits_for_it(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.server.stop()
        process = stage.start("--lease-seconds=5")
        await asyncio.sleep(2.0)
        assert process.exit_code is None
        await stage.server.start()
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))

    play(tmp_path, story)


def test_a_pod_of_somebody_else_is_never_touched(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start()
        await stage.watching()
        container = {"name": "c", "image": "i", "env": []}
        others = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "digits-w-0"},
            "spec": {"containers": [container]},
        }
        stage.kubelet.unschedulable = lambda pod: pod["metadata"]["name"] == "digits-w-0"
        stage.server.add(others)
        stage.apply("digits")
        await stage.until(lambda: "in the way" in stage.condition("digits", "Degraded").get("message", ""))
        untouched = stage.server.find(PODS, NAMESPACE, "digits-w-0")
        assert untouched is not None
        assert not untouched["metadata"].get("deletionTimestamp")

    play(tmp_path, story)
