"""What ``examples/tools`` tells Argo CD, Argo Workflows and k9s is true of the resources and of ``kubectl vf``."""

from __future__ import annotations

import re
import shlex
from typing import Any

import lupa
import pytest
import yaml
from resource_rules import ROOT, broken_rules, crd, defaulted, structural_errors

from virtualflow.cluster.plugin import parser

TOOLS = ROOT / "examples" / "tools"
CHECKS = yaml.safe_load((TOOLS / "argo-cd.yaml").read_text())["data"]
STATUS = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
PHASES = STATUS["phase"]["enum"]


def health(kind: str, status: dict[str, Any] | None, generation: int = 2) -> tuple[str, str]:
    lua = lupa.LuaRuntime()
    made: dict[str, Any] = {"metadata": {"generation": generation}} | ({} if status is None else {"status": status})
    lua.globals().obj = lua.table_from(made, recursive=True)
    found = lua.execute(CHECKS[f"resource.customizations.health.virtualflow.dev_{kind}"])
    return found["status"], found["message"]


def condition(kind: str, status: str, reason: str = "Any", message: str = "so it is.") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


@pytest.mark.parametrize("phase", PHASES)
def test_argo_cd_knows_every_phase_of_a_job(phase: str) -> None:
    conditions = [condition("Progressing", "True"), condition(phase, "True", message="that is why.")]
    expected = {"Complete": "Healthy", "Failed": "Degraded", "Suspended": "Suspended"}.get(phase, "Progressing")
    said = "so it is." if expected == "Progressing" else "that is why."
    if phase in ("Pending", "Running", "Suspending", "BackOff"):  # no condition is called so
        conditions.pop()
    status = {"phase": phase, "observedGeneration": 2, "conditions": conditions}
    assert health("VirtualFlowJob", status) == (expected, said)


@pytest.mark.parametrize("status", [None, {}, {"phase": "Complete", "observedGeneration": 1}])
def test_what_no_operator_has_seen_is_progressing(status: dict[str, Any] | None) -> None:
    assert health("VirtualFlowJob", status)[0] == health("VirtualFlowQueue", status)[0] == "Progressing"


@pytest.mark.parametrize("reason", ["InvalidSpec", "TemplateRejected", "CreationRefused"])
def test_a_job_that_is_refused_is_degraded(reason: str) -> None:
    refused = [condition("Progressing", "False", reason, "replicas must be at least 1.")]
    status = {"phase": "Pending", "observedGeneration": 2, "conditions": refused}
    assert health("VirtualFlowJob", status) == ("Degraded", "replicas must be at least 1.")


@pytest.mark.parametrize(
    ("ready", "expected"), [("True", "Healthy"), ("False", "Degraded"), ("Unknown", "Progressing")]
)
def test_argo_cd_knows_whether_a_queue_is_ready(ready: str, expected: str) -> None:
    status = {"observedGeneration": 2, "conditions": [condition("Ready", ready)]}
    assert health("VirtualFlowQueue", status)[0] == expected


def test_the_job_of_the_workflow_is_a_valid_one() -> None:
    (step,) = yaml.safe_load((TOOLS / "argo-workflows.yaml").read_text())["spec"]["templates"]
    resource = step["resource"]
    job = yaml.safe_load(re.sub(r"{{workflow\.parameters\.\w+}}", "2", resource["manifest"]))
    whole = defaulted(job)
    assert (structural_errors(whole), broken_rules(whole)) == ([], [])
    for phrase in (resource["successCondition"], resource["failureCondition"]):
        field, _, phase = phrase.partition(" == ")
        assert field == "status.phase"
        assert phase in PHASES
    (output,) = step["outputs"]["parameters"]
    assert output["valueFrom"]["jsonPath"] == "{.status.digest}"
    assert "digest" in STATUS


def test_the_keys_of_k9s_say_what_the_plugin_understands() -> None:
    plugins = yaml.safe_load((TOOLS / "k9s-plugins.yaml").read_text())["plugins"]
    assert len({each["shortCut"] for each in plugins.values()}) == len(plugins)
    for plugin in plugins.values():
        line = re.sub(r'"\$\(.*\)"', "JOB", plugin["args"][1]).replace("$", "").partition("|")[0]
        kubectl, vf, *words = shlex.split(line)
        assert (kubectl, vf) == ("kubectl", "vf")
        given = parser().parse_args(words)
        assert (given.context, given.namespace) == ("CONTEXT", "NAMESPACE")
        assert (given.worker if "pods" in plugin["scopes"] else given.job) == "NAME"
