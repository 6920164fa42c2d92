"""What tools and people wait for: Helm by kstatus, and a job that cannot begin says why."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import CommandFailed, Object, until
from cluster_jobs import Job, container, digits, script
from installation import Installed
from slots import add_queue, set_slots, take_slot

from kstatus import kstatus
from virtualflow.cluster.plugin import main

FULL = "e2e-full"
CRASHES = """
import os
import time

import torch
import virtualflow as vf

model = torch.nn.Linear(2, 1)
data = torch.utils.data.TensorDataset(torch.zeros(64, 2))
with vf.elastic(model, torch.optim.SGD(model.parameters(), lr=0.1), data, batch_size=8, steps=10_000) as run:
    for step in run:
        for (x,) in step:
            model(x).sum().backward()
        time.sleep(0.05)
        if os.path.exists("/tmp/end"):
            LAST
"""
"""A script that LAST ends when the test has seen steps in the status."""
WAITING = take_slot(digits("waits", queue=FULL, virtualNodes=64, replicas=64, minReplicas=64, maxReplicas=64))


@pytest.fixture(scope="module")
def full(installed: Installed) -> Iterator[None]:
    """A queue with fewer devices than the job's ``minReplicas``."""
    for node in installed.cluster.nodes():
        set_slots(installed.cluster, node)
    add_queue(installed.cluster, FULL)
    yield
    installed.cluster.kubectl("delete", "vfq", FULL, check=False)


def helm_install(installed: Installed, folder: Path, namespace: str, job: Object) -> None:
    """Install or upgrade to a chart of that one job with ``--wait``, and print how long that takes."""
    chart, name = folder / job["metadata"]["name"], job["metadata"]["name"]
    (chart / "templates").mkdir(parents=True, exist_ok=True)
    (chart / "Chart.yaml").write_text(json.dumps({"apiVersion": "v2", "name": "job", "version": "1.0.0"}))
    (chart / "templates" / "job.yaml").write_text(json.dumps(job))
    begun = time.monotonic()
    try:
        installed.cluster.helm("upgrade", "--install", name, str(chart), "-n", namespace, "--wait", "--timeout=60s")
    finally:
        print(f"helm --wait for the job {name}: {time.monotonic() - begun:.1f} s")


@pytest.mark.parametrize(
    ("job", "phase"),
    [
        pytest.param(digits("trains", steps=3000, pause=0.1), "Running", id="trains"),
        pytest.param(digits("suspended", suspend=True), "Suspended", id="is suspended"),
        pytest.param(WAITING, "Pending", id="waits in its queue"),
    ],
)
@pytest.mark.usefixtures("full")
def test_helm_waits_for_a_job(installed: Installed, namespace: str, tmp_path: Path, job: Object, phase: str) -> None:
    helm_install(installed, tmp_path, namespace, job)
    assert Job(installed.cluster, namespace, job["metadata"]["name"]).status()["phase"] == phase


def test_helm_fails_with_a_job_that_fails_and_goes_on_after_one_that_is_complete(
    installed: Installed, namespace: str, tmp_path: Path
) -> None:
    broken = script("broken", "raise ValueError('no')", backoffLimit=0)
    with pytest.raises(CommandFailed):
        helm_install(installed, tmp_path, namespace, broken)
    short, complete = digits("complete", steps=5), Job(installed.cluster, namespace, "complete")
    helm_install(installed, tmp_path, namespace, short)
    complete.wait_phase("Complete", 120)
    helm_install(installed, tmp_path, namespace, short)
    for name, expected in (("broken", "Failed"), ("complete", "Current")):
        assert kstatus(installed.cluster.get("vfj", namespace, name) or {}) == expected
    said = complete.kubectl("wait", "--for=condition=Complete", "vfj/complete", "--timeout=10s")
    assert "condition met" in said


def test_a_misspelt_field_and_a_volume_that_is_not_there_are_named(
    start: Callable[[Object], Job],
) -> None:
    misspelt = digits("misspelt")
    container(misspelt)["resourcess"] = {"limits": {"nvidia.com/gpu": 1}}
    stuck = digits("stuck", elasticity={"startupDeadlineSeconds": 75})
    pod = stuck["spec"]["workerGroups"][0]["template"]["spec"]
    pod["volumes"].append({"name": "data", "configMap": {"name": "not-there"}})
    container(stuck)["volumeMounts"].append({"name": "data", "mountPath": "/data"})
    jobs = start(misspelt), start(stuck)
    said = jobs[0].wait_condition("Progressing", "TemplateRejected", 30)["message"]
    assert 'unknown field "spec.containers[0].resourcess"' in said
    assert [found["metadata"]["name"] for found in jobs[0].pods()] == []
    said = jobs[1].wait_condition("Degraded", "CannotStart", 60)["message"]
    assert "FailedMount" in said
    assert "not-there" in said
    failed = jobs[1].wait_condition("Failed", "StartupDeadlineExceeded", 90)["message"]
    assert "not-there" in failed


