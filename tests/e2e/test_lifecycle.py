"""What happens in the life of a job on a cluster, as its owner sees it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from cluster import Object, until
from cluster_jobs import TRAINER_IMAGE, Job, container, digits, script, second_group
from installation import Installed

Start = Callable[[Object], Job]

STARTS = 240.0
"""Seconds in which a worker starts where other programs use the processors."""

CRASH = """
import virtualflow as vf, torch

def the_users_own_function():
    raise ValueError("the users own mistake")

torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
data = torch.utils.data.TensorDataset(torch.zeros(64, 2))
with vf.elastic(model, torch.optim.SGD(model.parameters(), lr=0.1), data, batch_size=8, steps=50) as run:
    for step in run:
        the_users_own_function()
"""
TWICE = """
import os, time
import torch, torch.nn.functional as F
import virtualflow as vf

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
data = torch.utils.data.TensorDataset(torch.randn(128, 8), torch.randn(128, 8))
for lr, steps in ((0.1, 40), (0.01, 1_200)):
    optimizer = torch.optim.SGD(model.parameters(), lr)
    with vf.elastic(model, optimizer, data, batch_size=16, steps=steps) as run:
        for step in run:
            for x, y in step:
                F.mse_loss(model(x), y).backward()
            time.sleep(0.05 if "KUBERNETES_SERVICE_HOST" in os.environ else 0)
"""
GLUTTON = """
hoard = []
while True:
    hoard.append(bytearray(b"x" * 10_000_000))
