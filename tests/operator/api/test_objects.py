"""What is read from raw objects, and how the status is written."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes import NOW, body, training

from virtualflow.protocol.messages import encode
from virtualflow.protocol.termination_message import TerminationMessage
from virtualflow_operator.api.job import Failures, JobStatus, merge_patch, read_status, write_status
from virtualflow_operator.api.objects import format_time, parse_time, read_job, read_node, read_pod, read_service

JSON = st.recursive(
    st.one_of(st.integers(-5, 5), st.text(max_size=3), st.lists(st.text(max_size=2), max_size=2)),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.sampled_from("abcd"), JSON, max_size=4)


def apply_patch(target: Any, patch: Any) -> Any:
    """RFC 7386, section 2."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = apply_patch(result.get(key), value)
    return result


@given(OBJECTS, OBJECTS)
def test_a_merge_patch_makes_the_new_object_from_the_old(old: dict[str, Any], new: dict[str, Any]) -> None:
    before = copy.deepcopy((old, new))
    patch = merge_patch(old, new)
    assert apply_patch(old, patch) == new
    assert (old, new) == before
    assert (patch == {}) == (old == new)


def test_a_status_is_the_same_after_it_was_written_and_read() -> None:
    status = training().job.status
    assert read_status(write_status(status)) == status
    assert merge_patch(write_status(status), write_status(read_status(write_status(status)))) == {}


def test_what_a_person_looks_at_is_there_from_the_beginning() -> None:
    first = {"phase": "Pending", "replicas": 0, "readyReplicas": 0, "changes": 0, "repeatedSteps": 0}
    assert write_status(JobStatus()) == first


@pytest.mark.parametrize("status", [None, {}, {"phase": "Nonsense"}, {"conditions": 7}, {"step": "many"}], ids=str)
def test_a_status_that_cannot_be_read_counts_as_empty(status: dict[str, Any] | None) -> None:
    assert read_status(status) == JobStatus()


def test_fields_of_a_newer_operator_do_not_disturb() -> None:
    assert read_status({"phase": "Running", "novelty": 1, "failures": {"count": 2, "x": 1}}).failures == Failures(
        count=2
    )


@given(st.integers(0, 4 * 10**9))
def test_times_are_read_as_they_were_written(seconds: int) -> None:
    assert parse_time(format_time(seconds)) == seconds
    assert parse_time(format_time(seconds + 0.9)) == seconds


@pytest.mark.parametrize("text", [None, "", "soon", "2023-99-99T00:00:00Z"])
def test_what_is_no_time_is_none(text: str | None) -> None:
    assert parse_time(text) is None


@pytest.mark.parametrize(
    "spec", [None, {}, [], "text", {"replicas": "many"}, {"workerGroups": 7}, {"workerGroups": [{}]}], ids=str
)
def test_a_job_that_cannot_be_read_says_why_and_has_no_groups(spec: Any) -> None:
    job = read_job(body() | {"spec": spec})
    assert job.faults[0].startswith("spec cannot be read: ")
    assert job.spec.worker_groups == ()


def test_a_job_that_cannot_be_read_is_still_its_controllers() -> None:
    assert read_job(body(managedBy="x/y", replicas="many")).spec.managed_by == "x/y"
    assert read_job(body(managedBy=7)).spec.managed_by is None


# --- pods -------------------------------------------------------------------------------------------------------------


def raw(**status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "p", "uid": "u"},
        "spec": {"containers": [{"name": "trainer", "resources": {"requests": {"cpu": 2}}}, {"name": "sidecar"}]},
        "status": status,
    }


def state(name: str, **value: Any) -> dict[str, Any]:
    return {"name": name, "state": value}


def test_of_a_bare_pod_nothing_is_assumed() -> None:
    pod = read_pod({"metadata": {"name": "p", "uid": "u"}})
    assert (pod.phase, pod.node, pod.owner, pod.role, pod.exit, pod.ordinal) == ("Pending", "", "", "worker", None, 0)
    assert pod.live