@pytest.mark.parametrize(
    ("last", "behind", "told"),
    [
        pytest.param(
            "os._exit(3)",
            "| tee /tmp/log",
            ("it ended with exit code 0 before the training was complete, after ", "may have hidden how"),
            id="behind a pipe",
        ),
        pytest.param(
            "os.abort()",
            "; exit $?",
            ("ended with exit code 134 (SIGABRT):", "\nAborted"),
            id="behind a shell",
        ),
    ],
)
def test_the_end_of_a_script_is_told_whatever_stands_before_it(
    start: Callable[[Object], Job], last: str, behind: str, told: tuple[str, ...]
) -> None:
    job = script("wrapped", "", backoffLimit=0, replicas=1)
    words = f'python -X faulthandler -c "$SCRIPT" 2>&1 {behind}'
    container(job).update(
        {"command": ["sh", "-c", words], "env": [{"name": "SCRIPT", "value": CRASHES.replace("LAST", last)}]}
    )
    made = start(job)
    until("the operator has heard of steps", lambda: made.status().get("step"), 240)
    (pod,) = made.workers()
    made.kubectl("exec", pod["metadata"]["name"], "--", "touch", "/tmp/end")
    made.wait_phase("Failed", 120)
    message = made.condition("Failed")["message"]
    # Kubelets that share a machine tidy up each other's logs: then one of them says so in place of the log's end.
    message = message.replace("Error on reading termination message from logs", "Aborted")
    assert all(part in message for part in told), message


def test_an_event_names_the_workers_that_a_quota_let_be_made_and_no_other(
    installed: Installed, start: Callable[[Object], Job], namespace: str
) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "two"}, "spec": {"hard": {"pods": "2"}}}
    installed.cluster.apply(quota, namespace)
    job = start(digits("rationed", steps=3000, pause=0.1))
    job.wait_training(1, 240)
    until("the event is there", lambda: [e for e in job.events() if e["reason"] == "WorkersCreated"], 30)
    made = [event["message"] for event in job.events() if event["reason"] == "WorkersCreated"]
    assert made == [f"created {job.workers()[0]['metadata']['name']}"]


def test_a_suspension_that_loses_a_training_is_asked_for_and_said(
    installed: Installed, start: Callable[[Object], Job], capsys: pytest.CaptureFixture[str]
) -> None:
    job = start(digits("unsaved", steps=3000, pause=0.1))
    job.wait_training(2, 240)
    where = ["--kubeconfig", installed.cluster.kubeconfig, "-n", job.namespace, "unsaved"]
    assert main(["suspend", *where]) != 0
    assert "has no spec.checkpoint: a suspension loses " in capsys.readouterr().err
    assert not job.status()["phase"].startswith("Suspend")
    assert main(["suspend", "--force", *where]) == 0
    job.wait_phase("Suspended", 120)
    assert "the training is lost, " in job.condition("Suspended")["message"]


def test_a_deleted_job_that_a_finalizer_holds_is_over_and_has_no_series(
    installed: Installed, start: Callable[[Object], Job]
) -> None:
    job = start(digits("held", steps=3000, pause=0.1))
    job.wait_training(2, 240)

    def series() -> float:
        return installed.cluster.metrics().total("virtualflow_job_phase", job_namespace=job.namespace, job_name="held")

    until("the job's phase is a series", lambda: series() == 1, 30)
    body = json.dumps({"metadata": {"finalizers": ["example.com/billing"]}})
    job.kubectl("patch", "vfj", "held", "--type=merge", "-p", body)
    try:
        job.kubectl("delete", "vfj", "held", "--wait=false")
        assert job.wait_condition("Failed", "Deleted", 60)["status"] == "True"
        until("its series are gone", lambda: series() == 0, 30)
        until("its pods are gone", lambda: not job.pods(), 90)
    finally:
        job.kubectl("patch", "vfj", "held", "--type=merge", "-p", '{"metadata": {"finalizers": null}}')
