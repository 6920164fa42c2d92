"""What a decision about a job is made of: what there is, and what follows from that at once. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from virtualflow.protocol.http_api import Status
from virtualflow_operator.api import (
    Job,
    JobSpec,
    Link,
    Node,
    Pod,
    QueueSpec,
    Service,
    find_problems,
)
from virtualflow_operator.jobs import template_hashes
from virtualflow_operator.jobs.device_kinds import sort_by_kind
from virtualflow_operator.jobs.lodging import sort_by_host
from virtualflow_operator.jobs.pod_classification import PodClassification, classify_pods
from virtualflow_operator.queues import Grant, Granted, Kueue, settle_admission, settle_grant
from virtualflow_operator.settings import OperatorSettings


@dataclass(frozen=True)
class Verdict:
    """What the API server said about the templates with that hash."""

    template_hash: str
    at: float
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """All that is known of a job."""

    job: Job
    pods: tuple[Pod, ...] = ()
    """All that bear the job's label."""
    former: tuple[Pod, ...] = ()
    """Those that had ended when they were deleted, as they were last seen."""
    service: Service | None = None
    nodes: Mapping[str, Node] | None = None
    """``None``: the operator may not look at nodes."""
    crowds: Mapping[str, int] = field(default_factory=dict)
    """Workers of all jobs on each node where the job has pods, if its queue wants nodes to fall idle."""
    link: Link | None = None
    verdict: Verdict | None = None
    trouble: str = ""
    """What the API server refused the last time, in words."""
    grant: Grant | None = None
    """What the job's queue has decided, if it has one."""
    queue: QueueSpec | None = None
    """The job's queue, if there is one of that name."""
    host_nodes: frozenset[str] = frozenset()
    """Where workers are of the job on whose devices its queue has it compute, if so."""
    kueue: Kueue | None = None
    """What is known of Kueue, if that concerns the job."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A scene at one moment, as the rules see it."""

    scene: Scene
    now: float
    settings: OperatorSettings
    asked: Job
    """The job as it is without Kueue: what Kueue is asked for."""
    granted: Granted
    faults: tuple[str, ...]
    """What is wrong with the specification, in sentences."""
    pods: PodClassification
    link: Link | None
    """To the coordinator of the attempt under way."""

    @property
    def job(self) -> Job:
        """The job as its queue lets it be."""
        return self.granted.job

    @property
    def spec(self) -> JobSpec:
        """Its specification."""
        return self.granted.job.spec

    @property
    def finishing(self) -> bool:
        """Whether the training is complete and scripts go on: perhaps to another run of it."""
        done = self.remote is not None and self.remote.phase == "done" and not self.spec.suspend
        return done and any(
            not worker.pod.finished and worker.standing in ("training", "draining", "done")
            for worker in self.pods.workers
        )

    @property
    def kinds(self) -> Mapping[str, int]:
        """Workers that it is to have of each kind of device, where its queue tells them apart."""
        return self.granted.kinds if self.scene.queue is not None and self.scene.queue.kinds else {}

    @property
    def host(self) -> str:
        """Namespace and name of the job on whose devices it is to compute; empty: on its own."""
        given = self.granted.status.allocation
        return given.host if given is not None else ""

    @property
    def shares_devices(self) -> bool:
        """Whether it computes in turns with others: then its speed says nothing of itself."""
        given = self.granted.status.allocation
        return given is not None and bool(given.host or given.lodgers)

    @property
    def still(self) -> bool:
        """Whether no pod may be made at present: it is not known where and how many.

        So it is for a moment when a queue is given kinds of device, or other names for them, or when its jobs are to
        share no devices any more.
        """
        if self.host and (self.scene.queue is None or self.scene.queue.jobs_per_device < 2):
            return True
        named = {kind.name for kind in self.scene.queue.kinds} if self.scene.queue is not None else set()
        undecided = bool(named) and not (self.granted.kinds and self.granted.kinds.keys() <= named)
        return self.granted.still or (undecided and not self.spec.suspend)

    @property
    def remote(self) -> Status | None:
        """What the coordinator said last."""
        return self.link.status if self.link is not None else None

    @property
    def connected(self) -> bool:
        """Whether the coordinator is to be reached."""
        return self.link is not None and self.link.connected

    @property
    def rejection(self) -> str:
        """Why the API server refuses the present templates; empty: it does not, for all that is known."""
        verdict = self.scene.verdict
        current = verdict is not None and verdict.template_hash == template_hashes.templates_hash(self.job)
        return verdict.error if verdict is not None and current else ""

    @property
    def rest(self) -> str:
        """Why the job is to have no workers, in words."""
        if self.granted.kueue and self.granted.waits:
            return self.granted.waits
        return f"the queue {self.spec.queue} gives it none" if self.granted.waits else "the job is suspended"

    def without_link(self) -> Facts:
        """The same when what the coordinator says is of an attempt that is over."""
        return replace(self, link=None)


def gather_facts(scene: Scene, now: float, settings: OperatorSettings) -> Facts:
    """See what follows from a scene."""
    faults = tuple([scene.job.fault] if scene.job.fault else find_problems(scene.job.spec))
    granted = asked = settle_grant(scene.job, scene.grant)
    if scene.kueue is not None:
        shape = None if faults else template_hashes.pod_sets_hash(scene.job)
        granted = settle_admission(asked, scene.kueue, shape, now)
    attempt = granted.status.attempt
    attempts = {pod.uid: pod.attempt for pod in scene.pods}
    earlier = scene.link is not None and attempts.get(scene.link.pod, attempt) != attempt
    link = None if earlier else scene.link
    pods = classify_pods(
        granted.job, scene.pods, nodes=scene.nodes, link=link, now=now, settings=settings, changeable=not faults
    )
    facts = Facts(
        scene=scene,
        now=now,
        settings=settings,
        asked=asked.job,
        granted=granted,
        faults=faults,
        pods=pods,
        link=link,
    )
    if facts.still:
        return facts
    pods = sort_by_kind(pods, facts.kinds, scene.queue, scene.nodes)
    return replace(facts, pods=sort_by_host(pods, facts.host, scene.host_nodes))
