"""The operator process in a fake cluster with a queue that has kinds of device."""

from __future__ import annotations

from pathlib import Path

import pytest
from kubelet import NODES as NODE_NAMES
from queue_stage import QUICK_POLICY, add_queue, queue, queued, ready
from stage import Stage, play

from virtualflow_operator.constants import LABEL_KIND, WORKER
from virtualflow_operator.k8s.client import NODES, Object

DEVICE = "example.com/device"
KINDS = [
    {"name": "fast", "nodeSelector": {"matchLabels": {DEVICE: "fast"}}, "rating": 4},
    {"name": "slow", "nodeSelector": {"matchExpressions": [{"key": DEVICE, "operator": "Exists"}]}},
]


def add_kinds(stage: Stage, **devices: str) -> None:
    """A queue of two kinds, over nodes of these devices."""
    add_queue(stage, kinds=KINDS)
    for node in NODE_NAMES:
        device = devices.get(node.replace("-", "_"))
        if device:
            stage.server.modify(NODES, None, node, {"metadata": {"labels": {DEVICE: device}}})


def places(stage: Stage, name: str) -> list[tuple[str, str]]:
    """The kind that each worker of a job was made for, and its node."""
    found = [pod for pod in stage.pods(name, WORKER) if not pod["metadata"].get("deletionTimestamp")]
    return sorted((pod["metadata"]["labels"].get(LABEL_KIND, ""), pod["spec"].get("nodeName", "")) for pod in found)


def allocation(stage: Stage, name: str) -> Object:
    found: Object = stage.status(name).get("allocation") or {}
    return found


def test_workers_run_on_the_kind_that_their_job_was_given_and_the_statuses_say_so(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        add_kinds(stage, node_a="fast", node_b="slow")
        stage.start(scheduling=QUICK_POLICY)
        stage.server.add(queued("digits", maxReplicas=2))
        await stage.until(lambda: stage.trains("digits", 2))
        assert places(stage, "digits") == [("fast", "node-a")] * 2
        assert allocation(stage, "digits")["kind"] == "fast"
        assert allocation(stage, "digits")["kinds"] == [{"kind": "fast", "workers": 2}]
        assert "(on fast; its speed is not measured yet)" in allocation(stage, "digits")["reason"]
        await stage.until(lambda: queue(stage)["status"]["jobs"]["running"] == 1)
        status = queue(stage)["status"]
        assert [(k["name"], k["total"], k["allocated"]) for k in status["kinds"]] == [
            ("fast", "2", "2"),
            ("slow", "2", "0"),
        ]
        assert status["nodesWithoutKind"] == ["node-c"]
        assert "1 node of no kind" in ready(stage)["message"]

    play(tmp_path, story)


@pytest.mark.slow
def test_a_better_kind_is_moved_to_without_a_repeated_step_but_not_by_a_bitwise_job(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        add_kinds(stage, node_a="slow", node_b="slow")
        stage.start(scheduling=QUICK_POLICY)
        stage.server.add(queued("bits", maxReplicas=2))
        stage.server.add(queued("loose", maxReplicas=2, reproducibility="Statistical"))
        await stage.until(lambda: stage.trains("bits", 2) and stage.trains("loose", 2))
        assert {kind for name in ("bits", "loose") for kind, _ in places(stage, name)} == {"slow"}
        began = stage.status("loose").get("step", 0)
        # Faster devices come.
        stage.server.modify(NODES, None, "node-c", {"metadata": {"labels": {DEVICE: "fast"}}})
        await stage.until(lambda: places(stage, "loose") == [("fast", "node-c")] * 2 and stage.trains("loose", 2))
        assert [kind for kind, _ in places(stage, "bits")] == ["slow"] * 2
        assert stage.trains("bits", 2)
        assert stage.most[WORKER, "loose"] <= 4, "each has one successor"
        assert not stage.status("loose").get("repeatedSteps")
        await stage.until(lambda: stage.status("loose")["changes"] >= 1)
        await stage.until(lambda: stage.status("loose").get("step", 0) > began)

    play(tmp_path, story)


@pytest.mark.slow
def test_a_leader_that_comes_anew_goes_on_with_what_the_statuses_say(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        add_kinds(stage, node_a="slow")
        first = stage.start(scheduling=QUICK_POLICY)
        stage.server.add(queued("bits", maxReplicas=2))
        await stage.until(lambda: stage.trains("bits", 2))
        pods = stage.workers("bits")
        first.kill()
        stage.server.modify(NODES, None, "node-b", {"metadata": {"labels": {DEVICE: "fast"}}})
        await stage.replace(first, scheduling=QUICK_POLICY)
        await stage.until(lambda: [k["total"] for k in queue(stage)["status"]["kinds"]] == ["2", "2"])
        assert stage.workers("bits") == pods
        assert allocation(stage, "bits")["kind"] == "slow"

    play(tmp_path, story)
