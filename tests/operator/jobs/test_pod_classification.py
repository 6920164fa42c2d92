"""The fate of each pod, and which of the coordinator's workers it is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from scenes import (
    NOW,
    SETTINGS,
    Stage,
    edit,
    ended,
    given_up,
    group,
    homeless,
    link,
    nodes,
    remote,
    seen,
    swap,
    training,
)

from virtualflow.protocol.termination_message import TerminationMessage
from virtualflow_operator.api.objects import Node, Pod
from virtualflow_operator.jobs.manifests import hash_templates
from virtualflow_operator.jobs.pod_classification import (
    ClassifiedPod,
    PodClassification,
    classify_pods,
    describe_crash,
    find_worker,
)


def look(stage: Stage, now: float = NOW, **options: Any) -> PodClassification:
    facts: dict[str, Any] = {"templates": hash_templates(stage.job).groups} | options
    return classify_pods(stage.job, stage.pods, nodes=stage.nodes, link=stage.link, now=now, settings=SETTINGS, **facts)


def fate_of(stage: Stage, name: str = "digits-workers-1", **options: Any) -> ClassifiedPod:
    return next(placed for placed in look(stage, **options).workers if placed.pod.name == name)


def changed(**facts: Any) -> Stage:
    stage = training()
    return swap(stage, dataclasses.replace(stage.pods[2], **facts))


def finished(code: int, word: TerminationMessage | None = None, **facts: Any) -> Stage:
    stage = training()
    return swap(stage, dataclasses.replace(ended(stage.pods[2], code, word=word), **facts))


def on(**facts: Any) -> Stage:
    stage = training()
    stage.nodes = nodes(*stage.pods, node_1=Node("", **facts))
    return stage


def unheard(stage: Stage, *lost: bool) -> Stage:
    stage.link = link(remote("training", seen(stage.pods[1]), lost=(given_up(stage.pods[2]),) if lost else ()))
    return stage


def stuck(since: float) -> Stage:
    stage = training()
    return swap(stage, homeless(stage.pods[2], since))


FATES: dict[str, tuple[Stage, str]] = {
    "one that trains": (training(), "healthy"),
    "one on a cordoned node": (on(cordoned=True), "planned"),
    "one with an old template": (changed(template="old"), "planned"),
    "one on a node that announces its end": (on(taints=("karpenter.sh/disrupted",)), "announced"),
    "one that is evicted": (changed(disrupted="Evicted"), "announced"),
    "one of a group that is no more": (changed(group="former"), "planned"),
    "one that is being deleted": (changed(deleting_at=NOW + 5), "leaving"),
    "one that is being deleted on a dead node": (unheard(on(ready=False)), "lost"),
    "one whose node is no more": (unheard(on(gone=True)), "lost"),
    "one that trains although its node was deleted": (on(gone=True), "announced"),
    "one on a node of which nothing is known": (changed(node="node-9"), "healthy"),
    "one that was given up": (unheard(training(), True), "declared-lost"),
    "one that is being deleted and was given up": (unheard(changed(deleting_at=NOW + 5), True), "leaving"),
    "one that was given up on a cordoned node": (unheard(on(cordoned=True), True), "declared-lost"),
    "one without a node for long": (stuck(NOW - 30), "stuck"),
    "one without a node for a moment": (stuck(NOW - 29), "healthy"),
    "one that has left": (finished(0, TerminationMessage("left")), "left"),
    "one that has seen the end": (finished(0, TerminationMessage("done")), "left"),
    "one that ended while it was being deleted": (finished(0, deleting_at=NOW), "left"),
    "one that ended without a word": (finished(0), "crashed"),
    "one that raised": (finished(1, TerminationMessage("failed", error="x")), "crashed"),
    "one that the kubelet evicted": (finished(137, reason="Evicted"), "disrupted"),
    "one that the kubelet would not have": (changed(phase="Failed", reason="OutOfcpu"), "refused"),
    "one that the coordinator refused": (finished(75), "refused"),
    "one that was refused and is being deleted": (finished(75, deleting_at=NOW), "disrupted"),
}


@pytest.mark.parametrize(("stage", "fate"), FATES.values(), ids=FATES)
def test_every_pod_has_one_fate_with_a_reason(stage: Stage, fate: str) -> None:
    placed = fate_of(stage)
    assert placed.fate == fate
    assert bool(placed.reason) == (fate != "healthy")


def test_without_a_connection_a_node_that_is_not_ready_is_lost() -> None:
    stage = on(ready=False)
    assert fate_of(stage).fate == "healthy"
    assert stage.link is not None
    stage.link = dataclasses.replace(stage.link, connected=False)
    assert (fate_of(stage).fate, fate_of(stage).standing) == ("lost", "training")
    stage.link = dataclasses.replace(stage.link, since=NOW - 1)
    assert fate_of(stage).fate == "healthy", "the coordinator was not asked yet"


@pytest.mark.parametrize("old", ["a template", "a group"])
def test_a_specification_that_makes_no_sense_condemns_nobody(old: str) -> None:
    stage = edit(training(), workerGroups=[group(image="trainer:2") if old == "a template" else group("other")])
    assert fate_of(stage).fate == "planned"
    assert fate_of(stage, templates=None).fate == "healthy"


def test_an_outdated_worker_without_a_node_is_one_to_be_replaced() -> None:
    assert fate_of(edit(stuck(NOW - 300), workerGroups=[group(image="trainer:2")])).fate == "planned"


# --- whose is whose ---------------------------------------------------------------------------------------------------


def test_pods_are_told_apart_by_owner_role_and_attempt() -> None:
    stage = training(attempt=2)
    old = [dataclasses.replace(pod, name=f"old-{pod.name}", attempt=1) for pod in stage.pods]
    foreign = dataclasses.replace(stage.pods[1], name="foreign", owner="another")
    orphan = dataclasses.replace(stage.pods[1], name="orphan", owner="")
    stage.pods += [*old, foreign, orphan]
    survey = look(stage)
    assert [placed.pod.name for placed in survey.workers] == ["digits-workers-0", "digits-workers-1"]
    assert [pod.name for pod in survey.coordinators] == ["digits-coordinator-0"]
    assert {pod.name for pod in survey.stale} == {pod.name for pod in old}
    assert survey.names == {pod.name for pod in stage.pods}


def test_a_process_of_the_same_name_elsewhere_is_another() -> None:
    pod = training(1).pods[1]
    other = dataclasses.replace(pod, ip="10.9.9.9")
    status = remote("training", seen(other))
    assert find_worker(status, pod) is None
    assert find_worker(status, other) == status.workers[0]
    both = remote("training", seen(other, "silent"), seen(pod))
    assert find_worker(both, pod) == both.workers[1]
    assert find_worker(None, pod) is None


def test_a_new_process_of_a_name_that_was_given_up_is_not() -> None:
    stage = training()
    former = dataclasses.replace(stage.pods[2], ip="10.9.9.9")
    stage.link = link(remote("training", seen(stage.pods[1]), lost=(given_up(former),)))
    assert fate_of(stage).fate == "healthy"


# --- crashes in words -------------------------------------------------------------------------------------------------

POD = training(1).pods[1]


@pytest.mark.parametrize(
    ("pod", "said"),
    [
        pytest.param(
            ended(POD, 1, word=TerminationMessage("failed", error="ValueError: odd", traceback="Traceback\n  x\n")),
            "digits-workers-0 failed: ValueError: odd\nTraceback\n  x",
            id="an exception with its traceback",
        ),
        pytest.param(
            ended(POD, 137, reason="OOMKilled"),
            "digits-workers-0 was killed for using more memory than its limit; raise resources.limits.memory",
            id="too much memory",
        ),
        pytest.param(
            ended(POD, 1, message="\n".join(f"line {n}" for n in range(40))),
            "digits-workers-0 ended with exit code 1:\n" + "\n".join(f"line {n}" for n in range(28, 40)),
            id="the end of its log",
        ),
        pytest.param(ended(POD, 3), "digits-workers-0 ended with exit code 3; see its log", id="nothing but a code"),
        pytest.param(
            ended(POD, 137, message="loaded 3 shards"),
            "digits-workers-0 ended with exit code 137 (SIGKILL):\nloaded 3 shards",
            id="a signal that a wrapper passes on",
        ),
        pytest.param(
            ended(POD, 255), "digits-workers-0 ended with exit code 255; see its log", id="a code that is no signal"
        ),
        pytest.param(
            dataclasses.replace(POD, phase="Failed", reason="DeadlineExceeded"),
            "digits-workers-0 failed: DeadlineExceeded",
            id="no container at all",
        ),
    ],
)
def test_a_crash_is_described_for_a_person(pod: Pod, said: str) -> None:
    assert describe_crash(pod) == said
