"""Which facts about pods and nodes announce a loss, and whose fault an end was."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes import NOW, ended, training

from virtualflow.protocol.termination_message import TerminationMessage
from virtualflow_operator.api.objects import Node, Pod, Standing
from virtualflow_operator.jobs.pod_classification import (
    OUT_OF_SERVICE,
    TERMINATION_TAINTS,
    disrupted_by_cluster,
    find_disruption,
    never_began,
)

POD = training(1).pods[1]
GOING = TERMINATION_TAINTS[0]
FACTS: dict[str, tuple[dict[str, Any], Node | None, Standing, str | None]] = {
    "nothing": ({}, Node("node-0"), "training", None),
    "an unknown taint": ({}, Node("node-0", taints=("dedicated",)), "training", None),
    "a well-known taint": ({}, Node("node-0", taints=(GOING,)), "training", "now"),
    "a taint that was configured": ({}, Node("node-0", taints=("mine",)), "training", "now"),
    "a cordon": ({}, Node("node-0", cordoned=True), "training", "planned"),
    "a cordon and a taint": ({}, Node("node-0", cordoned=True, taints=(GOING,)), "training", "now"),
    "a deletion": ({"deleting_at": NOW}, Node("node-0"), "training", "now"),
    "an eviction": ({"disrupted": "Evicted"}, Node("node-0"), "training", "now"),
    "a shutdown of the node": ({}, Node("node-0", ready=False, shutting_down=True), "silent", "now"),
    "a node that is not ready, its worker silent": ({}, Node("node-0", ready=False), "silent", "lost"),
    "a node that is not ready, its worker unknown": ({}, Node("node-0", ready=False), "absent", "lost"),
    "a node that is not ready, its worker heard": ({}, Node("node-0", ready=False), "training", None),
    "a node that is out of service": ({}, Node("node-0", taints=(OUT_OF_SERVICE,)), "training", "lost"),
    "a node that is no more": ({}, Node("node-0", gone=True), "silent", "lost"),
    "a node that was deleted, its worker heard": ({}, Node("node-0", gone=True), "training", "now"),
    "no node yet": ({"node": ""}, None, "absent", None),
    "no node yet, and deleted": ({"node": "", "deleting_at": NOW}, None, "absent", "now"),
}


@pytest.mark.parametrize(("pod", "node", "standing", "kind"), FACTS.values(), ids=FACTS)
def test_what_a_pod_and_its_node_announce(
    pod: dict[str, Any], node: Node | None, standing: Standing, kind: str | None
) -> None:
    found = find_disruption(dataclasses.replace(POD, **pod), node, standing, ("mine",))
    assert (found.kind if found else None) == kind
    assert found is None or found.reason


def test_a_node_of_which_nothing_is_known_says_nothing() -> None:
    assert find_disruption(POD, None, "absent", ()) is None


@given(
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sets(st.sampled_from([GOING, OUT_OF_SERVICE, "mine", "other"])),
    st.sampled_from(["absent", "starting", "ready", "training", "draining", "silent", "done"]),
)
def test_more_bad_news_never_make_a_loss_look_smaller(
    ready: bool, shutting: bool, cordoned: bool, taints: set[str], standing: Standing
) -> None:
    gravity = {None: 0, "planned": 1, "now": 2, "lost": 3}

    def weigh(node: Node) -> int:
        found = find_disruption(POD, node, standing, ("mine",))
        return gravity[found.kind if found else None]

    node = Node(
        "node-0",
        ready=ready,
        shutting_down=shutting and not ready,
        cordoned=cordoned,
        taints=tuple(sorted(taints)),
    )
    assert weigh(node) <= weigh(dataclasses.replace(node, cordoned=True))
    assert weigh(node) <= weigh(dataclasses.replace(node, taints=(*node.taints, GOING)))
    assert weigh(node) <= weigh(dataclasses.replace(node, taints=(*node.taints, OUT_OF_SERVICE)))


def failed(code: int = 137, word: TerminationMessage | None = None, **facts: Any) -> Pod:
    return dataclasses.replace(ended(POD, code, word=word), **facts)


INNOCENT: dict[str, Pod] = {
    "the kubelet evicted it": failed(reason="Evicted"),
    "its node shut down": failed(reason="Terminated"),
    "its node had too little": failed(reason="OutOfcpu", exit=None),
    "the scheduler preempted it": failed(disrupted="PreemptionByScheduler: preempted"),
    "it was deleted": failed(deleting_at=NOW),
    "the coordinator refused it": failed(75, TerminationMessage("refused", reason="silent for 5 s")),
    "the job ended elsewhere": failed(1, TerminationMessage("ended", reason="the job has failed")),
    "its containers never ran": failed(exit=None),
}


@pytest.mark.parametrize("pod", INNOCENT.values(), ids=INNOCENT)
def test_an_end_that_is_not_the_programs_fault(pod: Pod) -> None:
    assert disrupted_by_cluster(pod)


@pytest.mark.parametrize(
    "word",
    [None, TerminationMessage("failed", error="ValueError"), TerminationMessage("done"), TerminationMessage("left")],
    ids=str,
)
@pytest.mark.parametrize("code", [1, 2, 75 + 1, 137, 139, 143])
def test_an_end_that_is_the_programs_fault_as_far_as_anybody_can_tell(
    code: int, word: TerminationMessage | None
) -> None:
    assert disrupted_by_cluster(failed(code, word)) == ""


def test_a_refusal_says_why() -> None:
    assert disrupted_by_cluster(INNOCENT["the coordinator refused it"]) == "the coordinator refused it: silent for 5 s"


SOON: dict[str, tuple[Pod, bool]] = {
    "its node had no room for it": (failed(reason="OutOfcpu", exit=None), True),
    "its node did not admit it": (failed(reason="UnexpectedAdmissionError", exit=None), True),
    "it was evicted after seconds": (failed(reason="Evicted", created=NOW - 9, finished_at=NOW), True),
    "it was evicted after minutes": (failed(reason="Evicted", created=NOW - 300, finished_at=NOW), False),
    "it was evicted, and nobody says when": (failed(reason="Evicted", exit=None), False),
}


@pytest.mark.parametrize(("pod", "expected"), SOON.values(), ids=SOON)
def test_a_pod_that_ends_before_it_can_have_trained_never_began(pod: Pod, expected: bool) -> None:
    assert never_began(pod) is expected


def test_the_stacks_of_one_that_hung_come_after_the_reason() -> None:
    word = TerminationMessage("refused", reason="its training thread hangs", traceback="train.py:3 in read")
    assert disrupted_by_cluster(failed(75, word)) == (
        "the coordinator refused it: its training thread hangs\ntrain.py:3 in read"
    )
