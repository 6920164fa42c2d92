"""Which pods get an identity, and when: decisions about jobs, and what they find in their pods."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes import NOW, SETTINGS, Spec, Stage, accepted, body, nodes, worker

from virtualflow_operator.api import CertificateStatus, Pod, Service, format_time, parse_time
from virtualflow_operator.api.objects import Job, read_job, read_pod
from virtualflow_operator.jobs import manifests
from virtualflow_operator.jobs.actions import CreatePod, IssueIdentity, JobPlan
from virtualflow_operator.jobs.identities import identity_name
from virtualflow_operator.jobs.manifests import hash_templates
from virtualflow_operator.jobs.scene import PodEvent
from virtualflow_operator.settings import DELIVERY, OperatorSettings

LIFE, RENEWAL = SETTINGS.certificates.lifetime, SETTINGS.certificates.renew_after
KEYS = ("0123abcd",)
OURS = dataclasses.replace(SETTINGS, key_ids=KEYS)


def certified(status: Spec | None = None, **spec: Any) -> Spec:
    """A job that has begun with certificates."""
    begun = accepted(body(**spec))
    return begun | {"status": begun["status"] | {"plaintext": False} | (status or {})}


def made(job: Job, **facts: Any) -> tuple[Pod, Pod]:
    """Its coordinator and its worker, with identities."""
    group = job.spec.worker_groups[0]
    names = (f"{job.name}-coordinator-0", manifests.worker_name(job, group, 0))
    first, second = (identity_name(job, name, NOW - 90) for name in names)
    pods = [
        manifests.coordinator_pod(job, 0, OURS, first),
        manifests.worker_pod(job, group, 0, "10.0.0.1", OURS, second),
    ]
    read = [read_pod(pod | {"metadata": pod["metadata"] | {"uid": uid}}) for pod, uid in zip(pods, "cw", strict=True)]
    known = {"phase": "Running", "node": "node-0", "ip": "10.1.0.1", "created": NOW - 9} | facts
    coordinator, worker = (dataclasses.replace(pod, **known) for pod in read)
    return coordinator, worker


def plan_of(
    raw: Spec,
    *pods: Pod,
    settings: OperatorSettings = OURS,
    issued: Mapping[str, float] | None = None,
    **facts: Any,
) -> JobPlan:
    service, given = Service("10.0.0.1", 0), issued or {}
    stage = Stage(raw, list(pods), service, nodes(*pods), None, settings=settings, issued=given, **facts)
    return stage.decide()


def certificates(issued: float, keys: tuple[str, ...] = KEYS) -> Spec:
    times = {"renewalTime": format_time(issued + RENEWAL), "expiryTime": format_time(issued + LIFE)}
    return {"certificates": times | {"keys": list(keys)}}


def issues(plan: JobPlan) -> dict[str, bool]:
    """Uids of the pods that get an identity, and whether in the place of another."""
    return {action.pod.uid: action.renew for action in plan.actions if isinstance(action, IssueIdentity)}


@pytest.mark.parametrize(
    ("status", "issued", "phase", "expected"),
    [
        pytest.param(certificates(NOW - 60), {}, "Running", {}, id="an operator that has just started"),
        pytest.param(
            certificates(NOW - 60), {}, "Pending", {"c": False, "w": False}, id="pods that may have none are given one"
        ),
        pytest.param(certificates(NOW - 60), {"c": 1.0, "w": 1.0}, "Pending", {}, id="pods that have been given one"),
        pytest.param(
            certificates(NOW - RENEWAL - 9), {"c": NOW - 8, "w": NOW - 30}, "Running", {"w": True}, id="in time"
        ),
        pytest.param(
            certificates(NOW - RENEWAL), {}, "Running", {"c": True, "w": True}, id="in time, by another operator"
        ),
        pytest.param(certificates(NOW - 60, ("old",)), {}, "Running", {"c": True, "w": True}, id="by another key"),
        pytest.param({}, {}, "Running", {"c": True, "w": True}, id="nobody knows when"),
    ],
)
def test_which_pods_get_an_identity(
    status: Spec, issued: Mapping[str, float], phase: str, expected: dict[str, bool]
) -> None:
    raw = certified(status, replicas=1)
    plan = plan_of(raw, *made(read_job(raw), phase=phase), settings=OURS, issued=issued)
    assert issues(plan) == expected
    if status:
        known = read_job(raw).status.certificates
        assert (plan.status.certificates == known) or not expected, "not before it is done"


@pytest.mark.parametrize("named", ["somebody-elses-tls", "digits-workers-10-identity-0", "digits-workers-0"])
def test_a_secret_that_is_not_the_pods_is_left_alone(named: str) -> None:
    raw = certified(replicas=1)
    coordinator, _ = made(read_job(raw))
    job = read_job(raw)
    pod = manifests.worker_pod(job, job.spec.worker_groups[0], 0, "10.0.0.1", OURS, named)
    stranger = read_pod(pod | {"metadata": pod["metadata"] | {"uid": "w"}})
    assert issues(plan_of(raw, coordinator, stranger)) == {"c": True}


@given(
    ages=st.lists(
        st.none() | st.floats(0, 3 * LIFE).filter(lambda age: not RENEWAL - 2 < age < RENEWAL + 2),
        min_size=2,
        max_size=2,
    ),
    written=st.none() | st.floats(0, 3 * LIFE),
    keys=st.sampled_from([KEYS, ("old",), ("old", *KEYS)]),
)
def test_one_pass_gives_each_pod_what_it_needs_and_the_next_one_comes_to_rest(
    ages: list[float | None], written: float | None, keys: tuple[str, ...]
) -> None:
    status = {} if written is None else certificates(NOW - written, keys)
    raw = certified(status, replicas=1)
    pods = made(read_job(raw))
    issued = {pod.uid: NOW - age for pod, age in zip(pods, ages, strict=True) if age is not None}
    plan = plan_of(raw, *pods, settings=OURS, issued=issued)
    now = issued | dict.fromkeys(issues(plan), NOW)
    raw["status"] |= {"certificates": _written(plan.status.certificates)} if plan.status.certificates else {}
    plan = plan_of(raw, *pods, settings=OURS, issued=now)
    assert issues(plan) == {}
    shown = plan.status.certificates
    assert shown is not None
    assert shown.keys == KEYS
    assert NOW < (parse_time(shown.renewal_time) or 0.0) < (parse_time(shown.expiry_time) or 0.0)
    assert plan.wake_at is not None
    assert plan.wake_at <= (parse_time(shown.renewal_time) or 0.0)


def _written(status: CertificateStatus) -> Spec:
    return {"renewalTime": status.renewal_time, "expiryTime": status.expiry_time, "keys": list(status.keys)}


AGAIN = NOW - SETTINGS.events_retry
MOUNT = 'FailedMount: MountVolume.SetUp failed for volume "virtualflow-identity" : secret "x" not found'


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        pytest.param(None, {"c"}, id="not looked into yet"),
        pytest.param(PodEvent(AGAIN, MOUNT, warning=True), {"c", "w"}, id="a volume"),
        pytest.param(PodEvent(AGAIN), {"c", "w"}, id="nobody knows"),
        pytest.param(PodEvent(AGAIN, "Pulling: the image"), {"c"}, id="an image is pulled"),
        pytest.param(PodEvent(AGAIN + 1, MOUNT, warning=True), set(), id="just looked into"),
    ],
)
def test_a_pod_that_does_not_start_is_given_its_identity_again(event: PodEvent | None, expected: set[str]) -> None:
    raw = certified(certificates(NOW - 90), replicas=1)
    pods = made(read_job(raw), phase="Pending", created=NOW - 90)
    events = {} if event is None else {"c": event}
    plan = plan_of(raw, *pods, issued={"c": NOW - 90, "w": NOW - 90}, events=events)
    assert issues(plan) == dict.fromkeys(expected, False)


@pytest.mark.parametrize("replicas", [1, 2], ids=["as many workers as are wanted", "too few"])
def test_certificates_that_cannot_be_replaced_are_said_to_be_late_while_workers_train(replicas: int) -> None:
    def degraded(late: float, **facts: Any) -> tuple[str, str, str]:
        status = certificates(NOW - RENEWAL - late) | {"readyReplicas": 1, "trainingTime": format_time(NOW - 60)}
        raw = certified(status, replicas=replicas)
        plan = plan_of(raw, *made(read_job(raw)), **facts)
        assert plan.wake_at is not None or late >= DELIVERY
        assert len(issues(plan)) == (2 if late >= 0 else 0)
        condition = plan.status.condition("Degraded")
        assert condition is not None
        return condition.status, condition.reason, condition.message

    present = ("False", "AsWanted") if replicas == 1 else ("True", "FewerWorkers")
    assert degraded(-9.0)[:2] == present
    assert degraded(DELIVERY - 1)[:2] == present
    assert degraded(DELIVERY + 1)[:2] == present, "the operator has just come back, and nothing has failed yet"
    told, reason, message = degraded(DELIVERY + 1, failure="secrets is forbidden: policy pinned.")
    assert (told, reason) == ("True", "CertificatesLate")
    assert "no new certificates: secrets is forbidden: policy pinned. The first" in message
    assert f"expires at {format_time(NOW - DELIVERY - 1 - RENEWAL + LIFE)};" in message
    raw = certified(certificates(NOW - 2 * LIFE), replicas=replicas)
    gone = plan_of(raw).status.condition("Degraded")
    assert gone is None or gone.reason != "CertificatesLate", "no pod has them"


# --- in plaintext -----------------------------------------------------------------------------------------------------

ALLOWED = dataclasses.replace(OURS, allow_plaintext=True)
PLAIN = {"plaintext": True}


def pods_of(plan: JobPlan) -> list[Pod]:
    made = (action.manifest for action in plan.actions if isinstance(action, CreatePod))
    return [read_pod(pod | {"metadata": pod["metadata"] | {"uid": "u"}}) for pod in made]


def fresh(**spec: Any) -> Spec:
    """A job that is about to begin."""
    raw = body(**spec)
    return raw | {"status": {"templateHash": hash_templates(read_job(raw)).all}}


@pytest.mark.parametrize(
    ("raw", "plaintext"),
    [
        pytest.param(fresh(), False, id="a new job"),
        pytest.param(fresh(security=PLAIN), True, id="one that wants it"),
        pytest.param(accepted(body()), True, id="one that began under an older operator"),
        pytest.param(certified(security=PLAIN), False, id="one that wants it after it has begun"),
        pytest.param(certified({"plaintext": True}), True, id="one that wanted it when it began"),
    ],
)
def test_a_job_keeps_what_it_began_with(raw: Spec, plaintext: bool) -> None:
    plan = plan_of(raw, settings=ALLOWED)
    assert plan.status.plaintext == plaintext
    assert {pod.identity == "" for pod in pods_of(plan)} == {plaintext}
    told = [event.reason for event in plan.events].count("Plaintext")
    assert told == (plaintext and raw["status"].get("coordinator") is None)


def test_a_strangers_pod_does_not_let_it_begin_in_plaintext() -> None:
    raw = fresh()
    stranger = worker(read_job(raw))
    assert stranger.identity == ""
    assert plan_of(raw, stranger).status.plaintext is False


def test_a_suspension_lets_it_begin_anew() -> None:
    raw = accepted(body(suspend=True))
    plan = plan_of(raw, settings=OURS)
    assert (plan.status.phase, plan.status.plaintext, plan.status.certificates) == ("Suspended", None, None)
    resumed = raw | {"spec": raw["spec"] | {"suspend": False}}
    resumed["status"] = {"templateHash": raw["status"]["templateHash"]}
    assert plan_of(resumed, settings=OURS).status.plaintext is False


def test_plaintext_that_is_not_allowed_is_refused_in_one_sentence() -> None:
    plan = plan_of(fresh(security=PLAIN), settings=OURS)
    assert [action for action in plan.actions if isinstance(action, CreatePod)] == []
    progressing = plan.status.condition("Progressing")
    assert progressing is not None
    assert (progressing.status, progressing.reason) == ("False", "PlaintextNotAllowed")
    assert progressing.message == (
        "The job does not begin: spec.security.plaintext is not allowed here: remove it, or have whoever runs the "
        "cluster set the chart's value jobs.allowPlaintext."
    )
    assert [event.reason for event in plan.events] == ["PlaintextNotAllowed"]
    begun = accepted(body(security=PLAIN))
    assert plan_of(begun, settings=OURS).status.condition("Progressing") != progressing, "it trains on"


# --- in pods ----------------------------------------------------------------------------------------------------------


def test_pods_in_plaintext_are_as_they_were_and_their_hashes_too() -> None:
    job = read_job(body())
    plain, sealed = (manifests.worker_pod(job, job.spec.worker_groups[0], 0, "10.0.0.1", OURS, i) for i in ("", "s"))
    assert plain["metadata"]["annotations"] == sealed["metadata"]["annotations"]
    assert "volumes" not in plain["spec"]
    variables = {each["name"]: each.get("value") for each in plain["spec"]["containers"][0]["env"]}
    assert variables["VIRTUALFLOW_COORDINATOR"].startswith("http://")
    assert "VIRTUALFLOW_IDENTITY" not in variables


@pytest.mark.parametrize(("group", "mode"), [({}, 0o444), ({"fsGroup": 1000}, 0o440)], ids=["any user", "a group"])
def test_an_identity_is_mounted_in_the_container_that_trains_alone(group: Spec, mode: int) -> None:
    containers = [{"name": "trainer", "image": "t:1"}, {"name": "proxy", "image": "p:1"}]
    template = {"spec": {"containers": containers, "securityContext": group}}
    job = read_job(body(workerGroups=[{"name": "workers", "template": template}]))
    pod = manifests.worker_pod(job, job.spec.worker_groups[0], 0, "10.0.0.1", OURS, "the-secret")
    trainer, proxy = pod["spec"]["containers"]
    (volume,), (mount,) = pod["spec"]["volumes"], trainer["volumeMounts"]
    assert volume["projected"] == {"sources": [{"secret": {"name": "the-secret"}}], "defaultMode": mode}
    assert (mount["mountPath"], mount["readOnly"], "volumeMounts" in proxy) == ("/virtualflow/identity", True, False)
    variables = {each["name"]: each.get("value") for each in trainer["env"]}
    assert variables["VIRTUALFLOW_COORDINATOR"] == "https://10.0.0.1:7700"
    assert variables["VIRTUALFLOW_IDENTITY"] == mount["mountPath"]
    assert "VIRTUALFLOW_TOKEN" not in variables


def test_the_secret_of_an_identity_goes_with_its_pod() -> None:
    raw = certified(replicas=1)
    job = read_job(raw)
    for pod in made(job):
        secret = manifests.identity_secret(job, pod, {"identity.pem": b"key"})
        (owner,) = secret["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("Pod", pod.name, pod.uid)
        assert (secret["metadata"]["name"], secret["data"]) == (pod.identity, {"identity.pem": "a2V5"})


@given(st.integers(0, 1_000), st.integers(0, 1_000))
def test_a_later_pod_of_the_same_name_has_another_secret(first: int, second: int) -> None:
    job = read_job(body())
    names = {identity_name(job, "digits-workers-0", NOW + at) for at in (first, second)}
    assert len(names) == (1 if first == second else 2)
