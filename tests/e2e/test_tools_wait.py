"""What tools and people wait for: Helm by kstatus, and a job that cannot begin says why."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import CommandFailed, Object
from cluster_jobs import Job, container, digits, script
from installation import Installed
from slots import add_queue, set_slots, take_slot

from kstatus import kstatus

FULL = "e2e-full"
WAITING = take_slot(digits("waits", queue=FULL, virtualNodes=64, replicas=64, minReplicas=64, maxReplicas=64))


@pytest.fixture(scope="module")
def full(installed: Installed) -> Iterator[None]:
    """A queue with fewer devices than the job's ``minReplicas``."""
    for node in installed.cluster.nodes():
        set_slots(installed.cluster, node)
    add_queue(installed.cluster, FULL)
    yield
    installed.cluster.kubectl("delete", "vfq", FULL, check=False)


def helm_install(installed: Installed, folder: Path, namespace: str, job: Object) -> float:
    """Install a chart of that one job with ``--wait``; the seconds that it took."""
    (folder / "templates").mkdir()
    (folder / "Chart.yaml").write_text(json.dumps({"apiVersion": "v2", "name": "job", "version": "1.0.0"}))
    (folder / "templates" / "job.yaml").write_text(json.dumps(job))
    begun = time.monotonic()
    name = job["metadata"]["name"]
    installed.cluster.helm("install", name, str(folder), "-n", namespace, "--wait", "--timeout=60s")
    return time.monotonic() - begun


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
    seconds = helm_install(installed, tmp_path, namespace, job)
    found = Job(installed.cluster, namespace, job["metadata"]["name"])
    print(f"helm install --wait of a job that is {phase}: {seconds:.1f} s")
    assert found.status()["phase"] == phase


def test_a_job_that_fails_is_failed_and_one_that_is_complete_is_current(
    installed: Installed, start: Callable[[Object], Job], namespace: str, tmp_path: Path
) -> None:
    broken = script("broken", "raise ValueError('no')", backoffLimit=0)
    with pytest.raises(CommandFailed):
        helm_install(installed, tmp_path, namespace, broken)
    complete = start(digits("complete", steps=5))
    complete.wait_phase("Complete", 120)
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
