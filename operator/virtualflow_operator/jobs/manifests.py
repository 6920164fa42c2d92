"""What a job consists of in the cluster, as manifests. Pure: the same job gives the same manifests.

A worker's pod is the user's template, which goes through untouched, plus what makes it a worker.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from virtualflow.protocol.identity import PAGE_TOKEN
from virtualflow.protocol.settings import (
    DRAIN_GRACE,
    ENV_ACTIVATIONS,
    ENV_ADDRESS,
    ENV_BACKWARD,
    ENV_CHECKPOINT_DIR,
    ENV_CHECKPOINT_KEEP,
    ENV_CHECKPOINT_MEMORY,
    ENV_CHECKPOINT_SECONDS,
    ENV_CHECKPOINT_STEPS,
    ENV_CONFIRMED_START,
    ENV_COORDINATOR,
    ENV_DEVICE_MEMORY,
    ENV_HANG_SECONDS,
    ENV_HASH_SEED,
    ENV_HOST_MEMORY,
    ENV_IDENTITY,
    ENV_ON_NON_FINITE,
    ENV_OPTIMIZER_PLACEMENT,
    ENV_PROFILE,
    ENV_REDUNDANCY,
    ENV_REPRODUCIBILITY,
    ENV_SHARD,
    ENV_TERMINATION_LOG,
    ENV_TOKEN,
    ENV_VERIFY,
    ENV_VIRTUAL_NODES,
    ENV_WORKER,
    HASH_SEED,
)
from virtualflow_operator.api import (
    COORDINATOR_CONTAINER,
    COORDINATOR_POD,
    Job,
    Object,
    Pod,
    WorkerGroup,
    WorkerMemory,
    parse_quantity,
    without_nulls,
)
from virtualflow_operator.constants import (
    ANNOTATION_CONTAINER,
    ANNOTATION_TEMPLATE,
    API_VERSION,
    APP_NAME,
    CHECKPOINT_MOUNT,
    CHECKPOINT_VOLUME,
    COORDINATOR,
    COORDINATOR_PORT,
    COORDINATOR_PORT_NAME,
    HOSTNAME,
    IDENTITY_MOUNT,
    IDENTITY_VOLUME,
    KIND,
    LABEL_ATTEMPT,
    LABEL_COMPONENT,
    LABEL_GROUP,
    LABEL_INSTANCE,
    LABEL_JOB,
    LABEL_MANAGED_BY,
    LABEL_NAME,
    LABEL_ORDINAL,
    LABEL_PART_OF,
    LABEL_ROLE,
    MANAGED_BY,
    TERMINATION_LOG,
    TOKEN_KEY,
    WORKER,
)
from virtualflow_operator.settings import OperatorSettings

_PYTHON = re.compile(r"(.*/)?python[0-9.]*")
_USER = 65532
"""The user that coordinators run as: `nonroot` by convention."""


def selector(job: Job) -> str:
    """The label selector of a job's workers, as the scale subresource shows it."""
    return f"{LABEL_JOB}={job.name},{LABEL_ROLE}={WORKER}"


def labels(job: Job, role: str) -> dict[str, str]:
    return {
        LABEL_NAME: APP_NAME,
        LABEL_INSTANCE: job.name,
        LABEL_COMPONENT: role,
        LABEL_PART_OF: APP_NAME,
        LABEL_MANAGED_BY: MANAGED_BY,
        LABEL_JOB: job.name,
    }


def secret_name(job: Job, settings: OperatorSettings) -> str:
    """The name of the Secret with the job's token; a job and a key have one, so one that exists is the right one."""
    return f"{job.name}-virtualflow-token-{job.uid[:8]}-{settings.key_id}"


def coordinator_name(job: Job) -> str:
    """The name of the Service before the job's coordinator, and the beginning of its pod's."""
    return f"{job.name}-{COORDINATOR}"


def worker_name(job: Job, group: WorkerGroup, ordinal: int) -> str:
    return f"{job.name}-{group.name}-{ordinal}"


