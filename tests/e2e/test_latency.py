"""How long the cluster's news take to have an effect."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
from cluster import Metrics, Object, median_bound, until
from cluster_jobs import Job, digits, spread
from installation import Installed

Start = Callable[[Object], Job]

AGE = """
import time
uptime = float(open("/proc/uptime").read().split()[0])
ticks = int(open("/proc/1/stat").read().rsplit(")", 1)[1].split()[19])
print(time.time() - (uptime - ticks / 100))
"""
"""Prints when a container's first process was started (Unix seconds): its status knows whole seconds only."""


def change(job: Job, after: int, *causes: str, seconds: float = 60) -> Object:
    """Wait for a membership change with one of these causes, after the first ``after`` that the coordinator counts."""

    def found() -> Object | None:
        status = job.coordinator_status()
        fresh = status["changesTotal"] - after
        changes: list[Object] = status["changes"][-fresh:] if fresh > 0 else []
        return next((c for c in changes if c["cause"] in causes), None)

    return until(f"a change by {' or '.join(causes)}", found, seconds, every=0.02)


LOSSES = 3
TAINT = "ToBeDeletedByClusterAutoscaler"


def test_the_coordinator_is_told_of_a_lost_pod_within_half_a_second(installed: Installed, start: Start) -> None:
    """By taints: a worker whose pod is deleted or dies tells the coordinator itself, often before the operator can."""
    cluster = installed.cluster
    job = start(digits("told", steps=100_000, pause=0.05, replicas=3))
    job.wait_training(3)
    before = cluster.metrics()
    for _ in range(LOSSES):
        node = job.workers()[0]["spec"]["nodeName"]
        here = {pod["metadata"]["uid"] for pod in job.workers() if pod["spec"]["nodeName"] == node}
        cluster.kubectl("taint", "node", node, f"{TAINT}=now:NoSchedule")
        try:
            until(
                "the workers of that node have left",
                lambda gone=here: gone.isdisjoint(pod["metadata"]["uid"] for pod in job.workers()),
                30,
            )
            job.wait_training(3)
        finally:
            cluster.kubectl("taint", "node", node, f"{TAINT}-")
    after = cluster.metrics()
    name = "virtualflow_loss_told_seconds"
    bound, count = median_bound(before.histogram(name), after.histogram(name))
    mean = spent(before, after, name) / count
    print(f"told of {count} losses: median at most {bound} s, mean {mean:.3f} s after the watch event")
    assert count >= LOSSES
    assert bound <= 0.5


def spent(before: Metrics, after: Metrics, name: str) -> float:
    """Return the sum of what a histogram counted between two readings."""
    return after.total(f"{name}_sum") - before.total(f"{name}_sum")


def process_started(job: Job, pod: str) -> float:
    """Return when a pod's container was started, in Unix seconds."""
    return float(job.kubectl("exec", pod, "--", "python", "-c", AGE))


def bare_pod(job: Job, name: str) -> float:
    """Return the seconds from ``kubectl apply`` of a pod like a worker's to its container's start."""
    template = digits("bare")["spec"]["workerGroups"][0]["template"]
    template["spec"]["containers"][0]["command"] = ["sleep", "600"]
    template["spec"]["containers"][0]["args"] = []
    begun = time.time()
    job.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, **template})
    job.kubectl("wait", "pod", name, "--for=condition=Ready", "--timeout=60s", timeout=90)
    started = process_started(job, name)
    job.kubectl("delete", "pod", name, "--grace-period=0", "--force", "--wait=false")
    return started - begun


def test_a_scaled_up_job_has_its_new_container_within_a_second_of_what_a_bare_pod_takes(start: Start) -> None:
    """What the cluster takes for a pod is measured beside it, because that depends on the machine."""
    job = start(digits("joined", steps=100_000, pause=0.05, replicas=1))
    waited, bare = [], []
    for n in range(3):
        job.wait_training(1)
        bare.append(bare_pod(job, f"bare-{n}"))
        changes = job.coordinator_status()["changesTotal"]
        begun = time.time()
        job.kubectl("scale", "vfj", "joined", "--replicas=2")
        change(job, changes, "join", "resize")
        trained = time.time()
        worker = max(job.workers(), key=lambda pod: pod["metadata"]["creationTimestamp"])["metadata"]["name"]
        started = process_started(job, worker)
        print(
            f"from kubectl scale to the first step with the new worker: {trained - begun:.2f} s, of which its "
            f"container took {trained - started:.2f} s to start up, and {started - begun:.2f} s passed before; "
            f"a bare pod's container was started after {bare[-1]:.2f} s"
        )
        waited.append(started - begun)
        job.kubectl("scale", "vfj", "joined", "--replicas=1")
    assert min(waited) <= min(bare) + 1.0, (waited, bare)  # others who use the machine may slow down one or two


def test_a_power_cut_is_survived_within_the_heartbeat_limit_and_two_seconds(installed: Installed, start: Start) -> None:
    """The pause is what survivors measured: from the last step before the loss to the first one after it."""
    faults = installed.cluster.faults
    job = start(spread(digits("powered", steps=100_000, pause=0.05, replicas=3)))
    job.wait_training(3)
    changes = job.coordinator_status()["changesTotal"]
    coordinator = job.coordinator()["spec"]["nodeName"]
    nodes = [pod["spec"]["nodeName"] for pod in job.workers()]
    node = next((node for node in nodes if node != coordinator), nodes[0])
    try:
        faults.kill_node(node)
        lost = change(job, changes, "lost", "broken")
    finally:
        faults.start_node(node)
    until(f"{node} is ready again", lambda: node in installed.cluster.nodes(), 120)
    print(f"a power cut paused the training for {lost['pauseMs'] / 1000:.2f} s: {lost['reason']}")
    assert lost["pauseMs"] <= (5 + 2) * 1000
    assert lost["repeatedSteps"] <= 1


def test_a_worker_that_falls_silent_is_given_up_within_the_heartbeat_limit_and_two_seconds(
    installed: Installed, start: Start
) -> None:
    """A stopped process keeps its connections, as a power cut does that nobody says goodbye for."""
    job = start(digits("silent", steps=100_000, pause=0.05, replicas=3))
    job.wait_training(3)
    pod = job.workers()[-1]
    processes = installed.cluster.processes(pod)
    if not processes:
        pytest.skip("it stops a worker's process, which it can only where nodes are processes of this machine")
    changes = job.coordinator_status()["changesTotal"]
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    lost = change(job, changes, "lost", "broken")
    print(f"a silent worker paused the training for {lost['pauseMs'] / 1000:.2f} s: {lost['reason']}")
    assert lost["pauseMs"] <= (5 + 2) * 1000
    assert lost["repeatedSteps"] <= 1
    job.wait_training(3)  # its pod is replaced
