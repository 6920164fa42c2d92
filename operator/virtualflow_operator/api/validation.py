"""What no schema says of a job: what the operator builds upon in parts that the CustomResourceDefinition leaves open.

Types, ranges and rules of the schema are the API server's to check, and what else is in a pod is checked by a dry run.
An object of an older schema may break any of them: what cannot be read is a fault of the object, never an error here.
So it is with quantities, and with what a pod takes of its node as the scheduler counts it: nothing here raises.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Annotated, Any, Final, TypeVar

import msgspec

from virtualflow.protocol.settings import (
    ENV_ACTIVATIONS,
    ENV_ADDRESS,
    ENV_BACKWARD,
    ENV_CHECKPOINT_DIR,
    ENV_COORDINATOR,
    ENV_DEVICE_MEMORY,
    ENV_HOST_MEMORY,
    ENV_IDENTITY,
    ENV_ON_NON_FINITE,
    ENV_PROFILE,
    ENV_REPRODUCIBILITY,
    ENV_SHARD,
    ENV_TERMINATION_LOG,
    ENV_TOKEN,
    ENV_VIRTUAL_NODES,
    ENV_WORKER,
)
from virtualflow_operator.api.job import JobSpec, Object, WorkerMemory, without_nulls
from virtualflow_operator.constants import CHECKPOINT_VOLUME, IDENTITY_VOLUME, TURNS_VOLUME

_SUFFIXES = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1),
    "k": Decimal(10) ** 3, "M": Decimal(10) ** 6, "G": Decimal(10) ** 9, "T": Decimal(10) ** 12, "P": Decimal(10) ** 15,
    "E": Decimal(10) ** 18,
    "Ki": Decimal(2) ** 10, "Mi": Decimal(2) ** 20, "Gi": Decimal(2) ** 30, "Ti": Decimal(2) ** 40,
    "Pi": Decimal(2) ** 50, "Ei": Decimal(2) ** 60,
}  # fmt: skip

_QUANTITY = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,2})?)([numkMGTPE]?|[KMGTPE]i)")
_LONGEST = 64
"""Characters of a quantity: Kubernetes' own go to 2^63, and from 4,300 digits on Python makes no text of a number."""

Requests = tuple[Mapping[str, str], ...]
"""Quantities by resource, whose sum is what a pod takes."""


def parse_quantity(text: str | float) -> Decimal | None:
    """The number that a Kubernetes quantity stands for; ``None`` for what is none."""
    return _parse(str(text))


@lru_cache(4_096)  # thousands of pods request the same few amounts
def _parse(text: str) -> Decimal | None:
    found = _QUANTITY.fullmatch(text.strip()) if len(text) <= _LONGEST else None
    return None if found is None else Decimal(found[1]) * _SUFFIXES[found[2]]


def pod_requests(spec: object) -> Requests:
    """What a pod with this ``spec`` takes: its containers and sidecars together, or an init container if that is more.

    As Kubernetes counts ("Resource sharing within containers" in its page on init containers): those that have to end
    run one after the other, beside the sidecars that were begun before them; a limit stands for a request that is
    missing; the overhead of its runtime class comes on top.
    """
    pod = mapping(spec)
    found = [_requests(container) for container in mappings(pod.get("containers"))]
    sidecars: list[Mapping[str, str]] = []
    starts: list[Requests] = []
    for container in mappings(pod.get("initContainers")):
        if container.get("restartPolicy") == "Always":
            sidecars.append(_requests(container))
        else:
            starts.append((*sidecars, _requests(container)))
    found += sidecars
    more: dict[str, str] = {}
    for start in starts:
        for resource in {name for requests in start for name in requests}:
            beyond = total(start, resource) - total((*found, more), resource)
            if beyond > 0:
                more[resource] = f"{total((more,), resource) + beyond:f}"
    overhead = {str(name): str(amount) for name, amount in mapping(pod.get("overhead")).items()}
    return tuple(requests for requests in (*found, more, overhead) if requests)


def total(requests: Iterable[Mapping[str, str]], resource: str) -> Decimal:
    """The sum of what is requested of a resource; what is no quantity counts as nothing."""
    amounts = (parse_quantity(request[resource]) for request in requests if resource in request)
    return sum((amount for amount in amounts if amount is not None), Decimal(0))


def _requests(container: Mapping[str, Any]) -> Mapping[str, str]:
    resources = mapping(container.get("resources"))
    amounts = {**mapping(resources.get("limits")), **mapping(resources.get("requests"))}
    return {str(name): str(amount) for name, amount in amounts.items()}


def mapping(value: object) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def mappings(value: object) -> list[Mapping[str, Any]]:
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []


