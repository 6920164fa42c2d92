"""Admission by a queue of ours: as many workers as its latest decision gives the job, where it gives them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from virtualflow_operator import reasons
from virtualflow_operator.api import (
    AllocationStatus,
    Job,
    Node,
    Object,
    OfKind,
    Pod,
    QueueSpec,
    WorkerGroup,
    format_time,
)
from virtualflow_operator.constants import ON_DEMAND
from virtualflow_operator.jobs.admission import (
    Admission,
    AdmissionWait,
    Admitted,
    Placement,
    with_workers,
    without_workers,
)
from virtualflow_operator.jobs.node_fit import is_made_for
from virtualflow_operator.jobs.pod_classification import ClassifiedPod, PodClassification
from virtualflow_operator.jobs.worker_plan import NewWorker
from virtualflow_operator.queues.kinds import kind_of
from virtualflow_operator.queues.members import Grant, known_grant
from virtualflow_operator.queues.worker_pods import choose_grounds, confine, lodge, take_turns, tells_apart


@dataclass(frozen=True)
class QueueAdmission(Admission):
    grant: Grant | None = None
    """The latest decision, if this operator has made one."""
    queue: QueueSpec | None = None
    """``None``: there is no queue of that name."""
    host_nodes: frozenset[str] = frozenset()
    """Where workers are of the job on whose devices this one is to compute, if so."""
    crowds: Mapping[str, int] = field(default_factory=dict)
    """Workers of all jobs on each node where the job has pods, if the queue wants nodes to fall idle."""
    turns_directory: str = ""
    """Where on a node its turn server listens."""

    def admit(self, job: Job, *, sound: bool, now: float) -> Admitted:
        """Say what the queue lets the job have; until it has decided, a job that runs goes on as it is."""
        status = job.status
        if status.finished:
            return Admitted(job, reason=reasons.FINISHED)
        grant = self.grant if self.grant is not None and self.grant.uid == job.uid else None
        if grant is None and status.allocation is not None:
            grant = known_grant(job, 0.0)
        if grant is None and status.replicas and not job.spec.suspend:
            placement = QueuePlacement(self, {}, "")
            message = "Its queue has not decided yet."
            return Admitted(job, placement, reason=reasons.QUEUED, message=message, still=placement.undecided)
        if grant is None:
            why = "its queue has not decided yet"
            return Admitted(without_workers(job), wait=_wait(job, why), reason=reasons.QUEUED, message=why)
        wait = None
        if grant.workers:
            given = with_workers(job, grant.workers)
        elif job.spec.suspend:
            given = job
        else:
            given, wait = without_workers(job), _wait(job, grant.reason)
        placement = QueuePlacement(self, dict(grant.kinds) if grant.workers else {}, grant.host)
        still = placement.unhosted or (placement.undecided and not given.spec.suspend)
        return Admitted(given, placement, wait, _write(grant), grant.code, still=still)


@dataclass(frozen=True)
class QueuePlacement(Placement):
    by: QueueAdmission
    kinds: Mapping[str, int]
    """Workers that the job is to have of each kind of device, its own kind first; empty: that is not decided."""
    host: str
    """Namespace and name of the job on whose devices it is to compute; empty: on its own."""

    @property
    def crowds(self) -> Mapping[str, int]:
        return self.by.crowds

    @property
    def kinds_differ(self) -> bool:
        return self.by.queue is not None and bool(self.by.queue.kinds)

    @property
    def undecided(self) -> bool:
        """Whether the queue has kinds of device, or other names for them, and has not decided about the job since."""
        named = {kind.name for kind in self.by.queue.kinds} if self.by.queue is not None else set()
        return bool(named) and not (self.kinds and self.kinds.keys() <= named)

    @property
    def unhosted(self) -> bool:
        """Whether the job is on devices of another one, and its queue has jobs share devices no more."""
        return bool(self.host) and not self._in_turns

    @property
    def _in_turns(self) -> bool:
        return self.by.queue is not None and self.by.queue.jobs_per_device > 1

    @property
    def _given(self) -> Mapping[str, int]:
        return self.kinds if self.kinds_differ else {}

    def sort(self, pods: PodClassification, nodes: Mapping[str, Node] | None) -> PodClassification:
        """Note who is on another kind of device, or on other devices, than the queue gives the job."""
        pods = sort_by_kind(pods, self._given, self.by.queue, nodes)
        return sort_by_host(pods, self.host, self.by.host_nodes)

    def find_lacking(
        self, workers: Sequence[ClassifiedPod], groups: Sequence[WorkerGroup], nodes: Mapping[str, Node] | None
    ) -> tuple[Sequence[str], Collection[tuple[str, str]]]:
        lacking = lacking_kinds(self._given, workers)
        apart = (
            unsuitable([*self._given], groups, self.by.queue, nodes) if self.by.queue is not None and lacking else ()
        )
        return lacking, apart

    def place_workers(
        self, made: Sequence[tuple[NewWorker, Object]], job: Job, workers: Sequence[ClassifiedPod]
    ) -> None:
        """Confine new workers to the queue's nodes, to their kind of device, and beside their host."""
        queue = self.by.queue
        if queue is None:
            return
        apart = tells_apart(job.spec, queue)
        grounds = choose_grounds(len(made), job.spec, workers) if apart else [""] * len(made)
        for (worker, pod), ground in zip(made, grounds, strict=True):
            confine(pod, queue, ground, worker.kind)
            self.complete_template(pod)
            if self.host and queue.resource is not None:
                lodge(pod, job, self.host, queue.resource)

    def complete_template(self, pod: Object) -> None:
        """Tell a worker of its node's turn server, where jobs of the queue share devices."""
        if self._in_turns:
            take_turns(pod, self.by.turns_directory)


