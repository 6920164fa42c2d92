"""The rules of the resource that the API server checks: each is broken by a case, and says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kubernetes import client as kubernetes
from resource_rules import broken_rules, defaulted, job, schema, structural_errors

from virtualflow_operator.api.job import read_spec
from virtualflow_operator.api.validation import (
    COORDINATOR_CONTAINER,
    COORDINATOR_POD,
    OPERATOR_VARIABLES,
    find_problems,
)

Spec = dict[str, Any]


def container(**fields: Any) -> Spec:
    return {"name": "trainer", "image": "trainer:1"} | fields


def group(name: str = "workers", pod: Spec | None = None, **fields: Any) -> Spec:
    return {"name": name, "template": {"spec": {"containers": [container()]} | (pod or {})}} | fields


def with_variable(name: str) -> list[Spec]:
    return [group(pod={"containers": [container(), container(name="b", env=[{"name": "A"}, {"name": name}])]})]


BELOW_LEAST = "replicas must be at least minReplicas; raise replicas or lower minReplicas."
ABOVE_MOST = "replicas must be at most maxReplicas; lower replicas or raise maxReplicas."
CROSSED = "minReplicas must be at most maxReplicas; lower minReplicas or raise maxReplicas."
TOO_MANY = "replicas must be at most virtualNodes, as a worker carries at least one; lower replicas."
TOO_MANY_PROCESSES = "Each process of a worker carries at least one of virtualNodes; lower processesPerWorker."
LEAST_TOO_MANY = "minReplicas must be at most virtualNodes, as a worker carries at least one; lower it."
MOST_TOO_MANY = "maxReplicas must be at most virtualNodes, as a worker carries at least one; lower it."
NO_EQUAL_BITS = "verify compares bits, which are not equal if reproducibility is Statistical; remove one of them."
OTHER_BITS = (
    "Other kinds of device compute other bits than a Bitwise job promises; let acrossKinds be Stay, or reproducibility "
    "Statistical."
)
WEIGHTLESS = "weight must be at least 1, as a share of nothing trains nobody; raise it."
UNWRITTEN = "Redundancy Checkpoint goes on from one when a worker is lost; add checkpoint, or let it be Peer or None."
NO_SHARES = "redundancy is about shares, and with a what of None no worker has one; remove it."
NEVER_WHOLE = "A fraction must be 1, or the first blocks are never trained; add it, or give fullEvery."
FEW_IN_GROUPS = "The worker groups must allow minReplicas workers together; raise their maxReplicas."
NOT_COORDINATOR = "A worker group cannot be called coordinator; choose another name."
NOT_YOURS = "The operator sets this environment variable; remove it from the template."
NOT_ITS_TEMPLATES = (
    "A coordinator's template sets only resources, scheduling, labels and pull secrets; remove this field."
)


def coordinator(**fields: Any) -> Spec:
    return {"coordinator": {"template": {"spec": {"containers": [fields]}}}}


RULES: dict[str, tuple[Spec, list[str]]] = {
    "nothing but worker groups": ({}, []),
    "as many replicas as virtual nodes": ({"virtualNodes": 4, "replicas": 4, "minReplicas": 4, "maxReplicas": 4}, []),
    "as few replicas as the least": ({"replicas": 3, "minReplicas": 3}, []),
    "fewer replicas than the least": ({"replicas": 2, "minReplicas": 3}, [BELOW_LEAST]),
    "the default replicas are too few": ({"minReplicas": 3}, [BELOW_LEAST]),
    "more replicas than the most": ({"replicas": 3, "maxReplicas": 2}, [ABOVE_MOST]),
    "the default replicas are too many": ({"maxReplicas": 1}, [ABOVE_MOST]),
    "least and most crossed": ({"replicas": 3, "minReplicas": 3, "maxReplicas": 2}, [ABOVE_MOST, CROSSED]),
    "least and most crossed around": (
        {"replicas": 3, "minReplicas": 4, "maxReplicas": 2},
        [BELOW_LEAST, ABOVE_MOST, CROSSED],
    ),
    "more replicas than virtual nodes": ({"virtualNodes": 4, "replicas": 5}, [TOO_MANY]),
    "one virtual node for the default replicas": ({"virtualNodes": 1}, [TOO_MANY]),
    "more than the default virtual nodes": ({"replicas": 9}, [TOO_MANY]),
    "a least above the virtual nodes": (
        {"virtualNodes": 4, "replicas": 5, "minReplicas": 5},
        [TOO_MANY, LEAST_TOO_MANY],
    ),
    "a most above the virtual nodes": ({"virtualNodes": 4, "maxReplicas": 5}, [MOST_TOO_MANY]),
    "workers of several processes": ({"replicas": 4, "maxReplicas": 4, "processesPerWorker": 2}, []),
    "more processes than virtual nodes": ({"replicas": 3, "processesPerWorker": 3}, [TOO_MANY_PROCESSES]),
    "more processes than virtual nodes at most": (
        {"replicas": 2, "maxReplicas": 3, "processesPerWorker": 3},
        [TOO_MANY_PROCESSES],
    ),
    "groups that allow the least together": (
        {"minReplicas": 2, "workerGroups": [group("a", maxReplicas=1), group("b", maxReplicas=1)]},
        [],
    ),
    "groups that allow too few": (
        {"replicas": 3, "minReplicas": 3, "workerGroups": [group("a", maxReplicas=1), group("b", maxReplicas=1)]},
        [FEW_IN_GROUPS],
    ),
    "a weight of nothing": ({"weight": 0}, [WEIGHTLESS]),
    "workers that check one another": ({"verify": {"sample": 0.01}}, []),
    "workers of a statistical job that check one another": (
        {"verify": {"sample": 0.01}, "reproducibility": "Statistical"},
        [NO_EQUAL_BITS],
    ),
    "workers of a statistical job that do not": ({"verify": {"sample": 0}, "reproducibility": "Statistical"}, []),
    "a bitwise job that stays on its kind of device": ({"elasticity": {"acrossKinds": "Stay"}}, []),
    "a bitwise job that moves": ({"elasticity": {"acrossKinds": "Move"}}, [OTHER_BITS]),
    "a bitwise job that mixes": ({"elasticity": {"acrossKinds": "Mix"}}, [OTHER_BITS]),
    "a statistical job that mixes": ({"elasticity": {"acrossKinds": "Mix"}, "reproducibility": "Statistical"}, []),
    "a pass that is whole": ({"backward": {"fractions": [0.5, 1]}}, []),
    "steps in which all passes are whole": ({"backward": {"fractions": [0.5], "fullEvery": 4}}, []),
    "no pass that is whole": ({"backward": {"fractions": [0.5]}}, [f"backward: {NEVER_WHOLE}"]),
    "shares of nobody else": ({"sharding": {"what": "Parameters", "redundancy": "None"}}, []),
    "nothing divided": ({"sharding": {"what": "None"}}, []),
    "shares in checkpoints": (
        {"sharding": {"what": "Optimizer", "redundancy": "Checkpoint"}, "checkpoint": {"volume": {"emptyDir": {}}}},
        [],
    ),
    "shares in checkpoints that nobody writes": (
        {"sharding": {"what": "Parameters", "redundancy": "Checkpoint"}},
        [UNWRITTEN],
    ),
    "redundancy of nothing": (
        {"sharding": {"what": "None", "redundancy": "Peer"}},
        [f"sharding: {NO_SHARES}"],
    ),
    "a place in a queue": ({"queue": "shared", "weight": 1, "priority": -7}, []),
    "a group switched off": ({"workerGroups": [group(maxReplicas=0)]}, [FEW_IN_GROUPS]),
    "one of the groups has no limit": (
        {"replicas": 3, "minReplicas": 3, "workerGroups": [group("a", maxReplicas=1), group("b")]},
        [],
    ),
    "the group of the coordinator": (
        {"workerGroups": [group("a"), group("coordinator")]},
        [f"workerGroups[1].name: {NOT_COORDINATOR}"],
    ),
    "a group beside the coordinator": ({"workerGroups": [group("coordinators")]}, []),
    **{
        f"the operator's {name}": (
            {"workerGroups": with_variable(name)},
            [f"workerGroups[0].template.spec.containers[1].env[1].name: {NOT_YOURS}"],
        )
        for name in (*OPERATOR_VARIABLES, "VIRTUALFLOW_TOKEN_2", "VIRTUALFLOW_CHECKPOINT_STEPS")
    },
    "a coordinator with more memory": (coordinator(resources={"limits": {"memory": "1Gi"}}), []),
    "a coordinator's own environment": (
        coordinator(env=[{"name": "PYTHONWARNINGS", "value": "all:0:antigravity.x:0:0"}]),
        [f"coordinator.template.spec.containers[0].env: {NOT_ITS_TEMPLATES}"],
    ),
    **{
        f"the user's {name}": ({"workerGroups": with_variable(name)}, [])
        for name in ("VIRTUALFLOW_THREADS", "VIRTUALFLOW_AUDIT_DIR", "virtualflow_token", "MY_VIRTUALFLOW_TOKEN")
    },
}


@pytest.mark.parametrize(("spec", "sentences"), RULES.values(), ids=RULES.keys())
def test_a_rule_of_the_schema_says_what_is_wrong_with_a_job(spec: Spec, sentences: list[str]) -> None:
    document = job(**spec)
    assert structural_errors(defaulted(document)) == []
    by_rules = [f"{rule.path}: {rule.message}".removeprefix("spec: ") for rule in broken_rules(document)]
    assert [sentence.removeprefix("spec.") for sentence in by_rules] == sentences


PARTIAL = {"fractions": [1.0, 0.5]}
FIXED = {
    "virtualNodes": "virtualNodes cannot be changed, because the result depends on it; create a new job.",
    "reproducibility": "reproducibility cannot be changed, because the result depends on it; create a new job.",
    "managedBy": "managedBy cannot be changed; create a new job for the other controller.",
    "optimizerPlacement": ("optimizerPlacement cannot be changed, because the result depends on it; create a new job."),
    "backward": "backward cannot be changed, because the result depends on it; create a new job.",
    "sharding": "sharding cannot be changed, because all workers must divide alike; create a new job.",
    "verify": "verify cannot be changed, because all workers must check the same; create a new job.",
}
CHANGES: dict[str, tuple[Spec, Spec, list[str]]] = {
    "nothing": ({}, {}, []),
    "replicas, least and most": ({}, {"replicas": 3, "minReplicas": 2, "maxReplicas": 4}, []),
    "the template": ({}, {"workerGroups": [group(pod={"nodeSelector": {"a": "b"}})]}, []),
    "all worker groups": ({}, {"workerGroups": [group("others")]}, []),
    "suspend": ({}, {"suspend": True}, []),
    "memory given": ({}, {"workerGroups": [group(memory={"device": "24Gi"})]}, []),
    "other memory": (
        {"workerGroups": [group(memory={"device": "24Gi"})]},
        {"workerGroups": [group(memory={"device": "16Gi", "activations": "Swap"})]},
        [],
    ),
    "the same place of the optimizer": ({"optimizerPlacement": "Host"}, {"optimizerPlacement": "Host"}, []),
    "another place of the optimizer": (
        {"optimizerPlacement": "Host"},
        {"optimizerPlacement": "Device"},
        ["optimizerPlacement"],
    ),
    "a place of the optimizer given": ({}, {"optimizerPlacement": "Device"}, ["optimizerPlacement"]),
    "a place of the optimizer taken away": ({"optimizerPlacement": "Host"}, {}, ["optimizerPlacement"]),
    "the same backward passes": ({"backward": PARTIAL}, {"backward": PARTIAL | {"rotate": True}}, []),
    "other backward passes": ({"backward": PARTIAL}, {"backward": {"fractions": [1.0, 0.25]}}, ["backward"]),
    "backward passes that do not rotate": (
        {"backward": PARTIAL},
        {"backward": PARTIAL | {"rotate": False}},
        ["backward"],
    ),
    "short backward passes given": ({}, {"backward": PARTIAL}, ["backward"]),
    "short backward passes taken away": ({"backward": PARTIAL}, {}, ["backward"]),
    "the same division": ({"sharding": {"what": "Parameters"}}, {"sharding": {"what": "Parameters"}}, []),
    "another division": ({"sharding": {"what": "Parameters"}}, {"sharding": {"what": "Optimizer"}}, ["sharding"]),
    "other redundancy": (
        {"sharding": {"what": "Parameters"}},
        {"sharding": {"what": "Parameters", "redundancy": "None"}},
        ["sharding"],
    ),
    "a division given": ({}, {"sharding": {"what": "Parameters"}}, ["sharding"]),
    "a division taken away": ({"sharding": {"what": "Parameters"}}, {}, ["sharding"]),
    "the default written out": ({}, {"virtualNodes": 8, "reproducibility": "Bitwise"}, []),
    "more virtual nodes": ({"virtualNodes": 8}, {"virtualNodes": 16}, ["virtualNodes"]),
    "virtual nodes back to the default": ({"virtualNodes": 4}, {}, ["virtualNodes"]),
    "another reproducibility": ({}, {"reproducibility": "Statistical"}, ["reproducibility"]),
    "both at once": ({}, {"virtualNodes": 4, "reproducibility": "Statistical"}, ["virtualNodes", "reproducibility"]),
    "a controller given": ({}, {"managedBy": "example.com/other"}, ["managedBy"]),
    "a controller taken away": ({"managedBy": "example.com/other"}, {}, ["managedBy"]),
    "another controller": ({"managedBy": "example.com/other"}, {"managedBy": "example.com/third"}, ["managedBy"]),
    "checks begun": ({}, {"verify": {"sample": 0.5}}, ["verify"]),
    "checks ended": ({"verify": {"sample": 0.5}}, {}, ["verify"]),
    "more checks": ({"verify": {"sample": 0.5}}, {"verify": {"sample": 1}}, ["verify"]),
    "as many checks": ({"verify": {"sample": 1}}, {"verify": {"sample": 1.0}}, []),
    "the same controller": ({"managedBy": "example.com/other"}, {"managedBy": "example.com/other"}, []),
}


@pytest.mark.parametrize(("old", "new", "fields"), CHANGES.values(), ids=CHANGES.keys())
def test_a_rule_of_the_schema_says_what_cannot_be_changed(old: Spec, new: Spec, fields: list[str]) -> None:
    assert {rule.message for rule in broken_rules(job(**new), job(**old))} == {FIXED[field] for field in fields}


def of_type(kind: str) -> Any:
    """A value of a type of the Kubernetes client's models."""
    simple: dict[str, Any] = {"str": "a", "bool": True, "int": 1, "List[str]": ["a"]}
    return simple.get(kind, [{}] if kind.startswith("List") else {})


