"""A queue that wants whole nodes to fall idle: where the real scheduler puts its workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from cluster import Cluster, until
from cluster_jobs import Job, digits
from installation import Installed
from slots import add_queue, set_slots, take_slot

QUEUE = "e2e-packed"
SLOTS = 4
"""On each of three nodes: all workers of a test have room on one."""


@pytest.fixture
def queue(installed: Installed) -> Iterator[Cluster]:
    cluster = installed.cluster
    for node in cluster.nodes():
        set_slots(cluster, node, SLOTS)
    add_queue(cluster, QUEUE, placement="BinPack")
    yield cluster
    cluster.kubectl("delete", "vfq", QUEUE, "--ignore-not-found", check=False)


def test_workers_of_all_jobs_go_where_most_are_and_leave_the_emptiest_node_first(
    queue: Cluster, namespace: str
) -> None:
    jobs = {}
    for name, workers in (("one", 1), ("two", 2), ("three", 3)):
        job = digits(name, steps=100_000, pause=0.5, queue=QUEUE, replicas=workers, maxReplicas=workers, minReplicas=1)
        jobs[name] = Job(queue, namespace, name).create(take_slot(job))
        jobs[name].wait_training(workers)

    def nodes() -> Counter[str]:
        return Counter(pod["spec"]["nodeName"] for job in jobs.values() for pod in job.workers())

    # There is room for four on the first one, and the last two have to go elsewhere: to one node, not to two.
    assert sorted(nodes().values()) == [2, 4]
    emptier = min(nodes(), key=nodes().__getitem__)
    jobs["three"].patch({"replicas": 1, "maxReplicas": 1})
    until("a whole node has fallen idle", lambda: emptier not in nodes() and nodes().total() == 4, 60)
