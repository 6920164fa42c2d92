"""What the operator says of a job beyond the schema, and that nothing stored is more than it can read."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from resource_rules import crd, job

from tiers import examples
from virtualflow_operator.api.objects import read_job
from virtualflow_operator.api.validation import MAX_DEPTH, MAX_TEMPLATE
from virtualflow_operator.constants import CHECKPOINT_VOLUME, TURNS_VOLUME

Spec = dict[str, Any]


def problems_of(spec: object) -> list[str]:
    """What the operator says of a job with this specification, whatever it is."""
    read = read_job({"metadata": {"namespace": "ml", "name": "digits", "uid": "u"}, "spec": spec})
    return list(read.faults)


def container(**fields: Any) -> Spec:
    return {"name": "trainer", "image": "trainer:1"} | fields


def group(name: str = "workers", pod: Spec | None = None, **fields: Any) -> Spec:
    return {"name": name, "template": {"spec": {"containers": [container()]} | (pod or {})}} | fields


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


def template(**fields: Any) -> Spec:
    return {"workerGroups": [{"name": "workers", "template": group()["template"] | fields}]}


def containers(*entries: Any) -> Spec:
    return {"workerGroups": [group(pod={"containers": list(entries)})]}


TEMPLATE = "workerGroups[0].template"
POD = f"{TEMPLATE}.spec"
CLAIM = {"persistentVolumeClaim": {"claimName": "c"}}
UNREAD = "spec cannot be read"

BEYOND: dict[str, tuple[Any, str]] = {
    "a spec that is a list": ([], UNREAD),
    "a spec of nothing": (None, UNREAD),
    "replicas in words": ({"replicas": "2"}, UNREAD),
    "replicas that are true": ({"replicas": True}, UNREAD),
    "a negative number": ({"minReplicas": -1}, "minReplicas must"),
    "no virtual nodes": ({"virtualNodes": 0}, "virtualNodes must"),
    "a weight of nothing": ({"weight": 0}, "weight must"),
    "workers of no process": ({"processesPerWorker": 0}, "processesPerWorker must"),
    "processes in words": ({"processesPerWorker": "two"}, UNREAD),
    "processes without a command": (
        {"processesPerWorker": 2},
        f"{POD}.containers[0].command: 2 processes of a worker each run the container's command, and there is none",
    ),
    "processes that would share a device": (
        {"processesPerWorker": 2} | containers(container(command=["a"], resources={"limits": {"nvidia.com/gpu": 1}})),
        f"{POD}.containers[0].resources.limits: nvidia.com/gpu is 1, no multiple of processesPerWorker (2)",
    ),
    "processes that would leave a device idle": (
        {"processesPerWorker": 2} | containers(container(command=["a"], resources={"limits": {"amd.com/gpu": "3"}})),
        f"{POD}.containers[0].resources.limits: amd.com/gpu is 3, no multiple of processesPerWorker (2)",
    ),
    "processes of a command in words": (
        {"processesPerWorker": 2} | containers(container(command="python")),
        f"{POD}.containers[0].command: 2 processes",
    ),
    "groups that are a mapping": ({"workerGroups": {}}, UNREAD),
    "no groups": ({"workerGroups": []}, UNREAD),
    "a group that is a word": ({"workerGroups": ["gpu"]}, UNREAD),
    "a group of nobody": ({"workerGroups": [{"template": group()["template"]}]}, UNREAD),
    "a template that is a word": ({"workerGroups": [{"name": "a", "template": "pod"}]}, UNREAD),
    "a checkpoint in words": ({"checkpoint": "often"}, UNREAD),
    "a checkpoint without a volume": ({"checkpoint": {}}, UNREAD),
    "a coordinator in words": ({"coordinator": "small"}, UNREAD),
    "a coordinator's template in words": ({"coordinator": {"template": "small"}}, UNREAD),
    "memory of no size": (
        {"workerGroups": [group(memory={"device": "much"})]},
        "workerGroups[0].memory.device is 'much', which is no size of memory",
    ),
    "memory that no text can be made of": (
        {"workerGroups": [group(memory={"device": "9" * 5_000})]},
        "workerGroups[0].memory.device is '9999",
    ),
    "memory of nothing": (
        {"workerGroups": [group(), group("b", memory={"device": "1Gi", "host": "0Gi"})]},
        "workerGroups[1].memory.host is '0Gi', which is no size of memory",
    ),
    "memory in words": ({"workerGroups": [group(memory="24Gi")]}, UNREAD),
    "memory of the host alone": ({"workerGroups": [group(memory={"host": "96Gi"})]}, UNREAD),
    "short backward passes without fractions": ({"backward": {}}, UNREAD),
    "an optimizer elsewhere": ({"optimizerPlacement": "Disk"}, UNREAD),
    "something else divided": ({"sharding": {"what": "Gradients"}}, UNREAD),
    "a template without a pod": ({"workerGroups": [{"name": "a", "template": {}}]}, f"{TEMPLATE} cannot"),
    "metadata in words": (template(metadata="labels"), f"{TEMPLATE} cannot"),
    "a label that is a number": (template(metadata={"labels": {"a": 1}}), f"{TEMPLATE} cannot"),
    "an annotation that is true": (template(metadata={"annotations": {"a": True}}), f"{TEMPLATE} cannot"),
    "workers that restart": ({"workerGroups": [group(pod={"restartPolicy": "OnFailure"})]}, f"{POD}.restartPolicy is"),
    "containers in words": ({"workerGroups": [group(pod={"containers": "trainer"})]}, f"{TEMPLATE} cannot"),
    "no containers": (containers(), f"{TEMPLATE} cannot"),
    "a container in words": (containers("trainer"), f"{TEMPLATE} cannot"),
    "mounts in words": (containers(container(volumeMounts="a")), f"{TEMPLATE} cannot"),
    "an environment as a mapping": (containers(container(env={"A": "b"})), f"{TEMPLATE} cannot"),
    "a variable in words": (containers(container(env=["A=b"])), f"{TEMPLATE} cannot"),
    "volumes in words": ({"workerGroups": [group(pod={"volumes": "a"})]}, f"{TEMPLATE} cannot"),
    "init containers in words": ({"workerGroups": [group(pod={"initContainers": ["a"]})]}, f"{TEMPLATE} cannot"),
    "the operator's volume": (
        {"workerGroups": [group(pod={"volumes": [{"name": CHECKPOINT_VOLUME, "emptyDir": {}}]})]},
        f"{POD}.volumes: The volume {CHECKPOINT_VOLUME} is the operator's",
    ),
    "the operator's other volume": (
        {"workerGroups": [group(pod={"volumes": [{"name": TURNS_VOLUME, "emptyDir": {}}]})]},
        f"{POD}.volumes: The volume {TURNS_VOLUME} is the operator's",
    ),
    "a template of a megabyte": (
        template(metadata={"annotations": {"a": "x" * MAX_TEMPLATE}}),
        f"{TEMPLATE} is larger",
    ),
    "a template of long keys": (template(metadata={"annotations": {"x" * MAX_TEMPLATE: ""}}), f"{TEMPLATE} is larger"),
    "a deep template": ({"workerGroups": [group(pod={"x": nested(MAX_DEPTH)})]}, f"{TEMPLATE} is nested deeper"),
    "a bottomless template": ({"workerGroups": [group(pod={"x": nested(50_000)})]}, f"{TEMPLATE} is nested deeper"),
    "a coordinator's pod in words": ({"coordinator": {"template": {"spec": "small"}}}, "coordinator.template cannot"),
    "a coordinator that never restarts": (
        {"coordinator": {"template": {"spec": {"restartPolicy": "Never"}}}},
        "coordinator.template.spec.restartPolicy: A coordinator's template sets only",
    ),
    "a coordinator's field of a newer Kubernetes": (
        {"coordinator": {"template": {"spec": {"containers": [{"runAnotherProgram": "sh"}]}}}},
        "coordinator.template.spec.containers[0].runAnotherProgram: A coordinator's template sets only",
    ),
    "a coordinator with a second container": (
        {"coordinator": {"template": {"spec": {"containers": [{}, {"name": "b", "image": "b:1"}]}}}},
        "coordinator.template.spec.containers: A coordinator has one",
    ),
    "a coordinator with an init container": (
        {"coordinator": {"template": {"spec": {"initContainers": [{"name": "b", "image": "b:1"}]}}}},
        "coordinator.template.spec.initContainers: A coordinator's template sets only",
    ),
    "a coordinator's containers in words": (
        {"coordinator": {"template": {"spec": {"containers": "small"}}}},
        "coordinator.template cannot",
    ),
    "a coordinator's label that is a number": (
        {"coordinator": {"template": {"metadata": {"labels": {"a": 1}}}}},
        "coordinator.template cannot",
    ),
    "a deep coordinator": (
        {"coordinator": {"template": {"x": nested(50_000)}}},
        "coordinator.template is nested deeper",
    ),
    "a deep volume": ({"checkpoint": {"volume": {"csi": {"x": nested(50_000)}}}}, "checkpoint.volume is nested"),
}


@pytest.mark.parametrize(("spec", "beginning"), BEYOND.values(), ids=BEYOND.keys())
def test_what_the_operator_cannot_work_with_gets_one_clear_sentence(spec: Any, beginning: str) -> None:
    whole = job(**spec)["spec"] if isinstance(spec, dict) else spec
    (sentence,) = problems_of(whole)
    assert sentence.startswith(beginning), sentence
    assert re.fullmatch(r"(?s).+; .+\.", sentence), "it does not say what to do"
    assert len(sentence) < 300


def test_all_problems_are_told_at_once() -> None:
    pod = {"restartPolicy": "Always", "volumes": [{"name": CHECKPOINT_VOLUME}]}
    coordinator = {"template": {"spec": {"restartPolicy": "Always"}}}
    assert len(problems_of(job(workerGroups=[group(pod=pod)], coordinator=coordinator)["spec"])) == 3


def test_a_real_pod_may_use_all_that_is_not_the_operators() -> None:
    pod = {
        "initContainers": [{"name": "fetch", "image": "fetch:1", "env": [{"name": "VIRTUALFLOW_TOKEN"}]}],
        "restartPolicy": "Never",
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}},
    }
    assert problems_of(job(workerGroups=[group(pod=pod)])["spec"]) == []


def test_workers_of_several_processes_may_have_a_device_for_each() -> None:
    resources = {"limits": {"nvidia.com/gpu": 4, "cpu": "3", "memory": "1Gi"}}
    pods = containers(container(command=["python", "train.py"], resources=resources))
    assert problems_of(job(processesPerWorker=4, **pods)["spec"]) == []


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
    coordinator={"template": {"metadata": {"labels": {}}, "spec": {"containers": [{"name": "c", "resources": {}}]}}},
    checkpoint={"volume": CLAIM, "directory": "a"},
)["spec"]


@given(spec=somewhere(SHAPE) | st.dictionaries(st.sampled_from(FIELDS), JSON) | JSON)
@settings(max_examples=examples(200), deadline=None)
def test_no_input_makes_it_raise(spec: Any) -> None:
    for sentence in problems_of(spec):
        assert sentence.endswith(".")


def test_a_template_of_a_million_entries_is_refused_without_counting_them() -> None:
    spec = {"workerGroups": [group(pod={"x": [{}] * 2_000_000})]}
    begin = time.process_time()
    problems = problems_of(spec)
    assert time.process_time() - begin < 1, "all other jobs wait meanwhile"
    assert [problem for problem in problems if "is larger than" in problem]
