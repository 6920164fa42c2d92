"""What the reconciler knows of the cluster, as plain values read from raw objects.

Objects come as JSON from the API server; of a pod's three hundred fields, a decision needs two dozen. Times are Unix
seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from virtualflow.protocol.http_api import Status
from virtualflow.protocol.settings import ENV_COORDINATOR, ENV_WORKER
from virtualflow.protocol.termination_message import TerminationMessage, decode_termination_message
from virtualflow_operator.api.job import JobSpec, JobStatus, Object, read_spec, read_status
from virtualflow_operator.api.validation import Requests, find_problems, pod_requests
from virtualflow_operator.constants import (
    ANNOTATION_CONTAINER,
    ANNOTATION_HOST,
    ANNOTATION_TEMPLATE,
    COORDINATOR,
    GROUP,
    IDENTITY_VOLUME,
    KIND,
    LABEL_ATTEMPT,
    LABEL_CAPACITY,
    LABEL_GROUP,
    LABEL_KIND,
    LABEL_KUEUE_QUEUE,
    LABEL_ORDINAL,
    LABEL_ROLE,
    TURNS_VOLUME,
    WORKER,
)


def parse_time(text: str | None) -> float | None:
    """Unix seconds of a Kubernetes timestamp; ``None`` for none or for what is no time."""
    if not text:
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def format_time(seconds: float) -> str:
    """The Kubernetes timestamp of Unix seconds."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Exit:
    code: int
    reason: str
    message: str
    last_word: TerminationMessage | None


