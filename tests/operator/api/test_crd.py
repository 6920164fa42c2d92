"""The CustomResourceDefinition: complete, bounded, described, and of one mind with the code that reads it."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from typing import get_args

import msgspec
import pytest
from resource_rules import (
    CRD_FILE,
    QUEUE_CRD_FILE,
    ROOT,
    Schema,
    crd,
    defaulted,
    job,
    schema,
    structural_errors,
)

from virtualflow.protocol import messages
from virtualflow.protocol.settings import MAX_VIRTUAL_NODES, MAX_WORKERS
from virtualflow_operator import constants, reasons
from virtualflow_operator.api import validation
from virtualflow_operator.api.job import (
    PHASES,
    AllocationStatus,
    Checkpoint,
    Condition,
    ConditionType,
    Elasticity,
    Failures,
    JobSpec,
    JobStatus,
    LastChange,
    Measured,
    WorkerGroup,
    WorkerShare,
)

KEYWORDS_OF_1_20 = {
    *("type", "format", "description", "default", "enum", "pattern", "required", "properties", "items"),
    *("additionalProperties", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems"),
    *("minProperties", "maxProperties", "x-kubernetes-preserve-unknown-fields"),
    *("x-kubernetes-list-type", "x-kubernetes-list-map-keys"),
}
KUBERNETES_COST_LIMIT = 10_000_000
"""What one rule may cost at most, by the API server's own estimate, over all places where it applies."""


