"""Kueue's objects as the operator reads them: a ``Workload``, and what the flavors that it is given demand of pods.

Kueue's schema has been checked by the API server; of all that a Workload says, a decision needs what stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from virtualflow_operator.api.job import Object
from virtualflow_operator.api.objects import Job, parse_time
from virtualflow_operator.api.validation import mapping, mappings
from virtualflow_operator.constants import (
    ANNOTATION_KUEUE_ELASTIC,
    ANNOTATION_KUEUE_REPLACES,
    ANNOTATION_KUEUE_SLICE,
    ANNOTATION_POD_SETS,
    KIND,
    LABEL_KUEUE_PRIORITY,
    LABEL_KUEUE_QUEUE,
)


@dataclass(frozen=True)
class PodAdditions:
    """What pods must have beside what their template says."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Object, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PodSet:
    """Pods of one kind that a Workload asks for."""

    count: int
    least: int | None = None
    """Fewer may be admitted, down to so many; ``None``: all or none."""


@dataclass(frozen=True)
class Assignment:
    count: int
    flavors: tuple[str, ...] = ()
    topology: bool = False
    """Whether Kueue has chosen the nodes of each pod, too."""


@dataclass(frozen=True)
class WorkloadCondition:
    status: str
    reason: str = ""
    message: str = ""

    @property
    def true(self) -> bool:
        return self.status == "True"


_ABSENT = WorkloadCondition("Unknown")


@dataclass(frozen=True)
class Workload:
    namespace: str
    name: str
    uid: str
    owner: str
    """Uid of the job that controls it."""
    created: float
    queue: str
    pod_sets: Mapping[str, PodSet]
    """In their order, by name."""
    shape: str
    """The hash of what its pods ask for."""
    elastic: bool
    replaces: str
    """Namespace and name of the Workload whose place it takes; empty: none's."""
    first: str
    """The name of the first of those that replaced one another."""
    active: bool
    deleting: bool
    priority: int | None
    priority_class: str
    conditions: Mapping[str, WorkloadCondition]
    assignments: Mapping[str, Assignment]
    """What was admitted, by pod set; empty while nothing is."""
    updates: tuple[tuple[str, str, PodAdditions], ...]
    """What admission checks demand: the check, the pod set, and what its pods must have."""
    checks: tuple[str, ...]
    """Admission checks that are not ready, with what they say."""
    reclaimable: Mapping[str, int]
    raw: Object = field(repr=False, compare=False)
    """The whole object."""

    @property
    def key(self) -> str:
        """As an annotation names it."""
        return f"{self.namespace}/{self.name}"

    def condition(self, kind: str) -> WorkloadCondition:
        """The condition of that type; one that is not there is Unknown."""
        return self.conditions.get(kind, _ABSENT)

    @property
    def finished(self) -> bool:
        """Whether it is over for good, and holds nothing."""
        return self.condition("Finished").true

    @property
    def reserved(self) -> bool:
        """Whether quota is kept for it."""
        return self.condition("QuotaReserved").true

    @property
    def admitted(self) -> bool:
        """Whether its pods may run."""
        return self.reserved and self.condition("Admitted").true and bool(self.assignments)

    @property
    def evicted(self) -> bool:
        """Whether Kueue wants it to leave, or somebody has switched it off."""
        return self.condition("Evicted").true or not self.active


def kueue_queue(job: Job) -> str:
    """The LocalQueue that a job names; empty: none."""
    return str(mapping(job.raw["metadata"].get("labels")).get(LABEL_KUEUE_QUEUE) or "")


def kueue_priority(job: Job) -> str:
    """The WorkloadPriorityClass that a job names; empty: none."""
    return str(mapping(job.raw["metadata"].get("labels")).get(LABEL_KUEUE_PRIORITY) or "")


def is_elastic(body: Mapping[str, Any]) -> bool:
    """Whether a job or a Workload is to grow by Workloads that replace one another."""
    return mapping(mapping(body.get("metadata")).get("annotations")).get(ANNOTATION_KUEUE_ELASTIC) == "true"


