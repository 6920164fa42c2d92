"""The whole operator process in a fake cluster: what becomes of jobs when nothing is wrong with the API server."""

from __future__ import annotations

import base64
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from kubelet import NODES as NODE_NAMES
from stage import KEY, NAMESPACE, Stage, play
from trainers import DIGEST

from tiers import nightly, slow
from virtualflow.protocol import http_api
from virtualflow_operator.constants import COORDINATOR, LABEL_JOB, WORKER
from virtualflow_operator.controllers.issuer import derive_token
from virtualflow_operator.jobs.pod_classification import LEFT
from virtualflow_operator.k8s.client import JOBS, NODES, PDBS, PODS, SECRETS, SERVICES

# --- what a job becomes -----------------------------------------------------------------------------------------------


def test_a_job_becomes_a_coordinator_a_service_a_secret_and_workers(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        made = stage.apply("digits")
        uid = made["metadata"]["uid"]
        stage.start()
        await stage.until(lambda: stage.trains("digits"))
        ours = {
            "app.kubernetes.io/name": "virtualflow",
            "app.kubernetes.io/instance": "digits",
            "app.kubernetes.io/part-of": "virtualflow",
            "app.kubernetes.io/managed-by": "virtualflow-operator",
            "virtualflow.dev/job": "digits",
        }
        owner = {"apiVersion": "virtualflow.dev/v1alpha1", "kind": "VirtualFlowJob", "name": "digits", "uid": uid}
        owner |= {"controller": True, "blockOwnerDeletion": True}
        children = [
            item
            for kind in (PODS, SERVICES, SECRETS, PDBS)
            for item in stage.server.all(kind, NAMESPACE, f"{LABEL_JOB}=digits")
        ]
        for child in children:
            assert child["metadata"]["labels"].items() >= ours.items()
            if "-identity-" not in child["metadata"]["name"]:
                assert child["metadata"]["ownerReferences"] == [owner]
        kinds = ["Pod", "Pod", "Pod", "PodDisruptionBudget", "Secret", "Secret", "Secret", "Secret", "Service"]
        assert sorted(child["kind"] for child in children) == kinds
        assert [pod["metadata"]["name"] for pod in stage.pods("digits")] == [
            "digits-coordinator-0",
            "digits-w-0",
            "digits-w-1",
        ]
        secret = stage.secret("digits")
        service = stage.server.find(SERVICES, NAMESPACE, "digits-coordinator")
        assert base64.b64decode(secret["data"]["token"]).decode() == derive_token(KEY.encode(), uid)
        assert service is not None
        for ordinal, worker in enumerate(stage.pods("digits", WORKER)):
            own = {"component": "worker", "virtualflow.dev/worker-group": "w", "virtualflow.dev/ordinal": str(ordinal)}
            own = {"virtualflow.dev/attempt": "0", "app.kubernetes.io/component": own.pop("component")} | own
            assert worker["metadata"]["labels"] == ours | own | {"virtualflow.dev/role": "worker"}
            container = worker["spec"]["containers"][0]
            environment = {entry["name"]: entry.get("value") for entry in container["env"]}
            assert environment["VIRTUALFLOW_COORDINATOR"] == f"https://{service['spec']['clusterIP']}:7700"
            assert environment["VIRTUALFLOW_VIRTUAL_NODES"] == "8"
            assert (worker["spec"]["restartPolicy"], container["image"]) == ("Never", "trainer:test")
        (coordinator,) = stage.pods("digits", COORDINATOR)
        assert service["spec"]["selector"].items() <= coordinator["metadata"]["labels"].items()
        assert coordinator["spec"]["containers"][0]["image"] == "operator:test"

        body = stage.job("digits")
        assert body is not None
        status = body["status"]
        assert (status["phase"], status["workers"], status["coordinator"]) == ("Running", "2/2", "digits-coordinator-0")
        assert [share["virtualNodes"] for share in status["assignment"]] == ["0-3", "4-7"]
        assert stage.condition("digits", "Ready")["status"] == "True"
        assert {key: value for key, value in body.items() if key != "status"} == {
            key: value for key, value in made.items() if key != "status"
        } | {"metadata": made["metadata"] | {"resourceVersion": body["metadata"]["resourceVersion"]}}

    play(tmp_path, story)


def test_nothing_is_written_but_what_a_job_needs(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start()
        await stage.watching()
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        await stage.until(lambda: "Training" in stage.events("digits"))
        writes = stage.writes()
        for once in ("create services", "create poddisruptionbudgets"):
            assert writes.count(once) == 1
        assert writes.count("create secrets") == 4, "the job's, and one for each pod"
        tried = sum("dryRun=All" in request.path for request in stage.server.requests)
        assert tried == 2, "a worker and a coordinator"
        assert writes.count("create pods") - tried == stage.made.total() == 3
        allowed = {"create services", "create secrets", "create poddisruptionbudgets", "create pods", "create events"}
        assert set(writes) == allowed | {"patch virtualflowjobs/status"}
        assert writes.count("patch virtualflowjobs/status") <= 8
        assert writes.count("create events") <= 3
        assert not any(r.resource == "secrets" and r.verb != "create" for r in stage.server.requests)

    play(tmp_path, story)


@pytest.mark.slow
def test_nothing_is_asked_and_written_while_nothing_happens(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start()
        await stage.watching()
        for name in ("digits", "others"):
            stage.apply(name)
        for name in ("digits", "others"):
            await stage.until(lambda name=name: stage.trains(name))
            stage.kubelet.training(NAMESPACE, name).paused = True
        # The last progress that is reported may still be written; then comes silence.
        await stage.quiet()
        since = len(stage.server.requests)
        for number in range(40):
            # What does not matter: labels, a kubelet's heartbeats, other people's pods.
            stage.server.modify(JOBS, NAMESPACE, "digits", {"metadata": {"labels": {"note": str(number)}}})
            stage.server.modify(NODES, None, NODE_NAMES[0], {"metadata": {"annotations": {"beat": str(number)}}})
            stage.server.modify(PODS, NAMESPACE, "digits-w-0", {"metadata": {"annotations": {"note": str(number)}}})
            stage.server.modify(SERVICES, NAMESPACE, "digits-coordinator", {"metadata": {"labels": {"n": str(number)}}})
        stage.change("digits", backoffLimit=7)
        generation = stage.job("digits")["metadata"]["generation"]  # type: ignore[index]
        await stage.until(lambda: stage.status("digits")["observedGeneration"] == generation)
        asked = [f"{r.verb} {r.resource}" for r in stage.server.requests[since:] if r.resource != "leases"]
        assert len(asked) <= 2, f"one status for the change, and at most one for what follows from it: {asked}"
        assert set(asked) == {"patch virtualflowjobs/status"}

    play(tmp_path, story)


@pytest.mark.slow
def test_progress_is_written_now_and_then(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start("--progress-seconds=0.5")
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        since, step = len(stage.server.requests), stage.status("digits").get("step") or 0
        begin = time.monotonic()
        await stage.until(lambda: (stage.status("digits").get("step") or 0) >= step + 50)
        seconds = time.monotonic() - begin
        assert len(stage.writes(since)) <= seconds / 0.5 + 2
        assert float(stage.status("digits")["loss"]) < 1
        assert float(stage.status("digits")["stepsPerSecond"]) == 30

    play(tmp_path, story)


def test_a_training_runs_to_its_end(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start()
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        training = stage.kubelet.training(NAMESPACE, "digits")
        training.finish()
        await stage.until(lambda: stage.status("digits").get("phase") == "Complete")
        await stage.until(lambda: not stage.pods("digits", COORDINATOR))
        status = stage.status("digits")
        assert (status["digest"], status["step"], status["workers"]) == (DIGEST, training.step, "0/2")
        assert [pod["status"]["phase"] for pod in stage.pods("digits", WORKER)] == ["Succeeded"] * 2, "logs stay"
        assert stage.made.total() == 3

    play(tmp_path, story)


# --- losses -----------------------------------------------------------------------------------------------------------


def test_a_lost_pod_is_told_to_the_coordinator_at_once(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start()
        stage.apply("digits", replicas=8, virtualNodes=64)
        await stage.until(lambda: stage.trains("digits", 8))
        for _ in range(3):
            training = stage.kubelet.training(NAMESPACE, "digits")
            victim = training.members(training.plan)[-1]
            stage.kubelet.fail(NAMESPACE, victim.name)
            await stage.until(lambda victim=victim: told_gone(stage, victim.incarnation))
            await stage.until(lambda victim=victim: victim.incarnation not in plan_of(stage, "digits"))
        await stage.until(lambda: stage.trains("digits", 8))
        assert stage.most[WORKER, "digits"] == 8
        assert stage.status("digits")["repeatedSteps"] <= 3
        assert stage.status("digits").get("failures", {}).get("count", 0) == 0, "the cluster's doing is no crash"

    play(tmp_path, story)


def told_gone(stage: Stage, incarnation: str) -> bool:
    """Whether a coordinator was told that a process is no more."""
    return any(call.incarnation == incarnation for call in stage.told("digits", http_api.GoneCall))


def lost(stage: Stage, name: str) -> list[http_api.GoneCall]:
    """What the job's coordinators were told of workers that did not leave as they should.

    That a pod has ended or is deleted may be known before the coordinator's word that its worker has left.
    """
    return [call for call in stage.told(name, http_api.GoneCall) if call.reason != LEFT]


def plan_of(stage: Stage, name: str) -> set[str]:
    """Incarnations of those who train."""
    plan = stage.kubelet.training(NAMESPACE, name).plan
    return {member.incarnation for member in plan.members} if plan is not None else set()


def test_a_deleted_pod_is_drained_and_no_step_is_repeated(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start()
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        (first, _) = stage.kubelet.trainers.values()
        first.deaf = True  # it hears of its end from the coordinator alone
        stage.server.remove(PODS, NAMESPACE, first.name)
        await stage.until(lambda: stage.made.total() == 4 and stage.trains("digits"))
        assert [call.workers for call in stage.told("digits", http_api.DrainCall)] == [(first.name,)]
        assert not lost(stage, "digits")
        await stage.until(lambda: stage.status("digits").get("changes", 0) > 0)
        assert stage.status("digits").get("repeatedSteps", 0) == 0
        assert "Draining" in stage.events("digits")

    play(tmp_path, story)


@pytest.mark.slow
@pytest.mark.parametrize(
    "announcement",
    [
        {"taints": [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]},
        {"taints": [{"key": "example.com/soon", "effect": "NoExecute"}]},
        {"unschedulable": True},
    ],
    ids=["a taint", "a taint of our own", "cordoned"],
)
def test_workers_on_a_node_that_will_go_are_relieved(tmp_path: Path, announcement: dict[str, Any]) -> None:
    async def story(stage: Stage) -> None:
        stage.start("--extra-taints=example.com/soon")
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        pod = stage.pods("digits", WORKER)[0]
        node, name = pod["spec"]["nodeName"], pod["metadata"]["name"]
        stage.kubelet.avoided.add(node)
        stage.server.set_node(node, **announcement)
        await stage.until(lambda: name not in stage.workers("digits") and stage.trains("digits"))
        assert not lost(stage, "digits")
        assert stage.status("digits").get("repeatedSteps", 0) == 0

    play(tmp_path, story)


def test_a_power_cut_costs_at_most_one_step_and_its_stuck_pod_blocks_nothing(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start()
        stage.apply("digits", replicas=3, elasticity={"startupGraceSeconds": 1, "heartbeatLimitSeconds": 2})
        await stage.until(lambda: stage.trains("digits", 3))
        coordinator = stage.pods("digits", COORDINATOR)[0]
        victim = next(
            pod for pod in stage.pods("digits", WORKER) if pod["spec"]["nodeName"] != coordinator["spec"]["nodeName"]
        )
        name = victim["metadata"]["name"]
        stage.kubelet.cut_power(victim["spec"]["nodeName"])
        await stage.until(lambda: name not in stage.workers("digits") and stage.trains("digits", 3))
        stuck = stage.server.find(PODS, NAMESPACE, name)
        assert stuck is not None
        assert stuck["metadata"]["deletionTimestamp"]
        assert stage.status("digits").get("repeatedSteps", 0) <= 1
        assert stage.pods("digits", COORDINATOR) == [coordinator]

    play(tmp_path, story)


def test_a_lost_coordinator_is_replaced_while_the_training_goes_on(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start()
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        training = stage.kubelet.training(NAMESPACE, "digits")
        step = training.step
        stage.server.remove(PODS, NAMESPACE, "digits-coordinator-0")
        await stage.until(lambda: stage.made[COORDINATOR, "digits", "digits-coordinator-0"] == 2)
        await stage.until(lambda: stage.trains("digits") and stage.condition("digits", "Ready")["status"] == "True")
        await stage.until(lambda: (stage.status("digits").get("step") or 0) > step)
        assert training.step > step
        assert stage.made[WORKER, "digits", "digits-w-0"] == stage.made[WORKER, "digits", "digits-w-1"] == 1
        assert len(stage.workers("digits")) == 2

    play(tmp_path, story)


async def _in_another_pod(stage: Stage) -> None:
    def made() -> int:
        """How many there were; one that is replaced by the operator has a successor of another name."""
        return sum(n for (role, job, _), n in stage.made.items() if (role, job) == (COORDINATOR, "digits"))

    before = made()
    for pod in stage.pods("digits", COORDINATOR):
        stage.server.remove(PODS, NAMESPACE, pod["metadata"]["name"])
    await stage.until(lambda: made() > before)


async def _in_the_same_pod(stage: Stage) -> None:
    (pod,) = stage.pods("digits", COORDINATOR)
    await stage.kubelet.restart_coordinator(pod["metadata"]["uid"])


@pytest.mark.parametrize("replace", [slow(_in_another_pod), nightly(_in_the_same_pod)])
def test_a_new_coordinator_begins_nothing_beside_workers_that_it_does_not_hear(
    tmp_path: Path, replace: Callable[[Stage], Awaitable[None]]
) -> None:
    async def story(stage: Stage) -> None:
        stage.start()
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        training = stage.kubelet.training(NAMESPACE, "digits")
        members = set(training.plan.members) if training.plan is not None else set()
        stage.kubelet.cut_off |= {"digits-w-0", "digits-w-1"}
        await replace(stage)
        stage.change("digits", replicas=3)
        waits = "digits-w-0, digits-w-1 may train elsewhere"
        await stage.until(
            lambda: any(waits in pod.coordinator.state.reason for pod in stage.kubelet.coordinators.values())
        )
        await stage.until(lambda: "digits-w-0, digits-w-1." in stage.condition("digits", "Ready")["message"])
        step = training.step
        assert training.plan is not None
        assert set(training.plan.members) == members
        stage.kubelet.cut_off.clear()
        await stage.until(lambda: stage.trains("digits", 3))
        assert training.step >= step
        assert stage.status("digits").get("repeatedSteps", 0) == 0

    play(tmp_path, story)


def test_a_coordinator_that_does_not_answer_any_more_is_replaced(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start(coordinator_patience=0.5)
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        (pod,) = stage.pods("digits", COORDINATOR)
        await stage.kubelet.stop_coordinator(pod["metadata"]["uid"])
        await stage.until(lambda: stage.status("digits").get("coordinator") == "digits-coordinator-1")
        await stage.until(lambda: stage.trains("digits"))
        assert stage.made[WORKER, "digits", "digits-w-0"] == 1

    play(tmp_path, story)
