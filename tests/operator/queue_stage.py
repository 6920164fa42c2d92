"""Queues, and jobs in them, on the stage of the operator."""

from __future__ import annotations

from typing import Any

from kubelet import NODES as NODE_NAMES
from stage import NAMESPACE, Stage, job

from virtualflow_operator.k8s.client import NODES, QUEUES, Object
from virtualflow_operator.settings import SchedulingSettings

SLOT = "example.com/slot"
QUICK_POLICY = SchedulingSettings(hold=0.2)
"""Growth soon after a change, so that the tests need not wait for it."""


def queued(name: str, **spec: Any) -> Object:
    """A job of the queue ``shared``; each worker takes a slot."""
    container = {"name": "worker", "image": "trainer:test", "resources": {"limits": {SLOT: "1"}}}
    groups = [{"name": "w", "template": {"spec": {"containers": [container]}}}]
    return job(name, **({"queue": "shared", "workerGroups": groups, "maxReplicas": 8} | spec))


def add_queue(stage: Stage, slots: int = 2, name: str = "shared", **spec: Any) -> Object:
    """Give each node so many slots, and add a queue that shares them."""
    for node in NODE_NAMES:
        set_slots(stage, node, slots)
    whole = {"resource": SLOT} | spec
    spec = {key: value for key, value in whole.items() if value is not None}
    return stage.server.add(
        {"apiVersion": QUEUES.api_version, "kind": "VirtualFlowQueue", "metadata": {"name": name}, "spec": spec}
    )


def foreign_pod(name: str, slots: int) -> Object:
    """Somebody else's pod on a node, which takes so many slots."""
    container = {"name": "web", "image": "web:1", "resources": {"requests": {SLOT: str(slots)}}}
    metadata = {"name": name, "namespace": NAMESPACE}
    spec = {"containers": [container], "nodeName": "node-a"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def set_slots(stage: Stage, node: str, slots: int) -> None:
    stage.server.modify(NODES, None, node, {"status": {"allocatable": {SLOT: str(slots)}}}, "status")


def shares(stage: Stage, *names: str) -> list[int]:
    """Workers in pods, job by job."""
    return [len(stage.workers(name)) for name in names]


def given(stage: Stage, name: str) -> int | None:
    """What the job's status says that it was given."""
    found = stage.status(name).get("allocation", {}).get("workers")
    return found if found is None or isinstance(found, int) else None


def queue(stage: Stage, name: str = "shared") -> Object:
    found = stage.server.find(QUEUES, None, name)
    assert found is not None
    return found


def ready(stage: Stage, name: str = "shared") -> Object:
    conditions = (queue(stage, name).get("status") or {}).get("conditions") or [{}]
    found: Object = conditions[0]
    return found
