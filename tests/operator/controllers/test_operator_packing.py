"""The operator process in a fake cluster with a queue whose jobs share devices in turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from queue_stage import QUICK_POLICY, SLOT, add_queue, given, queue, queued
from stage import NAMESPACE, Stage, play, running

from virtualflow.protocol import messages as m
from virtualflow_operator.constants import LABEL_LODGER, TURNS_VOLUME, WORKER
from virtualflow_operator.k8s.client import Object

PAIR: dict[str, Any] = {"replicas": 2, "minReplicas": 2, "maxReplicas": 2}
PACE = 0.00375
"""Seconds for a virtual node: four of them are half of a trainer's step."""


def tell_pace(stage: Stage, name: str) -> None:
    """The workers of a job measure their steps, and how long they compute."""
    training = stage.kubelet.training(NAMESPACE, name)
    training.step_ms = 30.0
    for trainer in training.trainers.values():
        trainer.say(m.Pace(trainer.generation, PACE, PACE, PACE, 0.015, 10), keep=True)


def measured(stage: Stage, name: str) -> bool:
    scaling = stage.status(name).get("scaling") or [{}]
    return "computingMilliseconds" in scaling[0]


def host_of(stage: Stage, name: str) -> str:
    return str((stage.status(name).get("allocation") or {}).get("host") or "")


def homeless(stage: Stage) -> Object:
    """What the scheduler says of a pod that no node takes."""
    since = stage.server.store.now().strftime("%Y-%m-%dT%H:%M:%SZ")
    found = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "too small"}
    return found | {"lastTransitionTime": since}


def on(pods: list[Object]) -> set[str]:
    return {pod["spec"]["nodeName"] for pod in pods if running(pod)}


@pytest.mark.slow
def test_a_job_that_waits_computes_beside_another_until_it_gets_devices_of_its_own(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        add_queue(stage, slots=1, policy="FIFO", packing={"maxJobsPerDevice": 2})
        stage.start(scheduling=QUICK_POLICY)
        stage.server.add(queued("run-1", **PAIR))
        await stage.until(lambda: stage.trains("run-1"))
        hosts = {pod["metadata"]["name"] for pod in stage.pods("run-1", WORKER)}
        tell_pace(stage, "run-1")
        await stage.until(lambda: measured(stage, "run-1"))

        stage.server.add(queued("run-2", **PAIR))
        await stage.until(lambda: stage.trains("run-2"))
        assert host_of(stage, "run-2") == f"{NAMESPACE}/run-1"
        assert stage.condition("run-2", "Allocated")["reason"] == "InTurns"
        assert "computes in turns with default/run-1" in stage.condition("run-2", "Allocated")["message"]
        assert stage.status("run-1")["allocation"]["lodgers"] == [f"{NAMESPACE}/run-2"]
        assert queue(stage)["status"]["capacity"]["allocated"] == "2"
        lodgers = stage.pods("run-2", WORKER)
        assert on(lodgers) <= on(stage.pods("run-1", WORKER))
        for pod in lodgers:
            assert SLOT not in str(pod["spec"]["containers"])
            assert TURNS_VOLUME in [volume["name"] for volume in pod["spec"]["volumes"]]
        assert {pod["metadata"]["name"] for pod in stage.pods("run-1", WORKER)} == hosts, "nobody is replaced for it"

        stage.kubelet.training(NAMESPACE, "run-1").finish()
        await stage.until(lambda: stage.status("run-1").get("phase") == "Complete")
        await stage.until(lambda: not host_of(stage, "run-2") and stage.trains("run-2"))
        own = [pod for pod in stage.pods("run-2", WORKER) if running(pod)]
        assert all(LABEL_LODGER not in pod["metadata"]["labels"] and SLOT in str(pod["spec"]) for pod in own)
        assert stage.status("run-2").get("repeatedSteps", 0) == 0
        assert stage.condition("run-2", "Allocated")["reason"] == "Allocated"

    play(tmp_path, story)


@pytest.mark.nightly
def test_a_lodger_leaves_with_its_host_and_then_goes_to_the_next(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        add_queue(stage, slots=1, policy="Priority", packing={})
        stage.start(scheduling=QUICK_POLICY)
        stage.server.add(queued("run-1", **PAIR))
        await stage.until(lambda: stage.trains("run-1"))
        tell_pace(stage, "run-1")
        await stage.until(lambda: measured(stage, "run-1"))
        stage.server.add(queued("run-2", priority=-1, **PAIR))
        await stage.until(lambda: stage.trains("run-2") and host_of(stage, "run-2") == "default/run-1")

        stage.server.add(queued("run-3", priority=5, **PAIR))
        await stage.until(lambda: given(stage, "run-3") == 0)
        stage.change("run-1", suspend=True)
        await stage.until(lambda: given(stage, "run-2") == 0 and stage.trains("run-3"))
        assert stage.condition("run-2", "Allocated")["reason"] == "Queued"
        tell_pace(stage, "run-3")
        await stage.until(lambda: host_of(stage, "run-2") == "default/run-3" and stage.trains("run-2"))
        assert on(stage.pods("run-2", WORKER)) <= on(stage.pods("run-3", WORKER))

    play(tmp_path, story)


@pytest.mark.slow
def test_a_lodger_that_finds_no_place_waits_as_if_there_was_none(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        add_queue(stage, slots=1, policy="FIFO", packing={})
        stage.kubelet.unschedulable = lambda pod: LABEL_LODGER in pod["metadata"]["labels"]
        stage.start(scheduling=QUICK_POLICY, unschedulable_patience=0.5)
        stage.server.add(queued("run-1", **PAIR))
        await stage.until(lambda: stage.trains("run-1"))
        tell_pace(stage, "run-1")
        await stage.until(lambda: measured(stage, "run-1"))
        stage.server.add(queued("run-2", **PAIR))
        await stage.until(lambda: len(stage.pods("run-2", WORKER)) == 2)
        for pod in stage.pods("run-2", WORKER):
            stage.server.set_pod(NAMESPACE, pod["metadata"]["name"], conditions=[homeless(stage)])
        await stage.until(lambda: given(stage, "run-2") == 0 and not stage.workers("run-2"))
        stage.kubelet.training(NAMESPACE, "run-1").finish()
        await stage.until(lambda: stage.trains("run-2"))
        assert not host_of(stage, "run-2")

    play(tmp_path, story)
