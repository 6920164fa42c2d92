"""A job as Kueue's pod sets: one for each worker group and one for the coordinator, and how many pods each asks for.

Pure. A job asks for a number of workers; which groups they are of follows from the groups' order and limits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from virtualflow_operator.api import Job, Object, PodAdditions, PodSet, WorkerGroup
from virtualflow_operator.constants import COORDINATOR, KIND
from virtualflow_operator.jobs import manifests
from virtualflow_operator.jobs.manifests import hash_of
from virtualflow_operator.settings import OperatorSettings

_OF_A_POD = (
    "affinity", "containers", "initContainers", "nodeSelector", "overhead", "priorityClassName", "resourceClaims",
    "restartPolicy", "runtimeClassName", "schedulerName", "tolerations", "topologySpreadConstraints",
)  # fmt: skip
"""Fields of a pod that Kueue looks at. Commands, environments and volumes are not its business."""
_ASKED_FOR = (
    "affinity", "nodeSelector", "overhead", "priorityClassName", "resourceClaims", "runtimeClassName", "tolerations",
    "topologySpreadConstraints",
)  # fmt: skip
"""Fields of a pod template on which it depends whether and where its pods are admitted, beside its containers'
resources."""
_OF_A_CONTAINER = ("image", "name", "resources", "restartPolicy")
_LONGEST_NAME = 63
"""Characters of a Workload's name: it may be the value of a label."""


def spread(workers: int, groups: Sequence[WorkerGroup], least: Mapping[str, int] | None = None) -> dict[str, int]:
    """How many workers each group has, in the order of preference.

    Args:
        least: how many of each there are to be in any case.
    """
    counts = {group.name: (least or {}).get(group.name, 0) for group in groups}
    left = workers - sum(counts.values())
    for group in groups:
        room = left if group.max_replicas is None else group.max_replicas - counts[group.name]
        more = max(min(left, room), 0)
        counts[group.name] += more
        left -= more
    return counts


def ask_for(job: Job, counts: Mapping[str, int], *, elastic: bool) -> dict[str, PodSet]:
    """The pod sets that ask for so many workers of each group, and their coordinator.

    Kueue takes one set of which fewer may be admitted, and none in a job that grows by Workloads that replace one
    another. The largest group is that set.
    """
    sets = {COORDINATOR: PodSet(1), **{name: PodSet(count) for name, count in counts.items()}}
    if elastic:
        return sets
    largest = max(counts, key=lambda name: counts[name])
    others = sum(counts.values()) - counts[largest]
    least = max(job.spec.least - others, 1)
    if least < counts[largest]:
        sets[largest] = PodSet(counts[largest], least)
    return sets


def write_pod_sets(job: Job, sets: Mapping[str, PodSet], settings: OperatorSettings) -> list[Object]:
    templates = {COORDINATOR: manifests.coordinator_pod(job, 0, settings)}
    for group in job.spec.worker_groups:
        templates[group.name] = manifests.worker_pod(job, group, 0, "127.0.0.1", settings)
    written = []
    for name, asked in sets.items():
        least = {} if asked.least is None else {"minCount": asked.least}
        written.append({"name": name, "count": asked.count, **least, "template": _template(templates[name])})
    return written


def recount(pod_sets: Sequence[Mapping[str, Any]], counts: Mapping[str, int]) -> list[Object]:
    """The same pod sets with other counts: where quota is reserved, nothing else of them may change."""
    return [{**entry, "count": counts.get(entry["name"], entry["count"])} for entry in pod_sets]


def _template(pod: Object) -> Object:
    spec = {field: pod["spec"][field] for field in _OF_A_POD if field in pod["spec"]}
    for kind in ("containers", "initContainers"):
        if kind in spec:
            spec[kind] = [{key: c[key] for key in _OF_A_CONTAINER if key in c} for c in spec[kind]]
    return {"spec": spec}


def workload_name(job: Job, after: str) -> str:
    """The name of the job's Workload that takes the place of ``after``; empty: of its first one.

    The same for the same, so that making it twice is a conflict.
    """
    mark = hashlib.sha256(f"{job.uid}\n{after}".encode()).hexdigest()[:8]
    return f"{f'{KIND.lower()}-{job.name}'[: _LONGEST_NAME - 9]}-{mark}"


def add_to(pod: Object, more: PodAdditions) -> None:
    """Let a pod run where Kueue has given its job quota.

    Args:
        more: what the flavors and admission checks demand.
    """
    spec, metadata = pod["spec"], pod["metadata"]
    if more.node_selector:
        spec["nodeSelector"] = {**(spec.get("nodeSelector") or {}), **more.node_selector}
    own = spec.get("tolerations") or []
    lacking = [toleration for toleration in more.tolerations if toleration not in own]
    if lacking:
        spec["tolerations"] = [*own, *lacking]
    metadata["labels"] = {**more.labels, **metadata["labels"]}
    metadata["annotations"] = {**more.annotations, **metadata["annotations"]}


def pod_sets_hash(job: Job) -> str:
    """What of the job's pods Kueue is asked to admit: when it changes, they must be admitted anew.

    By the users' templates alone. What a newer operator asks for its coordinators is no reason to stop a training.
    """
    templates = {group.name: group.template for group in job.spec.worker_groups}
    return hash_of([_asked_for(job.spec.coordinator.template), {name: _asked_for(t) for name, t in templates.items()}])


def _asked_for(template: Object) -> Object:
    spec = template.get("spec")
    spec = spec if isinstance(spec, dict) else {}
    containers = [
        [container.get("resources"), container.get("restartPolicy")]
        for kind in ("initContainers", "containers")
        for container in spec.get(kind) or []
        if isinstance(container, dict)
    ]
    return {"containers": containers, **{field: spec[field] for field in _ASKED_FOR if spec.get(field) is not None}}
