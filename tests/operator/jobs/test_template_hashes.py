"""Which changes of a job replace its pods: those of what pods are made from, and never the operator's own."""

from __future__ import annotations

from typing import Any

import pytest
from scenes import body, group

from virtualflow_operator.api import Job
from virtualflow_operator.api.objects import read_job
from virtualflow_operator.jobs.manifests import coordinator_hash, hash_templates, template_hash

Spec = dict[str, Any]
CLAIM = {"persistentVolumeClaim": {"claimName": "kept"}}


def job_of(**spec: Any) -> Job:
    return read_job(body(**spec))


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        pytest.param({"workerGroups": [group(image="trainer:2")]}, True, id="an image"),
        pytest.param({"checkpoint": {"volume": CLAIM}}, True, id="a checkpoint"),
        pytest.param({"workerGroups": [group(memory={"device": "24Gi"})]}, True, id="memory"),
        pytest.param({"processesPerWorker": 2}, True, id="processes of a worker"),
        pytest.param({"processesPerWorker": 1}, False, id="one process, written out"),
        pytest.param({"replicas": 7, "minReplicas": 2}, False, id="the number of workers"),
        pytest.param({"workerGroups": [group(maxReplicas=4)]}, False, id="the size of the group"),
        pytest.param({"elasticity": {"scaleDownDelaySeconds": 9}}, False, id="a delay"),
        pytest.param({"suspend": True, "backoffLimit": 9}, False, id="the rest"),
    ],
)
def test_only_what_a_pod_is_made_from_changes_its_hash(change: Spec, differs: bool) -> None:
    before, after = job_of(), job_of(**change)
    old, new = (template_hash(job, job.spec.worker_groups[0]) for job in (before, after))
    assert (old != new) == differs
    assert (hash_templates(before).all != hash_templates(after).all) == differs


@pytest.mark.parametrize(
    ("spec", "template", "coordinator"),
    [
        pytest.param({}, "dc6a62f2f42b8b24", "a9d53ef5d5f1e395", id="a plain job"),
        pytest.param(
            {
                "workerGroups": [group(pod={"priorityClassName": "high"}, profile="/p.json", deviceType="T4")],
                "checkpoint": {"volume": CLAIM, "directory": "d", "everySteps": 9, "everySeconds": 60, "keep": 3},
                "coordinator": {"template": {"spec": {"priorityClassName": "high"}}},
                "elasticity": {"heartbeatLimitSeconds": 9, "drainGraceSeconds": 9},
            },
            "55e2fc8d69a29964",
            "7b41ffd5f0a73350",
            id="one with all that is hashed",
        ),
    ],
)
def test_hashes_are_those_of_every_version_before(spec: Spec, template: str, coordinator: str) -> None:
    """An operator that computes others replaces every pod of every job: these are never to be changed."""
    job = job_of(**spec)
    found = template_hash(job, job.spec.worker_groups[0]), coordinator_hash(job)
    assert found == (template, coordinator)


def test_a_field_that_a_newer_schema_gives_every_job_changes_no_hash() -> None:
    volume = {"volume": CLAIM, "keep": 3}
    before, after = job_of(checkpoint=volume), job_of(checkpoint=volume | {"addedLater": 7})
    assert hash_templates(before).all == hash_templates(after).all


def test_a_coordinator_is_not_replaced_because_workers_come_and_go() -> None:
    assert coordinator_hash(job_of(replicas=3)) == coordinator_hash(job_of(minReplicas=2))
