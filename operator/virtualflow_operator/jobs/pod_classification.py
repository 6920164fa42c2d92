"""The pods of a job, sorted by what is to become of them. Pure.

Facts about pods and nodes announce that a worker will be lost, or say that it is lost already. What is announced
becomes a drain before the pod dies, and costs nothing; what is lost is told to the coordinator at once, so that the
survivors need not wait for a heartbeat. Neither is ever the fault of the user's program.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from virtualflow.protocol.http_api import LostWorker, Status, WorkerStatus
from virtualflow.protocol.termination_message import EXIT_EVICTED
from virtualflow.protocol.wording import counted
from virtualflow_operator.api import CoordinatorLink, Job, Node, Pod, Standing
from virtualflow_operator.constants import COORDINATOR, TERMINATION_TAINTS, WORKER
from virtualflow_operator.settings import OperatorSettings

Fate = Literal[
    "healthy",
    "planned",
    "stuck",
    "announced",
    "leaving",
    "lost",
    "declared-lost",
    "left",
    "crashed",
    "disrupted",
    "refused",
    "unfit",
]
"""``healthy``: one of those that the job is to have. ``planned``: to be replaced first, then relieved. ``stuck``: no
node has room, and another group may. ``announced``: to be relieved at once. ``leaving``: terminating already. ``lost``:
dead, its pod still there. ``declared-lost``: alive perhaps, but the coordinator went on without it. ``left``,
``crashed``, ``disrupted``, ``refused``: ended, by itself, in the user's code, by the cluster, because coordinator or
kubelet would not have it. ``unfit``: nothing fits into its memory, and the others train on."""

LEFT = "it has left"
_HEARD: tuple[Standing, ...] = ("starting", "ready", "training", "draining")
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
"""An administrator says that the node is switched off and will not come back by itself."""

_KUBELET_REASONS = frozenset(
    {
        "Evicted",
        "NodeLost",
        "NodeShutdown",
        "Shutdown",
        "Terminated",
        "Preempting",
    }
)
"""``status.reason`` of pods that the cluster ended."""
_NOT_LET_IN = frozenset({"NodeAffinity", "UnexpectedAdmissionError"})
"""``status.reason`` of pods that a kubelet did not let in; those that lack room are ``OutOfcpu`` and the like."""
_SOON = 30.0
"""Seconds after its creation in which a pod that ends has most likely not trained."""


@dataclass(frozen=True)
class Disruption:
    kind: Literal["now", "planned", "lost"]
    """``now``: relieve it at once; ``planned``: replace it first; ``lost``: it does not train any more."""
    reason: str


def find_disruption(
    pod: Pod, node: Node | None, standing: Standing, extra_taints: Collection[str]
) -> Disruption | None:
    """What the cluster has in store for a pod that has not finished, if anything.

    Args:
        node: where it runs; ``None``: it has no node yet, or nothing is known of it.
        standing: how the coordinator sees its worker; what it hears from is not lost.
        extra_taints: keys of further taints that announce a loss.
    """
    heard = standing in ("starting", "ready", "training", "draining")
    if node is not None:
        if node.gone and not heard:
            return Disruption("lost", f"its node {pod.node} does not exist any more")
        if OUT_OF_SERVICE in node.taints:
            return Disruption("lost", f"its node {node.name} is out of service")
        if not node.ready and not node.shutting_down and not heard:
            return Disruption("lost", f"its node {node.name} is not ready")
    if pod.terminating:
        return Disruption("now", pod.disrupted or "its pod is being deleted")
    if pod.disrupted:
        return Disruption("now", pod.disrupted)
    if node is None:
        return None
    if node.gone:
        return Disruption("now", f"its node {node.name} was deleted")
    announced = [taint for taint in node.taints if taint in TERMINATION_TAINTS or taint in extra_taints]
    if announced:
        return Disruption("now", f"its node {node.name} has the taint {announced[0]}")
    if node.shutting_down:
        return Disruption("now", f"its node {node.name} is shutting down")
    if node.cordoned:
        return Disruption("planned", f"its node {node.name} is cordoned")
    return None


def never_began(pod: Pod) -> bool:
    """Whether the cluster ended a pod so soon that another one like it would most likely end in the same way."""
    if pod.exit is None:
        return pod.reason in _NOT_LET_IN or pod.reason.startswith("OutOf")
    return pod.finished_at is not None and pod.finished_at < pod.created + _SOON


def disrupted_by_cluster(pod: Pod) -> str:
    """Why the end of a failed pod was not its program's fault; empty if it was, as far as anybody can tell."""
    if pod.disrupted:
        return pod.disrupted
    if pod.reason in _KUBELET_REASONS | _NOT_LET_IN or pod.reason.startswith("OutOf"):
        return f"the cluster ended it ({pod.reason})"
    if pod.terminating:
        return "its pod was deleted"
    if pod.exit is not None and pod.exit.code == EXIT_EVICTED:
        word = pod.exit.last_word
        why = f"the coordinator refused it: {word.reason}" if word and word.reason else "the coordinator refused it"
        return f"{why}\n{word.traceback}" if word and word.traceback else why
    if pod.exit is not None and pod.exit.last_word is not None and pod.exit.last_word.kind == "ended":
        return "the job ended without it"
    if pod.exit is None:
        return "its containers never ended by themselves"
    return ""


