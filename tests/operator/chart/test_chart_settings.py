"""What the chart's values do: the operator reads them, the schema bounds them, the README lists them."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import pytest
import yaml
from rendering import (
    CHART,
    DEFAULTS,
    EVERYTHING,
    NAMESPACE,
    RELEASE,
    Object,
    each_set,
    environment,
    helm,
    render,
    schema,
    with_helm,
)

from virtualflow_operator.controllers.flags import OPTIONS, read_settings
from virtualflow_operator.settings import OperatorSettings


@with_helm
@each_set
def test_the_operator_reads_every_setting_from_its_environment(values: Object) -> None:
    variables = environment(render(values))
    assert {option.variable for option in OPTIONS} == {name for name in variables if name.startswith("VIRTUALFLOW_")}
    assert read_settings([], variables).lease.namespace == NAMESPACE


@with_helm
def test_what_is_said_in_the_values_is_what_the_operator_does() -> None:
    settings = read_settings([], environment(render({**EVERYTHING, "namespaces": ["team-a", "team-b"]})))
    assert settings.image == "registry.example.com/ml/operator@sha256:" + "0" * 64
    assert settings.image_pull_policy == "Always"
    assert settings.image_pull_secrets == ("first", "second")
    assert settings.namespaces == ("team-a", "team-b")
    assert settings.extra_taints == ("example.com/leaving", "reclaimed")
    assert (settings.job_metrics, settings.network_policies) == (False, True)
    assert (settings.lease.name, settings.lease.identity) == ("virtualflow-operator", "virtualflow-operator-0")


@with_helm
def test_the_values_have_the_defaults_of_the_operator() -> None:
    read, own = read_settings([], environment(render(DEFAULTS))), OperatorSettings()
    for name in (
        "queue",
        "crashes",
        "relist",
        "progress_interval",
        "unschedulable_patience",
        "job_metrics",
        "metrics_authentication",
        "extra_taints",
        "turns_directory",
    ):
        assert getattr(read, name) == getattr(own, name), name
    assert read.lease.duration == own.lease.duration
    assert (read.health_port, read.metrics_port, read.key_file) == (own.health_port, own.metrics_port, own.key_file)


@with_helm
@pytest.mark.parametrize("bound", ["minimum", "maximum"])
def test_the_operator_takes_whatever_the_schema_lets_through(bound: str) -> None:
    numbers = {
        name: rule[bound]
        for name, rule in schema()["properties"]["operator"]["properties"].items()
        if rule["type"] in {"integer", "number"}
    }
    settings = read_settings([], environment(render({"operator": numbers})))
    assert settings.queue.concurrency == numbers["concurrency"]
    assert settings.relist == numbers["resyncSeconds"]
    assert settings.unschedulable_patience == numbers["unschedulableSeconds"]
    assert settings.crashes.backoff_first == numbers["backoffSeconds"]


def leaves(rules: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every value that a schema knows."""
    for name, rule in rules["properties"].items():
        if "properties" in rule:
            yield from leaves(rule, (*path, name))
        else:
            yield (*path, name)


def documented() -> dict[tuple[str, ...], tuple[Any, str]]:
    """Every value of values.yaml that has a comment, with its default and the comment."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    found: dict[tuple[str, ...], tuple[Any, str]] = {}
    path: list[str] = []
    comment = ""
    for line in (CHART / "values.yaml").read_text().splitlines():
        text = line.strip()
        if text.startswith("# "):
            comment = text.removeprefix("# ")
        elif match := re.match(r"( *)([A-Za-z]+):", line):
            path = [*path[: len(match[1]) // 2], match[2]]
            if comment:
                default = functools.reduce(lambda value, name: value[name], path, values)
                found[tuple(path)] = (default, comment)
            comment = ""
        else:
            comment = ""
    return found


def test_the_schema_knows_every_value_and_each_is_commented() -> None:
    assert set(leaves(schema())) - {("global",)} == documented().keys()


def test_the_schema_is_strict_wherever_it_names_values() -> None:
    def check(rules: Mapping[str, Any]) -> None:
        assert rules["additionalProperties"] is False
        for rule in rules["properties"].values():
            if rule.get("type") == "object" and "properties" in rule:
                check(rule)

    jsonschema.Draft7Validator.check_schema(schema())
    check(schema())


def test_the_readme_lists_every_value_with_its_default() -> None:
    lines = ["| value | default | what it is |", "| --- | --- | --- |"]
    for path, (default, comment) in documented().items():
        lines.append(f"| `{'.'.join(path)}` | `{json.dumps(default)}` | {comment.replace('|', ',')} |")
    shown = (CHART / "README.md").read_text().split("<!-- values -->")[1].split("<!-- /values -->")[0]
    assert shown.strip().splitlines() == lines, "put this into the README:\n" + "\n".join(lines)


WRONG: dict[str, Object] = {
    "a misspelt value": {"replcas": 2},
    "a misspelt value inside": {"jobs": {"networkpolicies": True}},
    "a misspelt value deep inside": {"metrics": {"rules": {"enable": True}}},
    "a word for a number": {"replicas": "two"},
    "a negative number": {"replicas": -1},
    "a fraction for a whole number": {"operator": {"concurrency": 1.5}},
    "a number that is too large": {"operator": {"leaseSeconds": 86400}},
    "a word for a truth": {"crds": {"install": "yes"}},
    "one for a list": {"namespaces": "team-a"},
    "a name that is none": {"namespaces": ["Team A"]},
    "a namespace twice": {"namespaces": ["team-a", "team-a"]},
    "no namespace": {"namespaces": []},
    "a namespace of Kubernetes": {"namespaces": ["team-a", "kube-system"]},
    "an unknown choice": {"operator": {"logFormat": "strict"}},
    "an unknown pull policy": {"image": {"pullPolicy": "always"}},
    "a tag inside the repository": {"image": {"repository": "operator@sha256:0"}},
    "a pull secret that is a word": {"imagePullSecrets": ["first"]},
    "a port that is none": {"networkPolicy": {"egress": {"apiServerPorts": [70000]}}},
    "a label that is a number": {"podLabels": {"team": 1}},
    "an interval without a unit": {"metrics": {"serviceMonitor": {"interval": "30"}}},
}


@pytest.mark.parametrize("values", WRONG.values(), ids=WRONG.keys())
def test_the_schema_refuses(values: Object) -> None:
    assert list(jsonschema.Draft7Validator(schema()).iter_errors(values))


@each_set
def test_the_schema_takes(values: Object) -> None:
    jsonschema.Draft7Validator(schema()).validate(values)


@with_helm
def test_helm_says_which_value_is_wrong() -> None:
    answer = helm("template", RELEASE, str(CHART), values={"jobs": {"networkpolicies": True}})
    assert answer.returncode != 0
    assert "networkpolicies" in answer.stderr


@with_helm
def test_the_chart_can_be_a_part_of_another_one() -> None:
    alone, part = ({**values, "key": {"existingSecret": "my-key"}} for values in ({}, {"global": {"registry": "x"}}))
    assert render(alone) == render(part)