def worker_pod(
    job: Job, group: WorkerGroup, ordinal: int, address: str, settings: OperatorSettings, identity: str = ""
) -> Object:
    """The pod of a worker.

    Args:
        address: the coordinator's, without a port.
        identity: the name of the Secret with its identity; empty: the job is in plaintext.
    """
    template = without_nulls(group.template)
    spec: Object = template.get("spec") or {}
    spec["restartPolicy"] = "Never"
    spec.setdefault("terminationGracePeriodSeconds", job.spec.elasticity.drain_grace_seconds)
    spec.setdefault("automountServiceAccountToken", False)
    spec.setdefault("affinity", _away_from(job, COORDINATOR))
    container = spec["containers"][0]
    log = container.setdefault("terminationMessagePath", TERMINATION_LOG)
    container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    if job.spec.processes_per_worker > 1:
        container["command"] = _as_processes(container["command"], job.spec.processes_per_worker)
    told = _environment(job, group, address, log, settings, identity)
    container["env"] = [*told, *(container.get("env") or [])]
    if identity:
        # Without a group for volumes, who knows as which user it runs? The directory is in no other container.
        mode = 0o440 if (spec.get("securityContext") or {}).get("fsGroup") is not None else 0o444
        container.setdefault("volumeMounts", []).append(_IDENTITY_MOUNT)
        spec.setdefault("volumes", []).append(_identity_volume(identity, mode))
    if job.spec.checkpoint is not None:
        mounts = container.setdefault("volumeMounts", [])
        mounts.append({"name": CHECKPOINT_VOLUME, "mountPath": CHECKPOINT_MOUNT})
        spec.setdefault("volumes", []).append({"name": CHECKPOINT_VOLUME, **job.spec.checkpoint.volume})
    metadata = _metadata(job, worker_name(job, group, ordinal), WORKER, template.get("metadata") or {})
    metadata["labels"] |= {LABEL_ROLE: WORKER, LABEL_GROUP: group.name, LABEL_ORDINAL: str(ordinal)}
    metadata["labels"][LABEL_ATTEMPT] = str(job.status.attempt)
    metadata["annotations"][ANNOTATION_TEMPLATE] = template_hash(job, group)
    metadata["annotations"].setdefault(ANNOTATION_CONTAINER, container.get("name", ""))
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


_IDENTITY_MOUNT: Object = {"name": IDENTITY_VOLUME, "mountPath": IDENTITY_MOUNT, "readOnly": True}


def _identity_volume(identity: str, mode: int, *others: Object) -> Object:
    sources = [{"secret": {"name": identity}}, *others]
    return {"name": IDENTITY_VOLUME, "projected": {"sources": sources, "defaultMode": mode}}


def _credential(job: Job, settings: OperatorSettings, identity: str) -> Object:
    """The variable by which a pod learns how it is known."""
    return {"name": ENV_IDENTITY, "value": IDENTITY_MOUNT} if identity else _token_variable(job, settings)


