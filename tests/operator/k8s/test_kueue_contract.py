"""What the operator writes is what Kueue's own definitions take, on a real API server; the test plays Kueue's part.

There are no nodes: pods are made and go, and never run.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from unittest import mock

import contract
import pytest
from contract import DEFINITIONS, Cluster, eventually, on_the_real
from kueue_cases import DEFINITIONS as OF_KUEUE
from kueue_cases import FLAVOR_OBJECT, admitted, asks_for, told
from running import OperatorProcess
from stage import FLAGS, job

from virtualflow_operator.constants import LABEL_KUEUE_QUEUE, LABEL_ROLE, WORKER
from virtualflow_operator.k8s.client import FLAVORS, JOBS, PODS, WORKLOADS, AlreadyExists, Invalid, NotFound, Object


async def install(cluster: Cluster) -> None:
    """Let the API server know Kueue's kinds."""
    for definition in OF_KUEUE:
        with suppress(AlreadyExists):
            await cluster.api.create(DEFINITIONS, None, definition)

    async def served() -> bool:
        try:
            await cluster.api.list(WORKLOADS, cluster.namespace)
            await cluster.api.list(FLAVORS)
        except NotFound:
            return False
        return True

    await eventually(served)
    with suppress(AlreadyExists):
        await cluster.api.create(FLAVORS, None, FLAVOR_OBJECT)


class Kueue:
    """Kueue's part, and what a person does, in one namespace."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.api, self.namespace = cluster, cluster.api, cluster.namespace

    async def workload(self) -> Object:
        """The only Workload, once it is there."""

        async def there() -> bool:
            return bool(await self.api.list(WORKLOADS, self.namespace))

        await eventually(there)
        (found,) = await self.api.list(WORKLOADS, self.namespace)
        return found

    async def answer(self, change: object) -> None:
        body = await self.workload()
        status = change(body | {"status": body.get("status") or {}})["status"]  # type: ignore[operator]
        await self.api.patch(WORKLOADS, self.namespace, body["metadata"]["name"], {"status": status}, "status")

    async def pods(self) -> list[Object]:
        return await self.api.list(PODS, self.namespace, LABEL_ROLE)

    async def until_workers(self, count: int) -> list[Object]:
        async def so_many() -> bool:
            return sum(pod["metadata"]["labels"][LABEL_ROLE] == WORKER for pod in await self.pods()) == count

        await eventually(so_many)
        return await self.pods()


@pytest.mark.slow
@on_the_real
async def test_a_job_is_admitted_shrinks_is_evicted_and_is_suspended(cluster: Cluster, tmp_path: Path) -> None:
    if not cluster.own:
        pytest.skip("needs an API server of its own: it installs Kueue's definitions")
    await install(cluster)
    kueue, namespace = Kueue(cluster), cluster.namespace
    (tmp_path / "key").write_text("k" * 64)
    flags = [f"--namespaces={namespace}", f"--lease-namespace={namespace}", f"--key-file={tmp_path / 'key'}", "--kueue"]
    made = job("digits", replicas=3, minReplicas=1)
    made["metadata"] = {"name": "digits", "labels": {LABEL_KUEUE_QUEUE: "team"}}
    await cluster.api.create(JOBS, namespace, made)
    with mock.patch.dict(os.environ):
        operator = OperatorProcess(Path(contract._own_server()), tmp_path / "log", [*FLAGS, *flags], {})
    try:
        workload = await kueue.workload()
        name = workload["metadata"]["name"]
        assert asks_for(workload) == {"coordinator": 1, "w": 3}
        assert await kueue.pods() == []
        await kueue.answer(lambda body: admitted(body, w=2))
        for pod in await kueue.until_workers(2):
            assert pod["spec"]["nodeSelector"] == {"kubernetes.io/os": "linux"}
            assert FLAVOR_OBJECT["spec"]["tolerations"][0] in pod["spec"]["tolerations"]
        with pytest.raises(Invalid, match="queueName is immutable"):
            await cluster.api.patch(WORKLOADS, namespace, name, {"spec": {"queueName": "other"}})
        await cluster.api.patch(JOBS, namespace, "digits", {"spec": {"replicas": 1}})
        await kueue.until_workers(1)

        async def handed_back() -> bool:
            return (await kueue.workload())["status"].get("reclaimablePods") == [{"name": "w", "count": 2}]

        await eventually(handed_back)
        await kueue.answer(lambda body: told(body, ("Evicted", "True", "Preempted")))

        async def given_back() -> bool:
            return "admission" not in (await kueue.workload())["status"]

        await eventually(given_back)
        assert await kueue.pods() == []

        async def asks_again() -> bool:
            body = await kueue.workload()
            return asks_for(body)["w"] == 1 and not body["status"].get("reclaimablePods")

        await eventually(asks_again)
        await cluster.api.patch(JOBS, namespace, "digits", {"spec": {"suspend": True}})

        async def gone() -> bool:
            return not await cluster.api.list(WORKLOADS, namespace)

        await eventually(gone)
    except (AssertionError, TimeoutError) as error:
        error.add_note(operator.output()[-4_000:])
        raise
    finally:
        operator.kill()
        await operator.ended()
    assert "Traceback (most recent" not in operator.output()
