"""The definition of queues: complete, bounded, described, and of one mind with the code that reads it."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
import yaml
from resource_rules import QUEUE_CRD_FILE, ROOT, broken_rules, crd, defaulted, queue, schema, structural_errors
from test_crd import KEYWORDS_OF_1_20, nodes

from virtualflow_operator import constants, reasons
from virtualflow_operator.api.job import Condition
from virtualflow_operator.api.queue import (
    DEFAULT_POLICY,
    MAX_ALLOCATIONS,
    MAX_UNSORTED,
    CapacityStatus,
    Given,
    JobCounts,
    KindSpec,
    KindStatus,
    Limit,
    PackingSpec,
    QueueSpec,
    QueueStatus,
    Requirement,
    Selector,
    read_queue,
)

SCHEMA = schema(QUEUE_CRD_FILE)
NODES = dict(nodes(SCHEMA))
Spec = dict[str, Any]


def test_every_node_is_bounded_described_and_known_to_kubernetes_1_20() -> None:
    needed = {"array": {"maxItems"}, "string": {"maxLength"}, "integer": {"minimum", "maximum"}}
    needed["number"] = needed["integer"]
    for path, node in NODES.items():
        assert node["type"] in {"object", "array", "string", "integer", "number", "boolean"}, path
        assert needed.get(node["type"], set()) <= node.keys(), path
        assert "additionalProperties" not in node or "maxProperties" in node, path
        assert node.keys() - {"x-kubernetes-validations"} <= KEYWORDS_OF_1_20, path
        assert set(node.get("required", [])) <= node.get("properties", {}).keys(), path
        if not path.endswith("{}"):
            assert re.fullmatch(r"(?s)[A-Zt].{4,}\.", node["description"]), path


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("spec", QueueSpec),
        ("spec.nodeSelector", Selector),
        ("spec.spotSelector", Selector),
        ("spec.packing", PackingSpec),
        ("spec.nodeSelector.matchExpressions[]", Requirement),
        ("spec.limits[]", Limit),
        ("spec.kinds[]", KindSpec),
        ("spec.kinds[].nodeSelector", Selector),
        ("spec.kinds[].nodeSelector.matchExpressions[]", Requirement),
        ("status", QueueStatus),
        ("status.conditions[]", Condition),
        ("status.capacity", CapacityStatus),
        ("status.kinds[]", KindStatus),
        ("status.jobs", JobCounts),
        ("status.allocations[]", Given),
    ],
)
def test_the_code_reads_exactly_the_fields_of_the_schema(path: str, kind: type[msgspec.Struct]) -> None:
    assert {field.encode_name for field in msgspec.structs.fields(kind)} == NODES[path]["properties"].keys()


def test_names_defaults_and_subresources() -> None:
    names, version = crd(QUEUE_CRD_FILE)["spec"]["names"], crd(QUEUE_CRD_FILE)["spec"]["versions"][0]
    assert crd(QUEUE_CRD_FILE)["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert (names["kind"], names["plural"], names["shortNames"]) == (
        "VirtualFlowQueue",
        constants.QUEUE_PLURAL,
        ["vfq"],
    )
    assert (crd(QUEUE_CRD_FILE)["spec"]["scope"], version["name"]) == ("Cluster", constants.VERSION)
    assert version["subresources"] == {"status": {}}
    assert NODES["spec.policy"]["default"] == DEFAULT_POLICY
    assert NODES["status.allocations"]["maxItems"] == MAX_ALLOCATIONS
    assert NODES["status.nodesWithoutKind"]["maxItems"] == MAX_UNSORTED
    assert len(json.dumps(crd(QUEUE_CRD_FILE))) < 20_000


def test_printer_columns_show_fields_of_their_type() -> None:
    for column in crd(QUEUE_CRD_FILE)["spec"]["versions"][0]["additionalPrinterColumns"]:
        path = re.sub(r"\[\?.*?\]", "[]", column["jsonPath"].lstrip("."))
        assert path == "metadata.creationTimestamp" or NODES[path]["type"] == column["type"], path


def test_the_schema_names_every_reason_of_a_queue() -> None:
    source = (ROOT / "operator" / "virtualflow_operator" / "reasons.py").read_text(encoding="utf-8")
    own = re.findall(r'= "(\w+)"', source.split("# Of a queue's Ready")[1])
    listed = NODES["status.conditions[].reason"]["description"].split("In order: ")[1]
    assert sorted(re.findall(r"\w+", re.sub(r"\([^)]*\)|Amiss:", "", listed))) == sorted(own)
    assert reasons.SHARING in own


NOTHING_COUNTED = "A queue needs something to count; give it a resource, such as nvidia.com/gpu, or a capacity."
NODES_FOR_NOTHING = "Nodes are looked at for a resource only; give the queue a resource, or remove its selectors."
GPU = {"matchLabels": {"pool": "gpu"}}
KINDS_OF_NOTHING = "Kinds of device are told apart by nodes; give the queue a resource, or remove kinds."
KINDS_AND_CAPACITY = "A queue with kinds gives out what its nodes have; remove capacity, or set limits."
LIMITS_OF_KINDS = "A limit is of one of the kinds, if there are any; correct its kind."
SOME_PRICES = "Prices are compared; give every kind one, or none."
PACKING = "Jobs take turns on devices; count one as the resource, such as nvidia.com/gpu, or remove packing."
THRIFT = "thrift weighs the prices of kinds; give every kind one, or remove it."
ABOVE_NOTHING = "Ratings and prices are above 0; correct them, or leave them out."
SPOT_PRICE = "A spotPrice is compared with the price on demand; give the kind a price, too."


def demand(operator: str, *values: str) -> Spec:
    return {"matchExpressions": [{"key": "pool", "operator": operator} | ({"values": [*values]} if values else {})]}


def kind(name: str, **fields: float) -> Spec:
    return {"name": name, "nodeSelector": {"matchLabels": {"device": name}}} | fields


def limit(kind: str, namespace: str = "team-a") -> Spec:
    return {"namespace": namespace, "capacity": 4, "kind": kind}


RULES: dict[str, tuple[Spec, list[str]]] = {
    "a resource": ({}, []),
    "a capacity": ({"resource": None, "capacity": 8}, []),
    "both": ({"capacity": 8, "nodeSelector": GPU, "spotSelector": demand("Exists")}, []),
    "limits": ({"limits": [{"namespace": "team-a", "capacity": 4}]}, []),
    "nothing": ({"resource": None}, [NOTHING_COUNTED]),
    "nodes of no use": ({"resource": None, "capacity": 1, "nodeSelector": GPU}, [NODES_FOR_NOTHING]),
    "workers close together": ({"placement": "BinPack"}, []),
    "kinds": ({"kinds": [kind("fast"), kind("slow", rating=0.25)]}, []),
    "kinds with prices": ({"kinds": [kind("fast", price=3, spotPrice=1.2), kind("slow", price=1)], "thrift": 1}, []),
    "a limit of a kind": ({"kinds": [kind("fast")], "limits": [limit("fast"), limit("fast", "team-b")]}, []),
    "kinds of no use": (
        {"resource": None, "capacity": 1, "kinds": [kind("fast")]},
        [KINDS_OF_NOTHING, KINDS_AND_CAPACITY],
    ),
    "kinds and a capacity": ({"kinds": [kind("fast")], "capacity": 4}, [KINDS_AND_CAPACITY]),
    "a limit of another kind": ({"kinds": [kind("fast")], "limits": [limit("slow")]}, [LIMITS_OF_KINDS]),
    "a limit of no kind": ({"kinds": [kind("fast")], "limits": [limit("")]}, [LIMITS_OF_KINDS]),
    "a limit of a kind where there are none": ({"limits": [limit("fast")]}, [LIMITS_OF_KINDS]),
    "some prices": ({"kinds": [kind("fast", price=3), kind("slow")]}, [SOME_PRICES]),
    "thrift without prices": ({"kinds": [kind("fast")], "thrift": 0.5}, [THRIFT]),
    "thrift without kinds": ({"thrift": 0.5}, [THRIFT]),
    "a rating of nothing": ({"kinds": [kind("fast", rating=0)]}, [ABOVE_NOTHING]),
    "a price of nothing": ({"kinds": [kind("fast", price=0)]}, [ABOVE_NOTHING]),
    "a spot price of nothing": ({"kinds": [kind("fast", price=1, spotPrice=0.0)]}, [ABOVE_NOTHING]),
    "a spot price alone": ({"kinds": [kind("fast", spotPrice=1)]}, [SPOT_PRICE]),
    "jobs that share devices": ({"resource": "nvidia.com/gpu", "packing": {}}, []),
    "jobs that share workers": ({"resource": None, "capacity": 1, "packing": {}}, [PACKING]),
    "jobs that share processors": ({"resource": "cpu", "packing": {"maxJobsPerDevice": 2}}, [PACKING]),
    "spot nodes of no use": ({"resource": None, "capacity": 1, "spotSelector": GPU}, [NODES_FOR_NOTHING]),
}


@pytest.mark.parametrize(("spec", "sentences"), RULES.values(), ids=RULES.keys())
def test_a_rule_of_the_schema_says_what_is_wrong_with_a_queue(spec: Spec, sentences: list[str]) -> None:
    document = queue(**spec)
    assert structural_errors(defaulted(document, SCHEMA), SCHEMA) == []
    assert [rule.message for rule in broken_rules(document, node=SCHEMA)] == sentences


@pytest.mark.parametrize(
    "selector", [demand("In"), demand("Exists", "gpu"), demand("NotIn"), demand("DoesNotExist", "")]
)
def test_the_schema_refuses_a_demand_that_makes_no_sense(selector: Spec) -> None:
    document = queue(nodeSelector=selector)
    assert [rule.path for rule in broken_rules(document, node=SCHEMA)] == ["spec.nodeSelector.matchExpressions[0]"]


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"resource": "a b"}, "spec.resource"),
        ({"capacity": -1}, "spec.capacity"),
        ({"packing": {"maxJobsPerDevice": 3}}, "spec.packing.maxJobsPerDevice"),
        ({"packing": {"maxJobsPerDevice": 0}}, "spec.packing.maxJobsPerDevice"),
        ({"spotSelector": demand("Gt")}, "spec.spotSelector.matchExpressions[0].operator"),
        ({"placement": "Spread"}, "spec.placement"),
    ],
)
def test_an_invalid_queue_is_refused_at_the_right_place(spec: Spec, path: str) -> None:
    document = queue(**spec)
    assert [where for where, _ in structural_errors(defaulted(document, SCHEMA), SCHEMA)] == [path]


@pytest.mark.parametrize("spec", [[1], {"resource": 1}, {"resource": "cpu", "nodeSelector": 3}, {"capacity": -1}])
def test_whatever_a_queue_says_it_is_read_and_its_fault_told(spec: Any) -> None:
    assert read_queue({"metadata": {"name": "shared"}, "spec": spec}).fault


@pytest.mark.parametrize(
    ("selector", "labels", "selected"),
    [
        ({}, {}, True),
        (GPU, {"pool": "gpu", "zone": "a"}, True),
        (GPU, {"pool": "cpu"}, False),
        (demand("In", "gpu", "tpu"), {"pool": "tpu"}, True),
        (demand("NotIn", "gpu"), {}, True),
        (demand("NotIn", "gpu"), {"pool": "gpu"}, False),
        (demand("Exists"), {}, False),
        (demand("DoesNotExist"), {}, True),
        (GPU | demand("NotIn", "gpu"), {"pool": "gpu"}, False),
    ],
)
def test_nodes_are_selected_as_kubernetes_does(selector: Spec, labels: dict[str, str], selected: bool) -> None:
    assert msgspec.convert(selector, Selector).selects(labels) is selected


def test_a_status_at_its_fullest_is_valid() -> None:
    condition = {"type": "Ready", "status": "True", "reason": "Sharing", "message": "All is shared."}
    status = {
        "conditions": [condition | {"lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1}],
        "capacity": dict.fromkeys(("total", "onDemand", "spot", "usedByOthers", "allocated"), "1.5") | {"nodes": 3},
        "jobs": {"running": 1, "waiting": 0},
        "allocations": [{"namespace": "ml", "name": "digits", "workers": 2}],
    }
    assert structural_errors(queue() | {"status": status}, SCHEMA) == []


def test_the_example_is_a_valid_queue() -> None:
    shared = yaml.safe_load((ROOT / "examples" / "queue.yaml").read_text(encoding="utf-8"))
    assert structural_errors(defaulted(shared, SCHEMA), SCHEMA) == []
    assert broken_rules(shared, node=SCHEMA) == []
    assert read_queue(shared).fault == ""
