"""A job in a queue with packing: what its pods have more and less, and who goes when it gets other devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from scenes import NOW, Stage, container, created, deleted, drained, group, homeless, remote, seen, training, worker

from virtualflow.protocol.settings import ENV_TURNS
from virtualflow_operator.api import QueueSpec, read_pod
from virtualflow_operator.constants import ANNOTATION_HOST, LABEL_JOB, LABEL_LODGER, LABEL_ROLE, TURNS_VOLUME
from virtualflow_operator.jobs.actions import CheckTemplates, CreatePod, JobPlan
from virtualflow_operator.jobs.reconcile import reconcile
from virtualflow_operator.queues import Grant, QueueAdmission

GPU = "nvidia.com/gpu"
NODE = "kubernetes.io/hostname"
QUEUE = msgspec.convert({"resource": GPU, "packing": {"maxJobsPerDevice": 2}}, QueueSpec)
PLAIN = msgspec.convert({"resource": GPU}, QueueSpec)
ONE_GPU = {"containers": [container(resources={"limits": {GPU: 1, "memory": "1Gi"}, "requests": {GPU: 1}})]}


def decide(
    stage: Stage, host: str = "", queue: QueueSpec | None = QUEUE, nodes: tuple[str, ...] = (), **facts: Any
) -> JobPlan:
    """What is decided when the queue has given the job two workers, on devices of ``host`` if it is named."""
    grant = Grant(stage.job.uid, "shared", 2, "so it is", host=host, **facts)
    admission = QueueAdmission(grant, queue, frozenset(nodes), turns_directory=stage.settings.turns_directory)
    scene = dataclasses.replace(stage.scene, admission=admission)
    return reconcile(scene, NOW, stage.settings)


def waiting(**spec: Any) -> Stage:
    """A job of two workers that has none."""
    stage = training(2, queue="shared", **({"workerGroups": [group(pod=ONE_GPU)]} | spec))
    stage.pods, stage.link = stage.pods[:1], dataclasses.replace(stage.link, status=remote("waiting"))  # type: ignore[type-var]
    return stage


def lodging(host: str = "ml/host", **spec: Any) -> Stage:
    """A job that trains beside that one."""
    stage = training(2, queue="shared", **({"workerGroups": [group(pod=ONE_GPU)]} | spec))
    stage.pods = [stage.pods[0], *(dataclasses.replace(pod, host=host) for pod in stage.pods[1:])]
    return stage


def manifests(plan: JobPlan) -> list[dict[str, Any]]:
    return [action.manifest for action in plan.actions if isinstance(action, CreatePod)]


def test_workers_of_a_queue_with_packing_know_of_their_nodes_turn_server() -> None:
    pod, _ = manifests(decide(waiting()))
    assert pod["spec"]["volumes"] == [
        {"name": TURNS_VOLUME, "hostPath": {"path": "/run/virtualflow/turns", "type": "DirectoryOrCreate"}}
    ]
    (trainer,) = pod["spec"]["containers"]
    assert {"name": ENV_TURNS, "value": "/virtualflow/turns/socket"} in trainer["env"]
    assert trainer["volumeMounts"] == [{"name": TURNS_VOLUME, "mountPath": "/virtualflow/turns", "readOnly": True}]
    assert trainer["resources"]["limits"][GPU] == 1, "it has a device of its own"
    assert read_pod(pod | {"metadata": pod["metadata"] | {"uid": "1"}}).takes_turns
    plain, _ = manifests(decide(waiting(), queue=PLAIN))
    assert TURNS_VOLUME not in str(plain)
    assert ENV_TURNS not in str(plain)


def test_a_turn_server_that_a_template_names_is_the_one() -> None:
    own = {"containers": [container(env=[{"name": ENV_TURNS, "value": "/mine"}])]}
    pod, _ = manifests(decide(waiting(workerGroups=[group(pod=own)])))
    values = [entry["value"] for entry in pod["spec"]["containers"][0]["env"] if entry["name"] == ENV_TURNS]
    assert values[-1] == "/mine", "of several, a container has the last"


def test_a_lodgers_worker_requests_no_device_and_is_put_beside_one_of_its_host() -> None:
    pod, _ = manifests(decide(waiting(), "other/host"))
    (trainer,) = pod["spec"]["containers"]
    assert trainer["resources"] == {"limits": {"memory": "1Gi"}, "requests": {}}
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"} in trainer["env"]
    assert {"key": GPU, "operator": "Exists"} in pod["spec"]["tolerations"]
    assert pod["metadata"]["labels"][LABEL_LODGER] == "uid-1"
    assert pod["metadata"]["annotations"][ANNOTATION_HOST] == "other/host"
    affinity = pod["spec"]["affinity"]
    (beside,) = affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    labels = {"matchLabels": {LABEL_JOB: "host", LABEL_ROLE: "worker"}}
    assert beside == {"labelSelector": labels, "namespaces": ["other"], "topologyKey": NODE}
    (off,) = affinity["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert (off["namespaceSelector"], off["topologyKey"]) == ({}, NODE)
    assert off["labelSelector"]["matchExpressions"] == [
        {"key": LABEL_LODGER, "operator": "Exists"},
        {"key": LABEL_LODGER, "operator": "NotIn", "values": ["uid-1"]},
    ]
    read = read_pod(pod | {"metadata": pod["metadata"] | {"uid": "1"}})
    assert (read.host, read.takes_turns) == ("other/host", True)


def test_the_users_template_is_left_as_it_is() -> None:
    stage = waiting()
    before = str(stage.raw["spec"])
    decide(stage, "other/host")
    assert str(stage.raw["spec"]) == before


def test_templates_are_tried_with_what_the_queue_adds() -> None:
    stage = waiting()
    stage.raw["status"].pop("templateHash")
    (check,) = (action for action in decide(stage).actions if isinstance(action, CheckTemplates))
    assert [TURNS_VOLUME in str(pod) for pod in check.manifests] == [True, False], "workers, and not the coordinator"


def test_a_lodger_stays_as_long_as_it_is_where_its_host_is() -> None:
    plan = decide(lodging(), "ml/host", nodes=("node-0", "node-1", "node-2"))
    assert (created(plan), deleted(plan), drained(plan)) == ([], [], [])


def test_a_lodger_with_devices_of_its_own_goes_there_and_its_successors_come_first() -> None:
    stage = lodging()
    plan = decide(stage)
    assert len(created(plan)) == 2
    assert all(LABEL_LODGER not in pod["metadata"]["labels"] for pod in manifests(plan))
    assert (deleted(plan), drained(plan)) == ([], [])
    more = [worker(stage.job, n) for n in (2, 3)]
    known = [seen(pod, "ready" if n < 2 else "training", n, n + 1) for n, pod in enumerate([*stage.pods[1:], *more])]
    stage.pods += more
    stage.link = dataclasses.replace(stage.link, status=remote("training", *known))  # type: ignore[type-var]
    both = decide(stage)
    assert created(both) == []
    assert sorted(drained(both)) == ["digits-workers-0", "digits-workers-1"]


def test_a_worker_that_is_where_its_host_is_no_more_is_replaced() -> None:
    plan = decide(lodging(), "ml/host", nodes=("node-0", "node-7"))
    assert len(created(plan)) == 1
    assert decide(lodging(), "ml/host").actions == (), "a host whose pods nobody knows moves nobody"


def test_a_lodgers_worker_that_found_no_place_is_withdrawn_once_there_are_devices() -> None:
    stage = lodging()
    stage.pods[1] = homeless(stage.pods[1])
    stage.link = dataclasses.replace(stage.link, status=remote("training", seen(stage.pods[2], "training", 0, 8)))  # type: ignore[type-var]
    assert "digits-workers-0" in deleted(decide(stage))


@pytest.mark.parametrize("queue", [None, PLAIN], ids=["no queue", "a queue that lets none share"])
def test_nothing_is_made_for_a_lodger_before_its_queue_has_decided_anew(queue: QueueSpec | None) -> None:
    stage = lodging()
    plan = decide(dataclasses.replace(stage, pods=stage.pods[:2]), "ml/host", queue)
    assert (created(plan), deleted(plan)) == ([], [])


@pytest.mark.parametrize(("host", "lodgers"), [("ml/host", ()), ("", ("ml/guest",))], ids=["lodger", "host"])
def test_the_speed_of_jobs_that_share_devices_is_not_taken_for_their_own(host: str, lodgers: tuple[str, ...]) -> None:
    stage = lodging(host)
    assert stage.link is not None
    status = msgspec.structs.replace(stage.link.status, step_ms=50.0, computing_ms=20.0)  # type: ignore[type-var]
    stage.link = dataclasses.replace(stage.link, status=status)
    assert decide(stage, host, lodgers=lodgers).status.scaling == ()
    (point,) = decide(stage, host).status.scaling if not host else decide(lodging_alone(stage)).status.scaling
    assert (point.workers, point.steps_per_second, point.computing_milliseconds) == (2, "20", "20")


def lodging_alone(stage: Stage) -> Stage:
    """The same job on devices of its own."""
    return dataclasses.replace(stage, pods=[dataclasses.replace(pod, host="") for pod in stage.pods])
