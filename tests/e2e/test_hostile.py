"""A hundred manifests that nobody should send: each is refused, or answered by a condition that says why.

What the API server stores stays there for the next operator to read, so one takes over in the end.
"""

from __future__ import annotations

import copy
import json
import re
import time
from typing import Any

from cluster import Cluster, Metrics, Object, until
from cluster_jobs import Job, digits
from installation import Installed, wait_for_operators

POD = "spec.workerGroups.0.template.spec"
CONTAINER = f"{POD}.containers.0"
DROP = object()
ANSWER_SECONDS = 60.0
IDLE_SECONDS = 20.0
ANSWERS = ("InvalidSpec", "TemplateRejected", "Unschedulable", "CannotStart")


MOST_LEVELS = 9_900
"""Of a part of an object: the API server refuses objects of more than 10,000."""


def deep(levels: int) -> str:
    """Return a mark for mappings within mappings, more than a client's own encoder can nest."""
    return f"@deep {levels}@"


def number(text: str) -> str:
    """Return a mark for a number that a client's own encoder would not write."""
    return f"@number {text}@"


def written(job: Object) -> str:
    """Return the JSON of a job, its marks replaced."""
    text = json.dumps(job)
    for mark, levels in re.findall(r'("@deep (\d+)@")', text):
        depth = int(levels)
        text = text.replace(mark, '{"a":' * depth + "1" + "}" * depth)
    return re.sub(r'"@number (.*?)@"', r"\1", text)