OPERATOR_VARIABLES: Final = (
    ENV_COORDINATOR.removesuffix("INATOR"),
    ENV_TOKEN,
    ENV_IDENTITY,
    ENV_WORKER,
    ENV_ADDRESS,
    ENV_VIRTUAL_NODES.removesuffix("IRTUAL_NODES"),  # that they check one another, too
    ENV_CHECKPOINT_DIR.removesuffix("POINT_DIR"),
    ENV_REPRODUCIBILITY.removesuffix("PRODUCIBILITY"),  # the redundancy of shares, too
    ENV_TERMINATION_LOG.removesuffix("INATION_LOG"),
    ENV_PROFILE,
    ENV_ON_NON_FINITE.removesuffix("N_NON_FINITE"),  # the optimizer's placement, too
    ENV_DEVICE_MEMORY.removesuffix("_MEMORY"),
    ENV_HOST_MEMORY.removesuffix("_MEMORY"),
    ENV_ACTIVATIONS.removesuffix("ATIONS"),
    ENV_BACKWARD.removesuffix("WARD"),
    ENV_SHARD.removesuffix("ARD"),
)
"""Environment variables whose names begin like this are the operator's to set; a rule of the schema says the same."""

COORDINATOR_POD: Final = (
    *("affinity", "nodeSelector", "tolerations", "topologySpreadConstraints", "priorityClassName", "schedulerName"),
    *("runtimeClassName", "resources", "imagePullSecrets", "containers"),
)
"""All that a coordinator's template may say in its spec. The operator talks to what runs there, and its environment
holds the job's token: whatever else there is in a pod, now or later, is the operator's to set. The schema's rules say
the same."""

COORDINATOR_CONTAINER: Final = ("name", "resources", "imagePullPolicy")
"""All that it may say of its container."""

MAX_TEMPLATE: Final = 262_144
"""Characters of a pod template or volume as JSON; the API server refuses much larger pods anyway."""

_GPU: Final = "gpu"
"""In the names of resources that are accelerators, such as nvidia.com/gpu."""

MAX_DEPTH: Final = 64
"""Levels of lists and mappings in a pod template or volume; a pod's own fields need about 15."""


class _Part(msgspec.Struct, rename="camel"):
    """A part of a pod template that the operator reads or adds to; all else in it goes through untouched."""


class _Named(_Part):
    name: str = ""


class _Container(_Part):
    env: list[_Named] = []
    volume_mounts: list[Object] = []
    command: Any = None
    resources: Any = None


class _Pod(_Part):
    containers: list[_Container] = []
    init_containers: list[Object] = []
    volumes: list[_Named] = []
    restart_policy: str | None = None


class _Metadata(_Part):
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class _CoordinatorPod(_Part):
    containers: list[Object] = []


class _CoordinatorTemplate(_Part):
    spec: _CoordinatorPod = msgspec.field(default_factory=_CoordinatorPod)
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)


class _WorkerPod(_Pod):
    containers: Annotated[list[_Container], msgspec.Meta(min_length=1)]


class _WorkerTemplate(_Part):
    spec: _WorkerPod
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)


def find_problems(spec: JobSpec) -> list[str]:
    """What is wrong with a job that could be read, a sentence each, in the order of the fields; empty: nothing is."""
    counts = {
        "virtualNodes": spec.virtual_nodes,
        "replicas": spec.replicas,
        "minReplicas": spec.min_replicas,
        "maxReplicas": spec.max_replicas,
        "processesPerWorker": spec.processes_per_worker,
        "weight": spec.weight,
    }
    problems = [
        f"{key} must be at least 1; correct it." for key, value in counts.items() if value is not None and value < 1
    ]
    if spec.verify is not None and spec.verify.sample > 0 and spec.reproducibility == "Statistical":
        problems.append(
            "verify compares bits, which are not equal if reproducibility is Statistical; remove one of them."
        )
    problems += _sharding_problems(spec)
    if spec.reproducibility == "Bitwise" and spec.across_kinds != "Stay":
        problems.append(
            "Other kinds of device compute other bits than a Bitwise job promises; let acrossKinds be Stay, or "
            "reproducibility Statistical."
        )
    for index, group in enumerate(spec.worker_groups):
        if group.memory is not None:
            problems += _memory_problems(group.memory, f"workerGroups[{index}].memory")
        problems += _worker_problems(group.template, f"workerGroups[{index}].template", spec.processes_per_worker)
    problems += _coordinator_problems(spec.coordinator.template, "coordinator.template")
    if spec.checkpoint is not None and (problem := _too_large(spec.checkpoint.volume, "checkpoint.volume")) is not None:
        problems.append(problem)
    return problems


