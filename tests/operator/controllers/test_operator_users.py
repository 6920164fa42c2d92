"""The whole operator process in a fake cluster: what users do to a job that runs."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from fake_api import Fault
from stage import NAMESPACE, SECONDS, Stage, job, play, running

from kstatus import kstatus
from operator_metrics import scrape
from ports import free_port
from virtualflow.protocol import http_api
from virtualflow.protocol import messages as m
from virtualflow.protocol.settings import ENV_DEVICE_MEMORY
from virtualflow_operator.constants import LABEL_JOB, WORKER
from virtualflow_operator.k8s.client import EVENTS, JOBS, PODS, SECRETS, SERVICES


def test_a_job_is_scaled_through_its_scale_subresource(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start()
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        kind = stage.server.kind(JOBS)
        for replicas in (4, 1):
            scale = stage.server.store.scale(kind, stage.job("digits") or {})
            assert scale["status"]["selector"] == "virtualflow.dev/job=digits,virtualflow.dev/role=worker"
            scale["spec"]["replicas"] = replicas
            stage.server.store.rescale(kind, NAMESPACE, "digits", scale)
            await stage.until(lambda replicas=replicas: stage.trains("digits", replicas))
        await stage.until(lambda: len(stage.pods("digits", WORKER)) == 1)
        assert stage.most[WORKER, "digits"] == 4
        assert stage.status("digits").get("repeatedSteps", 0) == 0
        assert stage.made.total() == 5

    play(tmp_path, story)


def test_a_suspended_job_leaves_no_pod_and_resumes(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start()
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        stage.change("digits", suspend=True)
        await stage.until(lambda: stage.status("digits").get("phase") == "Suspended" and not stage.pods("digits"))
        assert stage.condition("digits", "Suspended")["status"] == "True"
        stage.change("digits", suspend=False)
        await stage.until(lambda: stage.trains("digits"))
        assert stage.most[WORKER, "digits"] == 2
        assert stage.made.total() == 6

    play(tmp_path, story)


@pytest.mark.slow
def test_the_counters_of_goodput_move_with_the_job_and_stay_when_it_is_over(tmp_path: Path) -> None:
    port = free_port()

    async def counted(paid: float, committed: float) -> tuple[float, float]:
        """Both counters, once each is above what is given."""
        deadline = time.monotonic() + SECONDS
        while True:
            sample = await asyncio.to_thread(scrape, port)
            of_the_job = 'worker_seconds_total{job_name="digits",job_namespace="default"}'
            now = [sample.get(f"virtualflow_job_{name}_{of_the_job}", 0.0) for name in ("paid", "committed")]
            if now[0] > paid and now[1] > committed:
                return now[0], now[1]
            assert time.monotonic() < deadline, now
            await asyncio.sleep(0.05)

    async def story(stage: Stage) -> None:
        stage.start("--progress-seconds=0.2", f"--metrics-port={port}")
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        first = await counted(0.0, 0.0)
        second = await counted(*first)
        stage.kubelet.training(NAMESPACE, "digits").finish()
        await stage.until(lambda: stage.status("digits").get("phase") == "Complete")
        last = await counted(second[0] - 0.001, second[1] - 0.001)
        assert last[1] <= last[0]

    play(tmp_path, story)


def test_a_job_that_is_deleted_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start()
        await stage.watching()
        for number, resource in enumerate(("pods", "services", "secrets", "virtualflowjobs/status")):
            name = f"digits-{number}"
            held = stage.server.inject(
                Fault(verb="patch" if "/" in resource else "create", resource=resource, delay=0.2)
            )
            stage.apply(name)
            await stage.until(lambda held=held: held.hits)
            stage.delete(name)
            await stage.until(lambda name=name: stage.nothing_left(name))
        stage.apply("last")
        await stage.until(lambda: stage.trains("last"))
        for number in range(4):  # what was held may have been made after its job had gone
            await stage.until(lambda number=number: stage.nothing_left(f"digits-{number}"))

    play(tmp_path, story)


@pytest.mark.slow
@pytest.mark.parametrize("foreground", [False, True], ids=["in the background", "in the foreground"])
def test_the_workers_of_a_deleted_job_leave_together_and_wait_for_nobody(tmp_path: Path, foreground: bool) -> None:
    async def story(stage: Stage) -> None:
        stage.start()
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        for trainer in stage.kubelet.trainers.values():
            trainer.deaf = True  # they hear of the end from the coordinator alone
        collect = stage.server.store.collect_garbage
        stage.server.store.collect_garbage = lambda: None  # type: ignore[method-assign]  # it takes its time
        if foreground:
            stage.server.modify(JOBS, NAMESPACE, "digits", {"metadata": {"finalizers": ["foregroundDeletion"]}})
        stage.delete("digits")
        await stage.until(lambda: [phase_of(stage, f"digits-w-{n}") for n in range(2)] == ["Succeeded"] * 2)
        assert {call.reason for call in stage.told("digits", http_api.StopCall)} == {"the job is deleted"}
        await stage.until(lambda: not stage.pods("digits"))
        stage.server.store.collect_garbage = collect  # type: ignore[method-assign]
        if foreground:
            stage.server.modify(JOBS, NAMESPACE, "digits", {"metadata": {"finalizers": None}})
        stage.apply("another")
        await stage.until(lambda: stage.trains("another") and stage.nothing_left("digits"))

    play(tmp_path, story)


def test_an_event_names_the_workers_that_were_made_and_no_other(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.server.inject(Fault(code=403, message="exceeded quota", resource="pods", name="digits-w-1", times=None))
        stage.start()
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits", 1))
        await stage.until(lambda: "WorkersCreated" in stage.events("digits"))
        made = [e["message"] for e in stage.server.all(EVENTS, NAMESPACE) if e["reason"] == "WorkersCreated"]
        assert made == ["created digits-w-0"]

    play(tmp_path, story)


def test_a_webhook_that_does_not_answer_is_named_until_it_does(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        said = 'Internal error occurred: failed calling webhook "guard.example.com": no endpoints available'
        stage.server.inject(Fault(code=500, message=said, verb="create", resource="pods", times=None))
        stage.start()
        stage.apply("digits")
        await stage.until(lambda: said in stage.condition("digits", "Degraded").get("message", ""))
        assert stage.condition("digits", "Stalled")["reason"] == "CreationRefused"
        await stage.until(lambda: "CreationRefused" in stage.events("digits"))
        stage.server.heal()
        await stage.until(lambda: stage.trains("digits"))
        assert stage.condition("digits", "Degraded")["status"] == "False"

    play(tmp_path, story)


@pytest.mark.slow
def test_a_deleted_job_that_somebody_else_holds_is_over_and_has_no_series(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        port = free_port()
        stage.start(f"--metrics-port={port}")
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        stage.server.modify(JOBS, NAMESPACE, "digits", {"metadata": {"finalizers": ["example.com/billing"]}})
        stage.delete("digits")
        await stage.until(lambda: stage.status("digits")["phase"] == "Failed")
        assert (stage.condition("digits", "Failed")["reason"], stage.pods("digits")) == ("Deleted", [])
        assert (stage.status("digits")["replicas"], stage.status("digits")["workers"]) == (0, "0/2")
        assert kstatus(stage.job("digits") or {}) == "Terminating"
        found = await asyncio.to_thread(scrape, port)
        assert not [name for name in found if 'job_name="digits"' in name]
        stage.server.modify(JOBS, NAMESPACE, "digits", {"metadata": {"finalizers": None}})
        await stage.until(lambda: stage.nothing_left("digits"))

    play(tmp_path, story)


@pytest.mark.slow
def test_a_job_that_is_deleted_and_made_anew_at_once_is_another_job(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start()
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        for _ in range(3):
            former = stage.job("digits")
            assert former is not None
            stage.delete("digits")
            made = stage.apply("digits")
            await stage.until(lambda: stage.trains("digits"))
            owners = {pod["metadata"]["ownerReferences"][0]["uid"] for pod in stage.pods("digits") if running(pod)}
            assert owners == {made["metadata"]["uid"]}
            assert stage.secret("digits")["metadata"]["ownerReferences"][0]["uid"] == made["metadata"]["uid"]
        assert stage.most[WORKER, "digits"] == 2

    play(tmp_path, story)


@pytest.mark.slow
@pytest.mark.parametrize("down", [False, True], ids=["the operator sees it", "the operator is away"])
def test_the_pods_of_an_orphaned_job_train_on_and_a_new_one_of_its_name_is_refused(tmp_path: Path, down: bool) -> None:
    async def story(stage: Stage) -> None:
        process = stage.start()
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        await stage.quiet()
        pods = {pod["metadata"]["uid"] for pod in stage.pods("digits")}
        stage.server.modify(JOBS, NAMESPACE, "digits", {"metadata": {"finalizers": ["orphan"]}})
        if down:
            process.kill()
        stage.delete("digits")
        # The pods' watch tells of it later than the jobs' does.
        gate = asyncio.Event()
        stage.server.inject(Fault(verb="watch", resource="pods", times=None, gate=gate))
        stage.server.drop_watches(PODS)
        for resource in (PODS, SERVICES, SECRETS):
            for item in stage.server.all(resource, NAMESPACE, f"{LABEL_JOB}=digits"):
                name = item["metadata"]["name"]
                stage.server.modify(resource, NAMESPACE, name, {"metadata": {"ownerReferences": None}})
        stage.server.modify(JOBS, NAMESPACE, "digits", {"metadata": {"finalizers": None}})
        await stage.until(lambda: stage.job("digits") is None)
        stage.apply("digits")
        if down:
            stage.server.heal()
            await stage.replace(process)
        await stage.until(lambda: stage.condition("digits", "Progressing").get("reason") == "NameTaken")
        assert "delete pods,services,secrets" in stage.condition("digits", "Progressing")["message"]
        stage.server.heal()
        await stage.quiet()
        left = stage.pods("digits")
        assert {pod["metadata"]["uid"] for pod in left} == pods
        assert not any(pod["metadata"].get("deletionTimestamp") for pod in left)
        (service,) = stage.server.all(SERVICES, NAMESPACE, f"{LABEL_JOB}=digits")
        assert service["spec"]["selector"]["virtualflow.dev/ordinal"] == "0", "it leads to the orphans' coordinator"

        for resource in (PODS, SERVICES, SECRETS):
            for item in stage.server.all(resource, NAMESPACE, f"{LABEL_JOB}=digits"):
                stage.server.remove(resource, NAMESPACE, item["metadata"]["name"])
        await stage.until(lambda: stage.trains("digits"))

    play(tmp_path, story)


def test_a_changed_template_rolls_without_a_repeated_step(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start()
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        containers = [{"name": "worker", "image": "trainer:next"}]
        stage.change("digits", workerGroups=[{"name": "w", "template": {"spec": {"containers": containers}}}])

        def rolled() -> bool:
            images = {pod["spec"]["containers"][0]["image"] for pod in stage.pods("digits", WORKER) if running(pod)}
            return images == {"trainer:next"} and stage.trains("digits")

        await stage.until(rolled)
        assert stage.most[WORKER, "digits"] == 3, "one more than wanted"
        assert stage.status("digits").get("repeatedSteps", 0) == 0

    play(tmp_path, story)


@pytest.mark.slow
def test_changed_memory_rolls_without_a_repeated_step(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start()
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        group = job("digits")["spec"]["workerGroups"][0]
        stage.change("digits", workerGroups=[group | {"memory": {"device": "24Gi", "activations": "Swap"}}])

        def rolled() -> bool:
            pods = [pod["spec"]["containers"][0] for pod in stage.pods("digits", WORKER) if running(pod)]
            told = {entry["value"] for pod in pods for entry in pod["env"] if entry["name"] == ENV_DEVICE_MEMORY}
            return told == {str(24 << 30)} and stage.trains("digits")

        await stage.until(rolled)
        assert stage.status("digits").get("repeatedSteps", 0) == 0

    play(tmp_path, story)


def test_conditions_tell_whether_the_job_fits(tmp_path: Path) -> None:
    plan = m.MemoryPlan(9, 0, 5, "of 14 blocks 9 stay, 0 are swapped and 5 recomputed")
    too_small = (
        "the model does not fit into 1.00 MiB of the device's memory: the smallest budget that works is 2.00 MiB"
    )

    async def story(stage: Stage) -> None:
        stage.start()
        stage.apply("digits", backoffLimit=0)
        await stage.until(lambda: stage.trains("digits"))
        assert stage.condition("digits", "FitsWithOffload") == stage.condition("digits", "DoesNotFit") == {}
        one, other = stage.kubelet.trainers.values()
        one.memory = plan
        one.say(m.Note("info", plan.reason, plan))
        await stage.until(lambda: stage.condition("digits", "FitsWithOffload").get("status") == "True")
        assert plan.reason in stage.condition("digits", "FitsWithOffload")["message"]
        other.fail(m.Failed(0, too_small, "", does_not_fit=True))
        await stage.until(lambda: stage.condition("digits", "DoesNotFit").get("status") == "True")
        await stage.until(lambda: stage.workers("digits") == [one.name])
        assert stage.status("digits")["phase"] == "Running"
        assert stage.condition("digits", "FitsWithOffload")["status"] == "True"
        one.fail(m.Failed(0, too_small, "", does_not_fit=True))
        await stage.until(lambda: stage.status("digits").get("phase") == "Failed")
        told = {kind: stage.condition("digits", kind) for kind in ("DoesNotFit", "FitsWithOffload")}
        assert {kind: condition["status"] for kind, condition in told.items()} == {
            "DoesNotFit": "True",
            "FitsWithOffload": "False",
        }
        assert told["DoesNotFit"]["message"] == f"Worker group w: {too_small}."
        await stage.until(lambda: any("NoPlanFits" in event for event in stage.events("digits")))

    play(tmp_path, story)


def test_crashes_in_the_users_code_end_in_failed_with_its_words(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start("--backoff-seconds=0.1")
        stage.apply("digits", replicas=1, backoffLimit=1)
        for _ in range(2):
            await stage.until(lambda: len(stage.workers("digits")) == 1 and stage.kubelet.trainers)
            (name,) = stage.workers("digits")
            await stage.until(lambda name=name: phase_of(stage, name) == "Running")
            stage.kubelet.crash(NAMESPACE, name, "ValueError: no such digit")
            await stage.until(lambda name=name: name not in stage.workers("digits"))
        await stage.until(lambda: stage.status("digits").get("phase") == "Failed")
        assert "ValueError: no such digit" in stage.condition("digits", "Failed")["message"]

    play(tmp_path, story)


def phase_of(stage: Stage, name: str) -> str:
    pod = stage.server.find(PODS, NAMESPACE, name)
    return "" if pod is None else str(pod["status"]["phase"])
