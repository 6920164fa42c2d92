"""What a reconciliation decides: calls to the coordinator, changes in the cluster, and the job's next status; and the
draft in which the rules of one decision put it together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from virtualflow.protocol.http_api import Call
from virtualflow.protocol.messages import Change
from virtualflow_operator import reasons
from virtualflow_operator.api import Job, JobStatus, Object, Pod

# --- to the API server ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckTemplates:
    """Ask the API server whether it would take these pods; the answer goes into the next status."""

    manifests: tuple[Object, ...]
    template_hash: str


@dataclass(frozen=True)
class ReadEvents:
    """Find out from its events why a pod does not start, and make the job's token again if it is gone."""

    pod: str
    uid: str


@dataclass(frozen=True)
class CreateService:
    manifest: Object


@dataclass(frozen=True)
class PointService:
    name: str
    selector: dict[str, str]


@dataclass(frozen=True)
class CreatePod:
    role: str
    manifest: Object

    @property
    def name(self) -> str:
        name: str = self.manifest["metadata"]["name"]
        return name


@dataclass(frozen=True)
class IssueIdentity:
    """Give a pod the Secret with its identity."""

    pod: Pod
    renew: bool
    """Whether in the place of the one that it may have."""


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
class AdmissionAction:
    """Something that whoever admits the job is asked for, or told; the adapter that decides it carries it out."""


Action = (
    CheckTemplates
    | ReadEvents
    | CreateService
    | PointService
    | CreatePod
    | IssueIdentity
    | DeletePod
    | DeleteJob
    | AdmissionAction
)


@dataclass(frozen=True)
class EventMessage:
    """Something that a person would want to know: an event on the job."""

    reason: str
    message: str
    warning: bool = False

    @classmethod
    def lost(cls, worker: str, why: str, node: str = "") -> EventMessage:
        """A worker is lost; its node is named where the next one had better not go, too."""
        where = f" on node {node}" if node else ""
        return cls(reasons.LOST, f"{worker}{where} is lost: {why}", warning=True)

    @classmethod
    def convicted(cls, why: str) -> EventMessage:
        """A worker was found to be wrong; ``why`` names it and its node."""
        return cls(reasons.CONVICTED, f"{why}; the job keeps off that node where it can", warning=True)

    @classmethod
    def draining(cls, workers: Iterable[str], why: str) -> EventMessage:
        return cls(reasons.DRAINING, f"draining {_listed(workers)}: {why}")

    @classmethod
    def created(cls, workers: Iterable[str]) -> EventMessage:
        return cls(reasons.CREATED, f"created {_listed(workers)}")

    @classmethod
    def crashed(cls, why: str) -> EventMessage:
        return cls(reasons.CRASHED, why, warning=True)

    @classmethod
    def attempt_failed(cls, attempt: int, why: str) -> EventMessage:
        """All workers start again; attempts are counted from 1."""
        return cls(reasons.CRASHED, f"attempt {attempt} failed: {why}", warning=True)

    @classmethod
    def coordinator_replaced(cls) -> EventMessage:
        return cls(reasons.COORDINATOR_LOST, "the coordinator is replaced; training goes on without it meanwhile")


@dataclass(frozen=True)
class JobPlan:
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
    action_events: tuple[EventMessage, ...] = ()
    """Those among them that do not tell of the status."""
    changes: tuple[Change, ...] = ()
    """Membership changes that this status counts and the former did not."""
    wake_at: float | None = None
    """Decide again then at the latest; Unix seconds."""
    workers_wanted: int = 0
    """How many workers the job is to have, by its user or its queue."""


FAILED_GRACE = 2.0
"""Seconds for a worker that the job goes on without: it has nothing to hand over."""


LINGER_GRACE = 10.0
"""Seconds for the sidecars of a worker that has ended: they hold its devices, and may have a log to send."""


class Draft:
    """A plan in the making: the rules add to it, one after the other."""

    def __init__(self, job: Job, status: JobStatus) -> None:
        self.status = status
        self.calls: list[Call] = []
        self.written_calls: list[Call] = []
        self.recoveries: set[str] = set()
        self.actions: list[Action] = []
        self.events: list[EventMessage] = []
        self.wakes: list[float] = []
        self._job = job
        self._doomed: set[str] = set()

    def amend(self, **changes: Any) -> None:
        self.status = msgspec.structs.replace(self.status, **changes)

    def delete(self, pod: Pod, reason: str, cause: str, grace: float | None = None) -> None:
        """Delete a pod, with what it says itself or so many seconds between SIGTERM and SIGKILL."""
        if pod.uid not in self._doomed:  # the first reason counts
            self._doomed.add(pod.uid)
            self.actions.append(DeletePod(pod.name, pod.uid, reason, cause, grace))

    def end_lingering(self, pod: Pod) -> None:
        """End a pod whose worker has ended, and sidecars have not; its own grace is the worker's, and may be long.

        One that is being deleted is left alone: a kubelet waits as long as the first deletion has said.
        """
        if not pod.terminating:
            self.delete(pod, "its worker has ended, and its sidecars have not", "sidecar", LINGER_GRACE)

    def wake(self, at: float | None) -> None:
        """Decide again then; ``None``: no need."""
        if at is not None:
            self.wakes.append(at)

    @property
    def job(self) -> Job:
        """The job with the status as it is about to be written."""
        return replace(self._job, status=self.status)


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    if len(shown) > 8:
        shown = [*shown[:7], f"{len(shown) - 7} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)
