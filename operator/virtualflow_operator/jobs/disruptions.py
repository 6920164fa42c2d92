"""Which facts about pods and nodes announce that a worker will be lost, or say that it is lost already.

Pure. What is announced becomes a drain before the pod dies, and costs nothing; what is lost is told to the coordinator
at once, so that the survivors need not wait for a heartbeat. Neither is ever the fault of the user's program.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from virtualflow.protocol.termination_message import EXIT_EVICTED
from virtualflow_operator.api import Node, Pod, Standing
from virtualflow_operator.constants import TERMINATION_TAINTS

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
    """A worker will be lost, or is."""

    kind: Literal["now", "planned", "lost"]
    """``now``: relieve it at once; ``planned``: replace it first; ``lost``: it does not train any more."""
    reason: str


def find_disruption(
    pod: Pod, node: Node | None, standing: Standing, extra_taints: Collection[str]
) -> Disruption | None:
    """What the cluster has in store for a pod that has not finished, if anything.

    Args:
        pod: not finished.
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
