"""Nothing begins beside a training: a new coordinator is told who may still be in one.

The first coordinator process of an attempt may begin with whoever comes. That it may is written into the status before
it is told, by the number of the process; so what takes its place, in another pod or in the same one, is known to do so
whatever this operator has missed. It begins nothing before all pods that may train have reached it or have ended.
"""

from __future__ import annotations

from virtualflow_operator.api import Pod
from virtualflow_operator.jobs.disruptions import find_disruption
from virtualflow_operator.jobs.scene import Facts


def unheard(facts: Facts) -> list[str]:
    """Names of pods that may train, and that a coordinator waits for which knows of no training."""
    remote, first = facts.remote, facts.job.status.start_ticket
    if not facts.connected or remote is None or remote.start_ticket is None or first is None:
        return []
    here = {(worker.worker, worker.address) for worker in remote.workers if worker.state != "silent"}
    pods = may_train(facts, of_this_attempt=first != remote.start_ticket)
    return [pod.name for pod in pods if (pod.name, pod.ip) not in here]


def may_train(facts: Facts, *, of_this_attempt: bool) -> list[Pod]:
    """Pods that may be in a generation, or whose coordinator may let others begin.

    Args:
        facts: what there is.
        of_this_attempt: whether those of the attempt under way may, and not only those of former ones.
    """
    pods = list(facts.pods.stale)
    if of_this_attempt:
        present = facts.link.pod if facts.link is not None else ""
        pods += [worker.pod for worker in facts.pods.workers]
        pods += [pod for pod in facts.pods.coordinators if pod.uid != present]
    return [pod for pod in pods if _may_run(pod, facts)]


def _may_run(pod: Pod, facts: Facts) -> bool:
    """Whether a process of that pod may be alive, as far as it is not taken for lost (see ``losses``)."""
    if pod.finished or not pod.node or pod.waiting:
        return False
    if pod.deleting_at is not None and facts.now >= pod.deleting_at:
        return False
    disruption = find_disruption(pod, (facts.scene.nodes or {}).get(pod.node), "absent", ())
    return disruption is None or disruption.kind != "lost"
