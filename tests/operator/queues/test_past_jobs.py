"""What a queue remembers of jobs that have completed, and that its policy judges others by it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from scenes import NOW, body, container, group

from virtualflow_operator.api import Job, PastKind, Queue, format_time, read_job, read_queue
from virtualflow_operator.queues.allocation import QueueDecision, QueueMember, QueueScene, allocate
from virtualflow_operator.queues.members import Grant
from virtualflow_operator.queues.past_jobs import count_ended, read_past, served, write_past
from virtualflow_operator.scheduling.service_time import Past
from virtualflow_operator.settings import SchedulingSettings

TOLD = SchedulingSettings(hold=0.0)


def queue(units: int = 4, **status: Any) -> Queue:
    spec = {"capacity": units, "policy": "ShortestFirst"}
    return read_queue({"metadata": {"name": "shared", "uid": "q", "generation": 1}, "spec": spec, "status": status})


def job(name: str, status: dict[str, Any] | None = None, **spec: Any) -> Job:
    usual = {"queue": "shared", "minReplicas": 4, "workerGroups": [group(pod={"containers": [container()]})]}
    return read_job(body(status, name=name, uid=f"uid-{name}", **({"replicas": 4} | usual | spec)))


def completed(name: str, steps: int, at: float, phase: str = "Complete", speed: str = "2") -> Job:
    """At two steps a second with four workers, it needs two seconds of a worker a step."""
    measured = [{"workers": 4, "stepsPerSecond": speed}] if speed else []
    told = {"phase": phase, "step": steps, "scaling": measured, "completionTime": format_time(at)}
    return job(name, told)


def waiting(name: str) -> QueueMember:
    made = job(name)
    return QueueMember(made, Grant(made.uid, "shared", 0, "", since=NOW - 60, resized=NOW - 60), NOW - 60)


def decide(at: Queue, *members: QueueMember, ended: tuple[Job, ...] = ()) -> QueueDecision:
    return allocate(QueueScene(queue=at, members=members, nodes={}, completed=ended), now=NOW, settings=TOLD)


def test_service_is_counted_at_the_minimum_by_the_measured_speed() -> None:
    assert served(completed("a", 100, NOW), units=1) == 200
    assert served(completed("a", 100, NOW), units=1_000) == 200_000
    assert served(completed("a", 100, NOW, speed=""), units=1) is None


def test_a_job_is_counted_once_when_it_has_completed() -> None:
    ended = (
        (completed("bert-1", 100, NOW), 1),
        (completed("bert-2", 100, NOW + 5), 1),
        (completed("vit-1", 50, NOW + 2), 1),
        (completed("vit-2", 50, NOW + 9, phase="Failed"), 1),
        (completed("gpt-1", 50, NOW + 7, speed=""), 1),
    )
    past, until = count_ended(Past(), "", ended, TOLD)
    assert [(kind.pattern, kind.jobs) for kind in past.kinds] == [("bert", 2), ("vit", 1)]
    assert until == format_time(NOW + 7)
    assert count_ended(past, until, ended, TOLD) == (past, until)


@pytest.mark.parametrize("scale", [1, 1_000])
def test_what_is_written_is_read_again_and_written_alike(scale: int) -> None:
    ended = [(completed(f"bert-{index}", 100 + 37 * index, NOW + index), 1) for index in range(9)]
    past, _ = count_ended(Past(), "", ended, TOLD)
    written = write_past(past, scale)
    read = read_past(msgspec.structs.replace(queue().status, past=written), scale)
    assert write_past(read, scale) == written
    assert read.kinds[0].service == pytest.approx(past.kinds[0].service, abs=1e-3)
    assert read.kinds[0].error == pytest.approx(past.kinds[0].error, abs=1e-2)


def test_a_kind_whose_numbers_make_no_sense_is_left_out() -> None:
    told = [PastKind("ml", name, 1, seconds, "1") for name, seconds in (("a", "many"), ("b", "-1"), ("c", "nan"))]
    known = msgspec.structs.replace(queue().status, past=(*told, PastKind("ml", "d", 1, "10", "1.5")))
    assert [kind.pattern for kind in read_past(known, 1).kinds] == ["d"]


def test_the_queue_says_what_it_remembers_and_decides_by_it() -> None:
    """Neither job says how long it is; those that were like the younger one were shorter."""
    long, short = waiting("long-9"), replace(waiting("short-9"), submitted=NOW - 1)
    ended = (completed("long-8", 10_000, NOW - 50), completed("short-8", 10, NOW - 40))
    first = decide(queue(), long, short, ended=ended)
    assert {name: grant.workers for (_, name), grant in first.grants.items()} == {"long-9": 0, "short-9": 4}
    assert first.status is not None
    assert first.status.past == (PastKind("ml", "short", 1, "20", "1"), PastKind("ml", "long", 1, "2e+04", "1"))
    assert first.status.past_until == format_time(NOW - 40)
    later = decide(replace(queue(), status=first.status), long, short)  # those that have ended are deleted
    assert later.status is not None
    assert (later.grants, later.status.past) == (first.grants, first.status.past)
    fresh = decide(queue(), long, short)
    assert {name: grant.workers for (_, name), grant in fresh.grants.items()} == {"long-9": 4, "short-9": 0}


@pytest.mark.parametrize(("step", "begins"), [(0, "gpt-2"), (50_000, "vit-1")], ids=["not begun", "far"])
def test_a_job_that_has_not_ended_says_that_others_of_its_kind_are_long(step: int, begins: str) -> None:
    """None of either kind has ended, so the older one would go first."""
    measured = [{"workers": 4, "stepsPerSecond": "2"}]
    far = replace(waiting("gpt-1"), job=job("gpt-1", {"step": step, "scaling": measured}, suspend=True))
    younger = replace(waiting("vit-1"), submitted=NOW - 30)
    ended = (completed("short-8", 100, NOW - 50),)
    grants = decide(queue(), far, waiting("gpt-2"), younger, ended=ended).grants
    workers = {name: given.workers for (_, name), given in grants.items()}
    assert workers == {"gpt-1": 0, "gpt-2": 0, "vit-1": 0} | {begins: 4}
