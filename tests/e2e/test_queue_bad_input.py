"""Queues and jobs that make no sense: each says on itself what is the matter, and a sound job goes on beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from cluster import Cluster, CommandFailed, Object, until
from cluster_jobs import Job, digits
from installation import Installed, temporary_namespace
from slots import SLOT, add_queue, set_slots, take_slot

QUEUE, OTHER = "e2e-sound", "e2e-odd"
MANY = 8
"""Slots on each node: a kubelet takes up to half a minute to end the pods of the test before."""
SECONDS = 15.0
"""Within which the reason is there to be read."""


def queued(name: str, **spec: Any) -> Object:
    """A job of the sound queue that lasts until its namespace goes."""
    usual = {"queue": QUEUE, "replicas": 1, "maxReplicas": 2}
    return take_slot(digits(name, steps=100_000, pause=0.1, **(usual | spec)))


@pytest.fixture(scope="module")
def sound(installed: Installed) -> Iterator[Job]:
    """A job that trains with two workers in a sound queue, before anything odd comes."""
    cluster = installed.cluster
    for node in cluster.nodes():
        set_slots(cluster, node, MANY)
    add_queue(cluster, QUEUE)
    with temporary_namespace(cluster, "sound") as namespace:
        job = Job(cluster, namespace, "sound").create(queued("sound"))
        job.wait_training(2)
        yield job
    cluster.kubectl("delete", "vfq", QUEUE, OTHER, "--ignore-not-found", check=False)


@pytest.fixture(autouse=True)
def undisturbed(sound: Job) -> Iterator[None]:
    """Whatever a test does, the sound job makes steps with the workers that it had."""
    yield
    status = sound.wait_step((sound.status().get("step") or 0) + 2)
    assert (status["readyReplicas"], status.get("repeatedSteps", 0)) == (2, 0)


def ready(cluster: Cluster, name: str, reason: str) -> Object:
    """Wait until a queue's condition has that reason."""

    def reached() -> Object | None:
        found: Object = (cluster.get("vfq", None, name) or {})["status"]["conditions"][0]
        return found if found["reason"] == reason else None

    return until(f"the queue {name} says {reason}", reached, SECONDS)


@pytest.mark.parametrize(
    ("spec", "reason", "says"),
    [
        ({"nodeSelector": {"matchLabels": {"no-node": "has-this"}}}, "NoNodes", "selects no node; correct it"),
        ({"policy": "Fairest"}, "UnknownPolicy", "no policy 'Fairest'; give one of FIFO, Priority, WeightedFairShare"),
        ({"resource": "example.com/none"}, "NoCapacity", "they offer no example.com/none"),
    ],
    ids=["selects no node", "unknown policy", "counts what no node has"],
)
def test_a_queue_that_cannot_share_says_why_and_shares_once_it_is_mended(
    sound: Job, namespace: str, spec: Object, reason: str, says: str
) -> None:
    cluster = sound.cluster
    cluster.kubectl("delete", "vfq", OTHER, "--ignore-not-found")
    add_queue(cluster, OTHER, **spec)
    job = Job(cluster, namespace, "waiting").create(queued("waiting", queue=OTHER))
    condition = ready(cluster, OTHER, reason)
    assert (condition["status"], says in condition["message"]) == ("False", True), condition
    until("the job knows", lambda: job.condition("Allocated")["status"] == "False", SECONDS)
    assert job.workers() == []
    mend = {"resource": SLOT, "nodeSelector": None, "policy": "WeightedFairShare"}
    cluster.kubectl("patch", "vfq", OTHER, "--type=merge", "-p", json.dumps({"spec": mend}))
    until("the job has workers", job.workers, SECONDS)
    ready(cluster, OTHER, "Sharing")


def test_a_queue_of_no_such_form_is_refused(sound: Job) -> None:
    unknown = {"matchExpressions": [{"key": "a", "operator": "Like"}]}
    refused: list[tuple[Object, str]] = [
        ({"capacity": -1}, "spec.capacity"),
        ({"limits": [{"namespace": "a"}]}, "capacity"),
        ({"nodeSelector": unknown}, "operator"),
    ]
    for spec, says in refused:
        with pytest.raises(CommandFailed, match=says):
            add_queue(sound.cluster, "e2e-refused", **spec)


def test_a_job_whose_minimum_never_fits_says_so(sound: Job, namespace: str) -> None:
    most = MANY * len(sound.cluster.nodes()) + 1
    job = Job(sound.cluster, namespace, "huge")
    job.create(queued("huge", replicas=most, minReplicas=most, maxReplicas=most, virtualNodes=64))
    condition = job.wait_condition("Allocated", "NeverFits", SECONDS)
    assert f"minimum of {most} workers" in condition["message"]
    assert "lower the minimum or raise that" in condition["message"]
    assert job.workers() == []
    until("an event tells it", lambda: "Queued" in {event["reason"] for event in job.events()}, SECONDS)
    # Mended, it has what is free.
    job.patch({"minReplicas": 1, "replicas": 1, "maxReplicas": 1})
    job.wait_condition("Allocated", "Allocated", SECONDS)


def test_a_weight_of_zero_is_refused(sound: Job, namespace: str) -> None:
    with pytest.raises(CommandFailed, match="weight must be at least 1"):
        Job(sound.cluster, namespace, "weightless").create(queued("weightless", weight=0))


def test_a_queue_deleted_under_running_jobs_takes_nothing_from_them(sound: Job, namespace: str) -> None:
    cluster = sound.cluster
    cluster.kubectl("delete", "vfq", QUEUE)
    condition = sound.wait_condition("Allocated", "QueueMissing", SECONDS)
    assert condition["status"] == "True"
    assert f"there is no VirtualFlowQueue {QUEUE}; create it, or correct spec.queue" in condition["message"]
    late = Job(cluster, namespace, "late").create(queued("late"))
    assert late.wait_condition("Allocated", "QueueMissing", SECONDS)["status"] == "False"
    assert (len(sound.workers()), late.workers()) == (2, [])
    add_queue(cluster, QUEUE)
    sound.wait_condition("Allocated", "Allocated", SECONDS)
    until("the late job has workers", late.workers, SECONDS)
