"""The pods of a job, sorted by what is to become of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from virtualflow.calls import LostWorker, Status, WorkerStatus
from virtualflow_operator.constants import COORDINATOR, WORKER
from virtualflow_operator.disruptions import disrupted_by_cluster, find_disruption, never_began
from virtualflow_operator.resources import template_hash
from virtualflow_operator.settings import OperatorSettings
from virtualflow_operator.view import EVICTED_EXIT, Job, Link, Node, Pod, Standing

Fate = Literal[
    "healthy", "planned", "stuck", "announced", "leaving", "lost", "given-up", "left", "crashed", "disrupted", "refused"
]
"""``healthy``: one of those that the job is to have. ``planned``: to be replaced first, then relieved. ``stuck``: no
node has room, and another group may. ``announced``: to be relieved at once. ``leaving``: terminating already. ``lost``:
dead, its pod still there. ``given-up``: alive perhaps, but the coordinator went on without it. ``left``, ``crashed``,
``disrupted``, ``refused``: ended, by itself, in the user's code, by the cluster, because coordinator or kubelet would
not have it."""

LEFT = "it has left"
_HEARD: tuple[Standing, ...] = ("starting", "ready", "training", "draining")


@dataclass(frozen=True)
class Placed:
    """A worker's pod, how the coordinator sees it, and what is to become of it."""

    pod: Pod
    standing: Standing
    fate: Fate
    reason: str = ""
    incarnation: str = ""
    """Of the process that the coordinator knows; empty: none."""

    @property
    def ready(self) -> bool:
        """Whether it trains, or could at once."""
        return self.standing in ("ready", "training")


@dataclass(frozen=True)
class Survey:
    """All pods that bear a job's label."""

    workers: tuple[Placed, ...]
    """Of the attempt under way."""
    stale: tuple[Pod, ...]
    """Of earlier attempts, or of groups that the job has no more; coordinators too."""
    coordinators: tuple[Pod, ...]
    names: frozenset[str]
    """Names that are taken, also by pods of a namesake that is being deleted."""

    def of(self, *fates: Fate) -> list[Placed]:
        """Workers with one of these fates."""
        return [placed for placed in self.workers if placed.fate in fates]


def take_survey(
    job: Job,
    pods: Sequence[Pod],
    nodes: Mapping[str, Node] | None,
    link: Link | None,
    now: float,
    settings: OperatorSettings,
    *,
    changeable: bool = True,
) -> Survey:
    """Sort the pods of ``job``.

    Args:
        job: whose they are.
        pods: all that bear its label.
        nodes: by name; ``None``: the operator may not look at nodes.
        link: to the coordinator of the attempt, if there is one.
        now: Unix seconds.
        settings: the operator's.
        changeable: whether the specification makes sense; without, no pod is to go because of it.
    """
    own = [pod for pod in pods if pod.owner == job.uid]
    status = link.status if link is not None else None
    connected = link is not None and link.connected
    # One that was not asked yet may hear them all: right after an outage of the API server, all nodes look lost.
    unasked = link is not None and not connected and now < link.since + settings.coordinator_patience
    groups = {group.name: template_hash(job, group) for group in job.spec.worker_groups} if changeable else None
    workers, stale = [], []
    for pod in sorted((p for p in own if p.role == WORKER), key=lambda p: (p.group, p.ordinal)):
        if pod.attempt != job.status.attempt:
            stale.append(pod)
            continue
        known = find_worker(status, pod)
        standing: Standing = known.state if known is not None else "absent"
        heard: Standing = standing if connected else "starting" if unasked else "absent"
        fate, reason = _fate(job, pod, nodes, heard, status, now, settings, groups)
        workers.append(Placed(pod, standing, fate, reason, known.incarnation if known else ""))
    coordinators = [pod for pod in own if pod.role == COORDINATOR]
    return Survey(
        tuple(workers),
        tuple(stale + [pod for pod in coordinators if pod.attempt != job.status.attempt]),
        tuple(sorted((p for p in coordinators if p.attempt == job.status.attempt), key=lambda p: p.ordinal)),
        frozenset(pod.name for pod in pods),
    )


def find_worker(status: Status | None, pod: Pod) -> WorkerStatus | None:
    """What the coordinator says about the process in ``pod``; one of the same name elsewhere is another."""
    if status is None or not pod.ip:
        return None
    return next((w for w in status.workers if w.worker == pod.name and w.address == pod.ip), None)


def has_left(pod: Pod) -> bool:
    """Whether its worker went as it should: the others need nothing more of it."""
    spoke = pod.exit is not None and pod.exit.last_word is not None
    return pod.phase == "Succeeded" and (pod.terminating or spoke)


def _given_up(status: Status | None, pod: Pod) -> LostWorker | None:
    if status is None or not pod.ip:
        return None
    return next((lost for lost in status.lost if lost.worker == pod.name and lost.address == pod.ip), None)


def _fate(
    job: Job,
    pod: Pod,
    nodes: Mapping[str, Node] | None,
    standing: Standing,
    status: Status | None,
    now: float,
    settings: OperatorSettings,
    groups: Mapping[str, str] | None,
) -> tuple[Fate, str]:
    if has_left(pod):
        return "left", LEFT
    if pod.phase == "Succeeded":
        why = "it ended with exit code 0 before the training was complete; its script must train with vf.elastic"
        return "crashed", f"{pod.name}: {why}"
    if pod.phase == "Failed":
        fault = disrupted_by_cluster(pod)
        evicted = pod.exit is not None and pod.exit.code == EVICTED_EXIT
        if fault and not pod.terminating and (evicted or never_began(pod)):
            return "refused", fault
        return ("disrupted", fault) if fault else ("crashed", describe_crash(pod))
    node = nodes.get(pod.node) if nodes is not None else None
    disruption = find_disruption(pod, node, standing, settings.extra_taints)
    given_up = _given_up(status, pod) if standing not in _HEARD else None
    if disruption is not None and disruption.kind == "lost":
        return "lost", disruption.reason
    if pod.terminating:
        return "leaving", disruption.reason if disruption else ""
    if given_up is not None:
        return "given-up", given_up.reason
    if disruption is not None and disruption.kind == "now":
        return "announced", disruption.reason
    if disruption is not None:
        return "planned", disruption.reason
    if groups is not None and pod.group not in groups:
        return "planned", f"the job has no worker group {pod.group} any more"
    if groups is not None and pod.template != groups[pod.group]:
        return "planned", "its template has changed"
    since = pod.unschedulable_since
    if pod.unschedulable and since is not None and now >= since + settings.unschedulable_patience:
        return "stuck", pod.unschedulable
    return "healthy", ""


def describe_crash(pod: Pod) -> str:
    """Why a worker failed, in a sentence; its traceback's last lines after it, where there are any."""
    ended = pod.exit
    if ended is None:
        return f"{pod.name} failed: {pod.reason or 'no container says why'}"
    word = ended.last_word
    if word is not None and word.error:
        tail = f"\n{word.traceback.rstrip()}" if word.traceback else ""
        return f"{pod.name} failed: {word.error}{tail}"
    if ended.reason == "OOMKilled":
        return f"{pod.name} was killed for using more memory than its limit; raise resources.limits.memory"
    lines = "\n".join(ended.message.strip().splitlines()[-12:])
    return f"{pod.name} ended with exit code {ended.code}" + (f":\n{lines}" if lines else "; see its log")
