"""How many workers to make and in which groups, and whom to relieve. Pure.

Workers are made in the first group that has room; a group with a worker that no node takes is passed over, and that
worker stays as a request for capacity until others have taken its place. So is a group into whose memory nothing fits.
Workers that are to be replaced (a changed template, a cordoned node) get a successor first, one at a time, and leave
when it is ready; those that never ran have nothing to wait for. Where the job goes to another kind of device, for which
its queue has made room, all of them get theirs at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from virtualflow_operator.api import WorkerGroup
from virtualflow_operator.constants import ON_DEMAND
from virtualflow_operator.jobs.pod_classification import ClassifiedPod


class NewWorker(NamedTuple):
    group: WorkerGroup
    ordinal: int
    kind: str = ""
    """Of device that it is for, where the job's queue tells them apart."""


@dataclass(frozen=True)
class WorkerPlan:
    create: tuple[NewWorker, ...] = ()
    retire: tuple[ClassifiedPod, ...] = ()
    withdraw: tuple[ClassifiedPod, ...] = ()
    """Those that never ran and are not needed any more."""


def plan_workers(
    desired: int,
    workers: Sequence[ClassifiedPod],
    groups: Sequence[WorkerGroup],
    names: Collection[str],
    prefix: str,
    *,
    refused: bool = False,
    surge: bool = True,
    unfit: Collection[str] = (),
    kinds: Sequence[str] = (),
    unsuitable: Collection[tuple[str, str]] = (),
    crowds: Mapping[str, int] | None = None,
) -> WorkerPlan:
    """Bring the number of workers to ``desired``.

    Args:
        workers: those that run or may run: healthy, planned and stuck ones count, others are ignored.
        groups: in order of preference.
        prefix: what names of workers begin with: the job's name.
        refused: whether the API server lets no further pod be made at present (a quota, usually).
        surge: whether there may be one more than ``desired``, so that a successor comes before its predecessor leaves.
        unfit: names of groups into whose memory nothing fits.
        kinds: of device, of each worker that is lacking; empty: the job's queue tells none apart.
        unsuitable: names of groups, and kinds on which their templates may not be.
        crowds: workers of all jobs on each node, where those go first that are alone on theirs.
    """
    unborn = [worker for worker in workers if _never_ran(worker)]
    here = [worker for worker in workers if worker.fate in ("healthy", "planned") and worker not in unborn]
    stuck = [worker for worker in workers if worker.fate == "stuck"]
    planned = [worker for worker in here if worker.fate == "planned"]
    # For those that go to another kind of device there is room; the others are replaced one at a time.
    more = max(sum(1 for worker in planned if worker.misplaced), 1 if planned and surge else 0)
    target = desired + more
    rank = _Rank({group.name: index for index, group in enumerate(groups)}, crowds or {})
    scheduled = sum(1 for worker in here if worker.pod.node)
    withdraw = (*unborn, *_withdraw(sorted(stuck, key=lambda p: _dispensable(p, rank)), max(target - scheduled, 0)))
    if len(here) < target:
        # Those that are to be replaced do not count where their successor may be one too many for a while.
        counted = [worker for worker in (*here, *stuck) if worker.fate != "planned" or not surge]
        # Without anybody left, and no other group, it is tried again: whether that is too often, others decide.
        sound = [group for group in groups if group.name not in unfit] or ([] if here else groups)
        places = [*kinds, *([next(iter(kinds), "")] * target)][: target - len(here)]
        created = _place(places, counted, sound, names, prefix, unsuitable)
        retire = _relieve_in_place(here, planned, full=refused or bool(stuck))
        return WorkerPlan(created, retire, withdraw)
    if len(here) > target:
        order = sorted(here, key=lambda worker: _dispensable(worker, rank))
        # Successors may all be starting yet: somebody keeps the state of the training for them.
        kept = next((worker for worker in reversed(order) if worker.ready), None)
        order = [worker for worker in order if worker is not kept]
        return WorkerPlan(retire=tuple(order[: len(here) - target]), withdraw=withdraw)
    if planned and not surge:
        return WorkerPlan(retire=_relieve_in_place(here, planned, full=True), withdraw=withdraw)
    order = sorted(planned, key=lambda worker: _dispensable(worker, rank))[:more]
    spare = sum(worker.ready for worker in here) - desired
    return WorkerPlan(retire=_relieve_replaced(order, spare), withdraw=withdraw)


