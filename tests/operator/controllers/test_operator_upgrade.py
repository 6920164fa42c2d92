"""An operator of a newer version, with its own image and definition, takes over jobs that train."""

from __future__ import annotations

from pathlib import Path

import pytest
from stage import NAMESPACE, Stage, play, running

from other_version import NEWER
from virtualflow._version import __version__
from virtualflow_operator.constants import COORDINATOR, WORKER
from virtualflow_operator.k8s import JOBS, PODS

OLD, NEW = "operator:test", "operator:newer"
CHECKPOINT = {"volume": {"persistentVolumeClaim": {"claimName": "kept"}}}


def upgrade_definition(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the schema have a field more, with a default, and the job have it."""
    schema = stage.server.kind(JOBS).schema
    assert schema is not None
    fields = schema["properties"]["spec"]["properties"]["checkpoint"]["properties"]
    monkeypatch.setitem(fields, "addedLater", {"type": "integer", "default": 7})
    job = stage.server.modify(JOBS, NAMESPACE, "digits", {"metadata": {"labels": {"touched": "yes"}}})
    assert job["spec"]["checkpoint"]["addedLater"] == 7


def uids(stage: Stage, role: str | None = None) -> set[str]:
    return {pod["metadata"]["uid"] for pod in stage.pods("digits", role)}


def connected(stage: Stage) -> int:
    """How many workers the coordinator is connected to."""
    found = [stage.kubelet.coordinators[uid] for uid in uids(stage, COORDINATOR) & stage.kubelet.coordinators.keys()]
    return sum(worker.connected for pod in found for worker in pod.coordinator.state.roster.workers.values())


def coordinator_image(stage: Stage) -> str:
    (pod,) = [pod for pod in stage.pods("digits", COORDINATOR) if running(pod)]
    return str(pod["spec"]["containers"][0]["image"])


@pytest.mark.slow
def test_an_upgrade_of_the_operator_changes_nothing_about_a_job_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(stage: Stage) -> None:
        process = stage.start()
        stage.apply("digits", checkpoint=CHECKPOINT)
        await stage.until(lambda: stage.trains("digits"))
        pods, made = uids(stage), stage.made.copy()
        training = stage.kubelet.training(NAMESPACE, "digits")
        plan = training.plan

        process.kill()
        upgrade_definition(stage, monkeypatch)
        process = await stage.replace(process, version="newer", image=NEW)
        since, step = len(stage.server.requests), training.step
        await stage.until(lambda: stage.trains("digits"))
        await stage.until(lambda: (stage.status("digits").get("step") or 0) > step)
        await stage.quiet()
        assert (uids(stage), stage.made, training.plan) == (pods, made, plan)
        assert not {"create pods", "delete pods"} & set(stage.writes(since))

        # It talks to the older coordinator, and its workers fit the others.
        stage.change("digits", replicas=3)
        await stage.until(lambda: stage.trains("digits", 3))
        assert pods < uids(stage)
        (pod,) = uids(stage, COORDINATOR)
        await stage.until(lambda: stage.kubelet.coordinators[pod].coordinator.state.wanted == 3)

        # A coordinator that is lost comes back in the version that the workers were admitted by.
        workers, (former,) = uids(stage, WORKER), uids(stage, COORDINATOR)
        (name,) = [pod["metadata"]["name"] for pod in stage.pods("digits", COORDINATOR)]
        stage.server.remove(PODS, NAMESPACE, name, 0)
        await stage.until(lambda: former not in uids(stage, COORDINATOR) and stage.trains("digits", 3))
        await stage.until(lambda: connected(stage) == 3)  # who is asked to leave before waits for its grace
        assert coordinator_image(stage) == stage.status("digits")["coordinatorImage"] == OLD
        assert uids(stage, WORKER) == workers
        assert stage.status("digits")["repeatedSteps"] == 0

        stage.change("digits", suspend=True)
        await stage.until(lambda: stage.status("digits").get("phase") == "Suspended" and not stage.pods("digits"))
        stage.change("digits", suspend=False)
        await stage.until(lambda: stage.trains("digits", 3))
        assert coordinator_image(stage) == NEW

    play(tmp_path, story)


@pytest.mark.slow
def test_an_operator_of_a_version_too_far_away_says_so_and_leaves_a_job_alone(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        process = stage.start()
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        pods, training = uids(stage), stage.kubelet.training(NAMESPACE, "digits")

        process.kill()
        process = await stage.replace(process, version="far")
        await stage.until(lambda: stage.condition("digits", "Ready").get("reason") == "ProtocolMismatch")
        said = stage.condition("digits", "Ready")["message"]
        assert f"(virtualflow {__version__}) and this client protocol" in said
        assert f"(virtualflow {NEWER})" in said
        step = training.step
        await stage.until(lambda: training.step > step)
        assert uids(stage) == pods

        process.kill()
        await stage.replace(process)
        await stage.until(lambda: stage.condition("digits", "Ready").get("reason") == "Training")
        assert (uids(stage), stage.status("digits")["repeatedSteps"]) == (pods, 0)

    play(tmp_path, story)
