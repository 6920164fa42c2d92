"""One job through everything that a cluster does to it, to the bits of a run that nobody disturbed.

Every act waits for what it must bring about: the right number of workers training, and steps made since. What is
announced repeats no step; what is not repeats one at most.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise

import pytest
from cluster import SYSTEM, Cluster, Faults, Object, until
from cluster_jobs import Files, Job, digits, spread
from installation import Installed

from conftest import SHARED
from virtualflow.protocol.http_client import CoordinatorClient
from virtualflow.protocol.identity import IssuedIdentity
from virtualflow.protocol.settings import SignalSettings
from virtualflow_operator.constants import COORDINATOR_PORT

STEPS = 1200
PAUSE = 0.5
"""Seconds that each step takes longer: the training lasts until all has happened, and leaves the processors alone."""


@pytest.fixture
def claim(installed: Installed, namespace: str) -> Iterator[str]:
    """A claim on a volume that all nodes share, for checkpoints."""
    cluster, directory = installed.cluster, SHARED / namespace
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    size = {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteMany"]}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": namespace},
        "spec": {**size, "storageClassName": "", "hostPath": {"path": str(directory), "type": "Directory"}},
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "checkpoints"},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "",
            "volumeName": namespace,
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    cluster.apply(volume, namespace)
    cluster.apply(claim, namespace)
    yield "checkpoints"
    cluster.kubectl("delete", "pv", namespace, "--wait=false", check=False)
    shutil.rmtree(directory, ignore_errors=True)


class Acts:
    """The acts of the story, and the steps that each repeated."""

    def __init__(self, job: Job) -> None:
        self.job, self.repeated = job, 0

    @contextmanager
    def act(self, name: str, workers: int, cause: str, most: int, seconds: float = 90) -> Iterator[None]:
        """Let something happen; then ``workers`` train, a change by ``cause`` is counted, ``most`` steps are repeated.

        No cause: nothing of it may change who trains.
        """
        before = self.job.status()
        yield
        status = self.job.wait_training(workers, seconds)
        if cause:
            status = until(
                f"{name} is a change that the status counts",
                lambda: (s := self.job.status()).get("changes", 0) > before.get("changes", 0) and s,
                seconds,
            )
        repeated = status.get("repeatedSteps", 0) - before.get("repeatedSteps", 0)
        change = status.get("lastChange", {})
        print(
            f"{name}: step {status['step']}, {status['workers']} workers, repeated {repeated}; latest change "
            f"{change.get('cause')} {change.get('from')}->{change.get('to')}, {change.get('pauseMilliseconds')} ms"
        )
        assert repeated <= most, f"{name} repeated {repeated} steps: {change}"
        if cause:
            assert change["cause"] in cause.split("|"), f"{name}: {change}"
        else:
            assert status.get("changes", 0) == before.get("changes", 0), f"{name} changed who trains: {change}"
        self.repeated += repeated


def test_one_job_through_everything_ends_in_the_bits_of_an_undisturbed_run(
    installed: Installed, namespace: str, claim: str, reference: Callable[[Object], str]
) -> None:
    cluster, faults = installed.cluster, installed.cluster.faults
    undisturbed = reference(digits("story", steps=STEPS))
    volume = {"persistentVolumeClaim": {"claimName": claim}}
    checkpoint = {"volume": volume, "everySeconds": 20}
    manifest = spread(digits("story", steps=STEPS, pause=PAUSE, replicas=2, checkpoint=checkpoint))
    job = Job(cluster, namespace, "story").create(manifest)
    job.wait_training(2)
    acts = Acts(job)

    with acts.act("kubectl scale up", 3, "join", 0):
        job.kubectl("scale", "vfj/story", "--replicas=3")
    with acts.act("kubectl scale down", 2, "drain|resize", 0):
        job.kubectl("scale", "vfj/story", "--replicas=2")

    node = a_node_with_a_worker(cluster, job)
    try:
        with acts.act("kubectl drain of a node", 2, "join|drain", 0):
            flags = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=120s")
            cluster.kubectl("drain", node, *flags, timeout=150)
            assert all(pod["spec"].get("nodeName") != node for pod in job.workers())
    finally:
        cluster.kubectl("uncordon", node)

    with acts.act("kubectl delete pod", 2, "join|drain", 0):
        job.kubectl("delete", "pod", job.workers()[0]["metadata"]["name"])

    node = a_node_with_a_worker(cluster, job)
    try:
        with acts.act("power cut of a node", 2, "join|lost|broken", 1, 120):
            faults.kill_node(node)
    finally:
        faults.start_node(node)
    until(f"{node} is ready again", lambda: node in cluster.nodes(), 120)

    with acts.act("kubectl delete pod of the coordinator", 2, "", 0):
        lost = job.coordinator()["metadata"]
        job.kubectl("delete", "pod", lost["name"])
        until("another coordinator serves", lambda: job.coordinator()["metadata"]["uid"] != lost["uid"], 60)

    with acts.act("SIGKILL of the operator's leader", 2, "", 0):
        kill_leader(cluster)

    before = job.status()
    job.patch({"suspend": True})
    suspended = job.wait_phase("Suspended", 90)
    until("no pod is left", lambda: not job.pods(), 180)
    assert suspended["step"] > before["step"]
    with acts.act("suspend and resume", 2, "", 0):
        job.patch({"suspend": False})

    # At last, as it takes a scheduler a minute or more to find back to an API server that was away.
    with acts.act("20 s without an API server", 2, "", 0):
        endure_outage(job, faults)

    job.go_fast()
    status = job.wait_phase("Complete", 300)
    print(f"in all {status.get('changes')} changes, {status.get('repeatedSteps', 0)} repeated steps")
    assert status["digest"] == undisturbed
    assert status.get("repeatedSteps", 0) == acts.repeated <= 1


def a_node_with_a_worker(cluster: Cluster, job: Job) -> str:
    """Return a node that a worker is on, rather one without the coordinator and without the operator's leader."""
    others = {cluster.leader()["spec"]["nodeName"], job.coordinator()["spec"]["nodeName"]}
    nodes: list[str] = [pod["spec"]["nodeName"] for pod in job.workers()]
    return next((node for node in nodes if node not in others), nodes[0])


