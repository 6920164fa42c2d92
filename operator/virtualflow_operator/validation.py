"""The rules of the resource once more, and those that a schema cannot say: every problem is a sentence for the user.

API servers before 1.25 drop the CEL rules of the CustomResourceDefinition, and none looks into what it was told to
preserve. What is said here about a rule of the CRD is, word for word, what the CRD says. Nothing here raises, however
wrong the input is; the answer to it is always a list of sentences.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from virtualflow.settings import (
    ENV_ADDRESS,
    ENV_CHECKPOINT_DIR,
    ENV_COORDINATOR,
    ENV_PROFILE,
    ENV_REPRODUCIBILITY,
    ENV_TERMINATION_LOG,
    ENV_TOKEN,
    ENV_VIRTUAL_NODES,
    ENV_WORKER,
    MAX_VIRTUAL_NODES,
    MAX_WORKERS,
    VIRTUAL_NODES,
    WORKERS,
)
from virtualflow_operator.constants import CHECKPOINT_VOLUME, COORDINATOR, MAX_JOB_NAME

OPERATOR_VARIABLES: Final = (
    ENV_COORDINATOR,
    ENV_TOKEN,
    ENV_WORKER,
    ENV_ADDRESS,
    ENV_VIRTUAL_NODES,
    ENV_CHECKPOINT_DIR.removesuffix("_DIR"),
    ENV_REPRODUCIBILITY.removesuffix("DUCIBILITY"),
    ENV_TERMINATION_LOG.removesuffix("_LOG"),
    ENV_PROFILE,
)
"""Environment variables whose names begin like this are the operator's to set."""

MIN_REPLICAS: Final = 1
"""``spec.minReplicas`` of a job that names none; the schema says the same."""

MAX_GROUPS: Final = 16
MAX_CONTAINERS: Final = 16

MAX_TEMPLATE: Final = 262_144
"""Characters of a pod template or volume as JSON; the API server refuses much larger pods anyway."""

MAX_DEPTH: Final = 64
"""Levels of lists and mappings in a pod template or volume; a pod's own fields need about 15."""

FIXED: Final = {
    "virtualNodes": "virtualNodes cannot be changed, because the result depends on it; create a new job.",
    "reproducibility": "reproducibility cannot be changed, because the result depends on it; create a new job.",
    "managedBy": "managedBy cannot be changed; create a new job for the other controller.",
}
"""What a job keeps for life, and what to say to whoever changes it."""

_JOB_NAME = re.compile(r"[a-z][a-z0-9]*(-+[a-z0-9]+)*")
_GROUP_NAME = re.compile(r"[a-z0-9]+(-+[a-z0-9]+)*")
_MAX_GROUP_NAME = 20
_QUEUE_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_RESOURCE = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_MAX_UNITS = 1_000_000
"""Of weights, priorities and capacities."""
_MAX_QUEUE_NAME = 63
_DIRECTORY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
_MAX_DIRECTORY = 1_024


def validate(spec: object, name: object) -> list[str]:
    """What is wrong with a job, a sentence each, in the order of the fields; empty when nothing is.

    Args:
        spec: ``spec`` of the job, with or without the defaults of the schema; anything that JSON can hold.
        name: the name of the job.
    """
    problems = list(_name_problems(name))
    if not isinstance(spec, Mapping):
        return [*problems, "spec must be a mapping; describe the job in it."]
    problems += _count_problems(spec)
    problems += _queue_problems(spec)
    groups = spec.get("workerGroups")
    if not isinstance(groups, list) or not 0 < len(groups) <= MAX_GROUPS:
        problems.append(f"workerGroups must be a list of 1 to {MAX_GROUPS} groups; add a group with a pod template.")
    else:
        problems += _group_problems(groups)
    problems += _coordinator_problems(spec.get("coordinator"))
    problems += _checkpoint_problems(spec.get("checkpoint"))
    return problems


def immutable_changes(spec: object, fixed: Mapping[str, Any]) -> list[str]:
    """What was changed although it must not be, a sentence each.

    Args:
        spec: ``spec`` of the job as it is now.
        fixed: the values that it started with; what is missing here is not fixed yet, and so are ``virtualNodes`` and
            ``reproducibility`` of ``None``. A ``managedBy`` of ``None`` is fixed: there was none.
    """
    defaults = {"virtualNodes": VIRTUAL_NODES, "reproducibility": "Bitwise", "managedBy": None}
    changed: list[str] = []
    for key, sentence in FIXED.items():
        if key not in fixed or (fixed[key] is None and key != "managedBy"):
            continue
        now = spec.get(key) if isinstance(spec, Mapping) else None
        if (defaults[key] if now is None else now) != fixed[key]:
            changed.append(sentence)
    return changed


