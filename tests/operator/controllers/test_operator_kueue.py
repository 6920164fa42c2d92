"""The operator process beside Kueue, whose part the test plays: it admits, evicts and grows jobs in a fake cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fake_api import Fault
from kueue_cases import DEFINITIONS, FLAVOR_OBJECT, admitted, asks_for, told
from stage import NAMESPACE, Stage, job, play

from virtualflow.protocol.http_api import StopCall
from virtualflow_operator.constants import (
    ANNOTATION_KUEUE_ELASTIC,
    ANNOTATION_KUEUE_REPLACES,
    COORDINATOR,
    LABEL_KUEUE_QUEUE,
    WORKER,
)
from virtualflow_operator.k8s.client import JOBS, WORKLOADS, Object


def install(stage: Stage) -> None:
    for definition in DEFINITIONS:
        stage.server.add(definition)
    stage.server.add(FLAVOR_OBJECT)


def labelled(name: str = "digits", *, elastic: bool = False, **spec: object) -> Object:
    made = job(name, **spec)
    made["metadata"]["labels"] = {LABEL_KUEUE_QUEUE: "team"}
    if elastic:
        made["metadata"]["annotations"] = {ANNOTATION_KUEUE_ELASTIC: "true"}
    return made


def workloads(stage: Stage, *conditions: str) -> list[Object]:
    """The Workloads of which these conditions are true."""
    found = stage.server.all(WORKLOADS, NAMESPACE)
    return [body for body in found if all(truth(body, kind) == "True" for kind in conditions)]


def replacing(stage: Stage) -> list[Object]:
    """Those that are to take the place of another one."""
    return [body for body in workloads(stage) if ANNOTATION_KUEUE_REPLACES in body["metadata"]["annotations"]]


def truth(body: Object, kind: str) -> str | None:
    return next((c["status"] for c in body.get("status", {}).get("conditions") or [] if c["type"] == kind), None)


def answer(stage: Stage, body: Object, change: Callable[[Object], Object]) -> None:
    """Kueue writes a Workload's status."""
    status = change(body | {"status": body.get("status") or {}})["status"]
    stage.server.modify(WORKLOADS, NAMESPACE, body["metadata"]["name"], {"status": status}, "status")


