"""What a queue has to share, from nodes and other pods."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes import body, group

from virtualflow_operator.api.objects import Node, read_foreign_pod, read_job, read_node
from virtualflow_operator.api.queue import QueueSpec, Selector
from virtualflow_operator.queues.capacity import (
    KindCapacity,
    QueueCapacity,
    in_units,
    measure_capacity,
    requested,
    shown,
    tolerated,
    unfitness,
    worker_units,
)

GPU = "nvidia.com/gpu"
GPUS = QueueSpec(resource=GPU)
SPOT = Selector(match_labels={"capacity": "spot"})


def node(name: str, gpus: int = 8, **facts: Any) -> Node:
    return Node(name, **({"allocatable": {GPU: str(gpus), "cpu": "3900m"}} | facts))


def stock(*nodes: Node, spec: QueueSpec = GPUS, **facts: Any) -> QueueCapacity:
    arguments: dict[str, Any] = {"others": {}, "alive": {}, "tolerations": ()} | facts
    return measure_capacity(spec, {n.name: n for n in nodes}, **arguments)


OUT = {
    "not ready": {"ready": False},
    "cordoned": {"cordoned": True},
    "shutting down": {"shutting_down": True},
    "to be taken away": {"taints": ("ToBeDeletedByClusterAutoscaler",)},
    "lost by Kubernetes' own word": {"taints": ("node.kubernetes.io/unreachable",)},
    "announced by a taint of ours": {"taints": ("example.com/leaving",)},
}


@pytest.mark.parametrize("facts", OUT.values(), ids=OUT.keys())
def test_a_node_that_is_not_fit_for_work_counts_nothing(facts: dict[str, Any]) -> None:
    supply = stock(node("a"), node("b", **facts), leaving=("example.com/leaving",), tolerations=[frozenset({""})])
    assert (supply.total, supply.nodes, supply.selected) == (8, {"a"}, 2)
    assert supply.unfit["b"].startswith("it ")


def test_a_node_that_is_gone_is_not_even_selected() -> None:
    assert stock(node("a"), Node("b", gone=True)).selected == 1


TAINTED = ("nvidia.com/gpu",)


@pytest.mark.parametrize(
    ("tolerations", "fit"),
    [([], True), ([frozenset()], False), ([frozenset(), frozenset(TAINTED)], True), ([frozenset({""})], True)],
    ids=["no job to ask", "no job tolerates it", "one job does", "one tolerates all"],
)
def test_a_taint_that_keeps_others_away_from_accelerators(tolerations: list[frozenset[str]], fit: bool) -> None:
    assert (unfitness(node("a", taints=TAINTED), tolerations) == "") is fit


def test_spot_and_on_demand_are_told_apart_and_others_are_taken_off() -> None:
    nodes = (node("a"), node("b", labels={"capacity": "spot"}), node("c", labels={"capacity": "reserved"}))
    spec = QueueSpec(resource=GPU, spot_selector=SPOT)
    supply = stock(*nodes, spec=spec, others={"a": 3, "b": 20, "elsewhere": 1})
    assert (supply.on_demand, supply.spot, supply.used_by_others) == (13, 0, 11)


@pytest.mark.parametrize(
    ("capacity", "on_demand", "spot"), [(None, 8, 8), (20, 8, 8), (10, 8, 2), (4, 4, 0), (0, 0, 0)]
)
def test_a_capacity_caps_what_the_nodes_have_spot_first(capacity: int | None, on_demand: int, spot: int) -> None:
    spec = QueueSpec(resource=GPU, capacity=capacity, spot_selector=SPOT)
    supply = stock(node("a"), node("b", labels={"capacity": "spot"}), spec=spec)
    assert (supply.on_demand, supply.spot) == (on_demand, spot)


def test_a_capacity_without_a_resource_needs_no_nodes() -> None:
    assert stock(spec=QueueSpec(capacity=5)) == QueueCapacity({"": KindCapacity(5)})


def test_what_is_too_little_for_a_worker_on_each_node_is_nothing_together() -> None:
    cpus = QueueSpec(resource="cpu")
    assert stock(node("a"), node("b"), spec=cpus, grain=2_000).total == 2_000 * 2
    assert stock(node("a"), node("b"), spec=cpus).total == 3_900 * 2


def test_nodes_that_only_look_lost_keep_the_workers_that_are_known_to_train() -> None:
    supply = stock(node("a", ready=False), node("b", ready=False), alive={"a": 3})
    assert (supply.total, supply.nodes) == (3, {"a"})
    # A cordon is no mistake: those workers are to move.
    assert stock(node("a", cordoned=True), alive={"a": 3}).total == 0


@pytest.mark.parametrize(
    ("amount", "resource", "up", "units"),
    [("100m", "cpu", True, 100), ("1.0001", "cpu", True, 1001), ("1.0009", "cpu", False, 1000), (2, GPU, True, 2),
     ("1Gi", "memory", True, 2**30), ("nonsense", GPU, True, 0)],
)  # fmt: skip
def test_quantities_become_whole_units(amount: str, resource: str, up: bool, units: int) -> None:
    assert in_units(amount, resource, up=up) == units


@given(st.integers(0, 10**7))
def test_units_are_shown_as_people_write_them(units: int) -> None:
    assert in_units(shown(units, "cpu"), "cpu", up=True) == units
    assert shown(units, GPU) == str(units)


def test_a_worker_takes_what_its_largest_group_asks_for() -> None:
    def asking(name: str, **resources: Any) -> dict[str, Any]:
        return group(name, pod={"containers": [{"name": "t", "image": "t:1", "resources": resources}]})

    groups = [
        asking("a", requests={GPU: "1"}),
        asking("b", limits={GPU: "2"}),
        asking("c", requests={GPU: "8"}) | {"maxReplicas": 0},
    ]
    spec = read_job(body(workerGroups=groups)).spec
    assert worker_units(spec, GPU) == 2, "a limit is the request where there is none; a group switched off has no say"
    assert worker_units(spec, "cpu") == 0
    assert worker_units(spec, None) == 1


def test_tolerations_are_those_that_let_pods_run() -> None:
    tolerations = [{"key": "a"}, {"operator": "Exists"}, {"key": "b", "effect": "PreferNoSchedule"}]
    groups = [group("a", pod={"tolerations": tolerations, "containers": [{"name": "t", "image": "t:1"}]})]
    assert tolerated(read_job(body(workerGroups=groups)).spec) == {"a", ""}


def test_a_guest_takes_something_while_it_has_a_node_and_has_not_ended() -> None:
    def pod(phase: str, node: str) -> dict[str, Any]:
        containers = [{"resources": {"requests": {GPU: 2}}}, {"resources": {"requests": {GPU: "1"}}}, {}]
        return {
            "metadata": {"name": "web"},
            "spec": {"nodeName": node, "containers": containers},
            "status": {"phase": phase},
        }

    assert requested(read_foreign_pod(pod("Running", "a")).requests, GPU) == 3
    assert read_foreign_pod(pod("Running", "a")).node == "a"
    for ended in (pod("Succeeded", "a"), pod("Failed", "a"), pod("Pending", "")):
        assert read_foreign_pod(ended).node == ""


def test_a_node_is_read_with_its_labels() -> None:
    assert read_node({"metadata": {"name": "a", "labels": {"pool": "ml"}}}).labels == {"pool": "ml"}
