"""What ``examples/tools`` tells Argo CD, Argo Workflows and k9s is true of the resources and of ``kubectl vf``, and
kstatus, by which Helm and Flux wait, reads a job's state as it is.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable
from typing import Any

import lupa
import pytest
import yaml
from kueue_cases import asked, kueue_job
from kueue_cases import decide as decide_with_kueue
from resource_rules import QUEUE_CRD_FILE, ROOT, broken_rules, crd, defaulted, queue, schema, structural_errors
from resource_rules import job as new_job
from scenes import NOW, Stage, accepted, body, edit, ended, group, homeless, link, pending, remote, training, verdict_of

from kstatus import kstatus
from virtualflow.cluster.plugin import parser
from virtualflow.protocol.termination_message import TerminationMessage
from virtualflow_operator import reasons
from virtualflow_operator.api.job import write_status
from virtualflow_operator.api.objects import Node
from virtualflow_operator.api.queue import read_queue, write_queue_status
from virtualflow_operator.jobs.reconcile import reconcile
from virtualflow_operator.queues.admission import QueueAdmission
from virtualflow_operator.queues.allocation import QueueScene, allocate
from virtualflow_operator.queues.members import Grant
from virtualflow_operator.settings import SchedulingSettings

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


# --- kstatus ----------------------------------------------------------------------------------------------------------


def settled(stage: Stage, now: float = NOW) -> dict[str, Any]:
    """The job once that is written."""
    for _ in range(5):
        if not stage.write(stage.decide(now)):
            return stage.raw
    raise AssertionError("the status does not come to rest")


def beginning(**facts: Any) -> dict[str, Any]:
    stage = training(1)
    raw = accepted(body(replicas=1), phase="Pending")
    waiting = link(remote("waiting", wanted=1))
    return settled(Stage(raw, [stage.pods[0], pending(stage.pods[1], **facts)], stage.service, stage.nodes, waiting))


def without_a_node() -> dict[str, Any]:
    facts = homeless(training(1).pods[1])
    return beginning(unschedulable=facts.unschedulable, unschedulable_since=facts.unschedulable_since)


def refused(**facts: Any) -> dict[str, Any]:
    raw = body()
    return settled(Stage(raw, [], None, {}, None, **facts))


def with_wrong_template() -> dict[str, Any]:
    return refused(verdict=verdict_of(body(), "unknown field"))


def without_quota() -> dict[str, Any]:
    raw = accepted(body(), phase="Pending", coordinator=None)
    return settled(Stage(raw, [], None, {}, None, trouble="exceeded quota"))


def beside_orphans() -> dict[str, Any]:
    orphans = [dataclasses.replace(pod, owner="") for pod in training().pods]
    raw = accepted(body(), phase="Pending", coordinator=None)
    return settled(Stage(raw, orphans, None, {}, None))


def suspended() -> dict[str, Any]:
    stage = edit(training(), suspend=True)
    stage.pods, stage.link = [], None
    return settled(stage)


def of_a_queue(grant: Grant | None) -> dict[str, Any]:
    raw = body(queue="shared", maxReplicas=8)
    stage = Stage(raw, [], None, {}, None)
    scene = dataclasses.replace(stage.scene, admission=QueueAdmission(grant))
    return raw | {"status": write_status(reconcile(scene, NOW, stage.settings).status)}


def of_kueue() -> dict[str, Any]:
    raw = kueue_job()
    return raw | {"status": write_status(decide_with_kueue(raw, asked(raw)).status)}


def begun_again() -> dict[str, Any]:
    stage = training()
    stage.link = link(remote("failed", error="ValueError: odd batch"))
    return settled(stage)


def over(code: int = 0) -> dict[str, Any]:
    stage = training()
    word = TerminationMessage("done", step=100, digest="abc")
    stage.pods, stage.link = [ended(pod, 0, word=word) for pod in stage.pods[1:]], None
    return settled(stage)


def out_of_reach() -> dict[str, Any]:
    stage = training()
    stage.link = None
    return settled(stage)


NO_ROOM = Grant(
    "uid-1", "shared", 0, "the others have all", code=reasons.QUEUED, since=NOW - 9, resized=NOW - 5, waited=3.0
)
STATES: dict[str, tuple[Callable[[], dict[str, Any]], str, str]] = {
    "that no operator has seen": (lambda: defaulted(new_job()), "InProgress", "Progressing"),
    "that is taken up": (refused, "InProgress", "Progressing"),
    "whose workers start": (beginning, "InProgress", "Progressing"),
    "that no node takes": (without_a_node, "InProgress", "Progressing"),
    "that trains": (lambda: training().raw, "Current", "Progressing"),
    "that trains and grows": (lambda: settled(edit(training(), replicas=4)), "Current", "Progressing"),
    "that gets another image": (
        lambda: settled(edit(training(), workerGroups=[group(image="trainer:2")])),
        "InProgress",
        "Progressing",
    ),
    "whose coordinator is away": (out_of_reach, "InProgress", "Progressing"),
    "that begins again after a crash": (begun_again, "InProgress", "Progressing"),
    "that is about to be suspended": (lambda: settled(edit(training(), suspend=True)), "InProgress", "Progressing"),
    "that is suspended": (suspended, "Current", "Suspended"),
    "that its queue has not seen": (lambda: of_a_queue(None), "InProgress", "Progressing"),
    "that waits in its queue": (lambda: of_a_queue(NO_ROOM), "Current", "Progressing"),
    "that waits for Kueue": (of_kueue, "Current", "Progressing"),
    "with a specification of no sense": (lambda: settled(edit(training(), minReplicas=0)), "Failed", "Degraded"),
    "with a template that is refused": (with_wrong_template, "Failed", "Degraded"),
    "whose namespace has no quota": (without_quota, "Failed", "Degraded"),
    "whose name what an orphaned one left still bears": (beside_orphans, "Failed", "Degraded"),
    "that is complete": (over, "Current", "Healthy"),
    "that has failed": (lambda: settled(edit(training(), activeDeadlineSeconds=1)), "Failed", "Degraded"),
}


@pytest.mark.parametrize(("job", "expected", "argo"), STATES.values(), ids=STATES)
def test_a_job(job: Callable[[], dict[str, Any]], expected: str, argo: str) -> None:
    made = job()
    made["metadata"].setdefault("generation", 1)
    assert kstatus(made) == expected
    status = made["status"]
    assert health("VirtualFlowJob", status, made["metadata"]["generation"])[0] == argo
    for condition in status.get("conditions", ()):
        if condition["type"] in ("Reconciling", "Stalled"):
            assert (condition["status"], bool(condition["message"])) == ("True", True)
    assert structural_errors(defaulted(new_job() | {"status": status})) == []


QUEUES: dict[str, tuple[dict[str, Any], str, str]] = {
    "that shares": ({}, "Current", "Healthy"),
    "with a policy that is none": ({"policy": "Fairest"}, "Failed", "Degraded"),
    "that cannot be read": ({"limits": [1]}, "Failed", "Degraded"),
    "whose nodes may still come": ({"nodeSelector": {"matchLabels": {"pool": "x"}}}, "InProgress", "Progressing"),
    "that gives out nothing for now": ({"resource": "example.com/other"}, "InProgress", "Progressing"),
}


@pytest.mark.parametrize(("spec", "expected", "argo"), QUEUES.values(), ids=QUEUES)
def test_a_queue(spec: dict[str, Any], expected: str, argo: str) -> None:
    made = queue(**spec)
    made["metadata"]["generation"] = 1
    scene = QueueScene(queue=read_queue(made), members=(), nodes={"a": Node("a", allocatable={"cpu": "4"})})
    decided = allocate(scene, now=NOW, settings=SchedulingSettings()).status
    assert decided is not None
    made |= {"status": write_queue_status(decided)}
    assert (kstatus(made), health("VirtualFlowQueue", made["status"], 1)[0]) == (expected, argo)
    of_status = schema(QUEUE_CRD_FILE)["properties"]["status"]
    assert structural_errors(made["status"], of_status) == []
    made["metadata"]["generation"] += 1  # somebody has changed it, and the operator has not seen that yet
    assert kstatus(made) == "InProgress"
    assert health("VirtualFlowQueue", made["status"], made["metadata"]["generation"])[0] == "Progressing"


def test_a_queue_that_no_operator_has_seen_is_not_current() -> None:
    made = defaulted(queue(), schema(QUEUE_CRD_FILE))
    made["metadata"]["generation"] = 1
    assert kstatus(made) == "InProgress"


@pytest.mark.parametrize("reason", ["InvalidSpec", "TemplateRejected", "CreationRefused", "NameTaken"])
def test_a_job_that_is_refused_is_degraded(reason: str) -> None:
    refused = [condition("Progressing", "False", reason, "replicas must be at least 1.")]
    status = {"phase": "Pending", "observedGeneration": 2, "conditions": refused}
    assert health("VirtualFlowJob", status) == ("Degraded", "replicas must be at least 1.")


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
