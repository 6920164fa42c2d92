"""What is carried out of a decision about a queue, beside its status: metrics, and the end of queues nobody told of."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from api_clients import client_of
from fake_api import FakeApi
from prometheus_client.parser import text_string_to_metric_families
from scenes import NOW, container, group, training
from stage import DEFINITION, KEY, QUEUE_DEFINITION, job

from virtualflow_operator.api.objects import CoordinatorLink, format_time, read_job
from virtualflow_operator.constants import LABEL_JOB, LABEL_ROLE
from virtualflow_operator.controllers.coordinator_links import CoordinatorLinks
from virtualflow_operator.controllers.manager import Manager
from virtualflow_operator.controllers.queue_controller import QueueController
from virtualflow_operator.k8s.cache import Key, Store, queue_key
from virtualflow_operator.k8s.client import JOBS, QUEUES, KubeApi, Object
from virtualflow_operator.k8s.following import relist
from virtualflow_operator.k8s.leader_election import LeaseThread
from virtualflow_operator.k8s.nesting import DeepObjects
from virtualflow_operator.observability.metrics import Metrics
from virtualflow_operator.settings import LeaseSettings, OperatorSettings, SharingSettings

GPU = "nvidia.com/gpu"
ONE_GPU = {"resources": {"limits": {GPU: 1}}}
QUEUE: Object = {
    "apiVersion": QUEUES.api_version,
    "kind": "VirtualFlowQueue",
    "metadata": {"name": "shared"},
    "spec": {"capacity": 3},
}


def shown(metrics: Metrics) -> dict[str, float]:
    """The series of queues, by their names and last labels."""
    return {
        " ".join((sample.name.removeprefix("virtualflow_shared_"), *sample.labels.values())): sample.value
        for family in text_string_to_metric_families(metrics.exposition().decode())
        for sample in family.samples
        if sample.name.startswith("virtualflow_shared_") and "decision" not in sample.name
    }


def manager_of(api: KubeApi, metrics: Metrics, rest: float = 0.0) -> Manager:
    election = LeaseThread(KubeApi.connect, LeaseSettings())  # of which nothing is asked
    own, too_deep = (
        OperatorSettings(image="operator:test", sharing=SharingSettings(rest=rest)),
        DeepObjects(lambda kind: metrics.objects_cut.labels(kind).inc()),
    )
    return Manager(own, api, election, [KEY.encode()], metrics, too_deep)


@pytest.mark.parametrize(("rest", "decisions"), [(0.0, 3), (1e6, 1)], ids=["quick", "long"])
def test_after_a_decision_that_took_long_a_queue_is_left_alone(rest: float, decisions: int) -> None:
    async def story() -> None:
        async with asyncio.timeout(30), FakeApi() as server, client_of(server.url) as api:
            metrics = Metrics()
            manager = manager_of(api, metrics, rest)
            for definition in (DEFINITION, QUEUE_DEFINITION):
                server.add(definition)
            server.add(QUEUE)
            server.add(job("digits", queue="shared"))
            await relist(api, manager.store, (), lambda _: None, lambda _: None)
            again = [await manager.admissions.decide(queue_key("shared")) for _ in range(3)]
            assert f"virtualflow_shared_decision_seconds_count {decisions:.1f}" in metrics.exposition().decode()
            assert all(seconds is not None and seconds > 0 for seconds in again), "it is decided about in the end"

    asyncio.run(story())


def test_a_queue_is_shown_as_it_is_and_no_longer_once_it_is_gone() -> None:
    async def story() -> None:
        async with asyncio.timeout(30), FakeApi() as server, client_of(server.url) as api:
            metrics, visited = Metrics(), list[Key]()
            manager = manager_of(api, metrics)

            async def look() -> None:
                visited.clear()
                await relist(api, manager.store, (), visited.append, visited.append)
                for key in {key for key in visited if not key[0]}:
                    await manager.admissions.decide(key)

            for definition in (DEFINITION, QUEUE_DEFINITION):
                server.add(definition)
            server.add(QUEUE)
            server.add(job("large", queue="shared", replicas=4, minReplicas=4))
            await look()
            assert shown(metrics) == {
                "ready shared": 1, "capacity shared": 3, "allocated shared": 0, "jobs shared running": 0,
                "jobs shared waiting": 1,
            }  # fmt: skip
            server.add(job("small", queue="shared", maxReplicas=2))
            await look()
            assert (shown(metrics)["allocated shared"], shown(metrics)["jobs shared running"]) == (2, 1)
            server.modify(QUEUES, None, "shared", {"spec": {"policy": "Fairest"}})
            await look()
            assert shown(metrics)["ready shared"] == 0
            for name in ("large", "small"):
                server.modify(JOBS, "default", name, {"spec": {"queue": None}})
            server.remove(QUEUES, None, "shared")
            await look()
            assert visited.count(queue_key("shared")) == 1, "no watch has told of its end"
            assert shown(metrics) == {}

    asyncio.run(story())


def test_a_queue_remembers_what_its_jobs_needed_when_they_are_gone() -> None:
    async def story() -> None:
        async with asyncio.timeout(30), FakeApi() as server, client_of(server.url) as api:
            manager = manager_of(api, Metrics())

            async def past() -> Object:
                await relist(api, manager.store, (), lambda _: None, lambda _: None)
                await manager.admissions.decide(queue_key("shared"))
                return (await api.get(QUEUES, None, "shared"))["status"]

            for definition in (DEFINITION, QUEUE_DEFINITION):
                server.add(definition)
            server.add(QUEUE)
            server.add(job("bert-1", queue="shared", minReplicas=2))
            assert "past" not in await past()
            measured = {"step": 300, "scaling": [{"workers": 2, "stepsPerSecond": "3"}]}
            done = {"phase": "Complete", "completionTime": format_time(NOW)}
            server.modify(JOBS, "default", "bert-1", {"status": measured | done}, "status")
            known = {"namespace": "default", "pattern": "bert", "jobs": 1, "unitSeconds": "200", "offBy": "1"}
            for _ in range(2):
                status = await past()
                assert (status["past"], status["pastUntil"]) == ([known], format_time(NOW))
            server.remove(JOBS, "default", "bert-1")
            assert (await past())["past"] == [known]

    asyncio.run(story())


class Api(KubeApi):
    """Takes every status."""

    def __init__(self) -> None:
        pass

    async def patch(self, *_: Any) -> Object:
        return QUEUE | {"metadata": {"name": "shared", "resourceVersion": "2"}}


class Silent(CoordinatorLinks):
    """Connections to coordinators none of which has answered yet."""

    def __init__(self, *links: CoordinatorLink) -> None:
        self.known = links

    def view(self, key: Key) -> CoordinatorLink | None:
        return next(iter(self.known), None)


def unheard(*links: CoordinatorLink) -> tuple[QueueController, Store]:
    """What a new leader knows right after an outage: a job with two workers, on nodes that all look lost."""
    store = Store()
    store.foreign_pods_known = True
    stage = training(2, workerGroups=[group(pod={"containers": [container(**ONE_GPU)]})])
    store.queues.put(QUEUE | {"spec": {"resource": GPU}})
    times = {"since": format_time(NOW), "resizedTime": format_time(NOW), "waitedSeconds": 0}
    allocation = {"queue": "shared", "workers": 2, "reason": "x"} | times
    stage.raw["status"] |= {"allocation": allocation}
    stage.raw["spec"] |= {"queue": "shared"}
    store.jobs.put(stage.raw)
    for pod, name in zip(stage.pods, ("c", "0", "1"), strict=True):
        labels = {LABEL_JOB: "digits", LABEL_ROLE: pod.role}
        owners = [{"apiVersion": QUEUES.api_version, "kind": "VirtualFlowJob", "uid": "uid-1", "controller": True}]
        metadata = {"name": pod.name, "namespace": "ml", "uid": pod.uid, "labels": labels, "ownerReferences": owners}
        spec = {"nodeName": f"node-{name}", "containers": [container(**(ONE_GPU if name != "c" else {}))]}
        store.put_pod({"metadata": metadata, "spec": spec, "status": {"phase": "Running", "podIP": pod.ip}})
        conditions = [{"type": "Ready", "status": "Unknown"}]
        status = {"conditions": conditions, "allocatable": {GPU: "1"}}
        store.put_node({"metadata": {"name": f"node-{name}", "uid": name}, "spec": {}, "status": status})
    settings = OperatorSettings(image="operator:test")
    controller = QueueController(
        api=Api(),
        store=store,
        links=Silent(*links),
        metrics=Metrics(),
        wake=lambda _: None,
        wake_queue=lambda _: None,
        settings=settings,
    )
    return controller, store


@pytest.mark.parametrize(
    ("silent", "workers"),
    [(None, 2), (1.0, 2), (60.0, 0)],
    ids=["not connected yet", "not answered yet", "silent for too long"],
)
def test_workers_on_nodes_that_look_lost_count_until_their_coordinator_was_asked(
    silent: float | None, workers: int
) -> None:
    links = [] if silent is None else [CoordinatorLink("coordinator-0", False, time.time() - silent, None)]
    queue_controller, store = unheard(*links)
    again = asyncio.run(queue_controller.decide(queue_key("shared")))
    body = store.job(("ml", "digits"))
    assert body is not None
    grant = queue_controller.grant(("ml", "digits"), read_job(body))
    assert grant is not None
    assert grant.workers == workers
    assert again is not None
    assert (again <= 10) is bool(workers), "as soon as it must have answered, it is looked at again"
