"""A job in a queue with kinds of device: what is made for which kind, and who goes when the queue gives it another."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from scenes import NOW, Stage, created, deleted, drained, training

from virtualflow_operator.api import Node, QueueSpec
from virtualflow_operator.constants import LABEL_KIND
from virtualflow_operator.jobs.actions import CreatePod, JobPlan
from virtualflow_operator.jobs.reconcile import reconcile
from virtualflow_operator.queues import Grant, QueueAdmission

QUEUE = msgspec.convert(
    {
        "resource": "nvidia.com/gpu",
        "kinds": [{"name": name, "nodeSelector": {"matchLabels": {"device": name}}} for name in ("fast", "slow")],
    },
    QueueSpec,
)


def decide(stage: Stage, queue: QueueSpec | None = QUEUE, **kinds: int) -> JobPlan:
    """What is decided when the queue has given so many workers of each kind."""
    grant = Grant(stage.job.uid, "shared", sum(kinds.values()) or 2, "so it is", kind=next(iter(kinds), ""))
    grant = dataclasses.replace(grant, kinds=tuple(kinds.items()))
    scene = dataclasses.replace(stage.scene, admission=QueueAdmission(grant, queue))
    return reconcile(scene, NOW, stage.settings)


def on(*kinds: str, **spec: Any) -> Stage:
    """A job whose workers train on nodes of these kinds."""
    stage = training(len(kinds), queue="shared", **spec)
    stage.nodes = {f"node-{i}": Node(f"node-{i}", labels={"device": kind}) for i, kind in enumerate(kinds)}
    return stage


def made_for(plan: JobPlan) -> list[str]:
    """The kind of each worker that is made."""
    manifests = [action.manifest for action in plan.actions if isinstance(action, CreatePod)]
    return [manifest["metadata"]["labels"].get(LABEL_KIND, "") for manifest in manifests]


def test_workers_are_made_for_the_kinds_that_the_queue_gives() -> None:
    plan = decide(on("fast", "fast"), fast=3, slow=1)
    assert created(plan) == ["digits-workers-2", "digits-workers-3"]
    assert made_for(plan) == ["fast", "slow"]
    assert deleted(plan) == []


def test_all_go_to_another_kind_and_their_successors_come_first() -> None:
    plan = decide(on("slow", "slow"), fast=2)
    assert made_for(plan) == ["fast", "fast"]
    assert (drained(plan), deleted(plan)) == ([], [])
    both = decide(on("slow", "slow", "fast", "fast"), fast=2)
    assert created(both) == []
    assert sorted(drained(both)) == ["digits-workers-0", "digits-workers-1"]
    assert drained(both) == deleted(both)


def test_what_was_lent_goes_back_at_once() -> None:
    plan = decide(on("fast", "slow", "slow"), fast=1)
    assert sorted(drained(plan)) == ["digits-workers-1", "digits-workers-2"]
    assert created(plan) == []


@pytest.mark.parametrize("given", [{}, {"former": 3}], ids=["kinds are new to the queue", "kinds were renamed"])
def test_nothing_is_made_or_moved_before_the_queue_has_decided_by_its_present_kinds(given: dict[str, int]) -> None:
    plan = decide(on("fast", "slow"), **given)
    assert (created(plan), deleted(plan), plan.calls) == ([], [], ())


def test_without_its_queue_a_job_goes_on_with_what_it_has() -> None:
    plan = decide(on("fast", "slow"), None, fast=2)
    assert (created(plan), deleted(plan)) == ([], [])
