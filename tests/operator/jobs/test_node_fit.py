"""Quantities of Kubernetes, and what fits on no node."""

from __future__ import annotations

import dataclasses
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes import training

from virtualflow_operator.api.objects import Node
from virtualflow_operator.api.validation import parse_quantity
from virtualflow_operator.jobs.node_fit import could_take, never_fits
from virtualflow_operator.jobs.workers import keep_off

POD = training(1).pods[1]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0), ("1", 1), (1, 1), (0.5, "0.5"), ("100m", "0.1"), ("1500m", "1.5"), ("1.5", "1.5"),
        ("250u", "0.00025"),
        ("5n", "0.000000005"), ("2k", 2000), ("1M", 10**6), ("3G", 3 * 10**9), ("1T", 10**12), ("1P", 10**15),
        ("1E", 10**18), ("1Ki", 1024), ("64Mi", 64 * 2**20), ("1.5Gi", 3 * 2**29), ("1Ti", 2**40), ("1Pi", 2**50),
        ("1Ei", 2**60), ("1e3", 1000), ("1E3", 1000), ("12e-3", "0.012"), ("+1", 1), ("-1", -1), (".5", "0.5"),
        (" 1 ", 1),
    ],
)  # fmt: skip
def test_a_quantity_is_read_as_kubernetes_reads_it(text: str | float, number: int | str) -> None:
    assert parse_quantity(text) == Decimal(number)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "1x",
        "1KiB",
        "1 Gi",
        "Gi",
        "m",
        "e",
        "1e",
        "--1",
        "NaN",
        "sNaN",
        "Infinity",
        "1e999999999",
        "1_0",
        "9" * 65,
    ],
)
def test_what_is_no_quantity_is_none(text: str) -> None:
    assert parse_quantity(text) is None


@given(st.one_of(st.text(max_size=12), st.text("0123456789.eE+-munkKMGTPi", max_size=8), st.floats()))
def test_anything_is_read_without_an_error(text: str | float) -> None:
    number = parse_quantity(text)
    assert number is None or number.is_finite()


@given(st.integers(0, 10**9), st.sampled_from(["", "m", "k", "M", "G", "Ki", "Mi", "Gi"]))
def test_a_suffix_only_multiplies(number: int, suffix: str) -> None:
    whole, one = parse_quantity(f"{number}{suffix}"), parse_quantity(f"1{suffix}")
    assert whole is not None
    assert one is not None
    assert whole == number * one


NODES = {
    "small": Node("small", allocatable={"cpu": "2", "memory": "8Gi"}),
    "large": Node("large", allocatable={"cpu": "3900m", "memory": "16Gi", "nvidia.com/gpu": "2"}),
}


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        pytest.param({}, "", id="no request"),
        pytest.param({"cpu": "3900m", "memory": "16Gi"}, "", id="exactly the largest node"),
        pytest.param({"cpu": "4"}, "it requests cpu=4 and the largest node has 3900m", id="too many cores"),
        pytest.param({"memory": "17Gi"}, "memory=17Gi and the largest node has 16Gi", id="too much memory"),
        pytest.param({"nvidia.com/gpu": "4"}, "nvidia.com/gpu=4 and the largest node has 2", id="too many devices"),
        pytest.param({"amd.com/gpu": "1"}, "amd.com/gpu=1 and the largest node has 0", id="a device that no node has"),
        pytest.param({"cpu": "a lot"}, "", id="no quantity"),
    ],
)
def test_a_pod_that_is_larger_than_every_node_is_told_so(requests: dict[str, str], expected: str) -> None:
    said = never_fits(dataclasses.replace(POD, requests=(requests,)), NODES)
    assert expected in said
    assert bool(said) == bool(expected)


def test_the_requests_of_all_containers_count() -> None:
    both = dataclasses.replace(POD, requests=({"cpu": "3"}, {"cpu": "1500m", "memory": "1Gi"}))
    assert "it requests cpu=3+1500m and the largest node has 3900m" in never_fits(both, NODES)