def kill_leader(cluster: Cluster) -> None:
    """Kill the leader's process where it is one of this machine, else its pod; until another process leads."""
    leader = cluster.leader()
    before = cluster.lease()
    processes = cluster.processes(leader)
    for process in processes:
        os.kill(process, signal.SIGKILL)
    if not processes:
        name = leader["metadata"]["name"]
        cluster.kubectl("-n", SYSTEM, "delete", "pod", name, "--force", "--grace-period=0")
    taken = ("holderIdentity", "leaseTransitions")
    until(
        "another process leads",
        lambda: (now := cluster.lease()).get("holderIdentity") and any(now.get(k) != before.get(k) for k in taken),
        60,
    )


def endure_outage(job: Job, faults: Faults, seconds: float = 20) -> None:
    """Switch the API server off for so long, and watch the coordinator's step grow meanwhile.

    Where pods are out of reach from here, so is their coordinator while there is no API server: there the step is
    compared as soon as it answers again.
    """
    address, files = job.coordinator()["status"]["podIP"], job.control()
    begun, least = job.coordinator_status()["step"], seconds * 0.25 / PAUSE
    faults.stop_apiserver()
    try:
        if job.cluster.distant:
            time.sleep(seconds)
        else:
            told = asyncio.run(watch_steps(address, files, seconds))
            standstill = longest_standstill(told, seconds)
            grown = max(told.values(), default=begun) - begun
            print(
                f"without an API server: {grown} steps in {seconds:.0f} s, never more than {standstill:.1f} s for one"
            )
            assert grown > least, f"the training slowed down or stopped: {told}"
            assert standstill <= 5, f"the training stood still for {standstill:.1f} s: {told}"
    finally:
        faults.start_apiserver()
    until("the API server answers", lambda: job.cluster.request("GET", "/readyz") == "ok", 60)
    if job.cluster.distant:
        grown = job.coordinator_status()["step"] - begun
        print(f"without an API server: {grown} steps in {seconds:.0f} s, as was seen afterwards")
        assert grown > least, "the training slowed down or stopped"


async def watch_steps(address: str, files: Files, seconds: float) -> dict[float, int]:
    """Return what step a coordinator tells of in so long, by the seconds since the beginning; one a second."""
    begun, told = time.monotonic(), dict[float, int]()
    identity = IssuedIdentity(lambda _: files, math.inf)
    client = CoordinatorClient(f"https://{address}:{COORDINATOR_PORT}", identity, SignalSettings())
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds), client:
            async for status in client.watch(1.0, brief=True):
                told[time.monotonic() - begun] = status.step
    return told


def longest_standstill(told: dict[float, int], seconds: float) -> float:
    """Return for how many seconds at most no new step was told of."""
    newest, news = 0, [0.0]
    for at, step in told.items():
        if step > newest:
            newest = step
            news.append(at)
    return max(after - before for before, after in pairwise([*news, seconds]))