def _name_problems(name: object) -> Iterator[str]:
    if not isinstance(name, str) or len(name) > MAX_JOB_NAME or not _JOB_NAME.fullmatch(name):
        yield (
            f"The job's name must be a lower-case letter, then letters, digits and -, at most {MAX_JOB_NAME} "
            "characters in all; create it under another name."
        )


def _count_problems(spec: Mapping[str, Any]) -> list[str]:
    problems: list[str] = []

    def count(key: str, default: int | None, most: int) -> int | None:
        value = spec.get(key)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            problems.append(f"{key} must be a whole number from 1 to {most}; correct it.")
            return None
        return value

    nodes = count("virtualNodes", VIRTUAL_NODES, MAX_VIRTUAL_NODES)
    wanted = count("replicas", WORKERS, MAX_WORKERS)
    least = count("minReplicas", MIN_REPLICAS, MAX_WORKERS)
    most = count("maxReplicas", None, MAX_WORKERS)

    def at_most(low: int | None, high: int | None, sentence: str) -> None:
        if low is not None and high is not None and low > high:
            problems.append(sentence)

    carries = "as a worker carries at least one; lower"
    at_most(least, wanted, "replicas must be at least minReplicas; raise replicas or lower minReplicas.")
    at_most(wanted, most, "replicas must be at most maxReplicas; lower replicas or raise maxReplicas.")
    at_most(least, most, "minReplicas must be at most maxReplicas; lower minReplicas or raise maxReplicas.")
    at_most(wanted, nodes, f"replicas must be at most virtualNodes, {carries} replicas.")
    at_most(least, nodes, f"minReplicas must be at most virtualNodes, {carries} it.")
    at_most(most, nodes, f"maxReplicas must be at most virtualNodes, {carries} it.")
    at_most(
        least,
        _allowed_by_groups(spec.get("workerGroups")),
        "The worker groups must allow minReplicas workers together; raise their maxReplicas.",
    )
    return problems