def _sharding_problems(spec: JobSpec) -> Iterator[str]:
    if spec.sharding is None:
        return
    if spec.sharding.redundancy == "Checkpoint" and spec.checkpoint is None:
        yield (
            "Redundancy Checkpoint goes on from one when a worker is lost; add checkpoint, or let it be Peer or None."
        )
    if spec.sharding.redundancy is not None and spec.sharding.what == "None":
        yield "sharding: redundancy is about shares, and with a what of None no worker has one; remove it."


def _memory_problems(memory: WorkerMemory, place: str) -> Iterator[str]:
    for key, size in (("device", memory.device), ("host", memory.host)):
        if size is not None and (parse_quantity(size) or 0) < 1:
            yield f"{place}.{key} is {size[:_LONGEST]!r}, which is no size of memory; write one like 24Gi."


def _worker_problems(template: Object, place: str, processes: int) -> Iterator[str]:
    read = _read(template, place, _WorkerTemplate)
    if isinstance(read, str):
        yield read
        return
    if read.spec.restart_policy not in (None, "Never"):
        yield f"{place}.spec.restartPolicy is the operator's to choose; remove it."
    for volume in read.spec.volumes:
        if volume.name in (CHECKPOINT_VOLUME, IDENTITY_VOLUME, TURNS_VOLUME):
            yield f"{place}.spec.volumes: The volume {volume.name} is the operator's; choose another name."
    if processes > 1:
        yield from _process_problems(read.spec.containers[0], f"{place}.spec.containers[0]", processes)
    for number, container in enumerate(read.spec.containers):
        for index, variable in enumerate(container.env):
            if variable.name.startswith(OPERATOR_VARIABLES):
                at = f"{place}.spec.containers[{number}].env[{index}].name"
                yield f"{at}: The operator sets this environment variable; remove it from the template."


def _process_problems(container: _Container, place: str, processes: int) -> Iterator[str]:
    """What is wrong with the container of a worker of several processes."""
    command = container.command
    if not (command and isinstance(command, list) and all(isinstance(word, str) for word in command)):
        yield (
            f"{place}.command: {processes} processes of a worker each run the container's command, and there is none; "
            "write it into the template, as an image's own cannot be seen."
        )
    for resource, amount in mapping(mapping(container.resources).get("limits")).items():
        count = parse_quantity(str(amount)) if _GPU in str(resource) else None
        if count is not None and count % processes:
            yield (
                f"{place}.resources.limits: {str(resource)[:_LONGEST]} is {str(amount)[:_LONGEST]}, no multiple of "
                f"processesPerWorker ({processes}), so that devices would be idle or shared; correct one of them."
            )


def _coordinator_problems(template: Object, place: str) -> Iterator[str]:
    read = _read(template, place, _CoordinatorTemplate)
    if isinstance(read, str):
        yield read
        return
    if len(read.spec.containers) > 1:
        yield f"{place}.spec.containers: A coordinator has one container, the operator's; remove the others."
    spec = without_nulls(template).get("spec") or {}
    given = [f"spec.{field}" for field in spec if field not in COORDINATOR_POD]
    for container in read.spec.containers[:1]:
        given += [f"spec.containers[0].{field}" for field in container if field not in COORDINATOR_CONTAINER]
    for field in given:
        yield (
            f"{place}.{field[:100]}: A coordinator's template sets only resources, scheduling, labels and pull "
            "secrets; remove this field."
        )


_Template = TypeVar("_Template", _WorkerTemplate, _CoordinatorTemplate)


def _read(template: Object, place: str, kind: type[_Template]) -> _Template | str:
    """What the operator reads of a template, or why it cannot."""
    if (problem := _too_large(template, place)) is not None:
        return problem
    try:
        return msgspec.convert(without_nulls(template), kind)
    except msgspec.ValidationError as error:
        return f"{place} cannot be read: {error}; correct it."


def _too_large(value: object, place: str) -> str | None:
    """Say when ``value`` is larger or deeper than any real pod; whoever walks through it later may then recurse."""
    size, level, current = 2, 0, [value]
    while current:
        below: list[Any] = []
        for item in current:
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, Mapping):
                size += sum(len(key) + 4 for key in item if isinstance(key, str))
                below += item.values()
            elif isinstance(item, list | tuple):
                below += item
            if size + 2 * len(below) > MAX_TEMPLATE:
                break  # enough is known, and the rest may be a million entries
        size += 2 * len(below)
        level += 1
        if size > MAX_TEMPLATE:
            return f"{place} is larger than {MAX_TEMPLATE} characters; move large values into a ConfigMap."
        if below and level >= MAX_DEPTH:
            return f"{place} is nested deeper than {MAX_DEPTH} levels; simplify it."
        current = below
    return None
