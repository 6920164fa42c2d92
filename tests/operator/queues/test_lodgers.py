"""Who computes in turns on the devices of others: what a queue decides where jobs may share devices."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import NOW, body, container, group

from tiers import examples
from virtualflow_operator import reasons
from virtualflow_operator.api.objects import Node, read_job
from virtualflow_operator.api.queue import Queue, read_queue
from virtualflow_operator.queues.admission import QueueAdmission
from virtualflow_operator.queues.allocation import QueueDecision, QueueScene, allocate
from virtualflow_operator.queues.members import Grant, QueueMember, known_grant
from virtualflow_operator.scheduling import POLICIES
from virtualflow_operator.settings import SchedulingSettings

GPU = "nvidia.com/gpu"
EAGER = SchedulingSettings(hold=0.0)
Spec = dict[str, Any]


def queue(most: int | None = 2, **spec: Any) -> Queue:
    packing = {} if most is None else {"packing": {"maxJobsPerDevice": most}}
    whole = {"resource": GPU, "policy": "FIFO"} | packing | spec
    return read_queue({"metadata": {"name": "shared", "uid": "q", "generation": 3}, "spec": whole})


def measured(away: float = 0.5, workers: int = 2, kind: str = "", speed: float = 1.0) -> list[Spec]:
    """What is known of a job whose devices idle for that part of a step, of one second unless ``speed`` is another."""
    computing = f"{1_000 * (1 - away) / speed:g}"
    point = {"workers": workers, "stepsPerSecond": f"{speed:g}", "computingMilliseconds": computing}
    return [point | ({"kind": kind} if kind else {})]


def member(
    name: str,
    pods: tuple[str, ...] = (),
    away: float | None = 0.5,
    created: float = 100,
    speed: float = 1.0,
    **spec: Any,
) -> QueueMember:
    """A job of two workers, a GPU each. It runs where its pods are, and waits if it has none."""
    facts: Spec = {key: spec.pop(key) for key in ("made_for", "takes_turns", "lodging", "seatless") if key in spec}
    kind = facts["made_for"][0] if facts.get("made_for") else ""
    pod = {"containers": [container(resources={"limits": {GPU: spec.pop("gpus", 1)}})]}
    usual: Spec = {"queue": "shared", "replicas": 2, "minReplicas": 2, "maxReplicas": 2, "virtualNodes": 8}
    status = {} if away is None else {"scaling": measured(away, kind=kind, speed=speed)}
    raw = body(status, name=name, uid=f"uid-{name}", **(usual | {"workerGroups": [group(pod=pod)]} | spec))
    since, kinds = NOW - 60, ((kind, len(pods)),) if kind else ()
    grant = Grant(f"uid-{name}", "shared", len(pods), "", since=since, resized=since, kind=kind, kinds=kinds)
    return QueueMember(read_job(raw), grant, NOW - created, pods, **({"takes_turns": bool(pods)} | facts))


def nodes(count: int = 2, gpus: int = 1) -> dict[str, Node]:
    return {f"node-{i}": Node(f"node-{i}", allocatable={GPU: str(gpus)}) for i in range(count)}


PAIR = ("node-0", "node-1")


def decide(*members: QueueMember, at: Queue | None = None, **facts: Any) -> QueueDecision:
    scene = QueueScene(queue=at or queue(), members=members, **({"nodes": nodes()} | facts))
    return allocate(scene, now=NOW, settings=EAGER)


def hosts(decision: QueueDecision) -> dict[str, str]:
    return {name: grant.host for (_, name), grant in decision.grants.items() if grant.host}


def applied(decision: QueueDecision, *members: QueueMember) -> list[QueueMember]:
    """The jobs once they have become what was decided; those that were given devices are on free nodes."""
    free = [f"node-{i}" for i in range(9)]
    after = []
    for m in members:
        grant = decision.grants[m.key]
        own = 0 if grant.host else grant.workers
        pods = (
            tuple(m.pods[:own])
            + tuple(node for node in free if all(node not in other.pods for other in (*members, *after)))[
                : max(own - len(m.pods), 0)
            ]
        )
        lodging = grant.workers if grant.host else 0
        after.append(dataclasses.replace(m, grant=grant, pods=pods, lodging=lodging, takes_turns=bool(pods)))
    return after


def test_a_job_that_waits_computes_on_the_devices_of_another() -> None:
    decision = decide(member("a", PAIR), member("b"))
    lodger, host = decision.grants["ml", "b"], decision.grants["ml", "a"]
    assert (lodger.host, lodger.workers, lodger.code) == ("ml/a", 2, reasons.IN_TURNS)
    assert lodger.reason.startswith("computes in turns with ml/a until devices are free; waits")
    assert (host.workers, host.lodgers, host.code) == (2, ("ml/b",), reasons.ALLOCATED)
    assert host.reason.endswith("; in turns with ml/b")
    assert decision.status is not None
    assert decision.status.capacity is not None
    assert decision.status.capacity.allocated == "2", "a lodger takes nothing"
    assert (decision.status.jobs.running, decision.status.jobs.waiting) == (2, 0)


@pytest.mark.parametrize(
    ("backward", "seated"),
    [
        pytest.param({}, {"b": "ml/a"}, id="whole passes"),
        pytest.param({"fractions": [1, 0.1]}, {}, id="passes that rotate: one worker's long one holds up the other"),
        pytest.param({"fractions": [1, 0.1], "rotate": False}, {"b": "ml/a"}, id="passes by which work is split"),
    ],
)
def test_a_seat_is_predicted_by_how_far_backward_passes_go(backward: Spec, seated: dict[str, str]) -> None:
    spec: Spec = {"virtualNodes": 2} | ({"backward": backward} if backward else {})
    assert hosts(decide(member("a", PAIR, away=0.4, speed=1.2, **spec), member("b"))) == seated


NEVER: dict[str, tuple[QueueMember, QueueMember, Spec]] = {
    "its queue lets none share": (member("a", PAIR), member("b"), {"at": queue(None)}),
    "one job a device": (member("a", PAIR), member("b"), {"at": queue(1)}),
    "phases that nobody measured": (member("a", PAIR), member("b", away=None), {}),
    "a host of which nothing is known": (member("a", PAIR, away=None), member("b"), {}),
    "devices that never idle": (member("a", PAIR, away=0.0), member("b", away=0.0), {}),
    "nodes with several devices": (member("a", ("node-0",) * 2), member("b"), {"nodes": nodes(1, 2)}),
    "a host that was not told of turns": (member("a", PAIR, takes_turns=False), member("b"), {}),
    "a host that is not everywhere yet": (member("a", ("node-0", "")), member("b"), {}),
    "workers that are still leaving": (member("a", PAIR), member("b", ("node-1",)), {"nodes": nodes(3)}),
    "workers that leave a former host": (member("a", PAIR), member("b", lodging=1), {}),
    "workers that found no place there": (member("a", PAIR), member("b", seatless=True), {}),
    "workers of another size": (member("a", PAIR), member("b", gpus=2), {}),
    "suspended by its user": (member("a", PAIR), member("b", suspend=True), {}),
}


@pytest.mark.parametrize(("host", "waiting", "facts"), NEVER.values(), ids=NEVER.keys())
def test_nobody_computes_on_others_devices_with(host: QueueMember, waiting: QueueMember, facts: Spec) -> None:
    if waiting.pods:
        waiting = dataclasses.replace(waiting, grant=dataclasses.replace(waiting.grant, workers=0))
    assert not hosts(decide(host, waiting, **facts))


def test_a_job_that_has_not_run_yet_goes_by_one_like_it() -> None:
    assert hosts(decide(member("run-1", PAIR), member("run-2", away=None))) == {"run-2": "ml/run-1"}
    assert not hosts(decide(member("run-1", PAIR), member("other-2", away=None)))


def test_a_job_whose_devices_are_on_their_way_waits_for_them() -> None:
    sizes = {"replicas": 4, "minReplicas": 2, "maxReplicas": 4}
    four = tuple(f"node-{i}" for i in range(4))
    first, late = member("a", four, **sizes), member("b", **sizes)
    decision = decide(first, late, at=queue(policy="WeightedFairShare"), nodes=nodes(4))
    grant = decision.grants["ml", "b"]
    assert (grant.workers, grant.host) == (0, "")
    assert "as soon as those of others have left" in grant.reason


def test_a_lodger_has_as_many_workers_as_its_queue_would_give_it() -> None:
    three = {"at": queue(policy="FIFO"), "nodes": nodes(3)}
    host = member("a", ("node-0", "node-1", "node-2"), replicas=3, maxReplicas=3)
    lodger = member("b", replicas=2, minReplicas=1, maxReplicas=3)
    assert decide(host, lodger, **three).grants["ml", "b"].workers == 2


def test_a_lodger_stays_while_a_worker_of_its_host_is_replaced() -> None:
    host, lodger = member("a", PAIR), member("b")
    host, lodger = applied(decide(host, lodger), host, lodger)
    assert hosts(decide(dataclasses.replace(host, pods=("node-0", "")), lodger)) == {"b": "ml/a"}


def test_a_lodger_keeps_its_place_when_an_older_job_comes() -> None:
    host, lodger = member("a", PAIR), member("b", created=50)
    staying = applied(decide(host, lodger), host, lodger)
    assert hosts(decide(*staying, member("c", created=90))) == {"b": "ml/a"}


def test_a_lodger_gets_devices_of_its_own_as_soon_as_it_would_without_lodging() -> None:
    host, lodger = member("a", PAIR), member("b")
    begun = applied(decide(host, lodger), host, lodger)
    assert begun[1].grant.since == lodger.grant.since, "it still waits"
    more = decide(*begun, nodes=nodes(4))
    own = more.grants["ml", "b"]
    assert (own.host, own.workers, own.code) == ("", 2, reasons.ALLOCATED)
    assert own.waited == NOW - lodger.grant.since
    assert more.grants["ml", "a"].lodgers == ()


def test_a_lodger_waits_again_when_its_host_ends_and_then_goes_to_another() -> None:
    first, second, lodger = member("a", PAIR), member("b", ("node-2", "node-3")), member("c")
    place = {"nodes": nodes(4)}
    begun = applied(decide(first, second, lodger, **place), first, second, lodger)
    host = begun[2].grant.host
    left = [m for m in begun if m.name != host]
    # Others take the devices of the host at once: who waits longer goes first.
    newcomer = member("d", created=200)
    gone = decide(*left, newcomer, **place)
    assert gone.grants["ml", "d"].workers == 2
    assert (gone.grants["ml", "c"].workers, gone.grants["ml", "c"].host) == (0, ""), (
        "it leaves before it goes elsewhere"
    )
    after = applied(gone, *left, newcomer)
    assert hosts(decide(*after, **place))["c"] in {m.name for m in left} | {"ml/d"}


def test_a_lodger_whose_specification_makes_no_sense_leaves() -> None:
    host, lodger = member("a", PAIR), member("b")
    begun = applied(decide(host, lodger), host, lodger)
    wrong = read_job(begun[1].job.raw | {"spec": begun[1].job.raw["spec"] | {"weight": 0}})
    grant = decide(begun[0], dataclasses.replace(begun[1], job=wrong)).grants["ml", "b"]
    assert (grant.workers, grant.host, grant.code) == (0, "", reasons.INVALID_SPEC)


def test_a_queue_that_gives_out_nothing_leaves_lodgers_where_they_are() -> None:
    host, lodger = member("a", PAIR), member("b")
    begun = applied(decide(host, lodger), host, lodger)
    decision = decide(*begun, at=queue(policy="Fairest"))
    assert hosts(decision) == {"b": "ml/a"}
    assert decision.grants["ml", "a"].lodgers == ("ml/b",)


def test_jobs_share_devices_of_one_kind() -> None:
    kinds = [
        {"name": kind, "nodeSelector": {"matchLabels": {"gpu": kind}}} for kind in ("fast", "slow")
    ]  # fmt: skip
    there = {
        f"node-{i}": Node(f"node-{i}", allocatable={GPU: "1"}, labels={"gpu": kind})
        for i, kind in enumerate(["fast", "fast", "slow", "slow"])
    }
    fast = member("a", PAIR, made_for=("fast",) * 2)
    slow = member("b", ("node-2", "node-3"), made_for=("slow",) * 2)
    waits = dataclasses.replace(fast, job=member("c").job, pods=(), made_for=(), takes_turns=False)
    job = read_job(waits.job.raw | {"status": {"scaling": measured(kind="slow"), "startTime": "2023-01-01T00:00:00Z"}})
    waits = dataclasses.replace(waits, job=job, grant=Grant("uid-c", "shared", 0, "", since=NOW - 60, kind="slow"))
    grant = decide(fast, slow, waits, at=queue(kinds=kinds), nodes=there).grants["ml", "c"]
    assert (grant.host, grant.kind, grant.kinds) == ("ml/b", "slow", (("slow", 2),))


def test_an_operator_that_starts_anew_knows_who_lodges_where() -> None:
    decision = decide(member("a", PAIR), member("b"))
    for name in "ab":
        grant = decision.grants["ml", name]
        job = member(name).job
        admitted = QueueAdmission(grant).admit(job, sound=True, now=NOW)
        status = msgspec.structs.replace(job.status, allocation=admitted.allocation)
        known = known_grant(dataclasses.replace(job, status=status), NOW)
        assert (known.host, known.lodgers, known.code) == (grant.host, grant.lodgers, grant.code)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[list[QueueMember], dict[str, Node], str]:
    """Some jobs on some nodes of one device, others that wait."""
    count = draw(st.integers(2, 8))
    free = [f"node-{i}" for i in range(count)]
    members = []
    for n in range(draw(st.integers(2, 6))):
        size = draw(st.integers(1, 3))
        runs = size <= len(free) and (n < 2 or draw(st.booleans()))
        pods, free = (tuple(free[:size]), free[size:]) if runs else ((), free)
        away = draw(st.sampled_from([None, 0.0, 0.4, 0.5, 0.7]))
        one = member(
            f"{draw(st.sampled_from('ab'))}-{n}",
            pods,
            away,
            float(draw(st.integers(50, 99))),
            replicas=size,
            minReplicas=draw(st.integers(1, size)),
            maxReplicas=size,
        )
        members.append(one)
    return members, nodes(count), draw(st.sampled_from(sorted(POLICIES)))


@settings(max_examples=examples(150))
@given(scenes())
def test_what_holds_of_every_decision_with_lodgers(case: tuple[list[QueueMember], dict[str, Node], str]) -> None:
    now, there, policy = case
    before: QueueDecision | None = None
    for _ in range(6):
        decision = decide(*now, at=queue(policy=policy), nodes=there)
        alone = decide(*now, at=queue(None, policy=policy), nodes=there)
        own: Counter[str] = Counter()
        on_host: Counter[str] = Counter()
        for (_, name), grant in decision.grants.items():
            without = alone.grants["ml", name]
            if grant.host:
                assert not without.workers, "whoever gets devices without lodging gets them with it"
                on_host[grant.host] += grant.workers
            else:
                assert (grant.workers, grant.since) == (without.workers, without.since)
                own[f"ml/{name}"] = grant.workers
        assert own.total() <= len(there)
        for host, workers in on_host.items():
            assert workers <= own[host], "a lodger is on devices of one that runs, and no device has three"
        again = decide(*now, at=queue(policy=policy), nodes=there)
        assert again.grants == decision.grants
        if before is not None and hosts(before) and all(m.grant == before.grants[m.key] for m in now):
            for name, host in hosts(before).items():
                grant = decision.grants["ml", name]
                assert grant.host == host or not (grant.host and grant.workers), "nobody goes from host to host"
        before, now = decision, applied(decision, *now)
    settled = decide(*now, at=queue(policy=policy), nodes=there)
    assert settled.grants == before.grants, "nobody comes and goes while nothing happens"  # type: ignore[union-attr]
