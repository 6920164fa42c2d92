"""Workers of several processes on a cluster: pods that are scaled, drained and killed as one, to the laptop's bits."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cluster import Object, until
from cluster_jobs import Job, container, script, spread
from installation import Installed

Start = Callable[[Object], Job]

STARTS = 300.0
"""Seconds in which a worker starts where other programs use the processors."""

DIVIDED = """
import os, time
import torch, torch.nn.functional as F
import virtualflow as vf

torch.manual_seed(0)
blocks = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(4)]
model = torch.nn.Sequential(*blocks, torch.nn.Linear(32, 8))
data = torch.utils.data.TensorDataset(torch.randn(256, 32), torch.randn(256, 8))
optimizer = torch.optim.Adam(model.parameters(), 0.001)
slow = "KUBERNETES_SERVICE_HOST" in os.environ
with vf.elastic(model, optimizer, data, batch_size=16, steps=600, shard="parameters") as run:
    for step in run:
        for x, y in step:
            F.mse_loss(model(x), y).backward()
        time.sleep(0.3 if slow and not os.path.exists("/tmp/fast") else 0)
"""


def test_pods_of_two_processes_are_scaled_drained_and_killed_and_train_to_the_same_bits(
    installed: Installed, start: Start, reference: Callable[[Object], str]
) -> None:
    manifest = spread(script("several", DIVIDED, replicas=2, maxReplicas=4, processesPerWorker=2))
    container(manifest)["resources"]["limits"]["memory"] = "2Gi"
    job = start(manifest)
    status = job.wait_training(2, STARTS)
    shares = {share["worker"]: share["virtualNodes"] for share in status["assignment"]}
    assert sorted(shares) == [f"several-workers-{ordinal}" for ordinal in (0, 1)]
    assert all(re.fullmatch(r"\d-\d, \d-\d", nodes) for nodes in shares.values()), shares
    assert re.search(r"^\[[01]\] ", job.kubectl("logs", "several-workers-0"), re.MULTILINE) is None  # it prints nothing

    job.kubectl("scale", "vfj", "several", "--replicas=1")
    job.wait_training(1, STARTS)
    job.kubectl("scale", "vfj", "several", "--replicas=2")
    job.wait_training(2, STARTS)
    changes = job.status()["changes"]
    assert (changes, job.status().get("repeatedSteps", 0)) == (2, 0)

    # Its pod is deleted in order: both of its processes leave in one change, and another pod takes its place.
    job.kubectl("delete", "pod", job.workers()[0]["metadata"]["name"], "--wait=false")
    until("a pod was drained and replaced", lambda: job.status()["changes"] >= changes + 1, STARTS)
    changes = job.wait_training(2, STARTS)["changes"]
    assert job.status().get("repeatedSteps", 0) == 0

    # One process of a pod dies: the pod ends, once, and another one takes its place.
    victim = job.workers()[0]
    trainers = [
        process
        for process in installed.cluster.processes(victim)
        if b"virtualflow\0processes" not in Path(f"/proc/{process}/cmdline").read_bytes()
    ]
    if trainers:
        with suppress(ProcessLookupError):
            os.kill(trainers[-1], signal.SIGKILL)
    else:  # nodes are not processes of this machine
        job.kubectl("delete", "pod", victim["metadata"]["name"], "--force", "--grace-period=0")
    until("the loss is over", lambda: job.status()["changes"] >= changes + 2, STARTS)
    status = job.wait_training(2, STARTS)
    assert status["repeatedSteps"] <= 1
    assert victim["metadata"]["uid"] not in {pod["metadata"]["uid"] for pod in job.workers()}

    job.go_fast()
    status = job.wait_phase("Complete", 3 * STARTS)
    assert status["repeatedSteps"] <= 1
    alone = manifest | {"spec": manifest["spec"] | {"replicas": 1, "processesPerWorker": 1}}
    assert status["digest"] == reference(alone)