def test_the_container_that_trains_says_how_it_ended() -> None:
    word = TerminationMessage("done", step=7, digest="abc")
    trainer = state("trainer", terminated={"exitCode": 0, "reason": "Completed", "message": encode(word).decode()})
    sidecar = state("sidecar", terminated={"exitCode": 9})
    pod = read_pod(raw(phase="Succeeded", containerStatuses=[sidecar, trainer]))
    assert pod.exit is not None
    assert (pod.exit.code, pod.exit.last_word) == (0, word)
    assert pod.requests == ({"cpu": "2"},)


def test_an_init_container_that_failed_or_cannot_start_counts() -> None:
    failed = state("setup", terminated={"exitCode": 3, "message": "no data"})
    pod = read_pod(raw(phase="Failed", initContainerStatuses=[failed]))
    assert pod.exit is not None
    assert (pod.exit.code, pod.exit.message, pod.exit.last_word) == (3, "no data", None)
    stuck = state("setup", waiting={"reason": "ErrImagePull", "message": "not found"})
    assert read_pod(raw(initContainerStatuses=[stuck])).waiting == "ErrImagePull: not found"


def test_the_end_of_a_sidecar_is_nobodys_end() -> None:
    running = state("trainer", running={})
    for sidecar in (
        state("proxy", terminated={"exitCode": 1, "reason": "Error"}),
        state("proxy", waiting={"reason": "CrashLoopBackOff", "message": "back-off"}),
    ):
        body = raw(phase="Running", containerStatuses=[running], initContainerStatuses=[sidecar])
        body["spec"] |= {"restartPolicy": "Never", "initContainers": [{"name": "proxy", "restartPolicy": "Always"}]}
        pod = read_pod(body)
        assert (pod.phase, pod.finished, pod.waiting, pod.exit) == ("Running", False, "", None)


ENDED, RUNS, PULLED = {"terminated": {"exitCode": 0}}, {"running": {}}, {"waiting": {"reason": "ErrImagePull"}}


@pytest.mark.parametrize(
    ("phase", "trainer", "beside", "seen", "lingers"),
    [
        pytest.param("Running", RUNS, RUNS, "Running", False, id="both run"),
        pytest.param("Running", RUNS, {"terminated": {"exitCode": 1}}, "Running", False, id="the sidecar crashed"),
        pytest.param("Pending", RUNS, PULLED, "Running", False, id="the sidecar has no image"),
        pytest.param("Running", ENDED, RUNS, "Succeeded", True, id="the worker has left"),
        pytest.param("Pending", ENDED, PULLED, "Succeeded", True, id="the worker has left one that never came"),
        pytest.param("Running", {"terminated": {"exitCode": 137}}, RUNS, "Failed", True, id="the worker was killed"),
        pytest.param("Running", ENDED, ENDED, "Succeeded", False, id="both have ended"),
        pytest.param("Failed", ENDED, {"terminated": {"exitCode": 1}}, "Succeeded", False, id="the sidecar failed"),
        pytest.param("Failed", RUNS, RUNS, "Failed", False, id="the kubelet evicted both"),
    ],
)
def test_the_workers_container_says_whether_it_has_ended_whatever_stands_beside_it(
    phase: str, trainer: Any, beside: Any, seen: str, lingers: bool
) -> None:
    states = [state("sidecar", **beside), state("trainer", **trainer)]
    body = raw(phase=phase, containerStatuses=states)
    body["spec"]["restartPolicy"] = "Never"
    pod = read_pod(body)
    assert (pod.phase, pod.lingers, pod.holds_devices) == (seen, lingers, lingers or seen == "Running")


def test_the_container_that_trains_is_the_one_that_was_told_so() -> None:
    body = raw(phase="Running", containerStatuses=[state("sidecar", **RUNS), state("trainer", **ENDED)])
    body["metadata"]["annotations"] = {"kubectl.kubernetes.io/default-container": "sidecar"}
    body["spec"] |= {"restartPolicy": "Never", "containers": list(reversed(body["spec"]["containers"]))}
    assert not read_pod(body).finished
    body["spec"]["containers"][1]["env"] = [{"name": "VIRTUALFLOW_WORKER", "value": "p"}]
    assert read_pod(body).finished


