"""The rules of the resource: the operator's and those of the API server are the same, sentence by sentence."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from resource_rules import broken_rules, crd, defaulted, job, schema, structural_errors

from virtualflow_operator.constants import CHECKPOINT_VOLUME
from virtualflow_operator.validation import (
    FIXED,
    MAX_DEPTH,
    MAX_TEMPLATE,
    OPERATOR_VARIABLES,
    immutable_changes,
    validate,
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
LEAST_TOO_MANY = "minReplicas must be at most virtualNodes, as a worker carries at least one; lower it."
MOST_TOO_MANY = "maxReplicas must be at most virtualNodes, as a worker carries at least one; lower it."
WEIGHTLESS = "weight must be at least 1, as a share of nothing trains nobody; raise it."
FEW_IN_GROUPS = "The worker groups must allow minReplicas workers together; raise their maxReplicas."
NOT_COORDINATOR = "A worker group cannot be called coordinator; choose another name."
NOT_YOURS = "The operator sets this environment variable; remove it from the template."

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
    "groups that allow the least together": (
        {"minReplicas": 2, "workerGroups": [group("a", maxReplicas=1), group("b", maxReplicas=1)]},
        [],
    ),
    "groups that allow too few": (
        {"replicas": 3, "minReplicas": 3, "workerGroups": [group("a", maxReplicas=1), group("b", maxReplicas=1)]},
        [FEW_IN_GROUPS],
    ),
    "a weight of nothing": ({"weight": 0}, [WEIGHTLESS]),
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
    **{
        f"the user's {name}": ({"workerGroups": with_variable(name)}, [])
        for name in ("VIRTUALFLOW_THREADS", "VIRTUALFLOW_AUDIT_DIR", "virtualflow_token", "MY_VIRTUALFLOW_TOKEN")
    },
}


@pytest.mark.parametrize(("spec", "sentences"), RULES.values(), ids=RULES.keys())
def test_operator_and_api_server_agree_on_a_job(spec: Spec, sentences: list[str]) -> None:
    document = job(**spec)
    assert structural_errors(defaulted(document)) == []
    by_rules = [f"{rule.path}: {rule.message}".removeprefix("spec: ") for rule in broken_rules(document)]
    assert [sentence.removeprefix("spec.") for sentence in by_rules] == sentences
    assert validate(defaulted(document)["spec"], "digits") == sentences
    assert validate(document["spec"], "digits") == sentences, "the operator has other defaults than the schema"


CHANGES: dict[str, tuple[Spec, Spec, list[str]]] = {
    "nothing": ({}, {}, []),
    "replicas, least and most": ({}, {"replicas": 3, "minReplicas": 2, "maxReplicas": 4}, []),
    "the template": ({}, {"workerGroups": [group(pod={"nodeSelector": {"a": "b"}})]}, []),
    "all worker groups": ({}, {"workerGroups": [group("others")]}, []),
    "suspend": ({}, {"suspend": True}, []),
    "the default written out": ({}, {"virtualNodes": 8, "reproducibility": "Bitwise"}, []),
    "more virtual nodes": ({"virtualNodes": 8}, {"virtualNodes": 16}, ["virtualNodes"]),
    "virtual nodes back to the default": ({"virtualNodes": 4}, {}, ["virtualNodes"]),
    "another reproducibility": ({}, {"reproducibility": "Statistical"}, ["reproducibility"]),
    "both at once": ({}, {"virtualNodes": 4, "reproducibility": "Statistical"}, ["virtualNodes", "reproducibility"]),
    "a controller given": ({}, {"managedBy": "example.com/other"}, ["managedBy"]),
    "a controller taken away": ({"managedBy": "example.com/other"}, {}, ["managedBy"]),
    "another controller": ({"managedBy": "example.com/other"}, {"managedBy": "example.com/third"}, ["managedBy"]),
    "the same controller": ({"managedBy": "example.com/other"}, {"managedBy": "example.com/other"}, []),
}


@pytest.mark.parametrize(("old", "new", "fields"), CHANGES.values(), ids=CHANGES.keys())
def test_operator_and_api_server_agree_on_a_change(old: Spec, new: Spec, fields: list[str]) -> None:
    by_rules = {rule.message for rule in broken_rules(job(**new), job(**old))}
    assert by_rules == {FIXED[field] for field in fields}
    before = defaulted(job(**old))["spec"]
    fixed = {key: before.get(key) for key in FIXED}
    assert immutable_changes(defaulted(job(**new))["spec"], fixed) == [FIXED[field] for field in fields]
    assert immutable_changes(job(**new)["spec"], fixed) == [FIXED[field] for field in fields]


def test_what_the_job_has_not_started_with_is_not_fixed() -> None:
    spec = job(virtualNodes=4, managedBy="example.com/other")["spec"]
    assert immutable_changes(spec, {}) == []
    assert immutable_changes(spec, {"virtualNodes": None, "reproducibility": None}) == []
    assert immutable_changes(spec, {"virtualNodes": 8}) == [FIXED["virtualNodes"]]


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


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


def template(**fields: Any) -> Spec:
    return {"workerGroups": [{"name": "workers", "template": group()["template"] | fields}]}


def containers(*entries: Any) -> Spec:
    return {"workerGroups": [group(pod={"containers": list(entries)})]}


GROUP = "workerGroups[0]"
TEMPLATE = f"{GROUP}.template"
POD = f"{TEMPLATE}.spec"
CLAIM = {"persistentVolumeClaim": {"claimName": "c"}}

BEYOND: dict[str, tuple[Any, str]] = {
    "a spec that is a list": ([], "spec must"),
    "replicas in words": ({"replicas": "2"}, "replicas must"),
    "replicas that are true": ({"replicas": True}, "replicas must"),
    "a negative number": ({"minReplicas": -1}, "minReplicas must"),
    "a number too large to print": ({"maxReplicas": 10**5_000}, "maxReplicas must"),
    "groups that are a mapping": ({"workerGroups": {}}, "workerGroups must"),
    "no groups": ({"workerGroups": []}, "workerGroups must"),
    "17 groups": ({"workerGroups": [group(f"g{i}") for i in range(17)]}, "workerGroups must"),
    "a group that is a word": ({"workerGroups": ["gpu"]}, f"{GROUP} must"),
    "a group of nobody": ({"workerGroups": [{"template": group()["template"]}]}, f"{GROUP}.name must"),
    "a group that ends its line": ({"workerGroups": [group("gpu\n")]}, f"{GROUP}.name must"),
    "two groups of one name": ({"workerGroups": [group(), group()]}, "workerGroups[1].name: There is another"),
    "a group of minus one": ({"workerGroups": [group(maxReplicas=-1), group("b")]}, f"{GROUP}.maxReplicas must"),
    "a template that is a word": ({"workerGroups": [{"name": "a", "template": "pod"}]}, f"{TEMPLATE} must"),
    "a template without a pod": ({"workerGroups": [{"name": "a", "template": {}}]}, f"{TEMPLATE} must"),
    "metadata in words": (template(metadata="labels"), f"{TEMPLATE}.metadata must"),
    "a label that is a number": (template(metadata={"labels": {"a": 1}}), f"{TEMPLATE}.metadata.labels must"),
    "an annotation that is true": (
        template(metadata={"annotations": {"a": True}}),
        f"{TEMPLATE}.metadata.annotations must",
    ),
    "labels that are empty": (template(metadata={"labels": None}), f"{TEMPLATE}.metadata.labels must"),
    "workers that restart": (
        {"workerGroups": [group(pod={"restartPolicy": "OnFailure"})]},
        f"{POD}.restartPolicy must be Never",
    ),
    "containers in words": ({"workerGroups": [group(pod={"containers": "trainer"})]}, f"{POD}.containers must"),
    "no containers": (containers(), f"{POD}.containers must"),
    "17 containers": (containers(*[container()] * 17), f"{POD}.containers must"),
    "a container in words": (containers("trainer"), f"{POD}.containers[0] must"),
    "a container of nobody": (containers({"image": "a"}), f"{POD}.containers[0].name must"),
    "a container of nothing": (containers({"name": "a"}), f"{POD}.containers[0].image must"),
    "an image that is a list": (containers(container(image=["a"])), f"{POD}.containers[0].image must"),
    "mounts in words": (containers(container(volumeMounts="a")), f"{POD}.containers[0].volumeMounts must"),
    "an environment as a mapping": (containers(container(env={"A": "b"})), f"{POD}.containers[0].env must"),
    "a variable in words": (containers(container(env=["A=b"])), f"{POD}.containers[0].env[0] must"),
    "a variable without a name": (containers(container(env=[{"value": "b"}])), f"{POD}.containers[0].env[0] must"),
    "volumes in words": ({"workerGroups": [group(pod={"volumes": "a"})]}, f"{POD}.volumes must"),
    "volumes that are empty": ({"workerGroups": [group(pod={"volumes": None})]}, f"{POD}.volumes must"),
    "init containers in words": (
        {"workerGroups": [group(pod={"initContainers": ["a"]})]},
        f"{POD}.initContainers must",
    ),
    "the operator's volume": (
        {"workerGroups": [group(pod={"volumes": [{"name": CHECKPOINT_VOLUME, "emptyDir": {}}]})]},
        f"{POD}.volumes: The volume {CHECKPOINT_VOLUME} is the operator's",
    ),
    "a template of a megabyte": (
        template(metadata={"annotations": {"a": "x" * MAX_TEMPLATE}}),
        f"{TEMPLATE} is larger",
    ),
    "a template of long keys": (template(metadata={"annotations": {"x" * MAX_TEMPLATE: ""}}), f"{TEMPLATE} is larger"),
    "a deep template": ({"workerGroups": [group(pod={"x": nested(MAX_DEPTH)})]}, f"{TEMPLATE} is nested deeper"),
    "a bottomless template": ({"workerGroups": [group(pod={"x": nested(50_000)})]}, f"{TEMPLATE} is nested deeper"),
    "a coordinator in words": ({"coordinator": "small"}, "coordinator.template must"),
    "a coordinator's template in words": ({"coordinator": {"template": "small"}}, "coordinator.template must"),
    "a coordinator's pod in words": ({"coordinator": {"template": {"spec": "small"}}}, "coordinator.template must"),
    "a coordinator that never restarts": (
        {"coordinator": {"template": {"spec": {"restartPolicy": "Never"}}}},
        "coordinator.template.spec.restartPolicy is",
    ),
    "a coordinator with a token": (
        {"coordinator": {"template": {"spec": {"containers": [{"env": [{"name": "VIRTUALFLOW_TOKEN"}]}]}}}},
        "coordinator.template.spec.containers[0].env[0].name: The operator sets",
    ),
    "a coordinator's containers in words": (
        {"coordinator": {"template": {"spec": {"containers": "small"}}}},
        "coordinator.template.spec.containers must",
    ),
    "a coordinator's sidecar without an image": (
        {"coordinator": {"template": {"spec": {"containers": [{}, {"name": "proxy"}]}}}},
        "coordinator.template.spec.containers[1].image must",
    ),
    "a coordinator's label that is a number": (
        {"coordinator": {"template": {"metadata": {"labels": {"a": 1}}}}},
        "coordinator.template.metadata.labels must",
    ),
    "a deep coordinator": (
        {"coordinator": {"template": {"x": nested(50_000)}}},
        "coordinator.template is nested deeper",
    ),
    "a checkpoint in words": ({"checkpoint": "often"}, "checkpoint must"),
    "a checkpoint without a volume": ({"checkpoint": {}}, "checkpoint.volume must"),
    "a volume with a name": ({"checkpoint": {"volume": {"name": "a", **CLAIM}}}, "checkpoint.volume must"),
    "a volume of two kinds": ({"checkpoint": {"volume": {"emptyDir": {}, **CLAIM}}}, "checkpoint.volume must"),
    "a volume that is only a name": ({"checkpoint": {"volume": {"name": "a"}}}, "checkpoint.volume must"),
    "a volume in words": ({"checkpoint": {"volume": {"persistentVolumeClaim": "c"}}}, "checkpoint.volume must"),
    "a deep volume": ({"checkpoint": {"volume": {"csi": {"x": nested(50_000)}}}}, "checkpoint.volume is nested"),
    **{
        f"the directory {path!r}": ({"checkpoint": {"volume": CLAIM, "directory": path}}, "checkpoint.directory must")
        for path in ("", "/a", "..", "a/..", "a//b", "a/./b", "a\n", "x" * 1_025, 1)
    },
}


@pytest.mark.parametrize(("spec", "beginning"), BEYOND.values(), ids=BEYOND.keys())
def test_what_the_rules_do_not_cover_gets_one_clear_sentence(spec: Any, beginning: str) -> None:
    whole = job(**spec)["spec"] if isinstance(spec, dict) else spec
    (sentence,) = validate(whole, "digits")
    assert sentence.startswith(beginning), sentence
    assert re.fullmatch(r"(?s).+; .+\.", sentence), "it does not say what to do"
    assert len(sentence) < 300


def test_all_problems_are_told_at_once() -> None:
    spec = job(replicas=9, workerGroups=[group(pod={"restartPolicy": "Always", "volumes": 1})], checkpoint=1)["spec"]
    assert len(validate(spec, "Digits")) == 5


def test_a_real_pod_may_use_all_that_is_not_the_operators() -> None:
    pod = {
        "initContainers": [{"name": "fetch", "image": "fetch:1", "env": [{"name": "VIRTUALFLOW_TOKEN"}]}],
        "restartPolicy": "Never",
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}},
    }
    assert validate(job(workerGroups=[group(pod=pod)])["spec"], "digits") == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["name", "image", "env", "spec", "metadata", "labels", "x"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)
FIELDS = sorted(crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"])


def somewhere(shape: Any) -> st.SearchStrategy[Any]:
    """``shape`` with any of its parts replaced by anything."""
    if isinstance(shape, dict):
        whole = st.fixed_dictionaries({}, optional={key: somewhere(value) for key, value in shape.items()})
    elif isinstance(shape, list):
        whole = st.lists(st.one_of(*map(somewhere, shape)), max_size=3)
    else:
        whole = st.just(shape)
    return st.one_of(whole, whole, JSON)


SHAPE = job(
    **dict.fromkeys(("virtualNodes", "replicas", "minReplicas", "maxReplicas"), 3),
    workerGroups=[
        {
            "name": "workers",
            "maxReplicas": 2,
            "template": {
                "metadata": {"labels": {"a": "b"}, "annotations": {"a": "b"}},
                "spec": {
                    "restartPolicy": "Never",
                    "containers": [container(env=[{"name": "A", "value": "b"}], volumeMounts=[])],
                    "initContainers": [container()],
                    "volumes": [{"name": "data"}],
                },
            },
        }
    ],
    coordinator={"template": {"metadata": {"labels": {}}, "spec": {"containers": [container()]}}},
    checkpoint={"volume": CLAIM, "directory": "a"},
)["spec"]


@given(spec=somewhere(SHAPE) | st.dictionaries(st.sampled_from(FIELDS), JSON), name=JSON)
@settings(max_examples=200, deadline=None)
def test_no_input_makes_it_raise(spec: Any, name: Any) -> None:
    for sentence in [*validate(spec, name), *immutable_changes(spec, {"virtualNodes": 8, "managedBy": None})]:
        assert isinstance(sentence, str)
        assert sentence.endswith(".")


@given(
    virtual_nodes=st.integers(1, 6),
    replicas=st.integers(1, 6),
    least=st.integers(1, 6),
    most=st.none() | st.integers(1, 6),
    limits=st.lists(st.none() | st.integers(0, 4), min_size=1, max_size=3),
)
@settings(max_examples=40, deadline=None)
def test_operator_and_api_server_agree_on_any_numbers(
    virtual_nodes: int, replicas: int, least: int, most: int | None, limits: list[int | None]
) -> None:
    groups = [group(f"g{i}") | ({} if limit is None else {"maxReplicas": limit}) for i, limit in enumerate(limits)]
    document = job(
        virtualNodes=virtual_nodes, replicas=replicas, minReplicas=least, maxReplicas=most, workerGroups=groups
    )
    assert validate(document["spec"], "digits") == [rule.message for rule in broken_rules(document)]
