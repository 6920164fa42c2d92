"""What every decision about a job is made of, and how it collects what is to be done.

Common ground of ``reconcile``: news for the coordinator, deletions, notices, the status as it is. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from virtualflow.calls import Status
from virtualflow_operator import outlook, phases, reasons, resources
from virtualflow_operator.granting import Grant, settle_grant, with_allocation
from virtualflow_operator.job_status import JobStatus
from virtualflow_operator.notices import notices_of
from virtualflow_operator.plan import Action, Call, DeletePod, Notice, Plan, TellDrain, TellGone
from virtualflow_operator.pod_security import violations
from virtualflow_operator.queue_view import QueueSpec
from virtualflow_operator.settings import OperatorSettings
from virtualflow_operator.survey import LEFT, Placed, Survey, has_left, take_survey
from virtualflow_operator.validation import immutable_changes, validate
from virtualflow_operator.view import Job, Link, Node, Pod, Service, Standing
from virtualflow_operator.workforce import Workforce

FAILED_GRACE = 2.0
"""Seconds for a worker that the job goes on without: it has nothing to hand over."""
_RELIEVED: tuple[Standing, ...] = ("starting", "ready", "training")
"""Workers that may need to be told that they will be taken away."""
_PRESENT: tuple[Standing, ...] = ("starting", "ready", "training", "draining", "silent")
"""Workers that the coordinator counts on, or waits for."""


@dataclass(frozen=True)
class Verdict:
    """What the API server said about the templates with that hash."""

    template_hash: str
    at: float
    error: str = ""


@dataclass(frozen=True)
class Scene:
    """All that a decision about a job is made of."""

    job: Job
    pods: tuple[Pod, ...] = ()
    """All that bear the job's label."""
    former: tuple[Pod, ...] = ()
    """Those that had ended when they were deleted, as they were last seen."""
    service: Service | None = None
    nodes: Mapping[str, Node] | None = None
    """``None``: the operator may not look at nodes."""
    link: Link | None = None
    verdict: Verdict | None = None
    trouble: str = ""
    """What the API server refused the last time, in words."""
    grant: Grant | None = None
    """What the job's queue has decided, if it has one."""
    queue: QueueSpec | None = None
    """The job's queue, if there is one of that name."""