def _environment(
    job: Job, group: WorkerGroup, address: str, log: str, settings: OperatorSettings, identity: str
) -> list[Object]:
    """What a worker is told (the outside contracts in docs/design.md)."""
    host = f"[{address}]" if ":" in address else address
    spec = job.spec
    values: dict[str, str] = {
        ENV_COORDINATOR: f"{'https' if identity else 'http'}://{host}:{COORDINATOR_PORT}",
        ENV_VIRTUAL_NODES: str(job.status.virtual_nodes or spec.virtual_nodes),
        ENV_REPRODUCIBILITY: job.status.reproducibility or spec.reproducibility,
        ENV_ON_NON_FINITE: spec.on_non_finite,
        ENV_TERMINATION_LOG: log,
        ENV_HASH_SEED: str(HASH_SEED),
    }
    if group.profile is not None:
        values[ENV_PROFILE] = group.profile
    if group.memory is not None:
        values |= _memory(group.memory, spec.processes_per_worker)
    if spec.optimizer_placement is not None:
        values[ENV_OPTIMIZER_PLACEMENT] = spec.optimizer_placement
    if spec.backward is not None:
        values[ENV_BACKWARD] = msgspec.json.encode(spec.backward).decode()
    if spec.sharding is not None:
        values[ENV_SHARD] = spec.sharding.what
        if spec.sharding.redundancy is not None:
            values[ENV_REDUNDANCY] = spec.sharding.redundancy
    if spec.verify is not None:
        values[ENV_VERIFY] = str(spec.verify.sample)
    if spec.checkpoint is not None:
        directory = (spec.checkpoint.directory or job.uid).strip("/")
        values[ENV_CHECKPOINT_DIR] = f"{CHECKPOINT_MOUNT}/{directory}"
        values[ENV_CHECKPOINT_SECONDS] = str(spec.checkpoint.every_seconds)
        values[ENV_CHECKPOINT_KEEP] = str(spec.checkpoint.keep)
        if spec.checkpoint.every_steps is not None:
            values[ENV_CHECKPOINT_STEPS] = str(spec.checkpoint.every_steps)
        if spec.checkpoint.memory:
            values[ENV_CHECKPOINT_MEMORY] = "1"
    return [
        _credential(job, settings, identity),
        {"name": ENV_WORKER, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": ENV_ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        *({"name": name, "value": value} for name, value in values.items()),
    ]


def _as_processes(command: Sequence[str], processes: int) -> list[str]:
    """The command of a worker, as that of each of its processes: by the Python that it names, if it names one."""
    python = command[0] if _PYTHON.fullmatch(command[0]) else "python"
    # ``-P``: no file of the working directory decides what runs.
    return [python, "-P", "-m", "virtualflow", "processes", str(processes), "--", *command]


def _memory(memory: WorkerMemory, processes: int) -> dict[str, str]:
    """What each process is told: it has a device of its own, and a share of the host's memory."""
    sizes = {ENV_DEVICE_MEMORY: memory.device, ENV_HOST_MEMORY: memory.host}
    shared = {ENV_DEVICE_MEMORY: 1, ENV_HOST_MEMORY: processes}
    told = {
        name: str(int((parse_quantity(size) or 0) / shared[name])) for name, size in sizes.items() if size is not None
    }
    return told if memory.activations is None else told | {ENV_ACTIVATIONS: memory.activations}


def _token_variable(job: Job, settings: OperatorSettings) -> Object:
    reference = {"name": secret_name(job, settings), "key": TOKEN_KEY}
    return {"name": ENV_TOKEN, "valueFrom": {"secretKeyRef": reference}}


def coordinator_pod(job: Job, ordinal: int, settings: OperatorSettings, identity: str = "") -> Object:
    """The pod of a coordinator; what ``spec.coordinator.template`` says is merged over it.

    Args:
        identity: as a worker's pod has it.
    """
    container = _coordinator_container(job, settings, identity)
    spec: Object = {
        "restartPolicy": "Always",
        # It ends at once, unless its job is just stopping.
        "terminationGracePeriodSeconds": int(DRAIN_GRACE) + 5,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "affinity": _away_from(job, WORKER),
        "containers": [container],
    }
    if identity:
        spec["securityContext"]["fsGroup"] = _USER
        container["volumeMounts"] = [_IDENTITY_MOUNT]
        page = {"name": secret_name(job, settings), "items": [{"key": TOKEN_KEY, "path": PAGE_TOKEN}]}
        spec["volumes"] = [_identity_volume(identity, 0o440, {"secret": page})]
    if settings.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    template = without_nulls(job.spec.coordinator.template)
    given: Object = template.get("spec") or {}
    for over in given.get("containers", ())[:1]:
        fields = {key: value for key, value in over.items() if key in COORDINATOR_CONTAINER and key != "name"}
        spec["containers"] = [_merge(container, fields)]
    overrides = {key: value for key, value in given.items() if key in COORDINATOR_POD and key != "containers"}
    metadata = _metadata(job, f"{coordinator_name(job)}-{ordinal}", COORDINATOR, template.get("metadata") or {})
    metadata["labels"] |= {LABEL_ROLE: COORDINATOR, LABEL_ORDINAL: str(ordinal)}
    metadata["labels"][LABEL_ATTEMPT] = str(job.status.attempt)
    metadata["annotations"][ANNOTATION_TEMPLATE] = coordinator_hash(job)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": _merge(spec, overrides)}


def _coordinator_container(job: Job, settings: OperatorSettings, identity: str) -> Object:
    elasticity = job.spec.elasticity
    hang = []
    if elasticity.hang_seconds is not None:
        hang = [{"name": ENV_HANG_SECONDS, "value": str(elasticity.hang_seconds)}]
    return {
        "name": COORDINATOR,
        "image": job.status.coordinator_image or settings.image,
        "imagePullPolicy": settings.image_pull_policy,
        # Isolated: no PYTHON* variable and no file of its directory decides what runs.
        "command": ["python", "-I", "-u", "-m", "virtualflow", "coordinator"],
        # An image of an older operator refuses a flag that it does not know: what is new goes into the environment.
        "args": [
            *("--host", "0.0.0.0"),  # a pod's own address is not known before it runs
            *("--port", str(COORDINATOR_PORT)),
            *("--wanted", str(job.spec.desired)),
            *("--minimum", str(job.spec.least)),
            *("--startup-grace", str(elasticity.startup_grace_seconds)),
            *("--heartbeat-limit", str(elasticity.heartbeat_limit_seconds)),
        ],
        "env": [_credential(job, settings, identity), {"name": ENV_CONFIRMED_START, "value": "1"}, *hang],
        "ports": [{"name": COORDINATOR_PORT_NAME, "containerPort": COORDINATOR_PORT}],
        "readinessProbe": {
            "httpGet": {"path": "/healthz", "port": COORDINATOR_PORT_NAME},
            "periodSeconds": 5,
            "timeoutSeconds": 3,
        },
        "livenessProbe": {
            "httpGet": {"path": "/healthz", "port": COORDINATOR_PORT_NAME},
            "initialDelaySeconds": 10,
            "periodSeconds": 10,
            "timeoutSeconds": 5,
        },
        "resources": {"requests": {"cpu": "20m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings are merged, everything else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        before = merged.get(key)
        merged[key] = _merge(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return merged


def _away_from(job: Job, role: str) -> Object:
    """Coordinator and workers rather on different nodes: then no single power cut takes both."""
    term = {
        "labelSelector": {"matchLabels": {LABEL_JOB: job.name, LABEL_ROLE: role}},
        "topologyKey": HOSTNAME,
    }
    return {
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 50, "podAffinityTerm": term}]
        }
    }


def service(job: Job, ordinal: int, address: str = "") -> Object:
    """The stable address of the job's coordinator; it leads to one pod, so that a lost one is out at once.

    Args:
        address: which workers call, of a Service that is gone.
    """
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, coordinator_name(job), COORDINATOR),
        "spec": {
            "type": "ClusterIP",
            **({"clusterIP": address} if address else {}),
            "selector": service_selector(job, ordinal),
            "publishNotReadyAddresses": True,  # workers connect as soon as it listens, not a probe's period later
            "ports": [{"name": COORDINATOR_PORT_NAME, "port": COORDINATOR_PORT, "targetPort": COORDINATOR_PORT}],
        },
    }