def _wait(job: Job, why: str) -> AdmissionWait:
    queue = job.spec.queue
    return AdmissionWait(
        f"the queue {queue} has no workers for it: {why}",
        f"the queue {queue} gives it none",
        "for workers of its queue",
        reasons.QUEUED,
    )


def _write(grant: Grant) -> AllocationStatus:
    return AllocationStatus(
        grant.queue,
        grant.workers,
        grant.reason,
        format_time(grant.since),
        format_time(grant.resized),
        int(grant.waited),
        grant.kind,
        tuple(OfKind(*share) for share in grant.kinds),
        grant.host,
        grant.lodgers,
    )


# --- which of a job's workers are where its queue does not have them, and who is lacking there ------------------------
#
# A queue gives a job so many workers of each kind of device, on devices of its own or of another job. The others are
# replaced: the successor comes first, and takes part before they leave.


def kind_of_pod(pod: Pod, queue: QueueSpec, nodes: Mapping[str, Node] | None) -> str:
    """The kind of the node that a pod is on, or what it was made for while it has none; empty: of none."""
    node = (nodes or {}).get(pod.node)
    return pod.kind if node is None or node.gone else kind_of(queue, node.labels) or ""


def sort_by_kind(
    pods: PodClassification, given: Mapping[str, int], queue: QueueSpec | None, nodes: Mapping[str, Node] | None
) -> PodClassification:
    """Note the kind of each worker, and that those are to be replaced of which the queue gives the job no more.

    Args:
        given: how many workers it is to have of each kind; empty: that is not decided, or it is to have none.
        nodes: by name; ``None``: the operator may not look at nodes.
    """
    if queue is None or not queue.kinds:
        return pods
    workers = tuple(replace(worker, kind=kind_of_pod(worker.pod, queue, nodes)) for worker in pods.workers)
    if not given:
        return replace(pods, workers=workers)
    left, misplaced = dict(given), set()
    for worker in sorted((w for w in workers if w.fate in ("healthy", "stuck")), key=_worth_keeping, reverse=True):
        if left.get(worker.kind, 0):
            left[worker.kind] -= 1
        else:
            misplaced.add(worker.pod.uid)
    lacks = sum(left.values())
    return replace(
        pods,
        workers=tuple(
            # Of a kind that the job is to have, those beyond are only too many if no other is lacking.
            _misplaced(w) if w.pod.uid in misplaced and (lacks or w.kind not in given) else w
            for w in workers
        ),
    )


def sort_by_host(pods: PodClassification, host: str, nodes: Collection[str]) -> PodClassification:
    """Note that those workers are to be replaced which are not on the devices that the queue gives the job.

    Args:
        host: namespace and name of the job on whose devices it is to compute; empty: on its own.
        nodes: where workers of the host are; empty: that is not known, and nobody goes because of it.
    """
    return replace(pods, workers=tuple(_placed(worker, host, nodes) for worker in pods.workers))


def _placed(worker: ClassifiedPod, host: str, nodes: Collection[str]) -> ClassifiedPod:
    pod = worker.pod
    away = bool(host and nodes and pod.node) and pod.node not in nodes
    if worker.fate not in ("healthy", "stuck") or (pod.host == host and not away):
        return worker
    reason = f"its queue has it compute on devices of {host}" if host else "its queue gives the job devices of its own"
    return replace(worker, fate="planned", reason=reason, misplaced=True)


def lacking_kinds(given: Mapping[str, int], workers: Sequence[ClassifiedPod]) -> list[str]:
    """The kind of each worker that the job lacks of what its queue gives it; its own kind first."""
    have = [worker.kind for worker in workers if worker.fate == "healthy"]
    return [kind for kind, count in given.items() for _ in range(count - have.count(kind))]


def unsuitable(
    kinds: Sequence[str], groups: Sequence[WorkerGroup], queue: QueueSpec, nodes: Mapping[str, Node] | None
) -> frozenset[tuple[str, str]]:
    """Worker groups, and kinds of device on which their templates may not be."""
    there: dict[str, list[Node]] = {kind: [] for kind in kinds}
    for node in (nodes or {}).values():
        covered = queue.node_selector is None or queue.node_selector.selects(node.labels)
        kind = kind_of(queue, node.labels) if covered and not node.gone else None
        if kind in there:
            there[kind].append(node)
    return frozenset(
        (group.name, kind)
        for kind, of in there.items()
        for group in groups
        if not is_made_for(group.template.get("spec") or {}, of)
    )


def _misplaced(worker: ClassifiedPod) -> ClassifiedPod:
    return replace(worker, fate="planned", reason="its queue gives the job another kind of device", misplaced=True)


def _worth_keeping(worker: ClassifiedPod) -> tuple[bool, bool, bool, bool, int]:
    """Sort key: who rather stays, last."""
    pod = worker.pod
    return worker.fate == "healthy", worker.ready, bool(pod.node), pod.ground == ON_DEMAND, -pod.ordinal
