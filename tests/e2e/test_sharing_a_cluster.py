"""Three jobs share three nodes by their weights: the shares seen in pods, as jobs and nodes come and go."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from cluster import Cluster, Object, until
from cluster_jobs import Job, digits
from installation import Installed
from slots import add_queue, set_slots, take_slot

QUEUE = "e2e-shared"
STEPS = {"light": 400, "middle": 380, "heavy": 360}
WEIGHTS = {"light": 1, "middle": 2, "heavy": 3}
PAUSE = 1.5
"""Seconds that each step takes longer: the jobs last until all has happened, and leave the processors alone."""
SECONDS = 15.0
"""Within which the shares follow."""


@pytest.fixture
def queue(installed: Installed) -> Iterator[Cluster]:
    """A queue over all nodes, each of which has some slots."""
    cluster = installed.cluster
    for node in cluster.nodes():
        set_slots(cluster, node)
    add_queue(cluster, QUEUE)
    yield cluster
    cluster.kubectl("delete", "vfq", QUEUE, "--ignore-not-found", check=False)


def manifest(name: str, pause: float | None = PAUSE) -> Object:
    """A job of the queue; the number of steps tells their digests apart."""
    job = digits(name, steps=STEPS[name], pause=pause)
    if pause is not None:
        take_slot(job)["spec"] |= {"queue": QUEUE, "weight": WEIGHTS[name], "replicas": 1, "maxReplicas": 8}
        # A worker whose processors others use starts late, and that is no reason to train without the rest.
        job["spec"]["elasticity"] = {"startupGraceSeconds": 5, "drainGraceSeconds": 30}
    return job


class Sharing:
    """The jobs, and how long their shares took to follow."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace
        self.jobs: dict[str, Job] = {}

    def submit(self, name: str) -> None:
        self.jobs[name] = Job(self.cluster, self.namespace, name).create(manifest(name))

    def pods(self) -> dict[str, int]:
        """Workers' pods that have a node and are not going away, job by job."""
        return {
            name: sum(1 for pod in job.workers() if pod["spec"].get("nodeName") and not over(pod))
            for name, job in self.jobs.items()
        }

    def leaving(self) -> int:
        """Workers' pods that are going away, and that kubelets have not taken away yet."""
        return sum(
            "deletionTimestamp" in pod["metadata"] and not over(pod)
            for job in self.jobs.values()
            for pod in job.pods("worker")
        )

    def follow(self, what: str, seconds: float, **wanted: int) -> None:
        """Wait until the pods are as the policy wants them; how long kubelets take to end pods does not count."""
        wanted = {**dict.fromkeys(self.jobs, 0), **wanted}
        begun = time.monotonic()

        def shrunk() -> bool:
            here = {name: [pod for pod in job.workers() if not over(pod)] for name, job in self.jobs.items()}
            return all(len(pods) <= wanted[name] for name, pods in here.items())

        try:
            until(f"{what}: those who have too much are told to leave", shrunk, seconds)
            told = time.monotonic()
            until(f"{what}: they have left", lambda: not self.leaving() or self.pods() == wanted, 90)
            left = time.monotonic()
            until(f"{what}: pods are {wanted}", lambda: self.pods() == wanted, seconds - (told - begun))
        except AssertionError as error:
            given = {name: job.status().get("allocation") for name, job in self.jobs.items()}
            raise AssertionError(f"{error}; they are {self.pods()}, and given is {json.dumps(given)}") from None
        now = time.monotonic()
        print(
            f"{what}: {wanted} after {now - begun:.1f} s, of which kubelets took {left - told:.1f} s to end pods; "
            f"load {os.getloadavg()[0]:.1f}"
        )

    def settle(self, **workers: int) -> None:
        """Wait until so many workers train and have made steps together."""
        for name, count in workers.items():
            self.jobs[name].wait_training(count, 240)

    def finish(self, name: str) -> Object:
        """Let a job come to its end."""
        self.jobs[name].go_fast()
        return self.jobs[name].wait_phase("Complete", 300)


@dataclass(frozen=True)
class Standing:
    """How a job stood just before the power of a node was cut."""

    step: int
    at: float
    """time.monotonic() of when it had made that many."""
    bereft: bool
    """All of its workers were there: without checkpoints it begins anew."""
    coordinated_there: bool
    """So was its coordinator, and with it all knowledge of the steps that a job without workers had made."""

    @classmethod
    def of(cls, job: Job, node: str) -> Standing:
        homes = {pod["spec"].get("nodeName") for pod in job.workers() if not over(pod)}
        coordinated = job.coordinator()["spec"]["nodeName"]
        at = time.monotonic()
        return cls(job.coordinator_status()["step"], at, homes == {node}, coordinated == node)

    def check(self, job: Job, status: Object, cut_at: float) -> None:
        """What the power cut has cost: every step if nobody was left, else at most the one under way."""
        repeated = status.get("repeatedSteps", 0)
        told = [event["message"] for event in job.events() if event["reason"] == "Restarted"]
        if not self.bereft:
            assert (repeated <= 1, told) == (True, []), f"{job.name} repeated {repeated} steps: {told}, {self}"
            return
        most = self.step + (cut_at - self.at) / PAUSE + 1
        if self.coordinated_there:
            # Nobody is left who could tell the new coordinator of a step to be repeated, but the operator knows of one.
            assert (repeated <= 1, len(told)) == (True, 1), f"{job.name} repeated {repeated} steps: {told}, {self}"
            anew = re.fullmatch(r"began anew from the first step: .* had step (\d+), .*; \1 steps? repeated", told[0])
            assert anew is not None, f"{told}, {self}"
            assert 0 < int(anew[1]) <= most, f"{told}, {self}"
            return
        assert self.step <= repeated <= most, f"{job.name} repeated {repeated} steps: {told}, {self}"
        assert len(told) == 1, told
        again = re.fullmatch(
            r"0 workers → \d+ workers? at step [01] \(.*\): (?:pause .*, )?(\d+) steps? repeated.*", told[0]
        )
        assert again is not None, told
        assert int(again[1]) == repeated, "nothing else has cost a step"


