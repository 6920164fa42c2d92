"""Which kind of device workers are on, who is to be replaced by one on another, and where new ones may run."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes import SETTINGS, accepted, body, worker

from virtualflow_operator.api import Node, QueueSpec, read_job
from virtualflow_operator.constants import LABEL_KIND
from virtualflow_operator.jobs import manifests
from virtualflow_operator.jobs.node_fit import is_made_for
from virtualflow_operator.jobs.pod_classification import ClassifiedPod, PodClassification
from virtualflow_operator.queues.admission import kind_of_pod, lacking_kinds, sort_by_kind, unsuitable
from virtualflow_operator.queues.kinds import kind_of
from virtualflow_operator.queues.worker_pods import confine

JOB = read_job(accepted(body(virtualNodes=64)))
Spec = dict[str, Any]


def kind(name: str, **labels: str) -> Spec:
    return {"name": name, "nodeSelector": {"matchLabels": labels}}


def queue(*kinds: Spec) -> QueueSpec:
    return msgspec.convert({"resource": "nvidia.com/gpu", "kinds": list(kinds)}, QueueSpec)


QUEUE = queue(kind("fast", device="fast"), kind("slow", device="slow"))
NODES = {f"{name}-node": Node(f"{name}-node", labels={"device": name}) for name in ("fast", "slow", "odd")}


def on(*kinds: str, **facts: Any) -> list[ClassifiedPod]:
    """Workers on nodes of these kinds, all of them training."""
    return [
        ClassifiedPod(worker(JOB, i, node=f"{name}-node"), "training", "healthy", **facts)
        for i, name in enumerate(kinds)
    ]


def sorted_out(workers: list[ClassifiedPod], at: QueueSpec | None = QUEUE, **given_: int) -> list[tuple[str, bool]]:
    """The kind of each worker, and whether it is to be replaced."""
    pods = sort_by_kind(PodClassification(tuple(workers), (), (), frozenset()), given_, at, NODES)
    return [(worker.kind, worker.misplaced) for worker in pods.workers]


CASES: dict[str, tuple[list[tuple[str, bool]], list[tuple[str, bool]]]] = {
    "where they are to be": (sorted_out(on("fast", "fast"), fast=2), [("fast", False)] * 2),
    "all on another kind": (sorted_out(on("slow", "slow"), fast=2), [("slow", True)] * 2),
    "one on another kind": (sorted_out(on("fast", "slow"), fast=2), [("fast", False), ("slow", True)]),
    "one on a node of no kind": (sorted_out(on("fast", "odd"), fast=2), [("fast", False), ("", True)]),
    "too many of a kind, none lacking": (sorted_out(on("fast", "fast"), fast=1), [("fast", False)] * 2),
    "too many of one kind and too few of another": (
        sorted_out(on("fast", "fast"), fast=1, slow=1),
        [("fast", False), ("fast", True)],
    ),
    "those lent are taken back": (
        sorted_out(on("fast", "slow", "slow"), fast=1),
        [("fast", False), ("slow", True), ("slow", True)],
    ),
    "nothing is decided": (sorted_out(on("slow")), [("slow", False)]),
    "a queue without kinds": (sorted_out(on("slow"), queue(), fast=1), [("", False)]),
    "no queue": (sorted_out(on("slow"), None, fast=1), [("", False)]),
}


@pytest.mark.parametrize(("found", "expected"), CASES.values(), ids=CASES.keys())
def test_who_is_to_be_replaced(found: list[tuple[str, bool]], expected: list[tuple[str, bool]]) -> None:
    assert found == expected


def test_one_that_is_stuck_is_rather_replaced_than_one_that_trains() -> None:
    stuck = dataclasses.replace(worker(JOB, 0, node="", phase="Pending"), kind="fast")
    workers = [ClassifiedPod(stuck, "absent", "stuck"), *on("fast", "fast")[1:]]
    assert sorted_out(workers, fast=1, slow=1) == [("fast", True), ("fast", False)]


def test_a_pod_without_a_node_is_of_the_kind_that_it_was_made_for() -> None:
    pod = dataclasses.replace(worker(JOB, 0, node=""), kind="slow")
    assert kind_of_pod(pod, QUEUE, NODES) == "slow"
    assert kind_of_pod(dataclasses.replace(pod, node="fast-node"), QUEUE, NODES) == "fast", "what it is on is true"
    assert kind_of_pod(dataclasses.replace(pod, node="unheard-of"), QUEUE, NODES) == "slow"


def test_what_is_lacking_is_of_the_jobs_own_kind_first() -> None:
    pods = sort_by_kind(PodClassification(tuple(on("slow", "slow")), (), (), frozenset()), {"fast": 2}, QUEUE, NODES)
    assert lacking_kinds({"fast": 2}, pods.workers) == ["fast", "fast"]
    assert lacking_kinds({"slow": 3, "fast": 1}, on("slow", "slow")) == ["slow"] * 3 + ["fast"]


def test_a_group_is_not_for_a_kind_on_which_its_template_may_not_be() -> None:
    pod = {"nodeSelector": {"device": "slow"}, "containers": [{"name": "a", "image": "b"}]}
    raw = body(workerGroups=[{"name": "picky", "template": {"spec": pod}}, {"name": "any", "template": {"spec": {}}}])
    groups = read_job(raw).spec.worker_groups
    assert unsuitable(["fast", "slow"], groups, QUEUE, NODES) == {("picky", "fast")}
    assert unsuitable(["fast", "slow"], groups, QUEUE, {}) == frozenset(), "nobody knows what nodes will be like"


FIT: dict[str, tuple[Any, bool]] = {
    "asks for nothing": ({}, True),
    "its label": ({"nodeSelector": {"device": "fast"}}, True),
    "another label": ({"nodeSelector": {"device": "slow"}}, False),
    "a selector that is a word": ({"nodeSelector": "fast"}, True),
    "an affinity that is a word": ({"affinity": "fast"}, True),
    "terms that nobody here can tell": (
        {
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [{"matchExpressions": [{"key": "n", "operator": "Gt", "values": ["3"]}]}]
                    }
                }
            }
        },
        True,
    ),
    "more than any node has": ({"containers": [{"resources": {"requests": {"nvidia.com/gpu": "9"}}}]}, False),
}


@pytest.mark.parametrize(("spec", "fit"), FIT.values(), ids=FIT.keys())
def test_whether_a_template_may_be_on_a_kind(spec: Spec, fit: bool) -> None:
    node = Node("a", ready=False, cordoned=True, labels={"device": "fast"}, allocatable={"nvidia.com/gpu": "8"})
    assert is_made_for(spec, [node]) is fit
    assert is_made_for(spec, []) is True


def test_a_template_must_tolerate_the_taints_of_its_kind() -> None:
    tainted = Node("a", taints=("gpu", "node.kubernetes.io/not-ready"))
    assert not is_made_for({}, [tainted])
    assert is_made_for({"tolerations": [{"key": "gpu"}]}, [tainted])


LABELS = st.dictionaries(st.sampled_from("ab"), st.sampled_from("12"), max_size=2)
DEMANDS = st.one_of(
    st.builds(
        lambda key, op, value: {"key": key, "operator": op, "values": [value]},
        st.sampled_from("ab"),
        st.sampled_from(["In", "NotIn"]),
        st.sampled_from("12"),
    ),
    st.builds(
        lambda key, op: {"key": key, "operator": op}, st.sampled_from("ab"), st.sampled_from(["Exists", "DoesNotExist"])
    ),
)
SELECTORS = st.fixed_dictionaries({"matchLabels": LABELS, "matchExpressions": st.lists(DEMANDS, max_size=2)})


@given(st.lists(SELECTORS, min_size=1, max_size=3), LABELS, st.integers(0, 2))
def test_a_worker_may_be_on_exactly_the_nodes_of_its_kind(
    selectors: list[Spec], labels: dict[str, str], chosen: int
) -> None:
    at = queue(*({"name": f"k{i}", "nodeSelector": selector} for i, selector in enumerate(selectors)))
    name = f"k{chosen % len(selectors)}"
    pod = manifests.worker_pod(JOB, JOB.spec.worker_groups[0], 0, "10.0.0.1", SETTINGS)
    confine(pod, at, kind=name)
    assert pod["metadata"]["labels"][LABEL_KIND] == name
    node = Node("a", labels=labels)
    required = pod["spec"]["affinity"].get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution")
    everything = at.kinds[0].node_selector.requirements == () and name == "k0"
    assert (required is None) <= (everything or _nothing_can_be(at, name))
    if required is not None:
        only_affinity = {"affinity": {"nodeAffinity": pod["spec"]["affinity"]["nodeAffinity"]}}
        assert is_made_for(only_affinity, [node]) is (kind_of(at, labels) == name)


def _nothing_can_be(at: QueueSpec, name: str) -> bool:
    """Whether a kind before it selects all nodes: such a queue is not ready, and gives out nothing."""
    before = at.kinds[: [kind.name for kind in at.kinds].index(name)]
    return any(kind.node_selector.requirements == () for kind in before)