# --- what becomes of each pod -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClassifiedPod:
    """A worker's pod, how the coordinator sees it, and what is to become of it."""

    pod: Pod
    standing: Standing
    fate: Fate
    reason: str = ""
    """Why, in one line."""
    detail: str = ""
    """More lines, such as a traceback's."""
    outdated: bool = False
    """Whether it is to be replaced because the job has changed, and not because of its node."""
    incarnation: str = ""
    """Of the process that the coordinator knows; empty: none."""
    given_up: bool = False
    """Whether it is declared lost because its training thread hangs, or a fault of its machine has ended it."""
    convicted: bool = False
    """Whether it came to wrong gradients or a wrong state, as other workers have found: its node is in doubt."""
    kind: str = ""
    """Of device that it is on, or was made for, where the job's queue tells them apart."""
    misplaced: bool = False
    """Whether it is to be replaced because the queue gives the job other kinds of device."""

    @property
    def ready(self) -> bool:
        """Whether it trains, or could at once."""
        return self.standing in ("ready", "training")

    @property
    def message(self) -> str:
        """Why, in full, and where if that is what matters."""
        said = f"{self.reason}\n{self.detail}" if self.detail else self.reason
        return f"{self.pod.name} on node {self.pod.node}: {said}" if self.convicted else said

    @property
    def counts(self) -> bool:
        """Whether it counts as a crash that the coordinator goes on without it: it hangs, was found to be wrong, or has
        told of a fault of its machine.
        """
        return self.fate == "declared-lost" and (self.given_up or self.convicted)


@dataclass(frozen=True)
class PodClassification:
    workers: tuple[ClassifiedPod, ...]
    """Of the attempt under way."""
    stale: tuple[Pod, ...]
    """Of earlier attempts, or of groups that the job has no more; coordinators too."""
    coordinators: tuple[Pod, ...]
    names: frozenset[str]
    """Names that are taken, also by pods of a namesake that is being deleted."""

    def of(self, *fates: Fate) -> list[ClassifiedPod]:
        return [worker for worker in self.workers if worker.fate in fates]


@dataclass(frozen=True)
class _Surroundings:
    """What the fate of a pod depends on, beside itself."""

    nodes: Mapping[str, Node] | None
    status: Status | None
    now: float
    settings: OperatorSettings
    templates: Mapping[str, str] | None
    """The hash of each group's template; ``None``: no pod is to go because of its template."""


class _Finding(NamedTuple):
    fate: Fate
    reason: str = ""
    outdated: bool = False
    given_up: bool = False