CASES: dict[str, dict[str, Any]] = {
    # --- wrong types
    "spec is a string": {"spec": "hello"},
    "spec is null": {"spec": None},
    "spec is missing": {"spec": DROP},
    "spec is a list": {"spec": [1, 2]},
    "virtual nodes in words": {"spec.virtualNodes": "eight"},
    "half a virtual node": {"spec.virtualNodes": 0.5},
    "virtual nodes are a list": {"spec.virtualNodes": [8]},
    "replicas are true": {"spec.replicas": True},
    "replicas are a string": {"spec.replicas": "2"},
    "replicas are a mapping": {"spec.replicas": {"from": 1}},
    "suspend is a word": {"spec.suspend": "yes"},
    "suspend is a number": {"spec.suspend": 1},
    "reproducibility of another kind": {"spec.reproducibility": "Perfect"},
    "reproducibility is a number": {"spec.reproducibility": 7},
    "groups are a mapping": {"spec.workerGroups": {"name": "workers"}},
    "groups are a string": {"spec.workerGroups": "workers"},
    "a group is a string": {"spec.workerGroups.0": "workers"},
    "a group is null": {"spec.workerGroups": [None]},
    "a template is a list": {"spec.workerGroups.0.template": []},
    "a template is a string": {"spec.workerGroups.0.template": "pod"},
    "a template is a number": {"spec.workerGroups.0.template": 3},
    "a pod is a string": {POD: "pod"},
    "a pod is null": {POD: None},
    "containers are a mapping": {f"{POD}.containers": {"name": "trainer"}},
    "containers are null": {f"{POD}.containers": None},
    "a container is a string": {f"{POD}.containers": ["trainer"]},
    "a container is null": {f"{POD}.containers": [None]},
    "an image is a number": {f"{CONTAINER}.image": 5},
    "a command is a string": {f"{CONTAINER}.command": "python"},
    "arguments are numbers": {f"{CONTAINER}.args": [1, 2]},
    "the environment is a mapping": {f"{CONTAINER}.env": {"A": "b"}},
    "a variable is a string": {f"{CONTAINER}.env": ["A=b"]},
    "a variable has a number for a value": {f"{CONTAINER}.env": [{"name": "A", "value": 1}]},
    "resources are a list": {f"{CONTAINER}.resources": [1]},
    "volumes are a mapping": {f"{POD}.volumes": {"name": "tmp"}},
    "mounts are a mapping": {f"{CONTAINER}.volumeMounts": {"name": "tmp"}},
    "labels are a list": {"spec.workerGroups.0.template.metadata": {"labels": ["a"]}},
    "a label is a number": {"spec.workerGroups.0.template.metadata": {"labels": {"a": 1}}},
    "elasticity is a number": {"spec.elasticity": 5},
    "the checkpoint is a string": {"spec.checkpoint": "/data"},
    "the volume is a string": {"spec.checkpoint": {"volume": "/data"}},
    "the coordinator is a list": {"spec.coordinator": []},
    "the coordinator's template is a string": {"spec.coordinator": {"template": "pod"}},
    "the security context is a list": {f"{POD}.securityContext": []},
    # --- numbers
    "no virtual nodes": {"spec.virtualNodes": 0},
    "fewer than no virtual nodes": {"spec.virtualNodes": -8},
    "too many virtual nodes": {"spec.virtualNodes": 65537},
    "far too many virtual nodes": {"spec.virtualNodes": 2**63 - 1},
    "more than a machine counts to": {"spec.virtualNodes": 10**30},
    "no replicas": {"spec.replicas": 0},
    "negative replicas": {"spec.replicas": -1},
    "a billion replicas": {"spec.replicas": 10**9},
    "replicas beyond 64 bits": {"spec.replicas": 2**70},
    "more replicas than virtual nodes": {"spec.virtualNodes": 2, "spec.replicas": 3, "spec.maxReplicas": 3},
    "the least is more than the most": {"spec.minReplicas": 5, "spec.maxReplicas": 2},
    "fewer replicas than the least": {"spec.minReplicas": 3, "spec.replicas": 2},
    "more replicas than the most": {"spec.replicas": 4, "spec.maxReplicas": 3},
    "groups too small for the least": {"spec.minReplicas": 2, "spec.workerGroups.0.maxReplicas": 1},
    "a negative group": {"spec.workerGroups.0.maxReplicas": -1},
    "a negative drain grace": {"spec.elasticity": {"drainGraceSeconds": -1}},
    "a heartbeat limit of nothing": {"spec.elasticity": {"heartbeatLimitSeconds": 0}},
    "a heartbeat limit of a century": {"spec.elasticity": {"heartbeatLimitSeconds": 3_155_760_000}},
    "a negative back-off": {"spec.backoffLimit": -3},
    "a back-off beyond bounds": {"spec.backoffLimit": 10**12},
    "a deadline in the past": {"spec.activeDeadlineSeconds": -60},
    "a time to live before the end": {"spec.ttlSecondsAfterFinished": -1},
    "checkpoints every no steps": {"spec.checkpoint": {"volume": {"emptyDir": {}}, "everySteps": 0}},
    "no checkpoints to keep": {"spec.checkpoint": {"volume": {"emptyDir": {}}, "keep": 0}},
    # --- what is missing
    "no groups": {"spec.workerGroups": []},
    "groups are missing": {"spec.workerGroups": DROP},
    "groups are null": {"spec.workerGroups": None},
    "a group without a name": {"spec.workerGroups.0.name": DROP},
    "a group without a template": {"spec.workerGroups.0.template": DROP},
    "a template without a pod": {"spec.workerGroups.0.template": {"metadata": {}}},
    "a template without containers": {f"{POD}.containers": DROP},
    "a template with no containers": {f"{POD}.containers": []},
    "a container without a name": {f"{CONTAINER}.name": DROP},
    "a container without an image": {f"{CONTAINER}.image": DROP},
    "a container with an empty image": {f"{CONTAINER}.image": ""},
    "a checkpoint without a volume": {"spec.checkpoint": {"everySeconds": 5}},
    "a volume without a source": {"spec.checkpoint": {"volume": {}}},
    "a volume that is two": {"spec.checkpoint": {"volume": {"emptyDir": {}, "hostPath": {"path": "/"}}}},
    "a mount of no volume": {f"{CONTAINER}.volumeMounts": [{"name": "none", "mountPath": "/none"}]},
    # --- names
    "a job's name of 63 characters": {"metadata.name": "j" * 63},
    "a job's name with a dot": {"metadata.name": "a.b"},
    "a group's name of 63 characters": {"spec.workerGroups.0.name": "g" * 63},
    "a group called coordinator": {"spec.workerGroups.0.name": "coordinator"},
    "a group with a slash": {"spec.workerGroups.0.name": "../etc"},
    "a group with a snowman": {"spec.workerGroups.0.name": "☃"},
    "a container with capitals": {f"{CONTAINER}.name": "Trainer"},
    "a directory that climbs": {"spec.checkpoint": {"volume": {"emptyDir": {}}, "directory": "../../etc"}},
    "an absolute directory": {"spec.checkpoint": {"volume": {"emptyDir": {}}, "directory": "/etc"}},
    "a label of a thousand characters": {"spec.workerGroups.0.template.metadata": {"labels": {"a": "x" * 1000}}},
    "ten thousand labels": {"spec.workerGroups.0.template.metadata": {"labels": {f"l{n}": "x" for n in range(10_000)}}},
    "a variable of the operator's": {f"{CONTAINER}.env": [{"name": "VIRTUALFLOW_TOKEN", "value": "mine"}]},
    "a restart policy of its own": {f"{POD}.restartPolicy": "Always"},
    # --- what a worker may not have
    "the host's network": {f"{POD}.hostNetwork": True},
    "the host's processes": {f"{POD}.hostPID": True},
    "the host's memory": {f"{POD}.hostIPC": True},
    "the host's file system": {f"{POD}.volumes": [{"name": "tmp", "hostPath": {"path": "/"}}]},
    "a privileged container": {f"{CONTAINER}.securityContext": {"privileged": True}},
    "all capabilities": {f"{CONTAINER}.securityContext": {"capabilities": {"add": ["ALL"]}}},
    "a port of the host": {f"{CONTAINER}.ports": [{"containerPort": 80, "hostPort": 80}]},
    "checkpoints on the host": {"spec.checkpoint": {"volume": {"hostPath": {"path": "/etc"}}}},
    "a coordinator on the host's network": {"spec.coordinator": {"template": {"spec": {"hostNetwork": True}}}},
    "a privileged second container": {
        f"{POD}.containers": [
            {"name": "a", "image": "x"},
            {"name": "b", "image": "x", "securityContext": {"privileged": True}},
        ]
    },
    "a privileged init container": {
        f"{POD}.initContainers": [{"name": "i", "image": "x", "securityContext": {"privileged": True}}]
    },
    # --- sheer nonsense
    "resources that are no quantity": {f"{CONTAINER}.resources": {"requests": {"cpu": "lots"}}},
    "a request above its limit": {f"{CONTAINER}.resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}},
    "more memory than there is": {f"{CONTAINER}.resources": {"requests": {"memory": "999Ti"}}},
    "a hundred levels": {f"{POD}.nodeSelector": deep(100)},
    "twelve hundred levels": {f"{POD}.nodeSelector": deep(1_200)},
    "all levels there are in a pod": {f"{POD}.unknown": deep(MOST_LEVELS)},
    "all levels there are in a template": {"spec.workerGroups.0.template.unknown": deep(MOST_LEVELS)},
    "all levels there are in a template's metadata": {
        "spec.workerGroups.0.template.metadata": {"unknown": deep(MOST_LEVELS)}
    },
    "all levels there are in a container": {f"{CONTAINER}.unknown": deep(MOST_LEVELS)},
    "all levels there are in a variable": {f"{CONTAINER}.env": [{"name": "A", "unknown": deep(MOST_LEVELS)}]},
    "all levels there are in the coordinator": {
        "spec.coordinator": {"template": {"spec": {"unknown": deep(MOST_LEVELS)}}}
    },
    "all levels there are in the checkpoints' volume": {
        "spec.checkpoint": {"volume": {"emptyDir": {"unknown": deep(MOST_LEVELS)}}}
    },
    "a number of five thousand digits": {f"{POD}.unknown": number("1" * 5_000)},
    "a number beyond all numbers": {f"{POD}.terminationGracePeriodSeconds": number("1e400")},
    "a great number": {f"{POD}.terminationGracePeriodSeconds": number("1e300")},
    "half a character": {f"{CONTAINER}.args": ["\ud800"]},
    "a character that ends strings": {f"{CONTAINER}.image": "a\0b"},
    "four hundred thousand mappings": {f"{POD}.unknown": [{}] * 400_000},
    "two megabytes of nothing": {"spec.workerGroups.0.template.metadata": {"annotations": {"a": "x" * 2_000_000}}},
    "twice the same group": {"spec.workerGroups": "twice"},
    "two containers of one name": {f"{POD}.containers": [{"name": "a", "image": "x"}, {"name": "a", "image": "x"}]},
}


def build(number: int, changes: dict[str, Any]) -> Object:
    """Return the manifest of a case: the digits example with these fields replaced or dropped."""
    job = digits(f"hostile-{number}")
    for path, value in changes.items():
        if value == "twice":
            value = [copy.deepcopy(job["spec"]["workerGroups"][0]) for _ in range(2)]  # noqa: PLW2901 -- a marker
        place: Any = job
        *parents, last = path.split(".")
        for key in parents:
            place = place[int(key)] if isinstance(place, list) else place.setdefault(key, {})
        if value is DROP:
            del place[last]
        elif isinstance(place, list):
            place[int(last)] = value
        else:
            place[last] = value
    return job


def test_each_of_a_hundred_hostile_manifests_is_refused_or_answered(installed: Installed, namespace: str) -> None:
    cluster = installed.cluster
    assert len(CASES) >= 100
    operators = {pod["metadata"]["uid"]: restarts(pod) for pod in cluster.operators()}
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=baseline")
    refused, taken = send_all(cluster, namespace)
    begun = time.monotonic()
    waiting, reasons = dict(taken), {}
    deadline = begun + ANSWER_SECONDS

    def all_answered() -> bool:
        for name in list(waiting):
            reason = answer(Job(cluster, namespace, name))
            if reason:
                reasons[waiting.pop(name)] = reason
        return not waiting or time.monotonic() > deadline

    until("all are answered", all_answered, ANSWER_SECONDS + 30, every=1.0)
    print(f"{refused} refused by the API server, {len(reasons)} answered in {time.monotonic() - begun:.0f} s")
    assert not waiting, f"nobody says what is wrong with: {', '.join(waiting.values())}"

    assert {pod["metadata"]["uid"]: restarts(pod) for pod in cluster.operators()} == operators
    cut = cluster.metrics().total("virtualflow_objects_cut_total", kind="VirtualFlowJob")
    assert cut >= sum(
        any(place in case for place in (" levels there are", "twelve hundred")) for case in taken.values()
    )
    cluster.fail_over()
    wait_for_operators(cluster)
    operators = {pod["metadata"]["uid"]: restarts(pod) for pod in cluster.operators()}
    job = Job(cluster, namespace, "well").create(digits("well", steps=20))
    job.wait_phase("Complete", 120)
    assert {pod["metadata"]["uid"]: restarts(pod) for pod in cluster.operators()} == operators
    before, since = settled(cluster), time.monotonic()
    time.sleep(IDLE_SECONDS)  # the length of the measurement
    requests = made(cluster.metrics()) - made(before)
    rate = requests / (time.monotonic() - since)
    print(f"with {len(taken)} such jobs there, an idle operator makes {rate:.2f} requests a second")
    assert rate <= 2 + 0.05 * len(taken)


def send_all(cluster: Cluster, namespace: str) -> tuple[int, dict[str, str]]:
    """Send all manifests: how many were refused, and the cases of the jobs that were taken, by name."""
    refused, taken = 0, {}
    for number, (case, changes) in enumerate(CASES.items()):
        manifest = build(number, changes)
        code = cluster.post(cluster.path("vfj", namespace), written(manifest))
        assert code < 500, f"{case}: the API server fails with {code}"
        if code >= 400:
            refused += 1
        else:
            taken[manifest["metadata"]["name"]] = case
    return refused, taken


def answer(job: Job) -> str:
    """Return the reason that the operator gives for not training a job, empty if there is none (yet)."""
    for condition in job.status().get("conditions", []):
        said = len(condition["message"]) > 20
        if condition["type"] == "Progressing" and condition["reason"] in ANSWERS and said:
            return str(condition["reason"])
        if condition["type"] == "Failed" and condition["status"] == "True" and said:
            return str(condition["reason"])
    return ""


def restarts(pod: Object) -> int:
    """Return how often a pod's container was started again."""
    return int(pod["status"]["containerStatuses"][0]["restartCount"])


def made(metrics: Metrics) -> float:
    """Return how many requests to the API server an operator has made."""
    return metrics.total("virtualflow_api_requests_total")


def settled(cluster: Cluster) -> Metrics:
    """Wait until the operator's queue is empty and return its metrics."""

    def empty() -> Metrics | None:
        metrics = cluster.metrics()
        return metrics if metrics.total("virtualflow_queue_depth") == 0 else None

    return until("the operator's queue is empty", empty, 60)
