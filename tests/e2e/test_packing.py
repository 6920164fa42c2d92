"""A queue whose jobs share devices in turns: on real nodes, two of which offer one device each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from cluster import RELEASE, ROOT, SYSTEM, Cluster, Object
from cluster_jobs import Job, digits
from installation import Installed, wait_for_operators
from slots import add_queue, set_slots, take_slot

QUEUE = "e2e-turns"
SERVER = f"{RELEASE}-turns"
STEPS = {"shared-1": 600, "shared-2": 520}
"""They are of one name but for its number, so that what is known of the first is known of the second."""
PAUSE = 0.4


def upgrade(cluster: Cluster, *values: str) -> None:
    """Change values of the release."""
    chart = str(ROOT / "charts" / "virtualflow")
    sets = [word for value in values for word in ("--set", value)]
    cluster.helm("upgrade", RELEASE, chart, "-n", SYSTEM, "--reuse-values", *sets)
    wait_for_operators(cluster)


@pytest.fixture
def queue(installed: Installed) -> Iterator[Cluster]:
    cluster = installed.cluster
    nodes = cluster.nodes()
    if len(nodes) < 2:
        pytest.skip("it needs two nodes that take pods")
    for place, node in enumerate(nodes):
        set_slots(cluster, node, 1 if place < 2 else 0)
    # One is enough, and where nodes share the files of a machine, two would want one place.
    upgrade(cluster, "turns.enabled=true", rf"turns.nodeSelector.kubernetes\.io/hostname={nodes[0]}")
    cluster.kubectl("-n", SYSTEM, "rollout", "status", f"daemonset/{SERVER}", "--timeout=90s", timeout=100)
    add_queue(cluster, QUEUE, policy="FIFO", packing={"maxJobsPerDevice": 2})
    try:
        yield cluster
    finally:
        cluster.kubectl("delete", "vfq", QUEUE, "--ignore-not-found", check=False)
        upgrade(cluster, "turns.enabled=false")


def manifest(name: str, pause: float | None = PAUSE) -> Object:
    """A job of two workers, with a device each."""
    job = digits(name, steps=STEPS[name], pause=pause)
    if pause is not None:
        take_slot(job)["spec"] |= {"queue": QUEUE, "replicas": 2, "minReplicas": 2, "maxReplicas": 2}
    return job


def test_a_job_without_devices_computes_in_turns_on_those_of_another_and_no_bit_changes(
    queue: Cluster, namespace: str, reference: Callable[[Object], str]
) -> None:
    undisturbed = {name: reference(manifest(name, pause=None)) for name in STEPS}

    def start(name: str) -> Job:
        return Job(queue, namespace, name).create(manifest(name))

    host = start("shared-1")
    host.wait_training(2)
    lodger = start("shared-2")  # no device is left
    condition = lodger.wait_condition("Allocated", "InTurns", 120)
    assert "shared-1" in condition["message"]
    lodger.wait_training(2, 180)

    def nodes(job: Job) -> list[str]:
        return sorted(pod["spec"]["nodeName"] for pod in job.workers())

    assert nodes(lodger) == nodes(host)
    assert len(set(nodes(host))) == 2
    assert lodger.status()["allocation"]["host"] == f"{namespace}/shared-1"

    before = host.status()["step"]
    lodger.go_fast()
    assert lodger.wait_phase("Complete", 300)["digest"] == undisturbed["shared-2"]
    assert host.status()["step"] > before, "it has trained beside it"
    host.go_fast()
    ended = host.wait_phase("Complete", 300)
    assert ended["digest"] == undisturbed["shared-1"]
    assert ended.get("repeatedSteps", 0) == 0