def fields_of(model: Any) -> dict[str, Any]:
    """Each field of a model, with some value."""
    return {model.attribute_map[name]: of_type(kind) for name, kind in model.openapi_types.items()}


@pytest.mark.parametrize(
    ("model", "allowed", "whole"),
    [
        (kubernetes.V1PodSpec, COORDINATOR_POD, lambda spec: {"coordinator": {"template": {"spec": spec}}}),
        (kubernetes.V1Container, COORDINATOR_CONTAINER, lambda fields: coordinator(**fields)),
    ],
    ids=["pod", "container"],
)
def test_schema_and_operator_allow_the_same_few_fields_of_all_that_a_coordinators_pod_has(
    model: Any, allowed: tuple[str, ...], whole: Callable[[Spec], Spec]
) -> None:
    fields = fields_of(model)
    assert set(allowed) <= fields.keys()
    for field, value in fields.items():
        body = job(**whole({field: value}))
        assert structural_errors(body) == []
        in_schema = [f"{rule.path.removeprefix('spec.')}: {rule.message}" for rule in broken_rules(body)]
        assert find_problems(read_spec(body["spec"])) == in_schema, field
        assert (field in allowed) == (not in_schema), field


def test_every_rule_of_the_schema_is_broken_by_a_case_of_the_tables() -> None:
    def messages(node: Any) -> set[str]:
        if isinstance(node, list):
            return set().union(*map(messages, node))
        if not isinstance(node, dict):
            return set()
        own = {rule["message"] for rule in node.get("x-kubernetes-validations", ())}
        return own.union(*map(messages, node.values()))

    tried = {sentence.split(": ")[-1] for _, sentences in RULES.values() for sentence in sentences}
    assert messages(schema()) == tried | {FIXED[field] for *_, fields in CHANGES.values() for field in fields}
