"""What a decision about a job is made of: what there is, and what follows from that at once. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from virtualflow.protocol.http_api import Status
from virtualflow_operator.api import (
    CoordinatorLink,
    Job,
    JobSpec,
    Node,
    Pod,
    Service,
)
from virtualflow_operator.jobs.admission import AT_ONCE, Admission, Admitted
from virtualflow_operator.jobs.manifests import TemplateHashes, hash_templates
from virtualflow_operator.jobs.pod_classification import PodClassification, classify_pods
from virtualflow_operator.settings import OperatorSettings


@dataclass(frozen=True)
class TemplateVerdict:
    """What the API server said about the templates with that hash."""

    template_hash: str
    at: float
    error: str = ""


@dataclass(frozen=True)
class PodEvent:
    """The latest event of a pod that does not start."""

    read_at: float
    said: str = ""
    """Its reason and message; empty: there is none, or the operator may not list events."""
    warning: bool = False


@dataclass(frozen=True, kw_only=True)
class Scene:
    job: Job
    pods: tuple[Pod, ...] = ()
    former: tuple[Pod, ...] = ()
    """Those that had ended when they were deleted, as they were last seen."""
    service: Service | None = None
    """The job's own before its coordinator."""
    orphaned_service: bool = False
    nodes: Mapping[str, Node] | None = None
    """``None``: the operator may not look at nodes."""
    link: CoordinatorLink | None = None
    verdict: TemplateVerdict | None = None
    trouble: str = ""
    """What the API server refused the last time, in words."""
    failure: str = ""
    """What it has failed to do several times in a row, in words."""
    events: Mapping[str, PodEvent] = field(default_factory=dict)
    issued: Mapping[str, float] = field(default_factory=dict)
    """When (Unix seconds) this process has issued the identities of which pods, by uid."""
    admission: Admission = AT_ONCE
    """Who says how many workers it may have."""


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """A scene at one moment, as the rules see it."""

    scene: Scene
    now: float
    settings: OperatorSettings
    admitted: Admitted
    faults: tuple[str, ...]
    """What is wrong with the specification, in sentences."""
    hashes: TemplateHashes
    pods: PodClassification
    link: CoordinatorLink | None
    """To the coordinator of the attempt under way."""

    @property
    def job(self) -> Job:
        return self.admitted.job

    @property
    def spec(self) -> JobSpec:
        return self.admitted.job.spec

    @property
    def finishing(self) -> bool:
        """Whether the training is complete and scripts go on: perhaps to another run of it."""
        done = self.remote is not None and self.remote.phase == "done" and not self.spec.suspend
        return done and any(
            not worker.pod.finished and worker.standing in ("training", "draining", "done")
            for worker in self.pods.workers
        )

    @property
    def orphans(self) -> bool:
        """Whether something of another training bears this job's labels: a deleted job of its name has left it."""
        return self.scene.orphaned_service or any(not pod.owner and pod.holds_devices for pod in self.scene.pods)

    @property
    def witnesses(self) -> list[Pod]:
        """Pods whose workers saw the end of the training and have ended, also those that are deleted since then."""
        pods = (*(worker.pod for worker in self.pods.workers), *self.scene.former)
        own = (pod for pod in pods if pod.owner == self.job.uid and pod.attempt == self.job.status.attempt)
        return [pod for pod in own if pod.finished and pod.saw_the_end]

    @property
    def shares_devices(self) -> bool:
        """Whether it computes in turns with others: then its speed says nothing of itself."""
        given = self.admitted.allocation
        return given is not None and bool(given.host or given.lodgers)

    @property
    def remote(self) -> Status | None:
        return self.link.status if self.link is not None else None

    @property
    def connected(self) -> bool:
        return self.link is not None and self.link.connected

    @property
    def rejection(self) -> str:
        """Why the API server refuses the present templates; empty: it does not, for all that is known."""
        verdict = self.scene.verdict
        current = verdict is not None and verdict.template_hash == self.hashes.all
        return verdict.error if verdict is not None and current else ""

    def overdue(self, pod: Pod) -> bool:
        """Whether a pod should have started by now, as it has a node."""
        return _starts(pod) and self.now >= pod.created + self.settings.startup_patience

    @property
    def rest(self) -> str:
        """Why the job is to have no workers, in words."""
        return self.admitted.wait.leave if self.admitted.wait is not None else "the job is suspended"

    def without_link(self) -> JobFacts:
        """The same when what the coordinator says is of an attempt that is over."""
        return replace(self, link=None)


def _starts(pod: Pod) -> bool:
    """Whether a pod has a node, and nothing says yet why none of its containers runs."""
    return pod.live and pod.phase == "Pending" and bool(pod.node) and not (pod.waiting or pod.preparing)


def gather_facts(scene: Scene, now: float, settings: OperatorSettings) -> JobFacts:
    faults = scene.job.faults
    admitted = scene.admission.admit(scene.job, sound=not faults, now=now)
    attempt = scene.job.status.attempt
    attempts = {pod.uid: pod.attempt for pod in scene.pods}
    earlier = scene.link is not None and attempts.get(scene.link.pod, attempt) != attempt
    link = None if earlier else scene.link
    hashes = hash_templates(scene.job)
    templates = None if faults else hashes.groups
    pods = classify_pods(
        admitted.job, scene.pods, nodes=scene.nodes, link=link, now=now, settings=settings, templates=templates
    )
    if not admitted.still:
        pods = admitted.placement.sort(pods, scene.nodes)
    return JobFacts(
        scene=scene,
        now=now,
        settings=settings,
        admitted=admitted,
        faults=faults,
        hashes=hashes,
        pods=pods,
        link=link,
    )