def kueue_wishes(body: Mapping[str, Any]) -> tuple[Any, ...]:
    """What of a job's metadata Kueue goes by."""
    labels = mapping(mapping(body.get("metadata")).get("labels"))
    return labels.get(LABEL_KUEUE_QUEUE), labels.get(LABEL_KUEUE_PRIORITY), is_elastic(body)


def read_workload(body: Object) -> Workload:
    metadata, spec, status = body["metadata"], mapping(body.get("spec")), mapping(body.get("status"))
    annotations = mapping(metadata.get("annotations"))
    owners = mappings(metadata.get("ownerReferences"))
    pod_sets = {
        str(entry.get("name") or "main"): PodSet(int(entry.get("count", 1)), entry.get("minCount"))
        for entry in mappings(spec.get("podSets"))
    }
    checks = mappings(status.get("admissionChecks"))
    return Workload(
        namespace=metadata.get("namespace") or "",
        name=metadata["name"],
        uid=metadata.get("uid") or "",
        owner=next((str(o.get("uid")) for o in owners if o.get("controller") and o.get("kind") == KIND), ""),
        created=parse_time(metadata.get("creationTimestamp")) or 0.0,
        queue=str(spec.get("queueName") or ""),
        pod_sets=pod_sets,
        shape=str(annotations.get(ANNOTATION_POD_SETS) or ""),
        elastic=is_elastic(body),
        replaces=str(annotations.get(ANNOTATION_KUEUE_REPLACES) or ""),
        first=str(annotations.get(ANNOTATION_KUEUE_SLICE) or ""),
        active=spec.get("active") is not False,
        deleting=bool(metadata.get("deletionTimestamp")),
        priority=spec.get("priority"),
        priority_class=str(mapping(spec.get("priorityClassRef")).get("name") or ""),
        conditions={
            str(entry.get("type")): WorkloadCondition(
                str(entry.get("status")), str(entry.get("reason") or ""), str(entry.get("message") or "")
            )
            for entry in mappings(status.get("conditions"))
        },
        assignments=_assignments(mapping(status.get("admission")), pod_sets),
        updates=tuple(
            (str(check.get("name")), str(update.get("name")), _read_placement(update))
            for check in checks
            for update in mappings(check.get("podSetUpdates"))
        ),
        checks=tuple(
            f"{check.get('name')} ({check.get('message')})" if check.get("message") else str(check.get("name"))
            for check in checks
            if check.get("state") != "Ready"
        ),
        reclaimable={
            str(entry.get("name")): int(entry.get("count") or 0) for entry in mappings(status.get("reclaimablePods"))
        },
        raw=body,
    )


def _assignments(admission: Mapping[str, Any], pod_sets: Mapping[str, PodSet]) -> dict[str, Assignment]:
    found = {}
    for entry in mappings(admission.get("podSetAssignments")):
        name = str(entry.get("name") or "main")
        asked = pod_sets.get(name)
        count = entry.get("count", asked.count if asked is not None else 0)
        flavors = tuple(dict.fromkeys(str(flavor) for flavor in mapping(entry.get("flavors")).values()))
        topology = bool(entry.get("topologyAssignment") or entry.get("delayedTopologyRequest"))
        found[name] = Assignment(int(count), flavors, topology)
    return found


def read_flavor(body: Object) -> PodAdditions:
    """What a ResourceFlavor demands of the pods that are given it."""
    spec = mapping(body.get("spec"))
    return PodAdditions(dict(mapping(spec.get("nodeLabels"))), tuple(map(dict, mappings(spec.get("tolerations")))))


def _read_placement(update: Mapping[str, Any]) -> PodAdditions:
    return PodAdditions(
        dict(mapping(update.get("nodeSelector"))),
        tuple(map(dict, mappings(update.get("tolerations")))),
        dict(mapping(update.get("labels"))),
        dict(mapping(update.get("annotations"))),
    )
