"""Which jobs the CustomResourceDefinition accepts, where it refuses others, and what it fills in."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from resource_rules import ROOT, broken_rules, defaulted, job, structural_errors

from virtualflow_operator.api.job import read_spec
from virtualflow_operator.api.validation import find_problems


def template(**container: Any) -> list[dict[str, Any]]:
    whole = {"name": "trainer", "image": "trainer:1"} | container
    present = {key: value for key, value in whole.items() if value is not None}
    return [{"name": "workers", "template": {"spec": {"containers": [present]}}}]


VALID = {
    "only worker groups": {},
    "the smallest numbers": {"virtualNodes": 1, "replicas": 1, "minReplicas": 1, "maxReplicas": 1, "backoffLimit": 0},
    "the largest numbers": {"virtualNodes": 65_536, "replicas": 4_096, "minReplicas": 4_096, "maxReplicas": 4_096},
    "an accelerator as a number": {"workerGroups": template(resources={"limits": {"nvidia.com/gpu": 1}})},
    "a variable of the user's": {"workerGroups": template(env=[{"name": "VIRTUALFLOW_THREADS", "value": "2"}])},
    "a checkpoint with its volume only": {"checkpoint": {"volume": {"persistentVolumeClaim": {"claimName": "c"}}}},
    "a checkpoint directory": {"checkpoint": {"volume": {"emptyDir": {}}, "directory": "team-a/digits_1.2"}},
    "no startup grace": {"elasticity": {"startupGraceSeconds": 0}},
    "another controller": {"managedBy": "kueue.x-k8s.io/multikueue"},
    "a place in a queue": {"queue": "shared-gpus", "priority": -5, "weight": 3},
    "a job that stops growing": {"elasticity": {"minEfficiency": 60, "minReplicasOn": "OnDemand"}},
    "workers that check one another": {"verify": {"sample": 0.01}},
    "workers that check one another in each step": {"verify": {"sample": 1}},
    "a group with a budget of memory": {"workerGroups": [template()[0] | {"memory": {"device": "24Gi"}}]},
    "a group with all of one": {
        "workerGroups": [template()[0] | {"memory": {"device": "1.5G", "host": "96Gi", "activations": "Swap"}}]
    },
    "an optimizer on the host": {"optimizerPlacement": "Host"},
    "short backward passes": {"backward": {"fractions": [1, 0.5]}},
    "all of them": {"backward": {"fractions": [0.5, 0.25], "rotate": False, "scale": "Sum", "fullEvery": 4}},
    "divided parameters": {"sharding": {"what": "Parameters"}},
    "all of them with nobody else": {"sharding": {"what": "Optimizer", "redundancy": "None"}},
    "resources of the coordinator": {"coordinator": {"template": {"spec": {"nodeSelector": {"a": "b"}}}}},
}

INVALID = {
    "no worker groups": ({"workerGroups": []}, "spec.workerGroups"),
    "too many worker groups": ({"workerGroups": template() * 17}, "spec.workerGroups"),
    "a missing list of groups": ({"workerGroups": None}, "spec"),
    "no virtual nodes": ({"virtualNodes": 0}, "spec.virtualNodes"),
    "too many virtual nodes": ({"virtualNodes": 65_537}, "spec.virtualNodes"),
    "virtual nodes in words": ({"virtualNodes": "eight"}, "spec.virtualNodes"),
    "no replicas": ({"replicas": 0}, "spec.replicas"),
    "half a replica": ({"replicas": 1.5}, "spec.replicas"),
    "too many replicas": ({"replicas": 4_097}, "spec.replicas"),
    "a huge number": ({"replicas": 10**30}, "spec.replicas"),
    "no least replicas": ({"minReplicas": 0}, "spec.minReplicas"),
    "no most replicas": ({"maxReplicas": 0}, "spec.maxReplicas"),
    "another reproducibility": ({"reproducibility": "bitwise"}, "spec.reproducibility"),
    "a queue in capitals": ({"queue": "Shared"}, "spec.queue"),
    "a negative weight": ({"weight": -1}, "spec.weight"),
    "an efficiency beyond all": ({"elasticity": {"minEfficiency": 101}}, "spec.elasticity.minEfficiency"),
    "a ground of its own": ({"elasticity": {"minReplicasOn": "Spot"}}, "spec.elasticity.minReplicasOn"),
    "suspend in words": ({"suspend": "yes"}, "spec.suspend"),
    "checks in more than each step": ({"verify": {"sample": 1.5}}, "spec.verify.sample"),
    "checks of no number": ({"verify": {}}, "spec.verify"),
    "a negative back-off limit": ({"backoffLimit": -1}, "spec.backoffLimit"),
    "a deadline of 0": ({"activeDeadlineSeconds": 0}, "spec.activeDeadlineSeconds"),
    "a negative time to live": ({"ttlSecondsAfterFinished": -1}, "spec.ttlSecondsAfterFinished"),
    "a long controller": ({"managedBy": "x" * 64}, "spec.managedBy"),
    "no heartbeats": ({"elasticity": {"heartbeatLimitSeconds": 0}}, "spec.elasticity.heartbeatLimitSeconds"),
    "a drain of two days": ({"elasticity": {"drainGraceSeconds": 172_800}}, "spec.elasticity.drainGraceSeconds"),
    "a checkpoint without a volume": ({"checkpoint": {"keep": 1}}, "spec.checkpoint"),
    "a volume of two kinds": ({"checkpoint": {"volume": {"emptyDir": {}, "nfs": {}}}}, "spec.checkpoint.volume"),
    "a volume of no kind": ({"checkpoint": {"volume": {}}}, "spec.checkpoint.volume"),
    "a way out of the volume": (
        {"checkpoint": {"volume": {"emptyDir": {}}, "directory": "a/../../b"}},
        "spec.checkpoint.directory",
    ),
    "an absolute directory": (
        {"checkpoint": {"volume": {"emptyDir": {}}, "directory": "/etc"}},
        "spec.checkpoint.directory",
    ),
    "checkpoints never kept": (
        {"checkpoint": {"volume": {"emptyDir": {}}, "keep": 0}},
        "spec.checkpoint.keep",
    ),
    "a group without a name": ({"workerGroups": [{"template": template()[0]["template"]}]}, "spec.workerGroups[0]"),
    "a long group name": ({"workerGroups": [template()[0] | {"name": "x" * 21}]}, "spec.workerGroups[0].name"),
    "a group in capitals": ({"workerGroups": [template()[0] | {"name": "GPU"}]}, "spec.workerGroups[0].name"),
    "a negative group": (
        {"workerGroups": [template()[0] | {"maxReplicas": -1}]},
        "spec.workerGroups[0].maxReplicas",
    ),
    "a profile beside a secret": (
        {"workerGroups": [template()[0] | {"profile": "/profiles/../secrets"}]},
        "spec.workerGroups[0].profile",
    ),
    "a profile elsewhere": (
        {"workerGroups": [template()[0] | {"profile": "../secrets"}]},
        "spec.workerGroups[0].profile",
    ),
    **{
        f"memory of {size!r}": (
            {"workerGroups": [template()[0] | {"memory": {"device": size}}]},
            "spec.workerGroups[0].memory.device",
        )
        for size in ("", "0", "0Gi", "-1Gi", "24GB", "24gi", "24Ei", "24m", "much", "1.Gi", 24)
    },
    "memory of the host alone": (
        {"workerGroups": [template()[0] | {"memory": {"host": "96Gi"}}]},
        "spec.workerGroups[0].memory",
    ),
    "activations in lower case": (
        {"workerGroups": [template()[0] | {"memory": {"device": "24Gi", "activations": "swap"}}]},
        "spec.workerGroups[0].memory.activations",
    ),
    "an optimizer elsewhere": ({"optimizerPlacement": "Disk"}, "spec.optimizerPlacement"),
    "backward passes of no length": ({"backward": {"fractions": [1, 0]}}, "spec.backward.fractions[1]"),
    "backward passes beyond all": ({"backward": {"fractions": [1.5]}}, "spec.backward.fractions[0]"),
    "no classes of passes": ({"backward": {"fractions": []}}, "spec.backward.fractions"),
    "backward passes without a word": ({"backward": {}}, "spec.backward"),
    "another scale": ({"backward": {"fractions": [1], "scale": "mean"}}, "spec.backward.scale"),
    "whole passes never": ({"backward": {"fractions": [0.5], "fullEvery": 0}}, "spec.backward.fullEvery"),
    "something else divided": ({"sharding": {"what": "Gradients"}}, "spec.sharding.what"),
    "redundancy alone": ({"sharding": {"redundancy": "Peer"}}, "spec.sharding"),
    "redundancy in lower case": (
        {"sharding": {"what": "Parameters", "redundancy": "peer"}},
        "spec.sharding.redundancy",
    ),
    "a template without containers": (
        {"workerGroups": [{"name": "workers", "template": {"spec": {"containers": []}}}]},
        "spec.workerGroups[0].template.spec.containers",
    ),
    "a container without an image": (
        {"workerGroups": template(image=None)},
        "spec.workerGroups[0].template.spec.containers[0]",
    ),
    "a container without a name": (
        {"workerGroups": template(name=None)},
        "spec.workerGroups[0].template.spec.containers[0]",
    ),
    "an image that is a number": (
        {"workerGroups": template(image=1)},
        "spec.workerGroups[0].template.spec.containers[0].image",
    ),
    "a label that is a number": (
        {
            "workerGroups": [
                {"name": "workers", "template": {**template()[0]["template"], "metadata": {"labels": {"a": 1}}}}
            ]
        },
        "spec.workerGroups[0].template.metadata.labels.a",
    ),
    "a coordinator with a second container": (
        {"coordinator": {"template": {"spec": {"containers": [{}, {"name": "b", "image": "b:1"}]}}}},
        "spec.coordinator.template.spec.containers",
    ),
    "workers that restart": (
        {
            "workerGroups": [
                {"name": "w", "template": {"spec": {**template()[0]["template"]["spec"], "restartPolicy": "Always"}}}
            ]
        },
        "spec.workerGroups[0].template.spec.restartPolicy",
    ),
}


@pytest.mark.parametrize("spec", VALID.values(), ids=VALID.keys())
def test_a_valid_job_is_accepted_and_can_be_read(spec: dict[str, Any]) -> None:
    document = defaulted(job(**spec))
    assert structural_errors(document) == []
    assert broken_rules(document) == []
    assert find_problems(read_spec(document["spec"])) == []
    assert read_spec(document["spec"]).worker_groups[0].name == "workers"


@pytest.mark.parametrize(("spec", "path"), INVALID.values(), ids=INVALID.keys())
def test_an_invalid_job_is_refused_at_the_right_place(spec: dict[str, Any], path: str) -> None:
    assert [where for where, _ in structural_errors(defaulted(job(**spec)))] == [path]


@pytest.mark.parametrize("name", ["", "Digits", "1digits", "-a", "a-", "a.b", "a_b", "x" * 41])
def test_a_name_that_children_could_not_bear_is_refused(name: str) -> None:
    assert {where for where, _ in structural_errors(job(name))} == {"metadata.name"}


def test_the_schema_fills_in_all_defaults() -> None:
    volume = {"emptyDir": {}}
    spec = defaulted(job(checkpoint={"volume": volume}))["spec"]
    del spec["workerGroups"]
    assert spec == {
        "virtualNodes": 8,
        "reproducibility": "Bitwise",
        "replicas": 2,
        "minReplicas": 1,
        "processesPerWorker": 1,
        "elasticity": {
            "drainGraceSeconds": 30,
            "startupGraceSeconds": 30,
            "scaleDownDelaySeconds": 0,
            "heartbeatLimitSeconds": 5,
            "minEfficiency": 0,
            "minReplicasOn": "Any",
        },
        "priority": 0,
        "weight": 1,
        "checkpoint": {"volume": volume, "everySeconds": 60, "keep": 3, "memory": False, "timeoutSeconds": 300},
        "suspend": False,
        "onNonFinite": "Continue",
        "backoffLimit": 3,
    }


EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.yaml")) if "VirtualFlowJob" in path.read_text("utf-8")]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_valid_jobs(path: Any) -> None:
    document = defaulted(yaml.safe_load(path.read_text(encoding="utf-8")))
    assert structural_errors(document) == []
    assert broken_rules(document) == []
    assert find_problems(read_spec(document["spec"])) == []