def _relieve_replaced(order: Sequence[ClassifiedPod], spare: int) -> tuple[ClassifiedPod, ...]:
    """Those that may go, as so many more are ready than there are to be."""
    gone = []
    for worker in order:
        spare -= worker.ready
        if spare < 0:
            break
        gone.append(worker)
    return tuple(gone)


def _withdraw(stuck: Sequence[ClassifiedPod], needed: int) -> tuple[ClassifiedPod, ...]:
    """Who of those in want of a node need not stay; the last one of a group says that the group is full."""
    left, gone = list(stuck), []
    for worker in stuck:
        alone = sum(1 for other in left if other.pod.group == worker.pod.group) == 1
        if len(left) > needed and not (needed and alone):
            left.remove(worker)
            gone.append(worker)
    return tuple(gone)


def _never_ran(worker: ClassifiedPod) -> bool:
    """Whether a pod that is not wanted as it is has not begun: its image, its size or its kind of device is why."""
    return (worker.outdated or worker.misplaced) and worker.pod.phase == "Pending" and worker.standing == "absent"


def _relieve_in_place(
    here: Sequence[ClassifiedPod], planned: Sequence[ClassifiedPod], *, full: bool
) -> tuple[ClassifiedPod, ...]:
    """On a full cluster a successor finds no node before somebody leaves; others must be there to keep the state."""
    all_ready = len(here) > 1 and all(worker.ready for worker in here)
    return (planned[0],) if planned and full and all_ready else ()


class _Rank(NamedTuple):
    groups: Mapping[str, int]
    """The place of each group in the order of preference."""
    crowds: Mapping[str, int]


def _dispensable(worker: ClassifiedPod, rank: _Rank) -> tuple[bool, bool, bool, bool, int, int, int]:
    """Sort key: who goes first. To be replaced anyway; without a node; not connected; on a spot node; of a less
    preferred group; with few others on its node.
    """
    return (
        worker.fate != "planned",
        bool(worker.pod.node),
        worker.standing not in ("absent", "starting"),
        worker.pod.ground == ON_DEMAND,
        -rank.groups.get(worker.pod.group, len(rank.groups)),
        rank.crowds.get(worker.pod.node, 0),
        -worker.pod.ordinal,
    )


def _place(
    kinds: Sequence[str],
    workers: Sequence[ClassifiedPod],
    groups: Sequence[WorkerGroup],
    names: Collection[str],
    prefix: str,
    unsuitable: Collection[tuple[str, str]],
) -> tuple[NewWorker, ...]:
    """A worker of each of these kinds of device, in the first group that has room for it."""
    taken = set(names)
    sizes = {g.name: sum(1 for p in workers if p.pod.group == g.name) for g in groups}
    full = {*unsuitable, *((worker.pod.group, worker.kind) for worker in workers if worker.fate == "stuck")}
    created: list[NewWorker] = []
    for kind in kinds:
        room = (g for g in groups if g.max_replicas is None or sizes[g.name] < g.max_replicas)
        group = next((g for g in room if (g.name, kind) not in full), None)
        if group is None:
            continue
        ordinal = next(n for n in range(len(taken) + 1) if f"{prefix}-{group.name}-{n}" not in taken)
        taken.add(f"{prefix}-{group.name}-{ordinal}")
        sizes[group.name] += 1
        created.append(NewWorker(group, ordinal, kind))
    return tuple(created)