def test_a_node_that_is_no_more_is_not_counted() -> None:
    pod = dataclasses.replace(POD, requests=({"cpu": "3"},))
    large = dataclasses.replace(NODES["large"], gone=True)
    assert never_fits(pod, {"small": NODES["small"], "large": large})


@pytest.mark.parametrize("nodes", [None, {}], ids=["nodes that may not be looked at", "no nodes"])
def test_without_nodes_nothing_is_said(nodes: dict[str, Node] | None) -> None:
    assert never_fits(dataclasses.replace(POD, requests=({"cpu": "1000"},)), nodes) == ""


NODE = Node("node-9", allocatable={"cpu": "4", "nvidia.com/gpu": "1"}, labels={"pool": "gpu", "zone": "a"})


def demanding(*terms: dict[str, Any]) -> dict[str, Any]:
    return {
        "affinity": {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [*terms]}}
        }
    }


def expression(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": [*values]}]}


def name(operator: str, value: str) -> dict[str, Any]:
    return {"matchFields": [{"key": "metadata.name", "operator": operator, "values": [value]}]}


def requesting(resource: str, amount: str) -> dict[str, Any]:
    return {"containers": [{"resources": {"requests": {resource: amount}}}]}


@pytest.mark.parametrize(
    ("spec", "could"),
    [
        pytest.param({}, True, id="asks for nothing"),
        pytest.param({"nodeSelector": {"pool": "gpu"}}, True, id="its pool"),
        pytest.param({"nodeSelector": {"pool": "cpu"}}, False, id="another pool"),
        pytest.param(requesting("nvidia.com/gpu", "1"), True, id="as much as it has"),
        pytest.param(requesting("nvidia.com/gpu", "2"), False, id="more than it has"),
        pytest.param(requesting("tpu", "1"), False, id="what it does not have"),
        pytest.param(demanding(expression("zone", "In", "a", "b")), True, id="its zone"),
        pytest.param(demanding(expression("zone", "NotIn", "a")), False, id="not its zone"),
        pytest.param(demanding(expression("zone", "In", "b"), expression("pool", "Exists")), True, id="either"),
        pytest.param(demanding(expression("cores", "Gt", "2")), False, id="cannot be told"),
        pytest.param(demanding(name("NotIn", "node-9")), False, id="not this one"),
        pytest.param(demanding(name("NotIn", "node-8")), True, id="not another one"),
        pytest.param(demanding(name("In", "node-8")), False, id="another one"),
    ],
)
def test_whether_a_node_could_take_a_pod_one_day(spec: dict[str, Any], could: bool) -> None:
    assert could_take(spec, NODE) is could


@pytest.mark.parametrize(
    ("facts", "tolerations", "could"),
    [
        ({"gone": True}, [], False),
        ({"ready": False}, [], False),
        ({"cordoned": True}, [], False),
        ({"taints": ("gpu",)}, [], False),
        ({"taints": ("gpu",)}, [{"key": "gpu", "operator": "Exists"}], True),
        ({"taints": ("gpu",)}, [{"operator": "Exists"}], True),
    ],
)
def test_a_node_that_takes_no_pods_is_none(facts: dict[str, Any], tolerations: list[Any], could: bool) -> None:
    assert could_take({"tolerations": tolerations}, dataclasses.replace(NODE, **facts)) is could


def test_nodes_to_keep_off_are_demanded_in_the_form_that_the_api_server_takes() -> None:
    """One name in each requirement, in each of the terms, which are alternatives."""
    pod = {
        "spec": {"tolerations": [{"operator": "Exists"}]}
        | demanding(expression("a", "Exists"), expression("b", "Exists"))
    }
    keep_off(pod, {name: Node(name, cordoned=True) for name in ("node-2", "node-1")})
    affinity = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    for term in affinity["nodeSelectorTerms"]:
        assert [field["values"] for field in term["matchFields"]] == [["node-1"], ["node-2"]]
