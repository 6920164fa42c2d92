"""The chart as Helm renders it: shared by its tests, which are skipped where there is no Helm."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "virtualflow"
DEFINITION = ROOT / "crds" / "virtualflowjobs.yaml"
QUEUE_DEFINITION = ROOT / "crds" / "virtualflowqueues.yaml"
RELEASE, NAMESPACE = "virtualflow", "virtualflow-system"
HELM = os.environ.get("HELM") or shutil.which("helm")
TIME_LIMIT = 60
"""Seconds for one call of helm."""

with_helm = pytest.mark.skipif(
    HELM is None, reason="needs helm: put Helm 3.8 or newer on the PATH, or name it with HELM=/path/to/helm"
)

Object = dict[str, Any]

DEFAULTS: Object = {}
NAMESPACED: Object = {"namespaces": ["team-a", "team-b"], "crds": {"install": False}, "rbac": {"userRoles": False}}
EVERYTHING: Object = {
    "image": {"repository": "registry.example.com/ml/operator", "digest": "sha256:" + "0" * 64, "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "first"}, {"name": "second"}],
    "replicas": 3,
    "jobs": {"extraTaints": ["example.com/leaving", "reclaimed"], "metrics": False},
    "kueue": {"enabled": True},
    "turns": {"enabled": True, "directory": "/var/run/turns", "nodeSelector": {"gpu": "true"}},
    "operator": {
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "extraArgs": ["--log-level=debug"],
    },
    "key": {"existingSecret": "my-key"},
    "serviceAccount": {"name": "trainer", "annotations": {"example.com/role": "operator"}},
    "podAnnotations": {"example.com/team": "ml"},
    "podLabels": {"example.com/team": "ml"},
    "priorityClassName": "system-cluster-critical",
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "ScheduleAnyway"}],
    "service": {"annotations": {"prometheus.io/scrape": "true"}},
    "metrics": {
        "serviceMonitor": {"enabled": True, "interval": "15s", "labels": {"release": "prometheus"}},
        "rules": {"enabled": True, "labels": {"release": "prometheus"}, "alertLabels": {"team": "ml"}},
        "dashboard": {"enabled": True, "annotations": {"grafana_folder": "Training"}},
    },
    "networkPolicy": {
        "enabled": True,
        "metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
        "egress": {"apiServer": [{"ipBlock": {"cidr": "10.0.0.1/32"}}], "apiServerPorts": [8443], "extra": [{}]},
    },
}
NOTHING: Object = {
    "replicas": 1,
    "crds": {"install": False},
    "serviceAccount": {"create": False},
    "rbac": {"create": False, "userRoles": False},
    "jobs": {"networkPolicies": False},
    "metrics": {"podMonitor": {"enabled": True}},
    "networkPolicy": {"enabled": True, "egress": {"enabled": False}},
}
SETS = {"defaults": DEFAULTS, "namespaced": NAMESPACED, "everything": EVERYTHING, "nothing": NOTHING}
each_set = pytest.mark.parametrize("values", SETS.values(), ids=SETS.keys())


class StrictLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Refuses a key that stands twice, as the API server does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key stands twice at {node.start_mark}"
        return super().construct_mapping(node, deep)


def helm(*arguments: str, values: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """Run helm with values on its standard input."""
    assert HELM is not None
    command = [HELM, *arguments, *(["--values", "-"] if values is not None else [])]
    return subprocess.run(
        command,
        input=json.dumps(values or {}),
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
    )


@functools.cache
def _rendered(values: str, release: str) -> str:
    answer = helm("template", release, str(CHART), "--namespace", NAMESPACE, values=json.loads(values))
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def render(values: Mapping[str, Any], release: str = RELEASE) -> list[Object]:
    """Return the objects that the chart makes of these values."""
    return parse(_rendered(json.dumps(values), release))


def parse(text: str) -> list[Object]:
    """Return the objects of YAML documents."""
    return [found for found in yaml.load_all(text, StrictLoader) if found]


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [found for found in objects if found["kind"] == kind]


def only(objects: list[Object], kind: str) -> Object:
    (found,) = of_kind(objects, kind)
    return found


def pod_templates(objects: list[Object]) -> Iterator[Object]:
    """Everything that becomes a pod, as templates."""
    yield from (found["spec"]["template"] for found in of_kind(objects, "Deployment"))
    yield from ({"metadata": found["metadata"], "spec": found["spec"]} for found in of_kind(objects, "Pod"))


def environment(objects: list[Object]) -> dict[str, str]:
    """The operator's variables, with what the kubelet fills in."""
    (container,) = only(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    fields = {"metadata.name": "virtualflow-operator-0", "metadata.namespace": NAMESPACE}
    variables = {}
    for variable in container["env"]:
        assert variable["name"] not in variables, f"{variable['name']} stands twice"
        if "valueFrom" in variable:
            variables[variable["name"]] = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            assert isinstance(variable["value"], str), variable
            variables[variable["name"]] = variable["value"]
    return variables


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return bool(selector) and selector.items() <= labels.items()


def schema() -> Object:
    return dict(json.loads((CHART / "values.schema.json").read_text()))