@pytest.mark.slow
def test_a_job_is_admitted_in_part_evicted_with_a_checkpoint_and_admitted_again(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        install(stage)
        stage.start("--kueue")
        stage.server.add(labelled(replicas=3, minReplicas=1))
        (workload,) = await stage.until(lambda: workloads(stage))
        assert asks_for(workload) == {"coordinator": 1, "w": 3}
        await stage.until(lambda: stage.condition("digits", "Allocated").get("reason") == "WaitsForKueue")
        assert stage.pods("digits") == [], "no pod before its admission, not even the coordinator's"
        answer(stage, workload, lambda body: admitted(body, w=2))
        await stage.until(lambda: stage.trains("digits", 2))
        for pod in stage.pods("digits"):
            assert pod["spec"]["nodeSelector"] == {"kubernetes.io/os": "linux"}
            assert FLAVOR_OBJECT["spec"]["tolerations"][0] in pod["spec"]["tolerations"]
        assert stage.condition("digits", "Progressing")["reason"] == "LimitedByKueue"
        (ready,) = await stage.until(lambda: workloads(stage, "PodsReady"))
        answer(stage, ready, lambda body: told(body, ("Evicted", "True", "Preempted"), message="for team-b"))
        await stage.until(lambda: stage.status("digits").get("phase") == "Suspended")
        assert stage.told("digits", StopCall), "behind one step"
        (free,) = await stage.until(lambda: [b for b in workloads(stage) if truth(b, "QuotaReserved") == "False"])
        assert "admission" not in free["status"]
        assert stage.pods("digits") == []
        assert stage.condition("digits", "Allocated")["reason"] == "EvictedByKueue"
        step = stage.status("digits")["step"]
        answer(stage, free, lambda body: told(admitted(body), ("Evicted", "False", "QuotaReserved")))
        await stage.until(lambda: stage.trains("digits", 3))
        await stage.until(lambda: stage.status("digits")["step"] >= step)
        stage.kubelet.training(NAMESPACE, "digits").finish()
        await stage.until(lambda: workloads(stage, "Finished"))
        assert stage.status("digits")["phase"] == "Complete"
        assert stage.most[WORKER, "digits"] == 3
        assert stage.status("digits").get("repeatedSteps", 0) == 0

    play(tmp_path, story)


@pytest.mark.slow
def test_a_pod_webhook_that_is_down_keeps_no_job_from_asking_for_quota_or_giving_it_back(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        install(stage)
        stage.start("--kueue")
        await stage.watching()
        said = "failed calling webhook"
        fault = stage.server.inject(Fault(code=500, message=said, verb="create", resource="pods", times=None))
        stage.server.add(labelled())
        await stage.until(lambda: workloads(stage))
        await stage.until(lambda: stage.condition("digits", "Progressing").get("reason") == "CreationRefused")
        assert said in stage.condition("digits", "Progressing")["message"]
        assert stage.condition("digits", "Allocated")["reason"] == "WaitsForKueue"
        stage.change("digits", suspend=True)
        await stage.until(lambda: not workloads(stage))
        assert fault.hits >= 3
        stage.server.heal()
        await stage.until(lambda: stage.condition("digits", "Progressing").get("reason") == "Suspended")
        stage.change("digits", suspend=False)
        (workload,) = await stage.until(lambda: workloads(stage))
        answer(stage, workload, admitted)
        await stage.until(lambda: stage.trains("digits"))

    play(tmp_path, story)


def test_an_elastic_job_grows_and_shrinks_without_leaving(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        install(stage)
        stage.start("--kueue")
        stage.server.add(labelled(elastic=True, replicas=3, minReplicas=1))
        (first,) = await stage.until(lambda: workloads(stage))
        answer(stage, first, admitted)
        (second,) = await stage.until(lambda: replacing(stage))
        replaces = second["metadata"]["annotations"][ANNOTATION_KUEUE_REPLACES]
        assert replaces == f"{NAMESPACE}/{first['metadata']['name']}"
        await stage.until(lambda: stage.trains("digits", 1))
        assert asks_for(second) == {"coordinator": 1, "w": 3}
        answer(stage, second, admitted)
        await stage.until(lambda: stage.trains("digits", 3))
        await stage.until(lambda: len(workloads(stage)) == 1)
        stage.change("digits", replicas=2)
        await stage.until(lambda: asks_for(workloads(stage)[0])["w"] == 2)
        await stage.until(lambda: stage.trains("digits", 2))
        assert stage.status("digits").get("repeatedSteps", 0) == 0
        assert stage.made[COORDINATOR, "digits", "digits-coordinator-0"] == 1
        # Suspended, it has no Workload; its quota went with its last pod.
        stage.change("digits", suspend=True)
        await stage.until(lambda: not workloads(stage))
        assert stage.pods("digits") == []

    play(tmp_path, story)


@pytest.mark.slow
def test_a_job_waits_until_there_is_a_kueue_and_goes_on_without_its_label(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start("--kueue", kueue_reread=0.2)
        stage.server.add(labelled())
        stage.apply("free")
        await stage.until(lambda: stage.trains("free", 2))
        await stage.until(lambda: stage.condition("digits", "Allocated").get("reason") == "KueueNotReady")
        assert "no Workloads of Kueue" in stage.condition("digits", "Allocated")["message"]
        refusal = Fault(verb="create", resource="workloads", code=403, message="no more than 5 Workloads", times=None)
        stage.server.inject(refusal)
        install(stage)
        await stage.until(lambda: "no more than 5" in stage.condition("digits", "Allocated").get("message", ""))
        stage.server.heal()
        await stage.until(lambda: workloads(stage))
        stage.server.modify(JOBS, NAMESPACE, "digits", {"metadata": {"labels": None}})
        await stage.until(lambda: stage.trains("digits", 2))
        await stage.until(lambda: not workloads(stage))

    play(tmp_path, story)