@dataclass(frozen=True)
class Pod:
    name: str
    uid: str
    owner: str
    """Uid of the job that controls it."""
    role: str
    group: str = ""
    ordinal: int = 0
    ground: str = ""
    """``on-demand`` or ``spot``, where its job tells them apart."""
    kind: str = ""
    """Of device that it was made for, where its queue tells them apart."""
    host: str = ""
    """Namespace and name of the job on whose devices it computes; empty: it has its own."""
    takes_turns: bool = False
    """Whether it has been told of the turn server of its node."""
    attempt: int = 0
    template: str = ""
    """Hash of the template that it was made from."""
    node: str = ""
    ip: str = ""
    identity: str = ""
    """The name of the Secret with its identity; empty: it is in plaintext."""
    calls: str = ""
    """The address at which it calls its coordinator, if it is a worker."""
    phase: str = "Pending"
    """Its worker's: what other containers do is nobody's business."""
    accompanied: bool = False
    """Whether other containers than native sidecars run beside its worker, or may yet."""
    created: float = 0.0
    deleting_at: float | None = None
    """When the kubelet will kill it; set for a pod that is being deleted."""
    reason: str = ""
    disrupted: str = ""
    """Why the cluster takes it away, by its DisruptionTarget condition."""
    unschedulable: str = ""
    """What the scheduler says, if it finds no place."""
    unschedulable_since: float | None = None
    waiting: str = ""
    preparing: bool = False
    """Whether an init container runs: that may take its time."""
    lacks_config: bool = False
    """Whether that is because a Secret or ConfigMap that it names is not there."""
    requests: Requests = ()
    finished_at: float | None = None
    exit: Exit | None = None

    @property
    def finished(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def lingers(self) -> bool:
        """Whether its worker has ended, and others keep the pod and its devices."""
        return self.finished and self.accompanied

    @property
    def holds_devices(self) -> bool:
        """Whether the scheduler counts what it asks for."""
        return self.lingers or not self.finished

    @property
    def succeeded(self) -> bool:
        """Whether its script has ended as it should."""
        return self.exit is not None and self.exit.code == 0

    @property
    def saw_the_end(self) -> bool:
        return self.exit is not None and self.exit.last_word is not None and self.exit.last_word.kind == "done"

    @property
    def terminating(self) -> bool:
        return self.deleting_at is not None

    @property
    def live(self) -> bool:
        """Whether it runs or may yet run, and nobody has asked it to go."""
        return not (self.finished or self.terminating)


@dataclass(frozen=True)
class Node:
    """A node, as far as the pods on it are concerned."""

    name: str
    gone: bool = False
    ready: bool = True
    shutting_down: bool = False
    cordoned: bool = False
    taints: tuple[str, ...] = ()
    """Keys of its taints that keep pods away or evict them."""
    allocatable: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ForeignPod:
    """A pod that is no job's, as far as it takes something of its node."""

    node: str
    requests: Requests


@dataclass(frozen=True)
class Service:
    """The service before a job's coordinator."""

    address: str
    ordinal: int | None
    """The coordinator that it leads to."""
    owner: str = ""


@dataclass(frozen=True)
class CoordinatorLink:
    pod: str
    """Uid of the coordinator's pod."""
    connected: bool
    since: float
    """Since when it is connected, or not."""
    status: Status | None = None
    refused: str = ""
    """Why the coordinator does not talk to this operator."""
    incompatible: bool = False
    """Whether that is because of their versions, not of the token."""
    misbehaves: str = ""
    """What it did that no coordinator does, if so: it is left alone for a while."""
    busy: str = ""
    """Why it is left alone for a while though it did nothing wrong, if so."""


@dataclass(frozen=True)
class Job:
    namespace: str
    name: str
    uid: str
    generation: int
    spec: JobSpec
    status: JobStatus
    raw: Object
    faults: tuple[str, ...] = ()
    """Why nothing is done about it, in sentences: its ``spec`` cannot be read, or makes no sense."""


def read_job(body: Object) -> Job:
    """Read a job; what is wrong with its spec is in ``faults``."""
    metadata = body["metadata"]
    try:
        spec = read_spec(body.get("spec") or {})
        faults = tuple(find_problems(spec))
    except msgspec.ValidationError as error:
        spec, faults = _unreadable(body), (f"spec cannot be read: {error}; correct it.",)
    if spec.queue and (metadata.get("labels") or {}).get(LABEL_KUEUE_QUEUE):
        faults = (f"a job waits in one queue: remove spec.queue, or the label {LABEL_KUEUE_QUEUE} of Kueue.",)
    return Job(
        metadata["namespace"],
        metadata["name"],
        metadata["uid"],
        metadata.get("generation", 0),
        spec,
        read_status(body.get("status")),
        body,
        faults,
    )


def _unreadable(body: Object) -> JobSpec:
    """A specification that nothing is done about; whose job it is counts nevertheless."""
    spec = body.get("spec")
    manager = spec.get("managedBy") if isinstance(spec, Mapping) else None
    return JobSpec(worker_groups=(), managed_by=manager if isinstance(manager, str) else None)


_STARTING = (None, "ContainerCreating", "PodInitializing")
"""Why a container waits that is about to start."""


def read_pod(body: Object) -> Pod:
    metadata, status = body["metadata"], body.get("status") or {}
    labels: Mapping[str, str] = metadata.get("labels") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or []}
    scheduled, target = conditions.get("PodScheduled", {}), conditions.get("DisruptionTarget", {})
    homeless = scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"
    trains = _name_of_worker(body)
    states = _container_states(body, trains)
    ended = next((state["terminated"] for state in states if "terminated" in state), None)
    reasons = [state["waiting"] for state in states if (state.get("waiting") or {}).get("reason") not in _STARTING]
    waits: Mapping[str, Any] = reasons[0] if reasons else {}
    annotations: Mapping[str, str] = metadata.get("annotations") or {}
    volumes = (body.get("spec") or {}).get("volumes") or []
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        owner=_owner(body),
        role=COORDINATOR if labels.get(LABEL_ROLE) == COORDINATOR else WORKER,
        group=labels.get(LABEL_GROUP, ""),
        ordinal=_number(labels.get(LABEL_ORDINAL)),
        ground=labels.get(LABEL_CAPACITY, ""),
        kind=labels.get(LABEL_KIND, ""),
        host=annotations.get(ANNOTATION_HOST, ""),
        identity=_identity(metadata["name"], volumes),
        takes_turns=any(volume.get("name") == TURNS_VOLUME for volume in volumes),
        attempt=_number(labels.get(LABEL_ATTEMPT)),
        template=annotations.get(ANNOTATION_TEMPLATE, ""),
        node=(body.get("spec") or {}).get("nodeName") or "",
        ip=status.get("podIP") or "",
        calls=_called(body),
        phase=_phase(body, trains),
        accompanied=_others_run(status, trains),
        created=parse_time(metadata.get("creationTimestamp")) or 0.0,
        deleting_at=parse_time(metadata.get("deletionTimestamp")),
        reason=status.get("reason") or "",
        disrupted=_sentence(target) if target.get("status") == "True" else "",
        unschedulable=scheduled.get("message") or "no node fits" if homeless else "",
        unschedulable_since=parse_time(scheduled.get("lastTransitionTime")) if homeless else None,
        waiting=_sentence(waits),
        preparing=any("running" in (c.get("state") or {}) for c in status.get("initContainerStatuses") or []),
        lacks_config=waits.get("reason") == "CreateContainerConfigError",
        requests=pod_requests(body.get("spec")),
        finished_at=parse_time((ended or {}).get("finishedAt")),
        exit=None if ended is None else _exit(ended),
    )


def _owner(body: Object) -> str:
    """Uid of the job that controls the object; empty: none does."""
    for ref in (body.get("metadata") or {}).get("ownerReferences") or []:
        group = str(ref.get("apiVersion") or "").partition("/")[0]
        if ref.get("controller") and ref.get("kind") == KIND and group == GROUP:
            return str(ref.get("uid") or "")
    return ""


def _name_of_worker(body: Object) -> str:
    """The name of the container that trains: the one that was told so, wherever a mesh puts its proxy."""
    containers: list[Object] = (body.get("spec") or {}).get("containers") or [{}]
    marked = (body["metadata"].get("annotations") or {}).get(ANNOTATION_CONTAINER)
    told = (c for c in containers if any(variable.get("name") == ENV_WORKER for variable in c.get("env") or []))
    name: str = next((c.get("name") for c in told), marked) or containers[0].get("name") or ""
    return name


