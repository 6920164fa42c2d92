"""What a reconciliation decides: calls to the coordinator, changes in the cluster, and the job's next status."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from virtualflow.protocol.http_api import Call
from virtualflow.protocol.messages import Change
from virtualflow_operator.api import JobStatus, Object

# --- to the API server ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckTemplates:
    """Ask the API server whether it would take these pods; the answer goes into the next status."""

    manifests: tuple[Object, ...]
    template_hash: str


@dataclass(frozen=True)
class CreateService:
    """The coordinator's Service."""

    manifest: Object


@dataclass(frozen=True)
class PointService:
    """Lead the coordinator's Service to another pod."""

    name: str
    selector: dict[str, str]


@dataclass(frozen=True)
class CreatePod:
    """A worker or coordinator."""

    role: str
    manifest: Object

    @property
    def name(self) -> str:
        """The pod's name."""
        name: str = self.manifest["metadata"]["name"]
        return name


@dataclass(frozen=True)
class DeletePod:
    """That very pod, not a later one of its name."""

    name: str
    uid: str
    reason: str
    cause: str
    """One of a few words, for the metric."""
    grace: float | None = None
    """Seconds until it is killed; ``None``: what the pod says."""


@dataclass(frozen=True)
class DeleteJob:
    """The job has been over for long enough."""


@dataclass(frozen=True)
class CreateWorkload:
    """Ask Kueue for quota."""

    manifest: Object


@dataclass(frozen=True)
class PatchWorkload:
    """Change a Workload as it was seen, or its status; not a newer version of it, nor another one of its name."""

    name: str
    body: Object
    subresource: Literal["status"] | None = None


@dataclass(frozen=True)
class DeleteWorkload:
    """That very Workload, with the quota that it has."""

    name: str
    uid: str


WorkloadAction = CreateWorkload | PatchWorkload | DeleteWorkload
Action = CheckTemplates | CreateService | PointService | CreatePod | DeletePod | DeleteJob | WorkloadAction


@dataclass(frozen=True)
class EventMessage:
    """Something that a person would want to know: an event on the job."""

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True)
class Plan:
    """One decision of the reconciler, in the order in which it is carried out."""

    status: JobStatus
    calls: tuple[Call, ...] = ()
    """To the coordinator; each may safely be repeated."""
    written_calls: tuple[Call, ...] = ()
    """The same, once the status is written: it says what they are based on."""
    recoveries: frozenset[str] = frozenset()
    """Incarnations of lost workers that the others have to recover from."""
    actions: tuple[Action, ...] = ()
    events: tuple[EventMessage, ...] = ()
    """Emitted once the status has been written."""
    changes: tuple[Change, ...] = ()
    """Membership changes that this status counts and the former did not."""
    wake_at: float | None = None
    """Decide again then at the latest; Unix seconds."""
    workers_wanted: int = 0
    """How many workers the job is to have, by its user or its queue."""
