"""One decision about one queue: what each job is given, and what the queue says."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import NOW, body, container, group

from tiers import examples
from virtualflow_operator import reasons
from virtualflow_operator.api.objects import Node, read_job
from virtualflow_operator.api.queue import Queue, read_queue
from virtualflow_operator.queues.allocation import QueueDecision, QueueScene, allocate
from virtualflow_operator.queues.members import Grant, QueueMember, known_grant
from virtualflow_operator.scheduling import POLICIES
from virtualflow_operator.settings import SchedulingSettings

GPU = "nvidia.com/gpu"
EAGER = SchedulingSettings(hold=0.0)
Spec = dict[str, Any]


def queue(**spec: Any) -> Queue:
    whole = {"resource": GPU} | spec
    wanted = {key: value for key, value in whole.items() if value is not None}
    return read_queue({"metadata": {"name": "shared", "uid": "q", "generation": 3}, "spec": wanted})


def member(
    name: str, workers: int = 0, pods: list[str] | None = None, status: Spec | None = None, **spec: Any
) -> QueueMember:
    """A job of which each worker takes a GPU; it has been given ``workers`` a minute ago."""
    pod = {"containers": [container(resources={"limits": {GPU: 1}})]}
    usual: Spec = {"queue": "shared", "virtualNodes": 64, "workerGroups": [group(pod=pod)]}
    job = read_job(body(status, name=name, uid=f"uid-{name}", **(usual | spec)))
    given = Grant(job.uid, "shared", workers, "", since=NOW - 60, resized=NOW - 60)
    return QueueMember(
        job, given, NOW - 100, tuple(pods if pods is not None else [f"node-{i % 3}" for i in range(workers)])
    )


def nodes(count: int = 3, gpus: int = 2) -> dict[str, Node]:
    return {f"node-{i}": Node(f"node-{i}", allocatable={GPU: str(gpus)}) for i in range(count)}


def decide(*members: QueueMember, at: Queue | None = None, **facts: Any) -> QueueDecision:
    how: Spec = {name: facts.pop(name) for name in ("now", "settings") if name in facts}
    scene = QueueScene(queue=at or queue(), members=members, **({"nodes": nodes()} | facts))
    return allocate(scene, **({"now": NOW, "settings": EAGER} | how))


def workers(shares: QueueDecision) -> dict[str, int]:
    return {name: grant.workers for (_, name), grant in shares.grants.items()}


def applied(shares: QueueDecision, *members: QueueMember) -> list[QueueMember]:
    """The jobs once they have become what was decided."""
    return [
        dataclasses.replace(
            m,
            grant=shares.grants[m.key],
            pods=tuple(f"node-{i % 3}" for i in range(shares.grants[m.key].workers)),
        )
        for m in members
    ]


def code(shares: QueueDecision) -> str:
    assert shares.status is not None
    return shares.status.conditions[0].reason


def test_a_queue_is_shared_by_weights() -> None:
    shares = decide(member("a"), member("b", weight=2), member("c", weight=3))
    assert workers(shares) == {"a": 1, "b": 2, "c": 3}
    assert {grant.code for grant in shares.grants.values()} == {reasons.ALLOCATED}
    assert code(shares) == reasons.SHARING
    assert shares.status is not None
    assert shares.status.observed_generation == 3
    assert [(given.name, given.workers) for given in shares.status.allocations] == [("c", 3), ("b", 2), ("a", 1)]


def test_workers_are_taken_away_at_once_and_given_when_they_have_left() -> None:
    first, late = member("first", 6), member("late")
    shares = decide(first, late)
    assert workers(shares) == {"first": 3, "late": 0}
    assert "as soon as those of others have left" in shares.grants["ml", "late"].reason
    leaving = dataclasses.replace(first, grant=shares.grants["ml", "first"])  # six pods are still there
    assert workers(decide(leaving, late)) == {"first": 3, "late": 0}
    one_gone = decide(dataclasses.replace(leaving, pods=leaving.pods[:5]), late)
    assert workers(one_gone) == {"first": 3, "late": 1}
    (begun,) = applied(one_gone, late)
    assert begun.grant.since == NOW
    assert begun.grant.resized < NOW, "the change is not over, so nothing holds back the rest"
    gone = dataclasses.replace(leaving, pods=leaving.pods[:3])
    assert workers(decide(gone, begun)) == {"first": 3, "late": 3}


def test_a_job_starts_when_there_is_room_for_its_minimum() -> None:
    first, late = member("first", 6), member("late", minReplicas=2)
    leaving = dataclasses.replace(first, grant=decide(first, late).grants["ml", "first"])
    assert workers(decide(dataclasses.replace(leaving, pods=leaving.pods[:5]), late))["late"] == 0
    assert workers(decide(dataclasses.replace(leaving, pods=leaving.pods[:4]), late))["late"] == 2


def test_what_is_decided_stays_so() -> None:
    members = [member("a"), member("b", weight=2), member("c", minReplicas=2)]
    for policy in POLICIES:
        at = queue(policy=policy)
        now, before = list(members), None
        for _ in range(4):
            shares = decide(*now, at=at)
            now = applied(shares, *now)
            if before is not None and before == workers(shares):
                break
            before = workers(shares)
        again = decide(*now, at=at)
        assert again.grants == shares.grants, policy
        assert again.status == shares.status


def test_a_job_that_no_longer_has_pods_on_a_lost_node_makes_room_there() -> None:
    lost = member("a", 4, pods=["node-0", "node-1", "node-9", "node-9"])
    assert workers(decide(lost, member("b"))) == {"a": 3, "b": 3}
    there = member("a", 4, pods=["node-0", "node-1", "node-2", "node-2"])
    assert workers(decide(there, member("b"))) == {"a": 3, "b": 2}


OBSTACLES: dict[str, tuple[Spec, Spec, str]] = {
    "an unknown policy": ({"policy": "Fairest"}, {}, reasons.UNKNOWN_POLICY),
    "no nodes": ({"nodeSelector": {"matchLabels": {"pool": "x"}}}, {}, reasons.NO_NODES),
    "a structure that cannot be read": ({"limits": [1]}, {}, reasons.INVALID_QUEUE),
    "no right to look at nodes": ({}, {"nodes": None}, reasons.NODES_UNKNOWN),
}


@pytest.mark.parametrize(("spec", "facts", "reason"), OBSTACLES.values(), ids=OBSTACLES.keys())
def test_a_queue_that_cannot_share_takes_nothing_from_anybody(spec: Spec, facts: Spec, reason: str) -> None:
    shares = decide(member("old", 2), member("new"), at=queue(**spec), **facts)
    assert code(shares) == reason
    assert shares.status is not None
    assert shares.status.conditions[0].status == "False"
    assert workers(shares) == {"old": 2, "new": 0}
    assert {grant.code for grant in shares.grants.values()} == {reasons.QUEUE_NOT_READY}
    assert shares.grants["ml", "old"].reason.endswith("it keeps its 2 workers")


def test_a_queue_that_does_not_exist_takes_nothing_from_anybody() -> None:
    scene = QueueScene(queue=None, members=[member("old", 2), member("new")], nodes=nodes())
    shares = allocate(scene, now=NOW, settings=EAGER)
    assert workers(shares) == {"old": 2, "new": 0}
    assert {grant.code for grant in shares.grants.values()} == {reasons.QUEUE_MISSING}
    assert shares.status is None


FAULTS: dict[str, tuple[Spec, str, str]] = {
    "a weight of zero": ({"weight": 0}, reasons.INVALID_SPEC, "weight must be at least 1"),
    "no workers that are counted": ({"workerGroups": [group()]}, reasons.NEVER_FITS, f"request no {GPU}"),
    "a minimum beyond the queue": ({"minReplicas": 7, "replicas": 7}, reasons.NEVER_FITS, "7 workers"),
    "suspended by its user": ({"suspend": True}, reasons.QUEUED, "suspended by its user"),
}


@pytest.mark.parametrize(("spec", "reason", "says"), FAULTS.values(), ids=FAULTS.keys())
def test_a_job_that_cannot_be_shared_with_says_why_and_the_others_go_on(spec: Spec, reason: str, says: str) -> None:
    shares = decide(member("odd", **spec), member("sound"))
    assert workers(shares) == {"odd": 0, "sound": 6}
    assert shares.grants["ml", "odd"].code == reason
    assert says in shares.grants["ml", "odd"].reason
    assert code(shares) == reasons.SHARING


TEMPLATES: dict[str, Spec] = {
    "resources that are a word": {"containers": [container(resources="lots")]},
    "requests that are a word": {"containers": [container(resources={"requests": "all"})]},
    "less than nothing": {"containers": [container(resources={"requests": {GPU: -1}})]},
    "an amount that is a mapping": {"containers": [container(resources={"requests": {GPU: {"a": 1}}})]},
    "an amount beyond all": {"containers": [container(resources={"requests": {GPU: "9e99"}})]},
    "containers that are a word": {"containers": "trainer"},
    "tolerations that are words": {"containers": [container(resources={"limits": {GPU: 1}})], "tolerations": ["all"]},
}


@pytest.mark.parametrize("pod", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_a_template_that_the_api_server_is_going_to_refuse_holds_up_nobody(pod: Spec) -> None:
    shares = decide(member("odd", workerGroups=[group(pod=pod)], maxReplicas=2), member("sound"))
    assert workers(shares)["sound"] >= 4
    assert code(shares) == reasons.SHARING


def test_a_running_job_that_makes_no_sense_any_more_keeps_its_workers_and_they_are_not_given_to_others() -> None:
    shares = decide(member("odd", 4, weight=0), member("sound"))
    assert workers(shares) == {"odd": 4, "sound": 2}


def test_what_it_keeps_counts_within_the_limit_of_its_namespace() -> None:
    limited = queue(limits=[{"namespace": "ml", "capacity": 4}])
    assert workers(decide(member("odd", 3, weight=0), member("sound"), at=limited)) == {"odd": 3, "sound": 1}
    over = queue(limits=[{"namespace": "ml", "capacity": 2}])
    assert workers(decide(member("odd", 3, weight=0), member("sound"), at=over)) == {"odd": 3, "sound": 0}


LIMITED = {
    "of every namespace": ({"namespaceLimit": 2}, {"a": 2, "b": 2}),
    "but for those that have their own": (
        {"namespaceLimit": 2, "limits": [{"namespace": "ml", "capacity": 4}]}, {"a": 4, "b": 2}
    ),
    "nothing for others": ({"namespaceLimit": 0, "limits": [{"namespace": "ml", "capacity": 5}]}, {"a": 5, "b": 0}),
    "none": ({}, {"a": 3, "b": 3}),
    "the highest weight counts": ({"maxWeight": 2}, {"a": 4, "b": 2}),
    "weights above it are equal": ({"maxWeight": 1}, {"a": 3, "b": 3}),
}  # fmt: skip


@pytest.mark.parametrize(("spec", "expected"), LIMITED.values(), ids=LIMITED.keys())
def test_a_queue_limits_every_namespace_and_weight(spec: Spec, expected: dict[str, int]) -> None:
    there = member("b")
    elsewhere = dataclasses.replace(there, job=dataclasses.replace(there.job, namespace="other"))
    heavy = member("a", weight=1_000 if "maxWeight" in spec else 1)
    assert workers(decide(heavy, elsewhere, at=queue(**spec))) == expected


def test_who_is_suspended_by_its_user_does_not_wait() -> None:
    shares = decide(member("resting", suspend=True), member("huge", minReplicas=7, replicas=7))
    assert shares.status is not None
    assert (shares.status.jobs.running, shares.status.jobs.waiting) == (0, 1)


@pytest.mark.parametrize(
    ("resource", "request_", "offered", "says"),
    [
        (GPU, "4", "8", "needs 28 nvidia.com/gpu and the capacity of the queue is 24 nvidia.com/gpu; lower"),
        ("cpu", "1500m", "3", "needs 10.5 cpu and the capacity of the queue is 9 cpu; lower"),
        ("memory", "3Gi", "4Gi", "needs 21Gi of memory and the capacity of the queue is 9Gi of memory; lower"),
    ],
)
def test_people_are_told_amounts_as_they_write_them(resource: str, request_: str, offered: str, says: str) -> None:
    pod = {"containers": [container(resources={"requests": {resource: request_}})]}
    huge = member("huge", minReplicas=7, replicas=7, workerGroups=[group(pod=pod)])
    sized = {name: Node(name, allocatable={resource: offered}) for name in ("a", "b", "c")}
    shares = decide(huge, at=queue(resource=resource), nodes=sized)
    assert says in shares.grants["ml", "huge"].reason


def test_a_queue_that_counts_workers_says_workers() -> None:
    shares = decide(member("huge", minReplicas=7, replicas=7), at=queue(resource=None, capacity=1), nodes={})
    assert "needs 7 workers and the capacity of the queue is 1 worker; lower" in shares.grants["ml", "huge"].reason


def test_one_worker_is_no_workers() -> None:
    leaving = member("first", 1, pods=["node-0"] * 6, replicas=1, maxReplicas=1)
    late = member("late", replicas=1, maxReplicas=1)
    assert decide(leaving, late).grants["ml", "late"].reason.startswith("1 worker as soon as")


def test_others_pods_and_limits_of_namespaces_are_kept_off() -> None:
    assert workers(decide(member("a"), others={"node-0": 2, "node-1": 1})) == {"a": 3}
    limited = queue(limits=[{"namespace": "ml", "capacity": 2}])
    assert workers(decide(member("a"), at=limited)) == {"a": 2}


def test_a_job_grows_no_further_than_it_is_efficient() -> None:
    curve = [{"workers": 4, "stepsPerSecond": "20"}, {"workers": 3, "stepsPerSecond": "19.9"}]
    curve.append({"workers": 1, "stepsPerSecond": "10"})
    slow = member("slow", 3, None, {"scaling": curve}, elasticity={"minEfficiency": 30})
    assert workers(decide(slow, member("other"))) == {"slow": 3, "other": 3}
    alone = decide(slow)
    assert workers(alone) == {"slow": 3}
    reason = alone.grants["ml", "slow"].reason
    assert reason.startswith("has its maximum; a further worker brings, as measured, less than minEfficiency (30 %)")


def test_a_job_that_finds_no_more_nodes_is_told_so() -> None:
    stuck = dataclasses.replace(member("large", 2), ceiling=2)
    assert "; no more of its workers found a node" in decide(stuck).grants["ml", "large"].reason


def test_a_job_that_comes_with_workers_keeps_counting_as_running() -> None:
    job = read_job(body({"replicas": 3}, queue="shared"))
    assert known_grant(job, 5.0).workers == 3
    given = {"queue": "shared", "workers": 2, "reason": "x", "since": "2026-01-01T00:00:00Z"}
    given |= {"resizedTime": "2026-01-01T00:01:00Z", "waitedSeconds": 9}
    grant = known_grant(read_job(body({"replicas": 3, "allocation": given}, queue="shared")), 5.0)
    assert (grant.workers, grant.resized - grant.since, grant.waited) == (2, 60, 9)


def test_a_grant_remembers_when_it_began_and_how_long_it_waited() -> None:
    waiting = Grant("uid", "shared", 0, "", since=100.0, resized=100.0)
    started = waiting.changed(2, "starts", reasons.ALLOCATED, 130.9)
    assert (started.since, started.resized, started.waited) == (130.0, 130.0, 30.0)
    grown = started.changed(3, "grows", reasons.ALLOCATED, 200.0)
    assert (grown.since, grown.resized, grown.waited) == (130.0, 200.0, 30.0)
    assert grown.changed(3, "the same", reasons.ALLOCATED, 300.0).resized == 200.0
    stopped = grown.changed(0, "stops", reasons.QUEUED, 400.0)
    assert (stopped.since, stopped.waited) == (400.0, 0.0)


# --- properties -------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from(sorted(POLICIES)),
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=5
    ),
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
)
def test_on_any_cluster_a_queue_comes_to_rest_within_its_capacity(
    policy: str, jobs: list[tuple[int, int, int, int]], gpus: list[int]
) -> None:
    at = queue(policy=policy)
    cluster = {f"node-{i}": Node(f"node-{i}", allocatable={GPU: str(n)}) for i, n in enumerate(gpus)}
    members = [
        member(f"j{i}", has, minReplicas=least, replicas=least + more, weight=weight)
        for i, (weight, least, more, has) in enumerate(jobs)
    ]
    before: dict[str, int] = {}
    for _ in range(8):
        shares = decide(*members, at=at, nodes=cluster)
        members = applied(shares, *members)
        if workers(shares) == before:
            break
        before = workers(shares)
    assert workers(decide(*members, at=at, nodes=cluster)) == before
    assert sum(before.values()) <= sum(gpus)
    for m in members:
        assert before[m.job.name] == 0 or before[m.job.name] >= m.job.spec.min_replicas


ODD = st.sampled_from([None, 0, 1, 2, 3, 7, 64, -1, 10**9, 10**30, 1.5, "2", "x", True, [], {}, [1], {"a": 1}])
FIELDS = st.sampled_from(
    ["replicas", "minReplicas", "maxReplicas", "virtualNodes", "weight", "priority", "suspend", "elasticity", "queue"]
)
SPEEDS = st.sampled_from(["1", "0", "-1", "nan", "x"])
POINT = st.fixed_dictionaries({"workers": st.integers(-1, 9), "stepsPerSecond": SPEEDS})


@st.composite
def odd_members(draw: st.DrawFn) -> list[QueueMember]:
    found = []
    for index in range(draw(st.integers(1, 3))):
        spec = draw(st.dictionaries(FIELDS, ODD, max_size=3))
        pod = {"containers": [container(resources={"limits": {GPU: draw(ODD)}})], "tolerations": draw(ODD)}
        groups = {"workerGroups": [group(pod=pod, maxReplicas=draw(ODD))]}
        status = {"scaling": draw(st.lists(POINT, max_size=3))}
        efficiency = {"elasticity": {"minEfficiency": draw(st.integers(0, 100))}}
        workers = draw(st.integers(0, 2))
        odd = member(f"odd-{index}", workers, None, status, **(efficiency | draw(st.sampled_from([{}, groups])) | spec))
        found.append(dataclasses.replace(odd, ceiling=draw(st.none() | st.integers(0, 3))))
    return found


@settings(max_examples=examples(300))
@given(odd_members(), st.sampled_from(sorted(POLICIES)))
def test_whatever_stands_in_a_job_its_queue_decides_about_all(members: list[QueueMember], policy: str) -> None:
    shares = decide(*members, member("sound"), at=queue(policy=policy), nodes=nodes(9, 2))
    assert len(shares.grants) == len(members) + 1
    assert code(shares) == reasons.SHARING
    assert sum(grant.workers for key, grant in shares.grants.items() if grant.code == reasons.ALLOCATED) <= 18
