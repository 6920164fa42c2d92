"""Decisions about workers whose training threads hang: each counts as a crash, and none stops those who train."""

from __future__ import annotations

import pytest
from msgspec import structs
from scenes import (
    NOW,
    Stage,
    created,
    deleted,
    ended,
    given_up,
    link,
    message_of,
    noticed,
    reason_of,
    remote,
    seen,
    swap,
    training,
    worker,
)

from virtualflow.protocol.termination_message import TerminationMessage
from virtualflow_operator import reasons
from virtualflow_operator.api import Pod

HANGS = "its training thread hangs: starting for 1800 s (limit 1800 s), and has not become ready, at train.py:7 in main"
SUCCESSOR = 1_900.0
"""Seconds from one that hangs to the next."""


def hang(stage: Stage, pod: Pod, *training: Pod, step: int = 40, reason: str = HANGS, hung: bool = True) -> None:
    """The coordinator has declared the worker of that pod lost, and these train."""
    lost = structs.replace(given_up(pod, reason), hung=hung)
    phase = "training" if training else "waiting"
    known = [seen(other) for other in training]
    stage.link = link(remote(phase, *known, wanted=2, minimum=1, step=step, lost=(lost,)))


def joiner(stage: Stage, number: int, now: float) -> Pod:
    """The pod of another worker, made at ``now``."""
    return worker(stage.job, number, created=now, uid=f"joiner-{number}")


def test_one_that_hangs_is_in_the_books_before_its_pod_is_deleted() -> None:
    stage = training()
    survivor, hung = stage.pods[1:]
    hang(stage, hung, survivor)
    plan = stage.decide()
    assert (deleted(plan), created(plan)) == ([], ["digits-workers-2"])
    assert (plan.status.failures.count, plan.status.failures.message) == (1, HANGS)
    assert noticed(plan).count(reasons.LOST) == 1
    stage.write(plan)
    plan = stage.decide()
    assert (deleted(plan), plan.status.failures.count) == (["digits-workers-1"], 1)
    assert reasons.LOST not in noticed(plan)


def test_one_that_ends_itself_meanwhile_counts_once() -> None:
    stage = training()
    survivor, hung = stage.pods[1:]
    hang(stage, hung, survivor)
    stage.write(stage.decide())
    swap(stage, ended(hung, 75, word=TerminationMessage("refused", step=40, reason=f"declared lost: {HANGS}")))
    plan = stage.decide()
    assert (plan.status.failures.count, noticed(plan).count(reasons.LOST)) == (1, 0)


def test_one_that_a_fault_of_its_machine_ended_counts_before_its_pod_has_ended() -> None:
    stage = training()
    survivor, faulty = stage.pods[1:]
    lost = structs.replace(given_up(faulty, "OSError: [Errno 5] Input/output error"), ended=True, machine_fault=True)
    stage.link = link(remote("training", seen(survivor), wanted=2, minimum=1, step=40, lost=(lost,)))
    plan = stage.decide()
    assert (deleted(plan), plan.status.failures.count) == ([], 1)
    stage.write(plan)
    swap(stage, ended(faulty, 1, word=TerminationMessage("failed", step=40, error=lost.reason)))
    plan = stage.decide()
    assert (deleted(plan), plan.status.failures.count) == (["digits-workers-1"], 1)


def test_one_that_fell_silent_is_replaced_without_being_counted() -> None:
    stage = training()
    survivor, silent = stage.pods[1:]
    hang(stage, silent, survivor, reason="no sign of life for 5 s", hung=False)
    plan = stage.decide()
    assert (deleted(plan), plan.status.failures.count) == (["digits-workers-1"], 0)


def test_a_joiner_that_hangs_each_time_never_stops_those_who_train() -> None:
    stage, now = training(backoffLimit=1), NOW
    survivor = stage.pods[1]
    for number in range(1, 7):
        pod = joiner(stage, number, now)
        stage.pods = [*stage.pods[:2], pod]
        now += SUCCESSOR
        hang(stage, pod, survivor, step=40 + 100 * number)
        plan = stage.decide(now)
        assert (plan.status.phase, plan.status.failures.count, plan.calls) == ("Running", 1, ())
        assert reason_of(plan, "Degraded") == ("True", reasons.FEWER_WORKERS)
        assert message_of(plan, "Degraded").endswith(f"The latest that ended too soon: {HANGS}.")
        stage.write(plan)
        assert deleted(stage.decide(now)) == [pod.name]


def test_without_anybody_who_trains_they_use_up_the_backoff_limit() -> None:
    stage, now, counts = training(1, backoffLimit=2), NOW, []
    while stage.job.status.phase != "Failed":
        assert len(counts) < 4
        pod = joiner(stage, len(counts) + 1, now)
        stage.pods = [stage.pods[0], pod]
        now += SUCCESSOR
        hang(stage, pod)
        plan = stage.decide(now)
        stage.write(plan)
        counts.append(plan.status.failures.count)
    assert counts == [1, 2, 3]
    assert reason_of(plan, "Failed") == ("True", reasons.BACK_OFF_LIMIT)
    assert "(backoffLimit 2): its training thread hangs" in message_of(plan, "Failed")
    assert "at train.py:7 in main" in message_of(plan, "Failed")


@pytest.mark.parametrize("limit", [0, 1])
def test_a_single_one_never_ends_a_job(limit: int) -> None:
    stage = training(1, backoffLimit=limit)
    hang(stage, stage.pods[1])
    plan = stage.decide()
    assert (plan.status.phase != "Failed", plan.status.failures.count) == (True, 1)


def test_those_that_hang_in_quick_succession_are_waited_for() -> None:
    stage, now, waits = training(), NOW, []
    survivor = stage.pods[1]
    for number in range(1, 5):
        pod = joiner(stage, number, now)
        stage.pods = [*stage.pods[:2], pod]
        now += 60.0
        hang(stage, pod, survivor, step=40 + number)
        plan = stage.decide(now)
        waits.append("" if created(plan) else "waits")
        stage.write(plan)
    assert waits == ["", "waits", "waits", "waits"]


def test_a_hang_of_before_is_not_the_reason_of_a_later_loss() -> None:
    stage = training()
    survivor, hung = stage.pods[1:]
    hang(stage, hung, survivor)
    stage.write(stage.decide(NOW))
    second = joiner(stage, 2, NOW + 10)
    stage.pods = [*stage.pods[:2], second]
    stage.link = link(remote("training", seen(survivor), seen(second), wanted=2, minimum=1, step=60))
    plan = stage.decide(NOW + 20)
    assert reason_of(plan, "Degraded")[0] == "False"
    stage.write(plan)
    stage.link = link(remote("training", seen(survivor), wanted=2, minimum=1, step=80))
    stage.pods = stage.pods[:2]
    assert message_of(stage.decide(NOW + 30), "Degraded").endswith("that are wanted: the others are starting.")