def classify_pods(
    job: Job,
    pods: Sequence[Pod],
    *,
    nodes: Mapping[str, Node] | None,
    link: CoordinatorLink | None,
    now: float,
    settings: OperatorSettings,
    templates: Mapping[str, str] | None,
) -> PodClassification:
    """Sort the pods of ``job``.

    Args:
        nodes: by name; ``None``: the operator may not look at nodes.
        link: to the coordinator of the attempt, if there is one.
        templates: the hash of each group's template; ``None``: no pod is to go because of its template.
    """
    own = [pod for pod in pods if pod.owner == job.uid]
    status = link.status if link is not None else None
    connected = link is not None and link.connected
    # One that was not asked yet may hear them all: right after an outage of the API server, all nodes look lost.
    unasked = link is not None and not connected and now < link.since + settings.coordinator_patience
    around = _Surroundings(nodes, status, now, settings, templates)
    workers, stale = [], []
    for pod in sorted((p for p in own if p.role == WORKER), key=lambda p: (p.group, p.ordinal)):
        if pod.attempt != job.status.attempt:
            stale.append(pod)
            continue
        known = find_worker(status, pod)
        standing: Standing = known.state if known is not None else "absent"
        heard: Standing = standing if connected else "starting" if unasked else "absent"
        found = _find_fate(pod, heard, around)
        reason, _, detail = found.reason.partition("\n")
        incarnation = known.incarnation if known is not None else ""
        fate, outdated = found.fate, found.outdated
        given_up, convicted = found.given_up, _is_convicted(status, pod)
        workers.append(ClassifiedPod(pod, standing, fate, reason, detail, outdated, incarnation, given_up, convicted))
    coordinators = [pod for pod in own if pod.role == COORDINATOR]
    return PodClassification(
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


def _declared_lost(status: Status | None, pod: Pod) -> LostWorker | None:
    if status is None or not pod.ip:
        return None
    return next((lost for lost in status.lost if lost.worker == pod.name and lost.address == pod.ip), None)


def _is_convicted(status: Status | None, pod: Pod) -> bool:
    """By the coordinator's word, or by its own: the coordinator may be gone."""
    lost, word = _declared_lost(status, pod), pod.exit.last_word if pod.exit is not None else None
    return (lost is not None and lost.convicted) or (word is not None and word.convicted)


def _too_small(status: Status | None, pod: Pod) -> str:
    """Why nothing fits into its memory and what would, likewise; empty: it does not say so."""
    lost, word = _declared_lost(status, pod), pod.exit.last_word if pod.exit is not None else None
    if lost is not None and lost.does_not_fit:
        return lost.reason
    return word.error or "" if word is not None and word.does_not_fit else ""


def _find_fate(pod: Pod, standing: Standing, around: _Surroundings) -> _Finding:
    too_small = _too_small(around.status, pod)
    if too_small:
        return _Finding("unfit", too_small)
    if pod.finished:
        made = around.status.earlier_steps + around.status.step if around.status is not None else 0
        return _find_end(pod, made)
    node = around.nodes.get(pod.node) if around.nodes is not None else None
    disruption = find_disruption(pod, node, standing, around.settings.extra_taints)
    declared_lost = _declared_lost(around.status, pod) if standing not in _HEARD else None
    if disruption is not None and disruption.kind == "lost":
        return _Finding("lost", disruption.reason)
    if pod.terminating:
        return _Finding("leaving", disruption.reason if disruption else "")
    if declared_lost is not None:
        given_up = declared_lost.hung or declared_lost.machine_fault
        return _Finding("declared-lost", declared_lost.reason, given_up=given_up)
    if disruption is not None:
        return _Finding("announced" if disruption.kind == "now" else "planned", disruption.reason)
    templates = around.templates
    if templates is not None and pod.group not in templates:
        return _Finding("planned", f"the job has no worker group {pod.group} any more", outdated=True)
    if templates is not None and pod.template != templates[pod.group]:
        return _Finding("planned", "its template has changed", outdated=True)
    since = pod.unschedulable_since
    if pod.unschedulable and since is not None and around.now >= since + around.settings.unschedulable_patience:
        return _Finding("stuck", pod.unschedulable)
    return _Finding("healthy")


def _find_end(pod: Pod, made: int) -> _Finding:
    """How a pod has ended, whose job has ``made`` so many steps."""
    if has_left(pod):
        return _Finding("left", LEFT)
    if pod.phase == "Succeeded":
        why = f"{pod.name}: it ended with exit code 0 before the training was complete"
        hidden = "a wrapper (sh -c, | tee) may have hidden how; let it exec the script, or set -o pipefail"
        if not made:  # or none has been told of yet
            return _Finding("crashed", f"{why}; its script must train with vf.elastic, or {hidden}")
        return _Finding("crashed", f"{why}, after {counted(made, 'step')}; {hidden}")
    fault = disrupted_by_cluster(pod)
    if not fault:
        return _Finding("crashed", describe_crash(pod))
    evicted = pod.exit is not None and pod.exit.code == EXIT_EVICTED
    again = not pod.terminating and (evicted or never_began(pod))
    return _Finding("refused" if again else "disrupted", fault)


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
    return f"{pod.name} ended with exit code {ended.code}{_signal(ended.code)}" + (
        f":\n{lines}" if lines else "; see its log"
    )


def _signal(code: int) -> str:
    """The signal that an exit code tells of, as shells and container runtimes say it; empty: none."""
    try:
        return f" ({signal.Signals(code - 128).name})" if code > 128 else ""
    except ValueError:
        return ""