def identity_prefix(pod: str) -> str:
    """How the names of Secrets begin that can be the identity of a pod of that name."""
    return f"{pod}-identity-"


def _identity(pod: str, volumes: list[Object]) -> str:
    """The Secret of a pod's identity; the first source of its volume is it.

    Anybody may make a pod that names another's Secret, and what is named here is overwritten.
    """
    found = next((volume for volume in volumes if volume.get("name") == IDENTITY_VOLUME), {})
    sources = (found.get("projected") or {}).get("sources") or [{}]
    named = str((sources[0].get("secret") or {}).get("name") or "")
    return named if named.startswith(identity_prefix(pod)) else ""


def _called(body: Object) -> str:
    """The address of the coordinator that a worker was told; the first of that name is the operator's."""
    containers: list[Object] = (body.get("spec") or {}).get("containers") or []
    told = (v.get("value") for c in containers for v in c.get("env") or [] if v.get("name") == ENV_COORDINATOR)
    return str(next(told, None) or "").partition("://")[2].rpartition(":")[0].strip("[]")


def _phase(body: Object, trains: str) -> str:
    """How far the container that trains is; a sidecar may run on behind it, fail, or never start.

    Of a pod that the cluster has ended, the state of its containers may be an old one.
    """
    status = body.get("status") or {}
    phase: str = status.get("phase") or "Pending"
    state = _state_of(status, trains)
    if "terminated" in state and (body.get("spec") or {}).get("restartPolicy") == "Never":
        return "Failed" if state["terminated"].get("exitCode") else "Succeeded"
    return "Running" if "running" in state and phase == "Pending" else phase


def _state_of(status: Object, name: str) -> Mapping[str, Any]:
    return next((c.get("state") or {} for c in status.get("containerStatuses") or [] if c.get("name") == name), {})


def _others_run(status: Object, trains: str) -> bool:
    """Whether containers beside it run, or may yet; a pod in a last phase has none."""
    if status.get("phase") in ("Succeeded", "Failed"):
        return False
    others = (c.get("state") or {} for c in status.get("containerStatuses") or [] if c.get("name") != trains)
    return any("terminated" not in state for state in others)


def _container_states(body: Object, trains: str) -> list[Mapping[str, Any]]:
    """States of the container that trains, and until it has started of init containers that failed or cannot start.

    A native sidecar (an init container that is always restarted) may end at any time, and means nothing.
    """
    status, spec = body.get("status") or {}, body.get("spec") or {}
    states = [_state_of(status, trains)]
    if "running" in states[0] or "terminated" in states[0]:
        return states
    sidecars = {c.get("name") for c in spec.get("initContainers") or [] if c.get("restartPolicy") == "Always"}
    for container in status.get("initContainerStatuses") or []:
        state = container.get("state") or {}
        failed = (state.get("terminated") or {}).get("exitCode") and container.get("name") not in sidecars
        if "waiting" in state or failed:
            states.append(state)
    return states


def read_foreign_pod(body: Object) -> ForeignPod:
    """Read a pod of others; one that has ended, or has no node yet, takes nothing."""
    node = (body.get("spec") or {}).get("nodeName") or ""
    ended = (body.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    return ForeignPod("", ()) if ended or not node else ForeignPod(node, pod_requests(body.get("spec")))


def _exit(ended: Mapping[str, Any]) -> Exit:
    message = ended.get("message") or ""
    return Exit(ended.get("exitCode", 0), ended.get("reason") or "", message, decode_termination_message(message))


def _sentence(state: Mapping[str, Any]) -> str:
    return ": ".join(part for part in (state.get("reason"), state.get("message")) if part)


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0


def read_node(body: Object) -> Node:
    spec, status = body.get("spec") or {}, body.get("status") or {}
    ready: Mapping[str, Any] = next((c for c in status.get("conditions") or [] if c.get("type") == "Ready"), {})
    taints = tuple(taint["key"] for taint in spec.get("taints") or [] if taint.get("effect") != "PreferNoSchedule")
    return Node(
        name=body["metadata"]["name"],
        ready=ready.get("status", "True") == "True",
        shutting_down=ready.get("status") == "False" and "shutting down" in (ready.get("message") or ""),
        cordoned=bool(spec.get("unschedulable")),
        taints=taints,
        allocatable=status.get("allocatable") or {},
        labels=body["metadata"].get("labels") or {},
    )


def read_service(body: Object) -> Service:
    spec = body.get("spec") or {}
    ordinal = (spec.get("selector") or {}).get(LABEL_ORDINAL)
    leads_to = int(ordinal) if ordinal and ordinal.isdigit() else None
    return Service(spec.get("clusterIP") or "", leads_to, _owner(body))


Standing = Literal["absent", "starting", "ready", "training", "draining", "silent", "done"]
"""How the coordinator sees a pod's worker."""
