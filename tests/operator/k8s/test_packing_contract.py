"""What the operator makes of a queue whose jobs share devices is what a real API server takes.

There are no nodes that run anything: the test plays the scheduler and the kubelets, and the coordinators stay silent.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from unittest import mock

import contract
import pytest
from contract import DEFINITIONS, NAMESPACES, Cluster, eventually, on_the_real
from queue_stage import SLOT, queued
from running import OperatorProcess
from stage import FLAGS, QUEUE_DEFINITION

from virtualflow.protocol.settings import ENV_TURNS
from virtualflow_operator.constants import ANNOTATION_HOST, LABEL_JOB, LABEL_LODGER, LABEL_ROLE, TURNS_VOLUME, WORKER
from virtualflow_operator.k8s.client import JOBS, NODES, PODS, QUEUES, AlreadyExists, ApiError, NotFound, Object

PAIR = {"replicas": 2, "minReplicas": 2, "maxReplicas": 2}
MEASURED = {"scaling": [{"workers": 2, "stepsPerSecond": "1", "computingMilliseconds": "500"}]}
BASELINE = {"pod-security.kubernetes.io/enforce": "baseline"}


async def install(cluster: Cluster) -> None:
    """Let the API server know queues, and two nodes with a device each."""
    with suppress(AlreadyExists):
        await cluster.api.create(DEFINITIONS, None, QUEUE_DEFINITION)

    async def served() -> bool:
        try:
            await cluster.api.list(QUEUES)
        except NotFound:
            return False
        return True

    await eventually(served)
    ready = {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {SLOT: "1"}, "capacity": {SLOT: "1"}}
    for name in names(cluster):
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"pool": cluster.namespace}}}
        await cluster.api.create(NODES, None, node)
        await cluster.api.patch(NODES, None, name, {"status": ready}, "status")
        await cluster.api.patch(NODES, None, name, {"spec": {"taints": None}})
    spec = {
        "resource": SLOT,
        "policy": "FIFO",
        "packing": {},
        "nodeSelector": {"matchLabels": {"pool": cluster.namespace}},
    }
    body = {"apiVersion": QUEUES.api_version, "kind": "VirtualFlowQueue", "spec": spec}
    made = await cluster.api.create(QUEUES, None, body | {"metadata": {"name": "shared"}})
    assert made["spec"]["packing"] == {"maxJobsPerDevice": 2}


def names(cluster: Cluster) -> list[str]:
    return [f"{cluster.namespace}-{n}" for n in range(2)]


async def workers(cluster: Cluster, name: str) -> list[Object]:
    found = await cluster.api.list(PODS, cluster.namespace, f"{LABEL_JOB}={name},{LABEL_ROLE}={WORKER}")
    return [pod for pod in found if not pod["metadata"].get("deletionTimestamp")]


async def until_made(cluster: Cluster, name: str, *, lodging: bool) -> list[Object]:
    """The two workers of a job, once there are such ones."""
    found: list[Object] = []

    async def there() -> bool:
        found[:] = [p for p in await workers(cluster, name) if (LABEL_LODGER in p["metadata"]["labels"]) is lodging]
        return len(found) == 2

    await eventually(there)
    return found


async def bind(cluster: Cluster, pods: list[Object]) -> None:
    for pod, node in zip(pods, names(cluster), strict=True):
        name = pod["metadata"]["name"]
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        code, answer = await cluster.send("POST", PODS.path(cluster.namespace, name) + "/binding", binding)
        assert code == 201, answer


@pytest.mark.slow
@on_the_real
async def test_a_job_lodges_with_another_and_gets_its_devices_when_that_ends(cluster: Cluster, tmp_path: Path) -> None:
    if not cluster.own:
        pytest.skip("needs an API server of its own: it makes nodes")
    await install(cluster)
    namespace = cluster.namespace
    (tmp_path / "key").write_text("k" * 64)
    flags = [f"--namespaces={namespace}", f"--lease-namespace={namespace}", f"--key-file={tmp_path / 'key'}"]
    for number in (1, 2):
        made = queued(f"run-{number}", **PAIR)
        del made["metadata"]["namespace"]
        await cluster.api.create(JOBS, namespace, made)
    await cluster.api.patch(JOBS, namespace, "run-1", {"status": MEASURED}, "status")
    with mock.patch.dict(os.environ):
        operator = OperatorProcess(Path(contract._own_server()), tmp_path / "log", [*FLAGS, *flags], {})
    try:
        hosts = await until_made(cluster, "run-1", lodging=False)
        assert await workers(cluster, "run-2") == [], "nobody lodges with a host that is nowhere yet"
        await bind(cluster, hosts)
        lodgers = await until_made(cluster, "run-2", lodging=True)
        for pod in (*hosts, *lodgers):
            (volume,) = (volume for volume in pod["spec"]["volumes"] if volume["name"] == TURNS_VOLUME)
            assert volume["hostPath"] == {"path": "/run/virtualflow/turns", "type": "DirectoryOrCreate"}
            (trainer,) = pod["spec"]["containers"]
            assert ENV_TURNS in [variable["name"] for variable in trainer["env"]]
        for pod in lodgers:
            assert pod["metadata"]["annotations"][ANNOTATION_HOST] == f"{namespace}/run-1"
            assert SLOT not in str(pod["spec"]["containers"][0]["resources"])
            (beside,) = pod["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            assert beside["labelSelector"]["matchLabels"] == {LABEL_JOB: "run-1", LABEL_ROLE: WORKER}
            assert (beside["namespaces"], beside["topologyKey"]) == ([namespace], "kubernetes.io/hostname")
        status = (await cluster.api.get(JOBS, namespace, "run-2"))["status"]
        assert status["allocation"]["host"] == f"{namespace}/run-1"
        await cluster.api.delete(JOBS, namespace, "run-1")
        for pod in hosts:  # nobody collects garbage here
            with suppress(NotFound):
                await cluster.api.delete(PODS, namespace, pod["metadata"]["name"], grace_seconds=0)
        for pod in await until_made(cluster, "run-2", lodging=False):
            assert pod["spec"]["containers"][0]["resources"]["limits"] == {SLOT: "1"}
    except (AssertionError, TimeoutError) as error:
        error.add_note(operator.output()[-4_000:])
        raise
    finally:
        operator.kill()
        await operator.ended()
        for name in names(cluster):
            await cluster.api.delete(NODES, None, name)
        await cluster.api.delete(QUEUES, None, "shared")
    assert "Traceback (most recent" not in operator.output()


@pytest.mark.slow
@on_the_real
async def test_a_namespace_with_pod_security_refuses_the_turn_servers_directory(cluster: Cluster) -> None:
    await cluster.api.patch(NAMESPACES, None, cluster.namespace, {"metadata": {"labels": BASELINE}})
    volume = {"name": TURNS_VOLUME, "hostPath": {"path": "/run/virtualflow/turns", "type": "DirectoryOrCreate"}}
    body = contract.pod("digits-0")

    async def enforced() -> bool:
        asked = body | {"spec": body["spec"] | {"volumes": [volume]}}
        try:
            await cluster.api.create(PODS, cluster.namespace, asked, dry_run=True)
        except ApiError as error:
            return f'hostPath volumes (volume "{TURNS_VOLUME}")' in str(error)
        return False

    await eventually(enforced)
