"""What a run on this machine takes from a VirtualFlowJob manifest, and what it says about the rest."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest

from virtualflow.errors import ConfigurationError
from virtualflow.local.manifest import JobManifest, expand, load_manifest, local_command, read_manifest

MANIFEST = """\
apiVersion: virtualflow.dev/v1alpha1
kind: VirtualFlowJob
metadata:
  name: digits
spec:
  virtualNodes: 8
  replicas: 3
  workerGroups:
    - name: workers
      template:
        spec:
          containers:
            - name: trainer
              image: virtualflow:dev
              command: [python]
              args: [examples/digits.py, --steps, $(STEPS)]
              env:
                - name: STEPS
                  value: "120"
              resources:
                limits: {cpu: "1"}
"""


def test_a_manifest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(MANIFEST)
    assert load_manifest(path) == JobManifest(
        name="digits",
        virtual_nodes=8,
        replicas=3,
        command=("python", "examples/digits.py", "--steps", "120"),
        environment={"STEPS": "120"},
    )


def _document() -> dict[str, Any]:
    import yaml

    document: dict[str, Any] = yaml.safe_load(MANIFEST)
    return copy.deepcopy(document)


def _container(document: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = document["spec"]["workerGroups"][0]["template"]["spec"]["containers"][0]
    return container


def test_numbers_that_are_not_given_are_left_to_the_defaults() -> None:
    document = _document()
    del document["spec"]["virtualNodes"], document["spec"]["replicas"], document["metadata"]
    manifest = read_manifest(document)
    assert (manifest.name, manifest.virtual_nodes, manifest.replicas) == (None, None, None)


def _without(key: str) -> Any:
    return lambda document: document.pop(key)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        pytest.param(lambda d: d.update(kind="Deployment"), "VirtualFlowJob", id="another kind"),
        pytest.param(lambda d: d.update(apiVersion="v1"), "virtualflow.dev", id="another group"),
        pytest.param(_without("spec"), "spec is missing", id="no spec"),
        pytest.param(lambda d: d["spec"].update(virtualNodes=0), "at least 1", id="no virtual nodes"),
        pytest.param(lambda d: d["spec"].update(replicas="3"), "whole number", id="replicas are a string"),
        pytest.param(lambda d: d["spec"].update(replicas=True), "whole number", id="replicas are a truth value"),
        pytest.param(lambda d: d["spec"].update(workerGroups=[]), "exactly one", id="no group"),
        pytest.param(lambda d: d["spec"]["workerGroups"].append({}), "exactly one", id="two groups"),
        pytest.param(lambda d: d["spec"].update(workerGroups=[3]), "must be a mapping", id="a group is a number"),
        pytest.param(lambda d: _container(d).pop("command"), "command is missing", id="no command"),
        pytest.param(lambda d: _container(d).update(args="a b"), "list of strings", id="args are a string"),
        pytest.param(lambda d: _container(d).update(args=["--steps", 5]), "in quotes", id="an argument is a number"),
        pytest.param(lambda d: _container(d).update(envFrom=[{}]), "envFrom needs a cluster", id="envFrom"),
        pytest.param(
            lambda d: _container(d).update(env=[{"name": "A", "valueFrom": {}}]),
            "takes A from the cluster",
            id="valueFrom",
        ),
        pytest.param(
            lambda d: _container(d).update(env=[{"name": "A", "value": 5}]), "in quotes", id="a value is a number"
        ),
        pytest.param(lambda d: _container(d).update(env={"A": "5"}), "must be a list", id="env is a mapping"),
    ],
)
def test_what_cannot_be_run_is_named_in_one_sentence(spoil: Any, said: str) -> None:
    document = _document()
    spoil(document)
    with pytest.raises(ConfigurationError, match=said) as caught:
        read_manifest(document)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(None, "No such file", id="no file"),
        pytest.param("a: [", "not YAML", id="not YAML"),
        pytest.param("", "exactly one document", id="empty"),
        pytest.param(MANIFEST + "---\n" + MANIFEST, "exactly one document", id="two documents"),
        pytest.param("- 1\n", "must be a mapping", id="a list"),
    ],
)
def test_a_file_that_is_no_manifest_is_named(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "job.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigurationError, match=said) as caught:
        load_manifest(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("word", "expanded"),
    [("$(A)", "1"), ("x$(A)y$(B)", "x1y$(B)"), ("$$(A)", "$(A)"), ("$A", "$A"), ("$()", "$()")],
)
def test_variables_are_expanded_as_in_kubernetes(word: str, expanded: str) -> None:
    assert expand(word, {"A": "1"}) == expanded


@pytest.mark.parametrize(
    ("command", "local"),
    [
        (("python", "a.py"), (sys.executable, "a.py")),
        (("python3", "a.py"), (sys.executable, "a.py")),
        (("/usr/bin/python3.12", "a.py"), (sys.executable, "a.py")),
        (("pythonic",), ("pythonic",)),
        (("sh", "-c", "python a.py"), ("sh", "-c", "python a.py")),
    ],
)
def test_python_is_this_interpreter(command: tuple[str, ...], local: tuple[str, ...]) -> None:
    assert local_command(command) == local
