"""What is carried out of a decision about a queue, beside its status: metrics, and the end of queues nobody told of."""

from __future__ import annotations

import asyncio

from fake_api import FakeApi
from prometheus_client.parser import text_string_to_metric_families
from stage import DEFINITION, KEY, QUEUE_DEFINITION, job

from virtualflow_operator.allocator import queue_key
from virtualflow_operator.kube import JOBS, QUEUES, KubeApi
from virtualflow_operator.metrics import Metrics
from virtualflow_operator.operator import Operator
from virtualflow_operator.settings import OperatorSettings
from virtualflow_operator.store import Key

QUEUE = {
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
        if sample.name.startswith("virtualflow_shared_")
    }


def test_a_queue_is_shown_as_it_is_and_no_longer_once_it_is_gone() -> None:
    async def story() -> None:
        async with asyncio.timeout(30), FakeApi() as server, KubeApi.at(server.url) as api:
            metrics, visited = Metrics(), list[Key]()
            operator = Operator(OperatorSettings(image="operator:test"), api, api, KEY.encode(), metrics)

            async def look() -> None:
                visited.clear()
                await operator.controller.resync(visited.append, visited.append)
                for key in {key for key in visited if not key[0]}:
                    await operator.controller.process(key)

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