def over(pod: Object) -> bool:
    return pod["status"].get("phase") in ("Succeeded", "Failed")


def test_three_jobs_share_three_nodes_by_their_weights_to_the_bits_of_undisturbed_runs(
    queue: Cluster, namespace: str, reference: Callable[[Object], str]
) -> None:
    nodes = queue.nodes()
    if len(nodes) != 3:
        pytest.skip(f"it needs three nodes that take pods, not {len(nodes)}")
    undisturbed = {name: reference(manifest(name, pause=None)) for name in STEPS}
    sharing = Sharing(queue, namespace)

    sharing.submit("light")
    sharing.follow("the first job alone", SECONDS, light=6)
    sharing.settle(light=6)
    sharing.submit("middle")
    sharing.follow("a second one of twice its weight", SECONDS, light=2, middle=4)
    sharing.settle(light=2, middle=4)
    sharing.submit("heavy")
    sharing.follow("a third one", SECONDS, light=1, middle=2, heavy=3)
    sharing.settle(light=1, middle=2, heavy=3)
    ready = (queue.get("vfq", None, QUEUE) or {})["status"]
    assert ready["conditions"][0]["reason"] == "Sharing"
    assert ready["capacity"]["total"] == "6"
    assert ready["jobs"] == {"running": 3, "waiting": 0}

    lost = nodes[2]
    before = {name: Standing.of(job, lost) for name, job in sharing.jobs.items()}
    queue.faults.kill_node(lost)
    cut_at = time.monotonic()
    print(f"the power of {lost} is cut: {before}")
    try:
        # Kubernetes takes 40 s to say that a node is not ready.
        until("four slots are left", lambda: capacity(queue) == "4", 120)
        begun = time.monotonic()

        def given() -> int:
            return sum(job.status()["allocation"]["workers"] for job in sharing.jobs.values())

        until("no more is given than there is", lambda: given() == 4, SECONDS)
        told = time.monotonic()

        def all_train() -> bool:
            here = alive(sharing, lost).values()
            return sum(here) == 4 and all(here)

        # Whose workers were there is chance: others may have to leave for its new one, which kubelets take time for.
        until("nobody starves", all_train, 90 + SECONDS)
        here, now = alive(sharing, lost), time.monotonic()
        print(f"a dead node: {told - begun:.1f} s to decide, {here} after {now - begun:.1f} s")
        for name, standing in before.items():
            if standing.bereft:
                until(f"{name} has begun anew", lambda n=name, s=standing: began_anew(sharing.jobs[n], s), 90)
    finally:
        queue.faults.start_node(lost)
    until("the node is back", lambda: lost in queue.nodes(), 120)
    set_slots(queue, lost)
    sharing.follow("a node comes", 4 * SECONDS, light=1, middle=2, heavy=3)
    sharing.settle(light=1, middle=2, heavy=3)

    ends = {"heavy": sharing.finish("heavy")}
    sharing.follow("the end of the third", SECONDS, light=2, middle=4)
    sharing.settle(light=2, middle=4)
    ends["middle"] = sharing.finish("middle")
    sharing.follow("the end of the second", SECONDS, light=6)
    sharing.settle(light=6)
    ends["light"] = sharing.finish("light")
    for name, status in ends.items():
        assert status["digest"] == undisturbed[name], f"{name} ended in other bits"
        before[name].check(sharing.jobs[name], status, cut_at)
    reasons = {event["reason"] for event in sharing.jobs["light"].events()}
    assert "Allocated" in reasons


def capacity(cluster: Cluster) -> str:
    """What the queue says that it has."""
    found: str = (cluster.get("vfq", None, QUEUE) or {})["status"]["capacity"]["total"]
    return found


def began_anew(job: Job, standing: Standing) -> bool:
    """Whether a job that had lost all of its workers makes the steps that it had made before."""
    return (job.status().get("step") or 0) < standing.step


def alive(sharing: Sharing, lost: str) -> dict[str, int]:
    """Workers' pods on the nodes that run, job by job; those on a dead one stay until it is back."""
    return {
        name: sum(1 for pod in job.workers() if pod["spec"].get("nodeName") not in (None, lost) and not over(pod))
        for name, job in sharing.jobs.items()
    }