def nodes(node: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Each node of a schema, with its path."""
    yield path, node
    for key, field in node.get("properties", {}).items():
        yield from nodes(field, f"{path}.{key}".lstrip("."))
    if "items" in node:
        yield from nodes(node["items"], f"{path}[]")
    if isinstance(node.get("additionalProperties"), Mapping):
        yield from nodes(node["additionalProperties"], f"{path}{{}}")


NODES = dict(nodes(schema()))
SPEC, STATUS = NODES["spec"], NODES["status"]


def test_every_node_has_a_type() -> None:
    types = {"object", "array", "string", "integer", "number", "boolean"}
    assert [path for path, node in NODES.items() if node.get("type") not in types] == []


def test_every_field_is_described() -> None:
    # Kubernetes forbids it for metadata, and nobody sees that of a map's values.
    seen = {path: node for path, node in NODES.items() if path != "metadata" and not path.endswith("{}")}
    described = re.compile(r"(?s)[A-Zt].{4,}\.")
    assert [path for path, node in seen.items() if not described.fullmatch(node.get("description", ""))] == []


def test_every_list_string_map_and_number_is_bounded() -> None:
    needed = {"array": {"maxItems"}, "string": {"maxLength"}, "integer": {"minimum", "maximum"}}
    assert [path for path, node in NODES.items() if not needed.get(node["type"], set()) <= node.keys()] == []
    maps = {path: node for path, node in NODES.items() if "additionalProperties" in node}
    assert [path for path, node in maps.items() if "maxProperties" not in node] == []


def test_no_keyword_is_newer_than_kubernetes_1_20_but_the_rules() -> None:
    known = KEYWORDS_OF_1_20 | {"x-kubernetes-validations"}
    assert {path: newer for path, node in NODES.items() if (newer := node.keys() - known)} == {}


def test_what_is_required_exists() -> None:
    absent = {path: {*node.get("required", ())} - node.get("properties", {}).keys() for path, node in NODES.items()}
    assert {path: names for path, names in absent.items() if names} == {}


def test_defaults_are_valid() -> None:
    given = {path: node for path, node in NODES.items() if "default" in node}
    wrong = {path: structural_errors(defaulted(node["default"], node), node) for path, node in given.items()}
    assert {path: errors for path, errors in wrong.items() if errors} == {}


def test_objects_keep_unknown_fields_only_where_kubernetes_knows_them_better() -> None:
    kept = {path for path, node in NODES.items() if node.get("x-kubernetes-preserve-unknown-fields")}
    template = "spec.workerGroups[].template"
    pods = {template, f"{template}.metadata", f"{template}.spec", f"{template}.spec.containers[]"}
    coordinator = "spec.coordinator.template"
    container = f"{coordinator}.spec.containers[]"
    refused = {path for path, node in NODES.items() if path.startswith(coordinator) and refuses(node)}
    assert kept - {path for path in kept if path.removesuffix("[]") in refused} == pods | {
        f"{template}.spec.containers[].env[]",
        coordinator,
        f"{coordinator}.spec",
        container,
        "spec.checkpoint.volume",
    }


def refuses(node: Schema) -> bool:
    """Whether a field is only there to be refused by its name."""
    return any(rule["rule"] == "false" for rule in node.get("x-kubernetes-validations", ()))


def test_lists_of_named_things_are_maps() -> None:
    maps = {
        path: node["x-kubernetes-list-map-keys"] for path, node in NODES.items() if "x-kubernetes-list-type" in node
    }
    assert maps == {
        "spec.workerGroups": ["name"],
        "status.conditions": ["type"],
        "status.assignment": ["worker"],
        "status.allocation.kinds": ["kind"],
        "status.endedRuns": ["run"],
    }
    for path, keys in maps.items():
        assert set(keys) <= set(NODES[f"{path}[]"]["required"])


def test_every_rule_says_what_to_do() -> None:
    rules = [rule for node in NODES.values() for rule in node.get("x-kubernetes-validations", ())]
    for rule in rules:
        assert rule.keys() == {"rule", "message"}
        assert re.fullmatch(r"[^.;]+; [^.;]+\.", rule["message"]), rule["message"]


def test_the_costliest_rule_is_far_from_the_limit() -> None:
    groups, path = SPEC["properties"]["workerGroups"], "spec.workerGroups[].template.spec.containers"
    times = groups["maxItems"] * NODES[path]["maxItems"] * NODES[f"{path}[].env"]["maxItems"]
    (rule,) = NODES[f"{path}[].env[].name"]["x-kubernetes-validations"]
    # As cel-go estimates: a tenth of a character of the literal for each startsWith, and one for each operation.
    literals = re.findall(r"startsWith\('(\w+)'\)", rule["rule"])
    once = sum(len(literal) * 0.1 + 3 for literal in literals) + 1
    assert tuple(literals) == validation.OPERATOR_VARIABLES
    assert times * once < KUBERNETES_COST_LIMIT / 2


def test_the_file_is_small_enough_to_apply_anywhere() -> None:
    # kubectl apply keeps a copy of all of it, as JSON, in an annotation, and annotations end at 256 KiB; Helm keeps a
    # copy of every release, compressed, in a Secret of at most 1 MiB. What people read all of is smaller than both.
    assert len(json.dumps(crd())) < 60_000
    assert CRD_FILE.stat().st_size < 60_000


def test_names_and_subresources() -> None:
    names, version = crd()["spec"]["names"], crd()["spec"]["versions"][0]
    assert len(crd()["spec"]["versions"]) == 1
    assert crd()["metadata"]["name"] == f"{constants.PLURAL}.{constants.GROUP}"
    assert crd()["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert (crd()["spec"]["group"], version["name"]) == (constants.GROUP, constants.VERSION)
    assert (names["kind"], names["plural"], names["singular"]) == (
        constants.KIND,
        constants.PLURAL,
        constants.KIND.lower(),
    )
    assert (names["shortNames"], names["categories"]) == (["vfj"], ["virtualflow", "all"])
    assert (crd()["spec"]["scope"], version["served"], version["storage"]) == ("Namespaced", True, True)
    assert version["subresources"] == {
        "status": {},
        "scale": {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        },
    }


def test_printer_columns_show_fields_of_their_type() -> None:
    columns = crd()["spec"]["versions"][0]["additionalPrinterColumns"]
    shown = [(column["name"].upper(), column.get("priority", 0)) for column in columns]
    assert [name for name, priority in shown if priority == 0] == ["PHASE", "WORKERS", "STEP", "LOSS", "AGE"]
    assert [name for name, priority in shown if priority] == ["TOTAL", "STEPS/S", "CHANGES", "REPEATED", "DIGEST"]
    for column in columns:
        path = column["jsonPath"].lstrip(".")
        assert (path, column["type"]) == ("metadata.creationTimestamp", "date") or (
            NODES[path]["type"] == column["type"]
        )


# --- of one mind with the code ----------------------------------------------------------------------------------------


def encoded_fields(kind: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    return {field.encode_name: field for field in msgspec.structs.fields(kind)}


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("spec", JobSpec),
        ("spec.workerGroups[]", WorkerGroup),
        ("spec.elasticity", Elasticity),
        ("spec.checkpoint", Checkpoint),
        ("status", JobStatus),
        ("status.conditions[]", Condition),
        ("status.allocation", AllocationStatus),
        ("status.scaling[]", Measured),
        ("status.assignment[]", WorkerShare),
        ("status.lastChange", LastChange),
        ("status.failures", Failures),
    ],
)
def test_the_code_reads_exactly_the_fields_of_the_schema(path: str, kind: type[msgspec.Struct]) -> None:
    assert set(encoded_fields(kind)) == NODES[path]["properties"].keys()


@pytest.mark.parametrize(
    ("path", "kind"), [("spec", JobSpec), ("spec.elasticity", Elasticity), ("spec.checkpoint", Checkpoint)]
)
def test_the_code_has_the_defaults_of_the_schema(path: str, kind: type[msgspec.Struct]) -> None:
    for key, field in encoded_fields(kind).items():
        node = NODES[path]["properties"][key]
        if node["type"] != "object" and "default" in node:
            assert field.default == node["default"], key
        elif node["type"] != "object" and not field.required:
            assert field.default is None, key


def test_the_code_has_the_limits_of_the_schema() -> None:
    spec = SPEC["properties"]
    assert spec["virtualNodes"]["maximum"] == MAX_VIRTUAL_NODES
    assert {spec[key]["maximum"] for key in ("replicas", "minReplicas", "maxReplicas")} == {MAX_WORKERS}


def test_the_schema_has_the_words_of_the_code() -> None:
    conditions = NODES["status.conditions[].type"]["description"]
    assert NODES["status.phase"]["enum"] == list(PHASES)
    assert re.findall(r"^(\w+):", conditions, flags=re.MULTILINE) == list(get_args(ConditionType))
    causes = NODES["status.lastChange.cause"]["description"]
    assert set(re.findall(r"\w+", causes.split(": ")[1])) - {"or"} == set(get_args(messages.Cause))


def test_the_schema_names_every_reason_of_a_condition_and_no_other() -> None:
    source = (ROOT / "operator" / "virtualflow_operator" / "reasons.py").read_text(encoding="utf-8")
    of_conditions = re.findall(r'^[A-Z_]+ = "(\w+)"', source.split("# Events only")[0], flags=re.MULTILINE)
    known = {value for key, value in vars(reasons).items() if key.isupper() and isinstance(value, str)}
    assert set(of_conditions) <= known
    listed = NODES["status.conditions[].reason"]["description"].split("In order: ")[1]
    without_remarks = re.sub(r"\([^)]*\)|Amiss:", "", listed)
    assert sorted(re.findall(r"\w+", without_remarks)) == sorted(set(of_conditions))


def test_a_status_at_its_fullest_is_valid() -> None:
    condition = {"type": "Ready", "status": "True", "reason": "Training", "message": "2 of 2 workers train."}
    status = {
        "phase": "Running",
        "conditions": [condition | {"lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1}],
        "replicas": 2,
        "workers": "2/2",
        "generation": 4,
        "assignment": [{"worker": "digits-workers-0", "virtualNodes": "0-3", "node": "node-1"}],
        "lastChange": {"from": 1, "to": 2, "cause": "join", "reason": "digits-workers-1 joined", "step": 12},
        "failures": {"count": 1, "streak": 1, "counted": ["1c8dcb5b"]},
        "loss": "0.123456",
    }
    assert structural_errors(job() | {"status": status}) == []
    assert structural_errors(job() | {"status": status | {"phase": "Walking"}}) != []


def test_the_page_about_the_resource_is_what_the_schema_says() -> None:
    location = importlib.util.spec_from_file_location("generate_resource", ROOT / "docs" / "generate_resource.py")
    assert location is not None
    assert location.loader is not None
    module = importlib.util.module_from_spec(location)
    location.loader.exec_module(module)
    page = (ROOT / "docs" / "reference" / "resource.md").read_text(encoding="utf-8")
    assert page == module.generate(crd()) + module.generate_queue(crd(QUEUE_CRD_FILE)), (
        "run: python docs/generate_resource.py > docs/reference/resource.md"
    )
    for path, node in NODES.items():
        if path.count(".") == 1 and path.startswith("spec."):
            assert node["description"] in page or "[]" in path
