"""What is known of Kueue that concerns a job, and which of the job's Workloads is for what. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from virtualflow_operator.api import Job, PodAdditions, Workload, kueue_queue


@dataclass(frozen=True)
class Kueue:
    """What is known of Kueue that concerns one job."""

    workloads: tuple[Workload, ...] = ()
    """All that bear the job's label."""
    flavors: Mapping[str, PodAdditions | None] = field(default_factory=dict)
    """What the flavors demand that its Workloads were given; ``None``: there is no such flavor."""
    priority: int | None = None
    """The value of the WorkloadPriorityClass that the job names; ``None``: it names none, or there is none."""
    refused: str = ""
    """Why a Workload could not be made or changed, in the API server's words; empty: it could."""
    trouble: str = ""
    """Why none of this is known, in words; empty: it is."""


@dataclass(frozen=True)
class WorkloadChain:
    """A job's Workloads, by what they are for: in the end they replace one another."""

    holding: Workload | None = None
    """The newest that has quota."""
    asking: Workload | None = None
    """The one that waits for quota; beside one that holds some, it takes its place."""
    granting: Workload | None = None
    """The one whose pods may run: the one that holds, or while that is not admitted yet, its predecessor."""
    others: tuple[Workload, ...] = ()
    """Those that are of no use any more."""


def chain_of(workloads: Sequence[Workload], uid: str) -> WorkloadChain:
    """Tell the Workloads of the job with that uid apart; a namesake's do not count, nor those being deleted."""
    own = sorted((w for w in workloads if w.owner == uid and not w.deleting), key=lambda w: (w.created, w.name))
    reserved = [w for w in own if w.reserved and not w.finished]
    # Two of them may be of the same second: the one that nobody replaces is the newest.
    replaced = {w.replaces for w in reserved}
    holding = next((w for w in reversed(reserved) if w.key not in replaced), None)
    waiting = [w for w in own if not w.reserved and not w.finished]
    if holding is not None:
        waiting = [w for w in waiting if w.replaces == holding.key]
    asking = waiting[-1] if waiting else None
    granting = holding if holding is not None and holding.admitted else None
    if holding is not None and granting is None:
        before = next((w for w in own if w.key == holding.replaces), None)
        granting = before if before is not None and before.assignments and not before.evicted else None
    if holding is not None and holding.evicted:
        granting = None
    used = {w.name for w in (holding, asking, granting) if w is not None}
    return WorkloadChain(holding, asking, granting, tuple(w for w in own if w.name not in used))


def follows_kueue(job: Job, kueue: Kueue | None) -> bool:
    """Whether Kueue has a say in a job: it names a queue of Kueue's, or still holds quota.

    Kueue's own integrations refuse to take the label from a job that runs. Here it counts once the quota is given back.
    """
    if kueue is None or job.spec.queue:
        return False
    return bool(kueue_queue(job)) or chain_of(kueue.workloads, job.uid).holding is not None


def admitted_counts(workload: Workload) -> dict[str, int]:
    """How many pods of each set may run: as many as were admitted, less what was handed back."""
    return {
        name: max(min(given.count, asked.count - workload.reclaimable.get(name, 0)), 0)
        for name, asked in workload.pod_sets.items()
        if (given := workload.assignments.get(name)) is not None
    }