def _queue_problems(spec: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a job's place in a queue."""
    queue, weight, priority = spec.get("queue"), spec.get("weight", 1), spec.get("priority", 0)
    if queue is not None and (
        not isinstance(queue, str) or len(queue) > _MAX_QUEUE_NAME or not _QUEUE_NAME.fullmatch(queue)
    ):
        yield (
            f"queue must be the name of a VirtualFlowQueue, at most {_MAX_QUEUE_NAME} lower-case letters, digits and "
            "-; correct it."
        )
    if weight == 0 and not isinstance(weight, bool):
        yield "weight must be at least 1, as a share of nothing trains nobody; raise it."
    elif not _whole(weight, 1):
        yield f"weight must be a whole number from 1 to {_MAX_UNITS}; correct it."
    if not _whole(priority, -_MAX_UNITS):
        yield f"priority must be a whole number from {-_MAX_UNITS} to {_MAX_UNITS}; correct it."


def _whole(value: object, least: int, most: int = _MAX_UNITS) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def validate_queue(spec: object) -> list[str]:
    """What is wrong with a queue, a sentence each; empty when nothing is.

    Args:
        spec: ``spec`` of the queue, with or without the defaults of the schema; anything that JSON can hold.
    """
    if not isinstance(spec, Mapping):
        return ["spec must be a mapping; describe the queue in it."]
    problems: list[str] = []
    resource, capacity = spec.get("resource"), spec.get("capacity")
    if resource is None and capacity is None:
        problems.append("A queue needs something to count; give it a resource, such as nvidia.com/gpu, or a capacity.")
    if resource is None and (spec.get("nodeSelector") is not None or spec.get("spotSelector") is not None):
        problems.append("Nodes are looked at for a resource only; give the queue a resource, or remove its selectors.")
    if resource is not None and not (isinstance(resource, str) and _RESOURCE.fullmatch(resource)):
        problems.append("resource must be the name of a resource that pods request; write, for example, cpu.")
    if capacity is not None and not _whole(capacity, 0):
        problems.append(f"capacity must be a whole number from 0 to {_MAX_UNITS}; correct it.")
    for key in ("nodeSelector", "spotSelector"):
        problems += _selector_problems(spec.get(key), key)
    return problems


def _selector_problems(selector: object, place: str) -> Iterator[str]:
    if selector is None:
        return
    expressions = selector.get("matchExpressions", []) if isinstance(selector, Mapping) else None
    if not isinstance(expressions, list):
        yield f"{place} must be a label selector; give it matchLabels or matchExpressions."
        return
    for index, expression in enumerate(expressions):
        operator = expression.get("operator") if isinstance(expression, Mapping) else None
        if not isinstance(expression, Mapping) or operator not in ("In", "NotIn", "Exists", "DoesNotExist"):
            yield f"{place}.matchExpressions[{index}] must have an operator; write In, NotIn, Exists or DoesNotExist."
        elif (operator in ("In", "NotIn")) != bool(expression.get("values")):
            yield f"{place}.matchExpressions[{index}] has values for In and NotIn, and for them only; correct them."


def _allowed_by_groups(groups: object) -> int | None:
    """The most workers that all groups allow together; ``None`` when there is no limit, or none that can be read."""
    if not isinstance(groups, list) or not groups:
        return None
    total = 0
    for group in groups:
        limit = group.get("maxReplicas") if isinstance(group, Mapping) else None
        if not isinstance(limit, int) or isinstance(limit, bool):
            return None
        total += limit
    return total


def _group_problems(groups: list[Any]) -> Iterator[str]:
    seen: set[str] = set()
    for index, group in enumerate(groups):
        place = f"workerGroups[{index}]"
        if not isinstance(group, Mapping):
            yield f"{place} must be a mapping; give it a name and a template."
            continue
        name, limit = group.get("name"), group.get("maxReplicas")
        if not isinstance(name, str) or len(name) > _MAX_GROUP_NAME or not _GROUP_NAME.fullmatch(name):
            yield (
                f"{place}.name must be lower-case letters, digits and - inside, at most {_MAX_GROUP_NAME} characters; "
                "choose another name."
            )
        elif name == COORDINATOR:
            yield f"{place}.name: A worker group cannot be called coordinator; choose another name."
        elif name in seen:
            yield f"{place}.name: There is another group called {name}; choose another name."
        else:
            seen.add(name)
        if limit is not None and (
            not isinstance(limit, int) or isinstance(limit, bool) or not 0 <= limit <= MAX_WORKERS
        ):
            yield f"{place}.maxReplicas must be a whole number from 0 to {MAX_WORKERS}; correct it."
        yield from _worker_template_problems(group.get("template"), f"{place}.template")


def _worker_template_problems(template: object, place: str) -> Iterator[str]:
    if not isinstance(template, Mapping) or not isinstance(template.get("spec"), Mapping):
        yield f"{place} must be a pod template; give it a spec with containers."
        return
    if (problem := _too_large(template, place)) is not None:
        yield problem
        return
    pod = template["spec"]
    yield from _metadata_problems(template, place)
    if pod.get("restartPolicy", "Never") != "Never":
        yield f"{place}.spec.restartPolicy must be Never, because the operator replaces workers; remove it."
    containers = pod.get("containers")
    if not isinstance(containers, list) or not 0 < len(containers) <= MAX_CONTAINERS:
        yield f"{place}.spec.containers must be a list of 1 to {MAX_CONTAINERS} containers; add a container."
    else:
        for index, container in enumerate(containers):
            yield from _container_problems(container, f"{place}.spec.containers[{index}]", ("name", "image"))
    yield from _pod_problems(pod, f"{place}.spec")


def _coordinator_problems(coordinator: object) -> Iterator[str]:
    if coordinator is None:
        return
    template = coordinator.get("template", {}) if isinstance(coordinator, Mapping) else None
    place = "coordinator.template"
    if not isinstance(template, Mapping) or not isinstance(template.get("spec", {}), Mapping):
        yield f"{place} must be a part of a pod template; give it metadata or a spec, or remove it."
        return
    if (problem := _too_large(template, place)) is not None:
        yield problem
        return
    pod = template.get("spec", {})
    yield from _metadata_problems(template, place)
    if "restartPolicy" in pod:
        yield f"{place}.spec.restartPolicy is the operator's to choose; remove it."
    containers = pod.get("containers", [])
    if not isinstance(containers, list) or len(containers) > MAX_CONTAINERS:
        yield f"{place}.spec.containers must be a list of at most {MAX_CONTAINERS} containers; correct or remove it."
    else:
        for index, container in enumerate(containers):
            # The first is laid over the operator's own, which has a name and an image.
            required = ("name", "image") if index else ()
            yield from _container_problems(container, f"{place}.spec.containers[{index}]", required)
    yield from _pod_problems(pod, f"{place}.spec")


def _metadata_problems(template: Mapping[str, Any], place: str) -> Iterator[str]:
    metadata = template.get("metadata", {})
    if not isinstance(metadata, Mapping):
        yield f"{place}.metadata must be a mapping; give it labels or annotations, or remove it."
        return
    for key in ("labels", "annotations"):
        values = metadata.get(key, {})
        if not isinstance(values, Mapping) or not all(isinstance(x, str) for pair in values.items() for x in pair):
            yield f"{place}.metadata.{key} must map strings to strings; put numbers and booleans in quotes."


def _pod_problems(pod: Mapping[str, Any], place: str) -> Iterator[str]:
    """What the operator builds upon; the rest of a pod is the API server's to check."""
    for key in ("initContainers", "volumes"):
        entries = pod.get(key, [])
        if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
            yield f"{place}.{key} must be a list of mappings; correct or remove it."
        elif key == "volumes" and any(entry.get("name") == CHECKPOINT_VOLUME for entry in entries):
            yield f"{place}.volumes: The volume {CHECKPOINT_VOLUME} is the operator's; choose another name."


def _container_problems(container: object, place: str, required: tuple[str, ...]) -> Iterator[str]:
    if not isinstance(container, Mapping):
        yield f"{place} must be a mapping; give it a name and an image."
        return
    for key in ("name", "image"):
        value = container.get(key)
        if not (isinstance(value, str) and value) and (key in required or key in container):
            yield f"{place}.{key} must be a string that is not empty; write the container's {key} there."
    mounts, environment = container.get("volumeMounts", []), container.get("env", [])
    if not isinstance(mounts, list):
        yield f"{place}.volumeMounts must be a list; correct or remove it."
    if not isinstance(environment, list):
        yield f"{place}.env must be a list of name and value; correct or remove it."
        return
    for index, entry in enumerate(environment):
        variable = entry.get("name") if isinstance(entry, Mapping) else None
        if not isinstance(variable, str) or not variable:
            yield f"{place}.env[{index}] must have a name; write name and value."
        elif variable.startswith(OPERATOR_VARIABLES):
            yield (
                f"{place}.env[{index}].name: The operator sets this environment variable; remove it from the template."
            )


def _checkpoint_problems(checkpoint: object) -> Iterator[str]:
    if checkpoint is None:
        return
    if not isinstance(checkpoint, Mapping):
        yield "checkpoint must be a mapping; give it a volume, or remove it."
        return
    volume, directory = checkpoint.get("volume"), checkpoint.get("directory")
    if not isinstance(volume, Mapping) or len(volume) != 1:
        yield "checkpoint.volume must be exactly one volume source; write, for example, persistentVolumeClaim."
    elif not isinstance(next(iter(volume.values())), Mapping):
        yield "checkpoint.volume must be a volume source without a name; write, for example, persistentVolumeClaim."
    elif (problem := _too_large(volume, "checkpoint.volume")) is not None:
        yield problem
    if directory is not None and (
        not isinstance(directory, str) or len(directory) > _MAX_DIRECTORY or not _DIRECTORY.fullmatch(directory)
    ):
        yield (
            f"checkpoint.directory must be a relative path of at most {_MAX_DIRECTORY} letters, digits and . _ - /, no "
            "part of which begins with a dot; correct it."
        )


def _too_large(value: object, place: str) -> str | None:
    """Say when ``value`` is larger or deeper than any real pod; whoever walks through it later may then recurse."""
    size, level, current = 0, 0, [value]
    while current:
        below: list[Any] = []
        for item in current:
            size += 2
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, Mapping):
                size += sum(len(key) + 4 for key in item if isinstance(key, str))
                below += item.values()
            elif isinstance(item, list | tuple):
                below += item
        level += 1
        if size > MAX_TEMPLATE:
            return f"{place} is larger than {MAX_TEMPLATE} characters; move large values into a ConfigMap."
        if below and level >= MAX_DEPTH:
            return f"{place} is nested deeper than {MAX_DEPTH} levels; simplify it."
        current = below
    return None