def service_selector(job: Job, ordinal: int) -> dict[str, str]:
    return {LABEL_JOB: job.name, LABEL_ROLE: COORDINATOR, LABEL_ORDINAL: str(ordinal)}


def secret(job: Job, token: str, settings: OperatorSettings) -> Object:
    """The job's token, which opens the live page alone, or all of a job in plaintext; nobody changes it."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(job, secret_name(job, settings), COORDINATOR),
        "type": "Opaque",
        "immutable": True,
        "stringData": {TOKEN_KEY: token},
    }


def identity_secret(job: Job, pod: Pod, files: Mapping[str, bytes]) -> Object:
    """The identity of a pod: it goes with it.

    Args:
        files: by name, as ``virtualflow.protocol.identity`` has them.
    """
    metadata = _metadata(job, pod.identity, pod.role)
    owner = {"apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid, "controller": True}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata | {"ownerReferences": [owner]},
        "type": "Opaque",
        "data": {name: base64.b64encode(content).decode() for name, content in files.items()},
    }


def disruption_budget(job: Job) -> Object:
    """Evictions leave one worker, which keeps the state of the training, until a successor runs.

    Not ``maxUnavailable``: that counts from the workers wanted, and a job that runs with fewer than it wants, which is
    nothing unusual, would keep its nodes from ever being drained.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(job, _own_name(job), WORKER),
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {LABEL_JOB: job.name, LABEL_ROLE: WORKER}}},
    }


