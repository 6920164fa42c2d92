"""Workloads for tests, as the operator makes them and Kueue answers them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from resource_rules import read_yaml
from scenes import NOW, SETTINGS, Spec, Stage, body

from virtualflow_operator.api import PodAdditions, format_time, read_job, read_workload
from virtualflow_operator.constants import ANNOTATION_KUEUE_ELASTIC, LABEL_KUEUE_QUEUE
from virtualflow_operator.jobs.actions import JobPlan
from virtualflow_operator.jobs.reconcile import reconcile
from virtualflow_operator.jobs.scene import Scene, TemplateVerdict
from virtualflow_operator.k8s.client import FLAVORS
from virtualflow_operator.kueue import CreateWorkload, DeleteWorkload, Kueue, KueueAdmission, PatchWorkload

DEFINITIONS: list[Spec] = [
    read_yaml(Path(__file__).parent / "kueue_crds" / f"{plural}.yaml")
    for plural in ("workloads", "resourceflavors", "workloadpriorityclasses")
]
"""Kueue's kinds, as far as the operator knows them."""
FLAVOR = PodAdditions({"pool": "reserved"}, ({"key": "reserved", "operator": "Exists"},))
FLAVOR_OBJECT: Spec = {
    "apiVersion": FLAVORS.api_version,
    "kind": "ResourceFlavor",
    "metadata": {"name": "gpus"},
    "spec": {
        "nodeLabels": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "reserved", "operator": "Exists", "effect": "NoSchedule"}],
    },
}


def named(raw: Spec, queue: str = "team", *, elastic: bool = False, **labels: str) -> Spec:
    """The same job with the label of a queue of Kueue's."""
    metadata = raw["metadata"] | {"labels": {LABEL_KUEUE_QUEUE: queue, **labels}}
    if elastic:
        metadata["annotations"] = {ANNOTATION_KUEUE_ELASTIC: "true"}
    return raw | {"metadata": metadata}


def kueue_job(status: Spec | None = None, *, elastic: bool = False, **spec: Any) -> Spec:
    """A job that is to be admitted by Kueue."""
    return named(body(status, **spec), elastic=elastic)


def view(*workloads: Spec, **facts: Any) -> Kueue:
    """What is known of Kueue; its flavor ``gpus`` is there."""
    return Kueue(tuple(map(read_workload, workloads)), **({"flavors": {"gpus": FLAVOR}} | facts))


def decide(
    raw: Spec,
    *workloads: Spec,
    now: float = NOW,
    stage: Stage | None = None,
    verdict: TemplateVerdict | None = None,
    **facts: Any,
) -> JobPlan:
    """What is decided about a job with these Workloads, beside the pods of a stage."""
    pods = tuple(stage.pods) if stage is not None else ()
    scene = Scene(
        job=read_job(raw),
        pods=pods,
        service=stage.service if stage is not None else None,
        nodes=stage.nodes if stage is not None else None,
        link=stage.link if stage is not None else None,
        verdict=verdict,
        admission=KueueAdmission(view(*workloads, **facts), SETTINGS),
    )
    plan = reconcile(scene, now, SETTINGS)
    assert plan == reconcile(scene, now, SETTINGS), "the same makes the same plan"
    return plan


def created(plan: JobPlan) -> Spec:
    """The one Workload that is made."""
    (action,) = [action for action in plan.actions if isinstance(action, CreateWorkload)]
    return action.manifest


def patched(plan: JobPlan) -> list[PatchWorkload]:
    return [action for action in plan.actions if isinstance(action, PatchWorkload)]


def deleted(plan: JobPlan) -> list[str]:
    return [action.name for action in plan.actions if isinstance(action, DeleteWorkload)]


def stored(manifest: Spec, number: int = 1) -> Spec:
    """A Workload as the API server keeps it."""
    made = copy.deepcopy(manifest)
    made["metadata"] |= {"uid": f"workload-{number}", "resourceVersion": str(number), "generation": 1}
    made["metadata"]["creationTimestamp"] = format_time(NOW - 60 + number)
    return made | {"status": {}}


def asked(raw: Spec, **facts: Any) -> Spec:
    """The Workload that a job without pods asks with."""
    return stored(created(decide(raw, **facts)))


def told(workload: Spec, *conditions: tuple[str, str, str], message: str = "so it is") -> Spec:
    """The same Workload with these conditions: type, status and reason."""
    known = {c["type"]: c for c in workload["status"].get("conditions") or []}
    for kind, truth, reason in conditions:
        known[kind] = {"type": kind, "status": truth, "reason": reason, "message": message}
        known[kind]["lastTransitionTime"] = format_time(NOW - 30)
    return workload | {"status": workload["status"] | {"conditions": list(known.values())}}


def reserved(workload: Spec, flavor: str = "gpus", **counts: int) -> Spec:
    """The same Workload once it has quota, for so many of these pod sets and all of the others."""
    assignments = [
        {"name": entry["name"], "count": counts.get(entry["name"], entry["count"]), "flavors": {"cpu": flavor}}
        for entry in workload["spec"]["podSets"]
    ]
    admission = {"clusterQueue": "all-gpus", "podSetAssignments": assignments}
    with_quota = told(workload, ("QuotaReserved", "True", "QuotaReserved"), message="Quota reserved")
    return with_quota | {"status": with_quota["status"] | {"admission": admission}}


def admitted(workload: Spec, flavor: str = "gpus", **counts: int) -> Spec:
    """The same Workload once Kueue has admitted it."""
    return told(
        reserved(workload, flavor, **counts), ("Admitted", "True", "Admitted"), message="The workload is admitted"
    )


def asks_for(workload: Spec) -> dict[str, int]:
    return {entry["name"]: entry["count"] for entry in workload["spec"]["podSets"]}