"""


def test_a_deleted_job_leaves_nothing_and_is_gone_soon(installed: Installed, start: Start) -> None:
    job = start(digits("digits", steps=3000, pause=0.05))
    job.wait_training(2)
    begun = time.monotonic()
    job.kubectl("delete", "vfj", "digits", "--wait=true", timeout=60)

    def left() -> list[str]:
        names = [f"pod/{pod['metadata']['name']}" for pod in job.pods()]
        for kind in ("services", "secrets"):
            found = installed.cluster.items(kind, job.namespace)
            names += [f"{kind}/{o['metadata']['name']}" for o in found if o["metadata"]["name"].startswith("digits")]
        return names

    def patient() -> list[str]:
        found = [pod["metadata"] for pod in job.pods()]
        return [metadata["name"] for metadata in found if metadata.get("deletionGracePeriodSeconds", 30) > 2]

    # Their own grace is 30 s. The kubelet of Kubernetes 1.20 takes no notice of one that was shortened afterwards.
    until("no pod of the job has more than 2 s to end", lambda: not patient(), 15)
    until("nothing is left of the job", lambda: not left(), 90)
    print(f"deletion took {time.monotonic() - begun:.1f} s")  # most of it is the kubelet's housekeeping


def test_a_script_that_trains_twice_is_one_job_also_when_a_worker_is_lost_in_its_second_run(
    start: Start, reference: Callable[[Object], str]
) -> None:
    manifest = script("twice", TWICE, replicas=2)
    job = start(manifest)
    until("the second run is under way", lambda: job.status().get("run") == 2, STARTS)
    job.wait_training(2, STARTS)
    job.kubectl("delete", "pod", job.workers()[0]["metadata"]["name"], "--force", "--grace-period=0")
    until("its place is taken", lambda: job.status().get("changes", 0) >= 2, STARTS)
    status = job.wait_phase("Complete", STARTS)
    assert (status["run"], status["step"], status["earlierSteps"]) == (2, 1_200, 40)
    assert [(run["run"], run["steps"]) for run in status["endedRuns"]] == [(1, 40)]
    assert status["repeatedSteps"] <= 1
    assert status["digest"] == reference(manifest)


def test_a_sidecar_that_never_ends_keeps_no_pod_of_a_worker_that_has(installed: Installed, start: Start) -> None:
    manifest = digits("meshed", steps=1500, pause=0.1)
    pod = manifest["spec"]["workerGroups"][0]["template"]["spec"]
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(10**6)"
    pod["containers"].append({"name": "shipper", "image": TRAINER_IMAGE, "command": ["python", "-c", stubborn]})
    pod["terminationGracePeriodSeconds"] = 300
    job = start(manifest)
    job.wait_training(2)

    def without(name: str, seconds: float) -> None:
        until(f"{name} is gone", lambda: name not in [p["metadata"]["name"] for p in job.pods("worker")], seconds)

    job.kubectl("scale", "vfj", "meshed", "--replicas=1")
    without("meshed-workers-1", 60)  # it has left by a drain; its sidecar would have had five minutes
    (worker,) = job.workers()
    for process in installed.cluster.processes(worker):
        if b"SIG_IGN" not in Path(f"/proc/{process}/cmdline").read_bytes():
            os.kill(process, signal.SIGKILL)
    without(worker["metadata"]["name"], 60)
    job.wait_training(1)
    job.go_fast()
    job.wait_phase("Complete", 240)
    until("no pod is left", lambda: not job.pods(), 60)


def test_an_orphaned_job_trains_on_and_its_name_is_free_when_its_pods_are_gone(
    installed: Installed, start: Start
) -> None:
    manifest = digits("left", steps=3000, pause=0.05)
    job = start(manifest)
    job.wait_training(2)
    pods, control = {pod["metadata"]["uid"] for pod in job.pods()}, job.control()
    job.kubectl("delete", "vfj", "left", "--cascade=orphan", "--wait=true", timeout=60)
    start(manifest)
    message = job.wait_condition("Progressing", "NameTaken", 30)["message"]
    # The orphans believe whoever controlled their job, and not the new one of that name.
    step = job.coordinator_status(control)["step"]
    until("the orphans train on", lambda: job.coordinator_status(control)["step"] > step + 20, 30)
    left = job.pods()
    assert {pod["metadata"]["uid"] for pod in left} == pods
    assert not any("deletionTimestamp" in pod["metadata"] for pod in left)
    _, command, _ = message.split("`")
    installed.cluster.kubectl(*command.split()[1:], timeout=90)
    job.wait_training(2)


def test_a_changed_template_rolls_through_the_workers_without_a_repeated_step(start: Start) -> None:
    # Longer than two workers take to start one after the other, however busy the processors are: torch alone may take a
    # minute, and 3,000 such steps are over in less than three.
    manifest = digits("digits", steps=100_000, pause=0.05)
    job = start(manifest)
    job.wait_training(2, STARTS)
    before = {pod["metadata"]["uid"] for pod in job.workers()}
    container(manifest)["env"] = [{"name": "ROLLED", "value": "1"}]
    manifest["spec"]["workerGroups"][0]["memory"] = {"device": "1Gi", "activations": "Recompute"}
    job.create(manifest)

    def rolled() -> Object | None:
        pods, status = job.workers(), job.status()
        new = all(pod["spec"]["containers"][0].get("env", [{}])[-1].get("name") == "ROLLED" for pod in pods)
        fresh = len(pods) == 2 and new and before.isdisjoint(pod["metadata"]["uid"] for pod in pods)
        # The last of the old ones still trains when it is told to go, and what a change has cost is known when the
        # first step after it is made.
        names = {pod["metadata"]["name"] for pod in pods}
        trains = {share["worker"] for share in status.get("assignment", [])} == names and status.get("changes", 0) >= 2
        return status if fresh and trains else None

    status = until("all workers are of the new template, and have made a step", rolled, 2 * STARTS)
    assert status.get("repeatedSteps", 0) == 0
    assert job.wait_training(2, STARTS).get("repeatedSteps", 0) == 0
    until("a worker tells of its plan", lambda: job.condition("FitsWithOffload").get("status") == "True", 60)
    assert "every block: recompute" in job.condition("FitsWithOffload")["message"]


def test_a_crash_in_the_users_code_fails_the_job_with_the_last_lines_of_the_traceback(start: Start) -> None:
    job = start(script("crash", CRASH, backoffLimit=1))
    status = job.wait_phase("Failed", 120)
    failed = job.condition("Failed")
    assert failed["status"] == "True"
    assert failed["reason"] == "BackoffLimitExceeded"
    assert "ValueError: the users own mistake" in failed["message"]
    assert "in the_users_own_function" in failed["message"]
    assert status["failures"]["count"] == 2  # the first one, and the one that backoffLimit allowed
    until("its coordinator is gone", lambda: not job.pods("coordinator"), 60)


def test_a_job_without_checkpoints_that_loses_all_workers_begins_anew_and_says_so(
    installed: Installed, start: Start
) -> None:
    job = start(digits("bereft", steps=100_000, pause=0.05, replicas=2))
    reached = job.wait_training(2)["step"]
    processes = [process for pod in job.workers() for process in installed.cluster.processes(pod)]
    if not processes:
        pytest.skip("it kills the workers' processes, which it can only where nodes are processes of this machine")
    for process in processes:
        with suppress(ProcessLookupError):  # it went with another one
            os.kill(process, signal.SIGKILL)
    event = until("an event tells it", lambda: next((e for e in job.events() if e["reason"] == "Restarted"), None), 90)
    print(event["message"])
    assert event["type"] == "Warning"
    assert re.match(r"0 workers → \d workers? at step [01] \(", event["message"])
    status = job.status()
    assert (status["lastChange"]["cause"], status["lastChange"]["from"]) == ("restart", 0)
    assert status["repeatedSteps"] >= reached


def test_a_worker_without_enough_memory_is_said_to_need_more(start: Start) -> None:
    manifest = script("oom", GLUTTON, backoffLimit=0, replicas=1)
    container(manifest)["resources"] = {"requests": {"memory": "64Mi"}, "limits": {"memory": "64Mi"}}
    job = start(manifest)
    job.wait_phase("Failed", 120)
    message = job.condition("Failed")["message"]
    assert "memory" in message
    assert "resources.limits.memory" in message


def test_a_worker_too_large_for_every_node_is_said_so(start: Start) -> None:
    manifest = digits("large")
    container(manifest)["resources"]["requests"]["cpu"] = "4000"
    job = start(manifest)
    condition = job.wait_condition("Progressing", "Unschedulable", 60)
    assert condition["status"] == "False"
    assert "cpu" in condition["message"].lower()
    # Nothing trains yet, so it is enough to ask for less.
    container(manifest)["resources"]["requests"]["cpu"] = "100m"
    container(manifest)["args"] = ["--steps", "50"]
    job.create(manifest)
    job.wait_phase("Complete", 180)


def test_the_second_group_takes_what_the_first_one_may_not(start: Start) -> None:
    manifest = digits("groups", steps=3000, pause=0.05, replicas=3)
    manifest["spec"]["workerGroups"][0] |= {"name": "spot", "maxReplicas": 1}
    second_group(manifest, "demand").pop("maxReplicas", None)
    job = start(manifest)
    job.wait_training(3)
    groups = [pod["metadata"]["labels"]["virtualflow.dev/worker-group"] for pod in job.workers()]
    assert sorted(groups) == ["demand", "demand", "spot"]


def test_the_second_group_steps_in_when_no_node_takes_the_first(start: Start) -> None:
    manifest = digits("fallback", steps=3000, pause=0.05)
    demand = second_group(manifest, "demand")
    assert demand["name"] == "demand"
    manifest["spec"]["workerGroups"][0]["name"] = "spot"
    manifest["spec"]["workerGroups"][0]["template"]["spec"]["nodeSelector"] = {"example.com/there-is-none": "true"}
    job = start(manifest)
    until("two workers train", lambda: job.status().get("readyReplicas") == 2, 150)
    shares = {share["worker"] for share in job.status()["assignment"]}
    assert all(name.startswith("fallback-demand-") for name in shares)


def test_an_image_that_cannot_be_had_is_said_so(start: Start) -> None:
    manifest = digits("image")
    container(manifest)["image"] = "localhost:1/no-such-image:1"
    job = start(manifest)
    condition = job.wait_condition("Progressing", "CannotStart", 90)
    assert condition["status"] == "False"
    assert "image" in condition["message"].lower()
    container(manifest)["image"] = TRAINER_IMAGE
    container(manifest)["args"] = ["--steps", "50"]
    job.create(manifest)
    job.wait_phase("Complete", 180)


def test_a_finished_job_is_removed_after_its_time_to_live(installed: Installed, start: Start) -> None:
    job = start(digits("brief", steps=20, ttlSecondsAfterFinished=3))
    job.wait_phase("Complete", 120)
    until("the job is gone", lambda: installed.cluster.get("vfj", job.namespace, "brief") is None, 30)
    until("so are its pods", lambda: not job.pods(), 60)


def test_a_job_out_of_time_fails(start: Start) -> None:
    job = start(digits("late", steps=100_000, pause=0.05, activeDeadlineSeconds=10))
    job.wait_phase("Failed", 60)
    assert job.condition("Failed")["reason"] == "DeadlineExceeded"


def test_scale_and_an_autoscaler_use_the_scale_subresource(installed: Installed, start: Start) -> None:
    job = start(digits("scaled", steps=3000, pause=0.05))
    autoscaler = {
        "apiVersion": "autoscaling/v1",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "scaled"},
        "spec": {
            "minReplicas": 3,
            "maxReplicas": 4,
            "scaleTargetRef": {"apiVersion": "virtualflow.dev/v1alpha1", "kind": "VirtualFlowJob", "name": "scaled"},
            "targetCPUUtilizationPercentage": 50,
        },
    }
    job.wait_training(2)
    path = installed.cluster.path("vfj", job.namespace, "scaled") + "/scale"
    scale = installed.cluster.request("GET", path)
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (2, 2)
    assert scale["status"]["selector"] == "virtualflow.dev/job=scaled,virtualflow.dev/role=worker"
    job.kubectl("scale", "vfj", "scaled", "--replicas=1")
    job.wait_training(1)
    job.cluster.apply(autoscaler, job.namespace)
    job.wait_training(3, 120)  # the autoscaler's minReplicas, by its controller and not by us


def test_another_operator_takes_over_within_15_seconds(installed: Installed, start: Start) -> None:
    cluster = installed.cluster
    job = start(digits("led", steps=3000, pause=0.05))
    job.wait_training(2)
    begun = time.monotonic()
    cluster.fail_over()
    seconds = time.monotonic() - begun
    job.kubectl("scale", "vfj", "led", "--replicas=3")
    until("the new leader has made a worker", lambda: len(job.workers()) == 3, 30)
    acting = time.monotonic() - begun
    print(f"another operator led after {seconds:.1f} s and had acted after {acting:.1f} s")
    assert seconds <= 15
    status = job.wait_training(3)
    assert status.get("repeatedSteps", 0) == 0


def test_a_failed_over_operator_does_no_work_twice(installed: Installed, start: Start) -> None:
    job = start(digits("once", steps=250, pause=0.05))
    job.wait_training(2)
    made = {pod["metadata"]["uid"] for pod in job.pods()}
    installed.cluster.fail_over()
    job.wait_phase("Complete", 120)
    # Events follow the status; when the workers have ended, nothing more is left to tell.
    until("the workers have ended", lambda: all(pod["status"]["phase"] == "Succeeded" for pod in job.workers()), 60)
    until("an event tells it", lambda: "Complete" in {event["reason"] for event in job.events()}, 30)
    assert {pod["metadata"]["uid"] for pod in job.pods()} <= made
    told = Counter({(event["reason"], event["message"]): event.get("count") or 1 for event in job.events()})
    assert set(told.values()) == {1}, told
    kinds = Counter(reason for reason, _ in told if reason != "Rebalanced")  # which depends on how busy the nodes are
    assert set(kinds.values()) == {1}, "of each kind one"
    assert {"WorkersCreated", "Complete"} <= kinds.keys()


@pytest.mark.parametrize("field", ["virtualNodes", "reproducibility", "optimizerPlacement"])
def test_what_the_result_depends_on_cannot_be_changed(start: Start, field: str) -> None:
    job = start(digits("fixed", steps=3000, pause=0.05))
    other: dict[str, object] = {"virtualNodes": 16, "reproducibility": "Statistical", "optimizerPlacement": "Host"}
    with pytest.raises(AssertionError, match="cannot be changed"):
        job.patch({field: other[field]})
