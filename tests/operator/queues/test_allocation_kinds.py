"""One decision about a queue with kinds of device: who gets which, and what the queue says of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from scenes import NOW, body, container, group

from tiers import examples
from virtualflow_operator import reasons
from virtualflow_operator.api import Node, Queue, read_job, read_queue
from virtualflow_operator.queues import Grant, QueueDecision, QueueMember, QueueScene, allocate, known_grant
from virtualflow_operator.scheduling import POLICIES
from virtualflow_operator.settings import SchedulingSettings

GPU = "nvidia.com/gpu"
DEVICE = "example.com/device"
EAGER = SchedulingSettings(hold=0.0)
Spec = dict[str, Any]
STATISTICAL: Spec = {"reproducibility": "Statistical"}
MIXES: Spec = STATISTICAL | {"elasticity": {"acrossKinds": "Mix"}}


def kind(name: str, **fields: Any) -> Spec:
    return {"name": name, "nodeSelector": {"matchLabels": {DEVICE: name}}} | fields


FAST, SLOW = kind("fast", rating=4), kind("slow", rating=1)


def queue(*kinds: Spec, **spec: Any) -> Queue:
    whole = {"resource": GPU, "kinds": list(kinds or (FAST, SLOW))} | spec
    return read_queue({"metadata": {"name": "shared", "uid": "q", "generation": 3}, "spec": whole})


def nodes(gpus: int = 2, **counts: int) -> dict[str, Node]:
    """So many nodes of each kind, by default one each; of ``none`` without a label."""
    found = {}
    for name, count in (counts or {"fast": 1, "slow": 1}).items():
        labels = {} if name == "none" else {DEVICE: name}
        for i in range(count):
            found[f"{name}-{i}"] = Node(f"{name}-{i}", allocatable={GPU: str(gpus)}, labels=labels)
    return found


def member(name: str, *, status: Spec | None = None, pods: list[str] | None = None, **spec: Any) -> QueueMember:
    pod = spec.pop("pod", {}) | {"containers": [container(resources={"limits": {GPU: 1}})]}
    usual: Spec = {"queue": "shared", "virtualNodes": 64, "workerGroups": [group(pod=pod)]}
    job = read_job(body(status, name=name, uid=f"uid-{name}", **(usual | spec)))
    return QueueMember(job, Grant(job.uid, "shared", 0, "", since=NOW - 60, resized=NOW - 60), NOW - 100, pods or [])


def running(made: QueueMember, kind: str = "", **kinds: int) -> QueueMember:
    """The job with workers of these kinds, the first of which is its own, and a pod for each."""
    home, workers = kind or next(iter(kinds)), sum(kinds.values())
    grant = dataclasses.replace(made.grant, workers=workers, kind=home, kinds=tuple(kinds.items()))
    return dataclasses.replace(made, grant=grant, pods=[f"{k}-0" for k, n in kinds.items() for _ in range(n)])


def decide(*members: QueueMember, at: Queue | None = None, **facts: Any) -> QueueDecision:
    how: Spec = {name: facts.pop(name) for name in ("now", "settings") if name in facts}
    scene = QueueScene(queue=at or queue(), members=members, **({"nodes": nodes()} | facts))
    return allocate(scene, **({"now": NOW, "settings": EAGER} | how))


def applied(shares: QueueDecision, *members: QueueMember) -> list[QueueMember]:
    """The jobs once they have become what was decided."""
    return [
        dataclasses.replace(
            m,
            grant=shares.grants[m.key],
            pods=[f"{k}-0" for k, n in shares.grants[m.key].kinds for _ in range(n)],
            made_for=[k for k, n in shares.grants[m.key].kinds for _ in range(n)],
        )
        for m in members
    ]


def split(shares: QueueDecision) -> dict[str, dict[str, int]]:
    return {name: dict(grant.kinds) for (_, name), grant in shares.grants.items()}


def measured(kind: str, *points: tuple[int, float]) -> list[Spec]:
    return [{"kind": kind, "workers": n, "stepsPerSecond": str(speed)} for n, speed in points]


def test_each_job_has_one_kind_and_its_status_and_the_queues_say_which() -> None:
    shares = decide(member("a", maxReplicas=2), member("b", maxReplicas=2), at=queue(kind("fast"), kind("slow")))
    assert sorted(map(tuple, (found.items() for found in split(shares).values()))) == [(("fast", 2),), (("slow", 2),)]
    for grant in shares.grants.values():
        assert grant.code == reasons.ALLOCATED
        assert f"(on {grant.kind}" in grant.reason
    assert shares.status is not None
    assert [(k.name, k.total, k.allocated, k.nodes) for k in shares.status.kinds] == [
        ("fast", "2", "2", 1),
        ("slow", "2", "2", 1),
    ]
    assert shares.status.capacity is not None
    assert (shares.status.capacity.total, shares.status.capacity.allocated) == ("4", "4")


def test_a_job_that_a_fast_device_hardly_helps_leaves_it_to_one_that_it_helps_a_lot() -> None:
    helped = {"step": 1, "totalSteps": 1_000, "scaling": [*measured("fast", (1, 8)), *measured("slow", (1, 1))]}
    same = {"step": 1, "totalSteps": 1_000, "scaling": [*measured("fast", (1, 2)), *measured("slow", (1, 1.9))]}
    shares = decide(
        member("helped", status=helped, maxReplicas=2, **STATISTICAL),
        member("same", status=same, maxReplicas=2, **STATISTICAL),
    )
    assert split(shares) == {"helped": {"fast": 2}, "same": {"slow": 2}}


def test_what_nobody_has_measured_is_assumed_by_the_ratings_and_said_so() -> None:
    known = {"scaling": measured("slow", (1, 3))}
    (grant,) = decide(member("a", status=known, **STATISTICAL)).grants.values()
    assert grant.kind == "fast"
    assert "its speed on fast is assumed, 5 times that on slow" in grant.reason  # it hopes for a little more than 4
    (unmeasured,) = decide(member("a")).grants.values()
    assert "its speed is not measured yet" in unmeasured.reason


def test_a_node_of_no_kind_is_given_to_nobody_and_named() -> None:
    shares = decide(member("a", **MIXES), nodes=nodes(fast=1, none=2))
    assert split(shares) == {"a": {"fast": 2}}
    assert shares.status is not None
    assert shares.status.nodes_without_kind == ("none-0", "none-1")
    assert shares.status.conditions[0].message.endswith("2 nodes of no kind: see nodesWithoutKind.")


def test_a_node_belongs_to_the_first_kind_that_selects_it() -> None:
    everything = {"name": "rest", "nodeSelector": {}}
    shares = decide(at=queue(FAST, everything), nodes=nodes(fast=1, slow=2, none=1))
    assert shares.status is not None
    assert [(k.name, k.nodes) for k in shares.status.kinds] == [("fast", 1), ("rest", 3)]


OBSTACLES: dict[str, tuple[Queue, dict[str, Node], str, str]] = {
    "no node of any kind": (queue(), nodes(none=2), reasons.NO_NODES, "None of its kinds selects any of its nodes"),
    "a kind behind one of all": (
        queue({"name": "all", "nodeSelector": {}}, FAST),
        nodes(),
        reasons.INVALID_QUEUE,
        "No node can be of the kind fast",
    ),
    "kinds that overlap in a thousand ways": (
        queue(*({"name": f"k{i}", "nodeSelector": {"matchLabels": {f"a{i}": "1", f"b{i}": "1"}}} for i in range(10))),
        nodes(),
        reasons.INVALID_QUEUE,
        "The kind k7 overlaps with those before it in more than 64 ways",
    ),
}


@pytest.mark.parametrize(("at", "there", "code", "says"), OBSTACLES.values(), ids=OBSTACLES.keys())
def test_kinds_that_make_no_sense_take_nothing_from_anybody(
    at: Queue, there: dict[str, Node], code: str, says: str
) -> None:
    shares = decide(running(member("old"), fast=2), at=at, nodes=there)
    assert shares.status is not None
    assert shares.status.conditions[0].reason == code
    assert says in shares.status.conditions[0].message
    assert [grant.workers for grant in shares.grants.values()] == [2]


BEGUN = {"step": 100, "totalSteps": 1_000_000, "startTime": "2026-01-01T00:00:00Z"}
QUICK = BEGUN | {"scaling": [*measured("slow", (1, 1)), *measured("fast", (1, 9))]}


def test_a_bitwise_job_stays_on_the_kind_on_which_it_began_and_waits_for_it() -> None:
    began = running(member("bits", status=QUICK), slow=2)
    assert split(decide(began)) == {"bits": {"slow": 2}}, "fast is free, and nine times as fast"
    suspended = running(member("bits", status=QUICK), "slow")
    other = running(member("other", **MIXES, minReplicas=2), slow=2)
    waits = decide(suspended, other)
    assert split(waits)["bits"] in ({}, {"slow": 1})
    gone = decide(suspended, at=queue(FAST))
    assert split(gone) == {"bits": {}}
    assert gone.grants["ml", "bits"].code == reasons.NEVER_FITS
    assert "no device of a kind that it may use (slow)" in gone.grants["ml", "bits"].reason


def test_a_statistical_job_moves_to_a_better_kind_as_a_whole() -> None:
    began = running(member("moves", status=QUICK, **STATISTICAL), slow=2)
    moved = decide(began)
    assert split(moved) == {"moves": {"fast": 2}}
    on_both = dataclasses.replace(began, grant=moved.grants["ml", "moves"], pods=["slow-0", "slow-0", "fast-0"])
    assert decide(on_both).grants == moved.grants, "those that leave change nothing"


def test_a_job_that_is_to_move_keeps_its_minimum_until_there_is_room() -> None:
    began = running(member("moves", status=QUICK, **STATISTICAL), slow=2)
    leaving = dataclasses.replace(member("over", maxReplicas=1), pods=["fast-0", "fast-0"])
    leaving = dataclasses.replace(leaving, grant=dataclasses.replace(leaving.grant, kind="fast"))
    held = decide(began, leaving)
    assert split(held)["moves"] == {"slow": 1}
    assert "on fast as soon as those of others have left" in held.grants["ml", "moves"].reason
    assert held.grants["ml", "moves"].kind == "slow", "it is at home where it is"


def test_a_job_that_mixes_has_what_others_leave_and_gives_it_back() -> None:
    known = BEGUN | {"scaling": [*measured("slow", (1, 1)), *measured("fast", (1, 2))]}
    mixes = member("mixes", status=known, **MIXES)
    both = decide(mixes)
    assert split(both) == {"mixes": {"fast": 2, "slow": 2}}
    assert "beside that 2 on slow, as long as nobody there needs them" in both.grants["ml", "mixes"].reason
    (began,) = applied(both, mixes)
    late = running(member("late", status=BEGUN), "slow")
    back = decide(began, late)
    assert split(back)["mixes"]["fast"] == 2
    assert split(back)["mixes"].get("slow", 0) < 2


def test_a_job_is_only_given_kinds_that_its_templates_may_be_on() -> None:
    pod = {"nodeSelector": {DEVICE: "slow"}}
    picky = member("picky", pod=pod, **MIXES)
    assert split(decide(picky, member("other", maxReplicas=2))) == {"picky": {"slow": 2}, "other": {"fast": 2}}
    nowhere = decide(member("nowhere", pod={"nodeSelector": {"pool": "x"}}))
    (grant,) = nowhere.grants.values()
    assert (grant.workers, grant.code) == (0, reasons.NEVER_FITS)


def test_limits_of_namespaces_are_of_a_kind() -> None:
    limits = [{"namespace": "ml", "capacity": 1, "kind": "fast"}]
    shares = decide(member("a", **MIXES), at=queue(limits=limits))
    assert split(shares) == {"a": {"fast": 1, "slow": 2}} or split(shares) == {"a": {"slow": 2, "fast": 1}}


def test_a_price_counts_as_much_as_thrift_says() -> None:
    dear = queue(kind("fast", rating=4, price=100), kind("slow", rating=1, price=1))
    assert decide(member("a"), at=dear).grants["ml", "a"].kind == "fast"
    thrifty = queue(kind("fast", rating=4, price=100), kind("slow", rating=1, price=1), thrift=1)
    assert decide(member("a"), at=thrifty).grants["ml", "a"].kind == "slow"


def test_a_running_job_of_a_queue_that_gets_kinds_goes_on_where_most_of_its_workers_are() -> None:
    before = member("old", status=BEGUN)
    grant = dataclasses.replace(before.grant, workers=3)
    before = dataclasses.replace(before, grant=grant, pods=["slow-0", "slow-0", "fast-0"])
    shares = decide(before)
    assert split(shares) == {"old": {"slow": 2}}
    assert shares.grants["ml", "old"].kind == "slow"
    renamed = dataclasses.replace(running(before, slow=2), pods=["slow-0", "slow-0"])
    other_names = queue(
        {"name": "v100", "nodeSelector": FAST["nodeSelector"]}, {"name": "k80", "nodeSelector": SLOW["nodeSelector"]}
    )
    assert split(decide(renamed, at=other_names)) == {"old": {"k80": 2}}


def test_a_job_keeps_its_kind_where_its_status_is_all_that_is_known() -> None:
    given: Spec = {"queue": "shared", "workers": 3, "reason": "x", "since": "2026-01-01T00:00:00Z", "kind": "slow"}
    given |= {
        "resizedTime": "2026-01-01T00:00:00Z",
        "kinds": [{"kind": "slow", "workers": 2}, {"kind": "fast", "workers": 1}],
    }
    grant = known_grant(read_job(body({"replicas": 3, "allocation": given}, queue="shared")), 5.0)
    assert (grant.kind, grant.kinds, grant.at_home) == ("slow", (("slow", 2), ("fast", 1)), 2)


def test_with_one_kind_all_is_as_without() -> None:
    members = [member("a"), member("b", weight=2), member("c", minReplicas=2)]
    for policy in POLICIES:
        plain = read_queue({"metadata": {"name": "shared"}, "spec": {"resource": GPU, "policy": policy}})
        without = decide(*members, at=plain, nodes=nodes(fast=3))
        one = decide(*members, at=queue(FAST, policy=policy), nodes=nodes(fast=3))
        assert {k: (g.workers, g.reason) for k, g in one.grants.items()} == {
            k: (g.workers, g.reason) for k, g in without.grants.items()
        }


SPEEDS = st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0.5, 1.0, 3.0, 9.0])), max_size=2)
WAYS: list[Spec] = [{}, STATISTICAL, MIXES]


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[QueueMember], dict[str, Node], str]:
    """Jobs of all sorts, on nodes of three kinds and of none."""
    counts = draw(
        st.sampled_from([{"fast": 1}, {"fast": 1, "slow": 2}, {"fast": 2, "slow": 1, "none": 1}, {"slow": 1}])
    )
    members = []
    for i in range(draw(st.integers(1, 5))):
        least = draw(st.integers(1, 3))
        status: Spec = {"scaling": [*measured("fast", *draw(SPEEDS)), *measured("slow", *draw(SPEEDS))]}
        if draw(st.booleans()):
            status |= {"step": 1, "totalSteps": draw(st.sampled_from([10, 1_000, 100_000]))}
        way = draw(st.sampled_from(WAYS))
        more = draw(st.integers(0, 3))
        made = member(f"j{i}", status=status, minReplicas=least, replicas=least + more, **way)
        has = {k: draw(st.integers(0, 3)) for k in ("fast", "slow")}
        has = {k: n for k, n in has.items() if n}
        if way != MIXES and has:
            has = dict([next(iter(has.items()))])
        if sum(has.values()) >= least:
            begun = structs.replace(made.job.status, start_time="2026-01-01T00:00:00Z")
            made = running(dataclasses.replace(made, job=dataclasses.replace(made.job, status=begun)), **has)
        members.append(made)
    return members, nodes(**counts), draw(st.sampled_from(sorted(POLICIES)))


@settings(max_examples=examples(80), deadline=None)
@given(clusters())
def test_on_any_cluster_a_queue_with_kinds_comes_to_rest_within_each_kind(
    cluster: tuple[list[QueueMember], dict[str, Node], str],
) -> None:
    members, there, policy = cluster
    at = queue(policy=policy)
    began = {m.job.name: m.grant.kind for m in members if m.grant.workers and m.job.spec.reproducibility == "Bitwise"}
    seen: list[dict[str, dict[str, int]]] = []
    for _ in range(16):
        shares = decide(*members, at=at, nodes=there)
        for m in members:
            grant = shares.grants[m.key]
            assert grant.reason
            assert grant.workers == sum(n for _, n in grant.kinds)
            assert grant.workers == 0 or grant.workers >= m.job.spec.min_replicas
            if m.job.name in began:
                assert {k for k, _ in grant.kinds} <= {began[m.job.name]}, "other devices compute other bits"
            if m.job.spec.across_kinds != "Mix":
                assert len(grant.kinds) <= 1
        members = applied(shares, *members)
        seen.append(split(shares))
        if len(seen) > 1 and seen[-1] == seen[-2]:
            break
    assert seen[-1] == seen[-2], "it comes to rest"
    for name in ("fast", "slow"):
        total = sum(2 for node in there if node.startswith(name))
        assert sum(found.get(name, 0) for found in seen[-1].values()) <= total