def test_what_keeps_a_pod_from_its_first_step_is_seen_behind_containers_that_are_about_to_start() -> None:
    coming = state("trainer", waiting={"reason": "PodInitializing"})
    proxy = state("proxy", waiting={"reason": "CrashLoopBackOff", "message": "back-off"})
    body = raw(containerStatuses=[coming], initContainerStatuses=[proxy])
    body["spec"]["initContainers"] = [{"name": "proxy", "restartPolicy": "Always"}]
    assert read_pod(body).waiting == "CrashLoopBackOff: back-off"


@pytest.mark.parametrize("reason", ["ContainerCreating", "PodInitializing"])
def test_a_container_that_is_about_to_start_is_no_obstacle(reason: str) -> None:
    assert read_pod(raw(containerStatuses=[state("trainer", waiting={"reason": reason})])).waiting == ""


def test_conditions_tell_of_the_scheduler_and_of_disruptions() -> None:
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    scheduled["lastTransitionTime"] = format_time(NOW)
    target = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager", "message": "taint"}
    pod = read_pod(raw(conditions=[scheduled, target]))
    assert (pod.unschedulable, pod.unschedulable_since) == ("0/3 nodes", NOW)
    assert pod.disrupted == "DeletionByTaintManager: taint"
    quiet = [scheduled | {"status": "True"}, target | {"status": "False"}]
    assert read_pod(raw(conditions=quiet)) == dataclasses.replace(read_pod(raw()))


@given(st.text(max_size=200))
def test_any_termination_message_is_taken(message: str) -> None:
    ended = state("trainer", terminated={"exitCode": 1, "message": message})
    pod = read_pod(raw(phase="Failed", containerStatuses=[ended]))
    assert pod.exit is not None
    assert pod.exit.message == message


# --- nodes and services -----------------------------------------------------------------------------------------------


def node(ready: str | None, message: str = "", **spec: Any) -> dict[str, Any]:
    conditions = [] if ready is None else [{"type": "Ready", "status": ready, "message": message}]
    return {"metadata": {"name": "n"}, "spec": spec, "status": {"conditions": conditions}}


@pytest.mark.parametrize(
    ("body", "ready", "leaving"),
    [
        pytest.param(node("True"), True, False, id="ready"),
        pytest.param(node("False", "kubelet stopped"), False, False, id="not ready"),
        pytest.param(node("Unknown", "node is shutting down"), False, False, id="unknown"),
        pytest.param(node("False", "node is shutting down"), False, True, id="shutting down"),
        pytest.param(node(None), True, False, id="new"),
    ],
)
def test_a_node_says_how_it_is(body: dict[str, Any], ready: bool, leaving: bool) -> None:
    found = read_node(body)
    assert (found.ready, found.shutting_down) == (ready, leaving)


def test_only_taints_that_keep_pods_away_count() -> None:
    taints = [
        {"key": "a", "effect": "NoSchedule"},
        {"key": "b", "effect": "PreferNoSchedule"},
        {"key": "c", "effect": "NoExecute"},
    ]
    found = read_node(node("True", taints=taints, unschedulable=True))
    assert (found.taints, found.cordoned) == (("a", "c"), True)


@pytest.mark.parametrize(
    ("selector", "ordinal"),
    [({"virtualflow.dev/ordinal": "3"}, 3), ({"virtualflow.dev/ordinal": "x"}, None), (None, None)],
)
def test_a_service_says_where_it_leads(selector: dict[str, str] | None, ordinal: int | None) -> None:
    assert read_service({"spec": {"clusterIP": "10.0.0.1", "selector": selector}}).ordinal == ordinal


def test_a_loss_of_nan_can_be_written() -> None:
    status = msgspec.structs.replace(JobStatus(), loss="NaN")
    assert write_status(status)["loss"] == "NaN"
