"""Slots: a resource of the tests' own that nodes offer, so that it does not matter what else runs there."""

from __future__ import annotations

from typing import Any

from cluster import Cluster, Object
from cluster_jobs import container

SLOT = "example.com/slot"
SLOTS = 2
"""On each node, usually."""


def set_slots(cluster: Cluster, node: str, slots: int = SLOTS) -> None:
    """Let a node offer slots, as a device plugin would."""
    capacity = {SLOT: str(slots)}
    body = {"status": {"capacity": capacity, "allocatable": capacity}}
    cluster.request("PATCH", f"/api/v1/nodes/{node}/status", body)


def take_slot(job: Object) -> Object:
    """Let each worker of a job take a slot."""
    resources = container(job)["resources"]
    resources["limits"][SLOT] = resources["requests"][SLOT] = "1"
    return job


def add_queue(cluster: Cluster, name: str, *, check: bool = True, **spec: Any) -> str:
    """Apply a queue that counts slots, unless its ``spec`` says otherwise; what kubectl says."""
    whole = {"resource": SLOT} | spec
    manifest = {
        "apiVersion": "virtualflow.dev/v1alpha1",
        "kind": "VirtualFlowQueue",
        "metadata": {"name": name},
        "spec": {key: value for key, value in whole.items() if value is not None},
    }
    return cluster.apply(manifest, "default", check=check)