def network_policy(job: Job, settings: OperatorSettings) -> Object:
    """Nobody but the job's own pods reaches its pods, and the operator its coordinator: strangers could fill the ports
    of workers, and NCCL and TCP stores know no passwords.
    """
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": settings.lease.namespace}},
        "podSelector": {"matchLabels": dict(settings.operator_labels)},
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        # Policies add up: one for an operator that has moved comes beside the former.
        "metadata": _metadata(job, f"{_own_name(job)}-{hash_of(operator)[:8]}", WORKER),
        "spec": {
            "podSelector": {"matchLabels": {LABEL_JOB: job.name}},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": {LABEL_JOB: job.name}}}]},
                {"from": [operator], "ports": [{"protocol": "TCP", "port": COORDINATOR_PORT}]},
            ],
        },
    }


def workload_metadata(job: Job, name: str) -> Object:
    return _metadata(job, name, "workload")


def _own_name(job: Job) -> str:
    """A name that no earlier or later job of the same name uses."""
    return f"{job.name}-{job.uid[:8]}"


def _metadata(job: Job, name: str, role: str, template: Mapping[str, Any] | None = None) -> Object:
    """Name, labels and owner of one of the job's objects; labels and annotations of a template stay, ours win."""
    template = template or {}
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": {**(template.get("labels") or {}), **labels(job, role)},
        "annotations": {**(template.get("annotations") or {})},
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": job.name,
                "uid": job.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }


# --- what pods are made from, as a hash: a pod with another one is replaced -------------------------------------------
# Another hash restarts every job. So what is hashed is named, and a newer field comes in only where it is no default.

_CHECKPOINT = ("directory", "everySeconds", "everySteps", "keep", "volume")
"""Fields of ``spec.checkpoint`` that a worker's pod is made from."""


def template_hash(job: Job, group: WorkerGroup) -> str:
    """What a worker's pod is made from. A profile is not in it: it is but a first guess."""
    checkpoint = job.raw["spec"].get("checkpoint")
    if checkpoint is not None:
        checkpoint = {field: checkpoint[field] for field in _CHECKPOINT if field in checkpoint}
    made_from = {"template": group.template, "checkpoint": checkpoint}
    if job.spec.on_non_finite != "Continue":
        made_from["onNonFinite"] = job.spec.on_non_finite
    if job.spec.checkpoint is not None and job.spec.checkpoint.memory:
        made_from["checkpointMemory"] = True
    if job.spec.processes_per_worker != 1:
        made_from["processes"] = job.spec.processes_per_worker
    if group.memory is not None:
        made_from["memory"] = [group.memory.device, group.memory.host, group.memory.activations]
    return hash_of(made_from)


def coordinator_hash(job: Job) -> str:
    """What the coordinator's pod is made from; as for workers, nothing of it may change with the operator."""
    elasticity = job.spec.elasticity
    made_from: Object = {"template": job.spec.coordinator.template, "heartbeat": elasticity.heartbeat_limit_seconds}
    if elasticity.hang_seconds is not None:
        made_from["hang"] = elasticity.hang_seconds
    return hash_of(made_from)


class TemplateHashes(NamedTuple):
    groups: Mapping[str, str]
    coordinator: str
    all: str


def hash_templates(job: Job) -> TemplateHashes:
    groups, coordinator = [template_hash(job, group) for group in job.spec.worker_groups], coordinator_hash(job)
    names = (group.name for group in job.spec.worker_groups)
    return TemplateHashes(dict(zip(names, groups, strict=True)), coordinator, hash_of([coordinator, *groups]))


def hash_of(value: Any) -> str:
    """Sixteen hexadecimal digits of what JSON can say."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]
