"""The whole operator process with many jobs, and with some that are broken: none waits for another."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
from fake_api import Fault
from stage import NAMESPACE, SECONDS, WRITES, Stage, job, play

from virtualflow_operator.constants import WORKER
from virtualflow_operator.k8s.client import JOBS, Object
from virtualflow_operator.settings import ApiSettings


@pytest.mark.slow
def test_twenty_jobs_at_once(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start(coordinator_patience=SECONDS)  # all begin at once, and may share two processors
        await stage.watching()
        names = [f"job-{number}" for number in range(20)]
        for name in names:
            stage.apply(name)
        for name in names:
            await stage.until(lambda name=name: stage.trains(name))
        assert stage.made_twice() == set()
        assert stage.made.total() == 60
        assert len(stage.writes()) < 20 * 21
        assert stage.server.count("get", "virtualflowjobs") == 0, "no job has lost anything, so none is asked for"
        for name in names:
            stage.delete(name)
        await stage.until(lambda: all(stage.nothing_left(name) for name in names))

    play(tmp_path, story)


def sent(stage: Stage, verbs: tuple[str, ...], resource: str, since: int) -> list[float]:
    """When the operator sent requests of that kind."""
    return [r.time for r in stage.server.requests[since:] if r.verb in verbs and r.resource == resource]


@pytest.mark.slow
def test_a_job_that_makes_steps_has_its_status_written_as_often_as_is_promised(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start("--progress-seconds=2")
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        await stage.until(lambda: (stage.status("digits").get("step") or 0) > 0)
        since = len(stage.server.requests)
        await stage.until(lambda: len(sent(stage, ("patch",), "virtualflowjobs/status", since)) == 4)
        times = sent(stage, ("patch",), "virtualflowjobs/status", since)
        assert times[-1] - times[0] > 5, "30 steps a second, and a write in 2 s"

    play(tmp_path, story)


@pytest.mark.slow
def test_a_job_that_changes_all_the_time_has_its_status_written_once_a_second_after_a_burst(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start()
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        since = len(stage.server.requests)
        seconds = itertools.count(100_000)

        def written() -> list[float]:
            return sent(stage, ("patch",), "virtualflowjobs/status", since)

        def changed_until_it_was_written_often() -> bool:  # asked with every request that the operator sends
            stage.change("digits", activeDeadlineSeconds=next(seconds))
            return len(written()) >= 14

        await stage.until(changed_until_it_was_written_often)
        times = written()
        span = times[-1] - times[0]
        assert len(times) <= 11 + span, "10 at once, then 1 a second"
        assert len(sent(stage, ("create", "patch"), "events", since)) <= 26 + span / 30

    play(tmp_path, story)


def add_event(stage: Stage, pod: Object, reason: str, message: str) -> None:
    """As a kubelet does, after that of the scheduler."""
    of_it = {key: pod["metadata"][key] for key in ("name", "namespace", "uid")} | {"kind": "Pod", "apiVersion": "v1"}
    told = (("2", "Warning", reason, message), ("1", "Normal", "Scheduled", "it has a node"))
    for second, kind, word, said in told:
        event = {"type": kind, "reason": word, "message": said, "lastTimestamp": f"2026-01-01T00:00:0{second}Z"}
        named = {"name": f"{pod['metadata']['name']}.{second}", "namespace": NAMESPACE}
        stage.server.add({"apiVersion": "v1", "kind": "Event", "metadata": named, "involvedObject": of_it} | event)


@pytest.mark.slow
def test_no_job_waits_for_a_slow_or_broken_one(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        patient = ApiSettings(request_timeout=SECONDS)
        stage.start("--concurrency=2", startup_patience=1.0, events_retry=1.0, api=patient)
        await stage.watching()
        inject, forever = stage.server.inject, {"times": None}
        inject(Fault(code=422, message="spec: no", verb="create", resource="pods", name="refused-.*", **forever))
        inject(
            Fault(code=403, message="forbidden: quota", verb="create", resource="secrets", name="poor-.*", **forever)
        )
        inject(Fault(gate=asyncio.Event(), verb="create", resource="services", name="slow-.*", **forever))
        inject(Fault(code=500, verb="patch", resource="virtualflowjobs/status", name="unwritten", **forever))
        stage.kubelet.mute.add("mute")
        stage.kubelet.unmounted.add("unmounted")
        broken = ("refused", "poor", "slow", "unwritten", "mute", "unmounted")
        for name in broken:
            stage.apply(name)
        await stage.until(lambda: all(fault.hits for fault in stage.server.faults))
        misspelt = {"name": "worker", "image": "trainer:test", "resourcess": {"limits": {"nvidia.com/gpu": 1}}}
        stage.apply("misspelt", workerGroups=[{"name": "w", "template": {"spec": {"containers": [misspelt]}}}])
        stage.apply("sound")
        await stage.until(lambda: len(stage.workers("sound")) == 2)
        await stage.until(lambda: stage.trains("sound"))
        await stage.until(lambda: stage.condition("refused", "Progressing").get("reason") == "TemplateRejected")
        await stage.until(lambda: "no event" in stage.condition("unmounted", "Progressing").get("message", ""))
        add_event(stage, stage.pods("unmounted", WORKER)[0], "FailedMount", "no such volume")
        await stage.until(lambda: stage.condition("unmounted", "Degraded").get("reason") == "CannotStart")
        assert "cannot start: FailedMount: no such volume" in stage.condition("unmounted", "Progressing")["message"]
        await stage.until(lambda: stage.condition("misspelt", "Stalled").get("reason") == "TemplateRejected")
        assert 'worker group w: Pod in version "v1"' in stage.condition("misspelt", "Progressing")["message"]
        assert 'unknown field "spec.containers[0].resourcess"' in stage.condition("misspelt", "Stalled")["message"]
        assert stage.pods("misspelt") == []
        await stage.until(lambda: "quota" in stage.condition("poor", "Progressing").get("message", ""))
        await stage.until(lambda: len(stage.workers("mute")) == 2)
        assert stage.condition("mute", "Ready")["status"] == "False"

    play(tmp_path, story)


GARBAGE: list[Any] = [
    pytest.param(None, id="no spec"),
    pytest.param("a text", id="a text"),
    pytest.param([], id="a list"),
    pytest.param({}, id="nothing in it"),
    pytest.param({"workerGroups": "many"}, id="groups that are a text"),
    pytest.param({"workerGroups": [None]}, id="a group that is nothing"),
    pytest.param({"workerGroups": [{"name": "w", "template": None}]}, id="no template"),
    pytest.param({"workerGroups": [{"name": "w", "template": {"spec": []}}]}, id="a template that is a list"),
    pytest.param({"workerGroups": [{"name": "w", "template": {"spec": {"containers": [7]}}}]}, id="a container of 7"),
    pytest.param(job("x", replicas=-(10**30))["spec"], id="a huge negative number"),
    pytest.param(job("x", replicas="2")["spec"], id="a number that is a text"),
    pytest.param(job("x", elasticity=[1])["spec"], id="elasticity of another type"),
    pytest.param(job("x", coordinator={"template": {"spec": {"containers": 3}}})["spec"], id="a strange coordinator"),
    pytest.param(job("x", coordinator={"template": {"metadata": 3}})["spec"], id="a coordinator with strange metadata"),
    pytest.param(job("x", checkpoint={"volume": "here"})["spec"], id="a volume that is a text"),
    pytest.param(job("x", checkpoint={"volume": {}, "directory": 3})["spec"], id="a directory that is a number"),
    pytest.param(job("x", managedBy=3)["spec"], id="a manager that is a number"),
    pytest.param(job("x", suspend="yes")["spec"], id="suspended by a text"),
]


def test_garbage_that_slipped_through_the_schema_is_answered_once(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start()
        await stage.watching()
        names = []
        for number, parameter in enumerate(GARBAGE):
            name = f"garbage-{number}"
            names.append(name)
            body = job(name)
            body["spec"] = parameter.values[0]
            if parameter.values[0] is None:
                del body["spec"]
            slip(stage, body)
        stage.apply("sound")
        await stage.until(lambda: stage.trains("sound"))
        for name, parameter in zip(names, GARBAGE, strict=True):
            await stage.until(lambda name=name: stage.condition(name, "Progressing"))
            condition = stage.condition(name, "Progressing")
            assert (condition["status"], condition["reason"]) == ("False", "InvalidSpec"), parameter.id
            assert len(condition["message"]) > 40, parameter.id
        await stage.quiet()
        for name in names:
            statuses = [r for r in stage.server.requests if r.name == name and r.verb in WRITES]
            assert len(statuses) == 1, parameter.id
            assert stage.events(name) == ["InvalidSpec"], parameter.id
            assert not stage.pods(name)
            stage.delete(name)

    play(tmp_path, story)


def slip(stage: Stage, body: Any) -> None:
    """Put an object into the store that our schema would refuse: another, looser one is in the cluster."""
    kind = stage.server.kind(JOBS)
    object.__setattr__(kind, "schema", {"x-kubernetes-preserve-unknown-fields": True})
    stage.server.store.create(kind, NAMESPACE, body)
