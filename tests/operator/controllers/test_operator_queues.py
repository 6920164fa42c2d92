"""The operator process in a fake cluster with queues: shares in pods, as jobs, nodes and other pods come and go."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fake_api import Fault
from kubelet import NODES as NODE_NAMES
from queue_stage import QUICK_POLICY, SLOT, add_queue, foreign_pod, given, queue, queued, ready, set_slots, shares
from stage import NAMESPACE, Stage, job, play

from kstatus import kstatus
from virtualflow_operator.constants import WORKER
from virtualflow_operator.k8s.client import NODES, PODS, QUEUES, Object


@pytest.mark.slow
def test_shares_follow_the_weights_as_jobs_come_and_go(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        add_queue(stage)
        stage.start(scheduling=QUICK_POLICY)
        stage.server.add(queued("light"))
        await stage.until(lambda: stage.trains("light", 6))
        stage.server.add(queued("heavy", weight=2))
        await stage.until(lambda: shares(stage, "light", "heavy") == [2, 4])
        await stage.until(lambda: stage.trains("heavy", 4))
        stage.server.add(queued("third", weight=3))
        await stage.until(lambda: shares(stage, "light", "heavy", "third") == [1, 2, 3])
        await stage.until(lambda: all(stage.trains(*pair) for pair in (("light", 1), ("heavy", 2), ("third", 3))))
        status = queue(stage)["status"]
        assert status["capacity"] == {
            "total": "6", "onDemand": "6", "spot": "0", "usedByOthers": "0", "allocated": "6", "nodes": 3
        }  # fmt: skip
        assert status["jobs"] == {"running": 3, "waiting": 0}
        assert [entry["workers"] for entry in status["allocations"]] == [3, 2, 1]
        assert stage.condition("third", "Allocated")["reason"] == "Allocated"
        assert stage.job("light")["spec"]["replicas"] == 2, "the user's own field is left alone"  # type: ignore[index]
        stage.kubelet.training(NAMESPACE, "third").finish()
        await stage.until(lambda: stage.status("third").get("phase") == "Complete")
        await stage.until(lambda: shares(stage, "light", "heavy") == [2, 4])
        assert stage.condition("third", "Allocated")["reason"] == "Finished"
        assert "Allocated" in stage.events("light")
        for name in ("light", "heavy"):
            assert stage.status(name).get("repeatedSteps", 0) == 0
        # Never were there more workers than slots, not even on the way.
        assert stage.most[WORKER, "light"] == 6

    play(tmp_path, story)


def test_workers_are_only_given_when_those_of_others_have_left(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        most = 0

        def count(_: object) -> None:
            nonlocal most
            pods = [pod for name in ("a", "b") for pod in stage.pods(name, WORKER)]
            most = max(most, sum(pod["status"]["phase"] in {"Pending", "Running"} for pod in pods))

        add_queue(stage)
        stage.server.store.listeners.append(count)
        stage.start(scheduling=QUICK_POLICY)
        stage.server.add(queued("a"))
        await stage.until(lambda: stage.trains("a", 6))
        stage.server.add(queued("b"))
        await stage.until(lambda: stage.trains("a", 3) and stage.trains("b", 3))
        assert most == 6

    play(tmp_path, story)


@pytest.mark.slow
def test_a_node_killed_a_node_added_and_pods_of_others_are_absorbed(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        add_queue(stage)
        stage.start(scheduling=QUICK_POLICY)
        stage.server.add(queued("digits", elasticity={"heartbeatLimitSeconds": 1, "drainGraceSeconds": 20}))
        await stage.until(lambda: stage.trains("digits", 6))
        stage.server.add(foreign_pod("web", 2))
        await stage.until(lambda: stage.trains("digits", 4))
        assert queue(stage)["status"]["capacity"]["usedByOthers"] == "2"
        stage.server.set_pod(NAMESPACE, "web", phase="Succeeded")
        await stage.until(lambda: stage.trains("digits", 6))
        stage.kubelet.cut_power("node-b")
        await stage.until(lambda: given(stage, "digits") == 4)
        stage.server.remove(NODES, None, "node-b")
        await stage.until(lambda: stage.trains("digits", 4))
        stage.server.add_node("node-d", **{SLOT: "3"})
        await stage.until(lambda: stage.trains("digits", 7))
        stage.server.set_node("node-d", unschedulable=True)
        await stage.until(lambda: given(stage, "digits") == 4)

    play(tmp_path, story)


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["late", "a refusal"])
def test_nothing_is_given_before_it_is_known_what_pods_of_others_take(tmp_path: Path, answer: str) -> None:
    async def story(stage: Stage) -> None:
        stage.start(scheduling=QUICK_POLICY)
        stage.apply("free")
        await stage.until(lambda: stage.trains("free", 2))
        stage.server.add(foreign_pod("web", 2))
        gate = asyncio.Event()
        fault = Fault(verb="list", resource="pods", gate=gate, code=403 if answer == "a refusal" else None, times=None)
        stage.server.inject(fault)
        add_queue(stage)
        stage.server.add(queued("digits"))
        await stage.until(lambda: fault.hits > 0)
        await stage.quiet()
        assert given(stage, "digits") is None
        gate.set()
        workers = 6 if answer == "a refusal" else 4  # who may not look does not count them
        await stage.until(lambda: stage.trains("digits", workers))
        assert stage.most[WORKER, "digits"] == workers

    play(tmp_path, story)


def test_a_job_without_a_share_is_suspended_and_goes_on_by_itself(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        add_queue(stage, slots=1, policy="Priority")
        stage.start(scheduling=QUICK_POLICY)
        stage.server.add(queued("first", replicas=2))
        await stage.until(lambda: stage.trains("first", 2))
        stage.server.add(queued("second", replicas=2))
        await stage.until(lambda: stage.condition("second", "Allocated").get("reason") == "Queued")
        assert stage.status("second")["phase"] == "Pending"
        assert stage.condition("second", "Progressing")["reason"] == "Queued"
        assert not stage.pods("second")
        stage.change("first", queue=None, suspend=True)
        await stage.until(lambda: stage.trains("second", 2))

    play(tmp_path, story)


@pytest.mark.slow
def test_who_is_more_entitled_gets_its_minimum_and_another_resumes_later(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        add_queue(stage, slots=1)
        stage.start(scheduling=QUICK_POLICY)
        stage.server.add(queued("digits", minReplicas=2))
        await stage.until(lambda: stage.trains("digits", 3))
        for node in ("node-a", "node-b"):
            set_slots(stage, node, 0)
        # What is left is less than its minimum: it leaves behind one step, and nothing is lost.
        await stage.until(lambda: stage.status("digits").get("phase") == "Suspended")
        assert stage.condition("digits", "Allocated")["reason"] == "NeverFits"
        assert stage.condition("digits", "Suspended")["reason"] == "Queued"
        step = stage.status("digits")["step"]
        set_slots(stage, "node-a", 1)
        await stage.until(lambda: stage.trains("digits", 2))
        await stage.until(lambda: stage.status("digits")["step"] >= step)
        assert stage.status("digits").get("repeatedSteps", 0) == 0

    play(tmp_path, story)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "reason", "says", "waited_for"),
    [
        ({"nodeSelector": {"matchLabels": {"pool": "none"}}}, "NoNodes", "selects no node", "InProgress"),
        ({"policy": "Fairest"}, "UnknownPolicy", "WeightedFairShare", "Failed"),
        ({"resource": "example.com/other"}, "NoCapacity", "offer no example.com/other", "InProgress"),
    ],
    ids=["a selector that selects nothing", "an unknown policy", "no capacity"],
)
def test_a_queue_that_cannot_share_says_why(
    tmp_path: Path, spec: Object, reason: str, says: str, waited_for: str
) -> None:
    async def story(stage: Stage) -> None:
        add_queue(stage, **spec)
        add_queue(stage, name="sound")
        stage.start(scheduling=QUICK_POLICY)
        stage.server.add(queued("digits"))
        stage.server.add(queued("other", queue="sound", maxReplicas=2))
        stage.server.add(job("free"))
        await stage.until(lambda: ready(stage).get("reason") == reason)
        assert ready(stage)["status"] == "False"
        assert says in ready(stage)["message"]
        assert kstatus(queue(stage)) == waited_for
        await stage.until(lambda: stage.trains("other", 2) and stage.trains("free", 2))
        await stage.until(lambda: stage.condition("digits", "Allocated").get("status") == "False")
        assert shares(stage, "digits") == [0]
        # Once it is mended, the job begins by itself.
        stage.server.modify(
            QUEUES, None, "shared", {"spec": {"policy": "WeightedFairShare", "resource": SLOT, "nodeSelector": None}}
        )
        await stage.until(lambda: stage.trains("digits", 4))
        assert kstatus(queue(stage)) == "Current"

    play(tmp_path, story)


@pytest.mark.slow
def test_a_job_that_is_no_good_holds_up_nobody(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        add_queue(stage)
        stage.start(scheduling=QUICK_POLICY)
        stage.server.add(queued("huge", replicas=8, minReplicas=8))
        stage.server.add(queued("weightless", weight=0))
        plain = job("uncounted", queue="shared")
        stage.server.add(plain)
        stage.server.add(queued("sound"))
        await stage.until(lambda: stage.trains("sound", 6))
        await stage.until(lambda: stage.condition("huge", "Allocated").get("reason") == "NeverFits")
        assert "minimum of 8 workers" in stage.condition("huge", "Allocated")["message"]
        await stage.until(lambda: stage.condition("weightless", "Progressing").get("reason") == "InvalidSpec")
        assert "weight must be at least 1" in stage.condition("weightless", "Progressing")["message"]
        await stage.until(lambda: stage.condition("uncounted", "Allocated").get("reason") == "NeverFits")
        assert f"request no {SLOT}" in stage.condition("uncounted", "Allocated")["message"]
        assert shares(stage, "huge", "weightless", "uncounted") == [0, 0, 0]
        assert ready(stage)["reason"] == "Sharing"
        # A running job that is made no good keeps what it has.
        stage.change("sound", weight=0)
        await stage.until(lambda: stage.condition("sound", "Allocated").get("reason") == "InvalidSpec")
        assert shares(stage, "sound") == [6]

    play(tmp_path, story)


@pytest.mark.slow
def test_a_queue_deleted_under_running_jobs_leaves_them_what_they_have(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        add_queue(stage)
        stage.start(scheduling=QUICK_POLICY)
        stage.server.add(queued("a"))
        stage.server.add(queued("b"))
        await stage.until(lambda: stage.trains("a", 3) and stage.trains("b", 3))
        stage.server.remove(QUEUES, None, "shared")
        await stage.until(lambda: stage.condition("a", "Allocated").get("reason") == "QueueMissing")
        assert "create it, or correct spec.queue" in stage.condition("a", "Allocated")["message"]
        stage.server.add(queued("late"))
        await stage.until(lambda: stage.condition("late", "Allocated").get("reason") == "QueueMissing")
        assert shares(stage, "a", "b", "late") == [3, 3, 0]
        # Out of the queue, a job has what it asks for.
        stage.change("b", queue=None)
        await stage.until(lambda: stage.trains("b", 2))
        assert "allocation" not in stage.status("b")
        assert stage.condition("b", "Allocated") == {}
        add_queue(stage)
        await stage.until(lambda: stage.trains("a", 2) and stage.trains("late", 2))

    play(tmp_path, story)


@pytest.mark.slow
def test_a_successor_of_the_operator_changes_nothing(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        add_queue(stage)
        process = stage.start(scheduling=QUICK_POLICY)
        stage.server.add(queued("a"))
        stage.server.add(queued("b", weight=2))
        await stage.until(lambda: stage.trains("a", 2) and stage.trains("b", 4))
        await stage.quiet()
        before = {name: stage.status(name)["allocation"] for name in ("a", "b")}
        made = dict(stage.made)
        process.kill()
        await stage.replace(process, scheduling=QUICK_POLICY)
        await stage.watching()
        await stage.quiet()
        assert {name: stage.status(name)["allocation"] for name in ("a", "b")} == before
        assert dict(stage.made) == made
        assert shares(stage, "a", "b") == [2, 4]

    play(tmp_path, story)


@pytest.mark.slow
def test_after_an_outage_a_new_leader_asks_before_it_takes_nodes_for_lost(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        add_queue(stage)
        process = stage.start(scheduling=QUICK_POLICY)
        stage.server.add(queued("digits", minReplicas=2))
        await stage.until(lambda: stage.trains("digits", 6))
        await stage.quiet()
        before, made = stage.status("digits")["allocation"], dict(stage.made)
        process.kill()
        for node in NODE_NAMES:  # no kubelet could say that it is well
            stage.server.set_node(node, ready="Unknown")
        await stage.replace(process, scheduling=QUICK_POLICY)
        await stage.watching()
        await stage.quiet()
        assert stage.status("digits")["allocation"] == before
        assert stage.status("digits")["phase"] == "Running"
        for node in NODE_NAMES:
            stage.server.set_node(node, ready=True)
        await stage.quiet()
        assert stage.status("digits")["allocation"] == before
        assert dict(stage.made) == made

    play(tmp_path, story)


@pytest.mark.slow
def test_a_queue_at_rest_is_never_written(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        add_queue(stage)
        stage.start(scheduling=QUICK_POLICY)
        for name in ("a", "b"):
            stage.server.add(queued(name))
            await stage.until(lambda name=name: stage.trains(name, len(stage.workers(name))))  # type: ignore[misc]
        await stage.until(lambda: stage.trains("a", 3) and stage.trains("b", 3))
        await stage.quiet()
        since, version = len(stage.server.requests), queue(stage)["metadata"]["resourceVersion"]
        stage.server.set_node("node-a", unschedulable=False)
        for node in NODE_NAMES:  # a kubelet's report says nothing new
            set_slots(stage, node, 2)
        await stage.quiet(2.0)
        assert queue(stage)["metadata"]["resourceVersion"] == version
        assert [write for write in stage.writes(since) if "pods" in write or "queues" in write] == []

    play(tmp_path, story)


@pytest.mark.slow
def test_a_fixed_capacity_counts_workers_and_needs_no_nodes(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        add_queue(stage, resource=None, capacity=3, limits=[{"namespace": NAMESPACE, "capacity": 2}])
        stage.start(scheduling=QUICK_POLICY)
        stage.server.add(job("digits", queue="shared", maxReplicas=8))
        await stage.until(lambda: stage.trains("digits", 2))
        stage.server.modify(QUEUES, None, "shared", {"spec": {"limits": []}})
        await stage.until(lambda: stage.trains("digits", 3))

    play(tmp_path, story)


def test_jobs_without_a_queue_know_nothing_of_queues(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start()
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        assert {"allocation", "scaling"}.isdisjoint(stage.status("digits"))
        assert stage.condition("digits", "Allocated") == {}
        assert all("nodeAffinity" not in pod["spec"]["affinity"] for pod in stage.server.all(PODS, NAMESPACE))

    play(tmp_path, story)
