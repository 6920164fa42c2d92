"""The CustomResourceDefinition as an API server of 1.25 or newer applies it: defaults, structure, and the CEL rules."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import celpy
import jsonschema
import yaml

ROOT = Path(__file__).parents[2]
CRD_FILE = ROOT / "crds" / "virtualflowjobs.yaml"
QUEUE_CRD_FILE = ROOT / "crds" / "virtualflowqueues.yaml"
Schema = Mapping[str, Any]
Object = dict[str, Any]


def read_yaml(file: Path) -> Object:
    """A document that is large: libyaml reads it ten times as fast, where there is one."""
    loaded: Object = yaml.load(file.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return loaded


@cache
def crd(file: Path = CRD_FILE) -> Object:
    """The definition."""
    return read_yaml(file)


def schema(file: Path = CRD_FILE) -> Object:
    """The schema of its only version."""
    found: Object = crd(file)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def queue(name: str = "shared", **spec: Any) -> Object:
    """A small valid queue with that spec on top; a field of ``None`` is left out."""
    whole = {"resource": "cpu"} | spec
    return {
        "apiVersion": "virtualflow.dev/v1alpha1",
        "kind": "VirtualFlowQueue",
        "metadata": {"name": name},
        "spec": {key: value for key, value in whole.items() if value is not None},
    }


def job(name: str = "digits", **spec: Any) -> Object:
    """A small valid job with that spec on top; a field of ``None`` is left out."""
    group = {"name": "workers", "template": {"spec": {"containers": [{"name": "trainer", "image": "trainer:1"}]}}}
    whole = {"workerGroups": [group]} | spec
    return {
        "apiVersion": "virtualflow.dev/v1alpha1",
        "kind": "VirtualFlowJob",
        "metadata": {"name": name},
        "spec": {key: value for key, value in whole.items() if value is not None},
    }


def defaulted(value: Any, node: Schema | None = None) -> Any:
    """A copy of ``value`` with the defaults of the schema."""
    node = schema() if node is None else node
    if isinstance(value, Mapping):
        filled = dict(value)
        for key, field in node.get("properties", {}).items():
            if key not in filled and "default" in field:
                filled[key] = copy.deepcopy(field["default"])
            if key in filled:
                filled[key] = defaulted(filled[key], field)
        return filled
    if isinstance(value, list) and "items" in node:
        return [defaulted(entry, node["items"]) for entry in value]
    return copy.deepcopy(value)


def structural_errors(document: Any, node: Schema | None = None) -> list[tuple[str, str]]:
    """Path and message of what the schema alone finds wrong, sorted."""
    validator = jsonschema.Draft202012Validator(schema() if node is None else node)
    return sorted((error.json_path.removeprefix("$."), error.message) for error in validator.iter_errors(document))


@dataclass(frozen=True)
class Broken:
    """A rule that does not hold."""

    path: str
    message: str


def broken_rules(document: Any, old: Any = None, node: Schema | None = None) -> list[Broken]:
    """The CEL rules that do not hold for ``document``, which replaces ``old`` if there is one."""
    node = schema() if node is None else node
    before = None if old is None else defaulted(old, node)["spec"]
    return list(_broken(defaulted(document, node)["spec"], before, node["properties"]["spec"], "spec"))


def _broken(value: Any, old: Any, node: Schema, path: str) -> Iterator[Broken]:
    for rule in node.get("x-kubernetes-validations", ()):
        if "oldSelf" in rule["rule"] and old is None:
            continue  # a transition rule, and nothing to compare with
        if not _holds(rule["rule"], value, old):
            yield Broken(path, rule["message"])
    if isinstance(value, Mapping):
        for key, field in node.get("properties", {}).items():
            if key in value:
                before = old.get(key) if isinstance(old, Mapping) else None
                yield from _broken(value[key], before, field, f"{path}.{key}")
    elif isinstance(value, list) and "items" in node:
        for index, entry in enumerate(value):
            yield from _broken(entry, None, node["items"], f"{path}[{index}]")


def _holds(rule: str, value: Any, old: Any) -> bool:
    activation = {"self": celpy.json_to_cel(value)}
    if "oldSelf" in rule:
        activation["oldSelf"] = celpy.json_to_cel(old)
    outcome = _program(rule).evaluate(activation)
    assert isinstance(outcome, celpy.celtypes.BoolType), f"{rule} gives {outcome!r}, not a bool"
    return bool(outcome)


@cache
def _program(rule: str) -> celpy.Runner:
    environment = celpy.Environment()
    return environment.program(environment.compile(rule), functions={"sum": _sum})


def _sum(numbers: celpy.celtypes.ListType) -> celpy.celtypes.IntType:
    """Kubernetes adds this function to the lists of CEL."""
    return celpy.celtypes.IntType(sum(int(number) for number in numbers))  # type: ignore[call-overload]