class Decision:
    """One decision; its steps share what it is made of and collect what is to be done."""

    def __init__(self, scene: Scene, now: float, settings: OperatorSettings) -> None:
        self.scene, self.now, self.settings = scene, now, settings
        self.granted = settle_grant(scene.job, scene.grant)
        self.job, self.status = self.granted.job, self.granted.status
        self.spec = self.job.spec
        self.faults = self.find_faults()
        attempts = {pod.uid: pod.attempt for pod in scene.pods}
        earlier = scene.link is not None and attempts.get(scene.link.pod, self.status.attempt) != self.status.attempt
        self.link = None if earlier else scene.link
        self.survey: Survey = take_survey(
            self.job, scene.pods, scene.nodes, self.link, now, settings, changeable=not self.faults
        )
        self.connected = self.link is not None and self.link.connected
        self.remote: Status | None = self.link.status if self.link is not None else None
        self.calls: list[Call] = []
        self.actions: list[Action] = []
        self.notices: list[Notice] = []
        self.wakes: list[float] = []
        self.doomed: set[str] = set()
        """Uids of the pods that this decision deletes."""

    def plan(self, status: JobStatus) -> Plan:
        """All that was collected, with the job's next status."""
        changes = outlook.fresh_changes(self.job.status, self.remote) if not self.job.status.finished else []
        status = with_allocation(status, self.job, self.granted, self.now)
        self.notices += notices_of(self.job.status, status, changes)
        return Plan(
            msgspec.structs.replace(status, observed_generation=self.job.generation),
            tuple(self.calls),
            tuple(self.actions),
            tuple(self.notices),
            tuple(changes),
            min((wake for wake in self.wakes if wake > self.now), default=None),
        )

    def tell(self) -> None:
        """Losses that are announced become drains, those that have happened are told at once."""
        if not self.connected:
            return
        for placed in self.survey.of("lost", "left", "crashed", "disrupted", "refused"):
            if placed.standing in _PRESENT:
                reason = placed.reason.splitlines()[0]
                trained = placed.fate != "left" and placed.standing in ("training", "draining")
                self.calls.append(TellGone(placed.pod.name, placed.incarnation, reason[:400], trained))
                if placed.fate != "left":
                    self.notice(reasons.LOST, f"{placed.pod.name} is lost: {reason}", warning=True)
        names = {pod.name for pod in self.scene.pods}
        # The coordinator's word that one has left may come later than the news that its pod is deleted.
        left = {(pod.name, pod.ip) for pod in self.scene.former if has_left(pod)}
        for worker in self.remote.workers if self.remote is not None else ():
            if worker.worker in names or worker.state not in _PRESENT:
                continue
            if (worker.worker, worker.address) in left:
                self.calls.append(TellGone(worker.worker, worker.incarnation, LEFT))
                continue
            trained = worker.state in ("training", "draining")
            reason = "its pod does not exist any more"  # it was deleted by force
            self.calls.append(TellGone(worker.worker, worker.incarnation, reason, trained))
            self.notice(reasons.LOST, f"{worker.worker} is lost: {reason}", warning=True)
        going = self.survey.of("leaving", "announced")
        for placed in going:
            self.drain([placed], placed.reason)

    def drain(self, leaving: Sequence[Placed], reason: str) -> None:
        """Tell the coordinator that it will lose these workers, unless it knows."""
        told = [placed for placed in leaving if placed.standing in _RELIEVED]
        if not told or not self.connected:
            return
        graces = [placed.pod.deleting_at - self.now for placed in told if placed.pod.deleting_at is not None]
        deadline = min(graces, default=float(self.spec.elasticity.drain_grace_seconds))
        names = tuple(placed.pod.name for placed in told)
        before = self.calls[-1] if self.calls else None
        if isinstance(before, TellDrain) and before.reason == reason[:400]:
            # One call for all that leave for one reason: they leave by one change.
            names, deadline = before.workers + names, min(before.deadline, deadline)
            self.calls.pop()
            self.notices.pop()
        self.calls.append(TellDrain(names, max(deadline, 0.0), reason[:400]))
        self.notice(reasons.DRAINING, f"draining {listed(names)}: {reason}")

    def clean(self) -> None:
        """Delete the pods of workers that have ended, or that the job goes on without."""
        for placed in self.survey.of("announced"):
            self.delete(placed.pod, placed.reason, "drain")
        for placed in self.survey.of("lost", "given-up"):
            if not placed.pod.terminating:
                self.delete(placed.pod, placed.reason, "lost", FAILED_GRACE)
        for placed in self.survey.of("left", "disrupted", "crashed", "refused"):
            counted = placed.fate not in ("crashed", "refused") or placed.pod.uid in self.status.failures.counted
            if counted and not placed.pod.terminating and not self.ends_job(placed):
                self.delete(placed.pod, placed.reason.splitlines()[0], placed.fate)

    def ends_job(self, placed: Placed) -> bool:
        """Whether that worker saw the end of the training: then its pod and its log stay."""
        word = placed.pod.exit.last_word if placed.pod.exit is not None else None
        return word is not None and word.kind == "done"

    def delete(self, pod: Pod, reason: str, cause: str, grace: float | None = None) -> None:
        """Delete a pod, with what it says itself or so many seconds between SIGTERM and SIGKILL."""
        if pod.uid not in self.doomed:  # the first reason counts
            self.doomed.add(pod.uid)
            self.actions.append(DeletePod(pod.name, pod.uid, reason, cause, grace))

    def notice(self, reason: str, message: str, *, warning: bool = False) -> None:
        """Tell people something, as an event."""
        self.notices.append(Notice(reason, message, warning))

    def step(self) -> int:
        """The step that the job is known to have reached."""
        return outlook.known_step(self.status, self.remote) or 0

    def find_faults(self) -> list[str]:
        """What is wrong with the specification, in sentences."""
        raw: Mapping[str, Any] = self.job.raw.get("spec") or {}
        fixed = {"virtualNodes": self.status.virtual_nodes, "reproducibility": self.status.reproducibility}
        faults = validate(raw, self.job.name) or ([self.job.fault] if self.job.fault else [])
        faults += immutable_changes(raw, {key: value for key, value in fixed.items() if value is not None})
        if faults:
            return faults
        # The pods as they would be made: what the user may not have, the operator must not make for them.
        for group in self.spec.worker_groups:
            pod = resources.worker_pod(self.job, group, 0, "127.0.0.1", self.settings)
            found = violations(pod, self.settings.pod_security)
            faults += [f"worker group {group.name}: {text}" for text in found]
        found = violations(resources.coordinator_pod(self.job, 0, self.settings), self.settings.pod_security)
        return faults + [f"coordinator: {text}" for text in found]

    @property
    def rest(self) -> str:
        """Why the job is to have no workers, in words."""
        return f"the queue {self.spec.queue} gives it none" if self.granted.waits else "the job is suspended"

    def settled_job(self) -> Job:
        """The job with the status as it is about to be written."""
        job = self.job
        return Job(job.namespace, job.name, job.uid, job.generation, job.spec, self.status, job.raw)

    def portray(self, workforce: Workforce | None = None) -> JobStatus:
        """The status, from all that is known now."""
        trouble = self.scene.trouble
        verdict = self.scene.verdict
        if verdict is not None and verdict.error and verdict.template_hash == resources.templates_hash(self.job):
            trouble = verdict.error
            rejected = True
        else:
            rejected = False
        status = outlook.portray(
            self.settled_job(), self.survey, self.scene.nodes, self.link, workforce, trouble, rejected, self.now
        )
        limit = self.granted.limit
        return phases.limited(status, self.job, limit, self.now) if limit else status


def listed(names: Iterable[str]) -> str:
    """Names as a sentence has them, however many there are."""
    shown = list(names)
    if len(shown) > 8:
        shown = [*shown[:7], f"{len(shown) - 7} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)
