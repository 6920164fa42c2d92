"""In which order what a policy wants is carried out, so that capacity is never exceeded on the way. Pure.

Workers are taken away at once, and given once those that were taken away have gone. A job that is to go to another kind
of device keeps its minimum where it is until it has it there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from virtualflow.protocol.wording import counted
from virtualflow_operator.scheduling import KindAllocation, KindDemand

ByKind = Mapping[str, int]


def release(
    wanted: Mapping[str, KindAllocation], demands: Sequence[KindDemand], held: Mapping[str, ByKind], totals: ByKind
) -> dict[str, KindAllocation]:
    """What is given at once of what a policy wants: less to those who are to have less, more only of what is free.

    Args:
        demands: what it was asked for; what each job has was given to it.
        held: workers of each job that have not gone yet, by kind.
    """
    kept = {d.job.name: _keep(d, wanted[d.job.name].workers) for d in demands}
    free = {
        kind: total - sum(d.job.units * max(_of(kept[d.job.name], kind), _of(held[d.job.name], kind)) for d in demands)
        for kind, total in totals.items()
    }
    given = dict(kept)
    growing = [d for d in demands if kept[d.job.name] != wanted[d.job.name].workers]
    for demand in sorted(growing, key=lambda d: (not d.total, d.job.began, d.job.name)):
        name, units = demand.job.name, demand.job.units
        found, taken = {}, {}
        for kind, most in wanted[name].workers.items():
            # Its own that are leaving make room for it.
            there = max(_of(demand.workers, kind), _of(held[name], kind))
            counted_for = max(_of(kept[name], kind), _of(held[name], kind))
            found[kind] = min(most, there + max(free.get(kind, 0), 0) // units)
            taken[kind] = units * max(found[kind] - counted_for, 0)
        if sum(found.values()) >= demand.job.minimum:
            given[name] = {kind: count for kind, count in found.items() if count}
            for kind, amount in taken.items():
                free[kind] -= amount
    return {
        d.job.name: wanted[d.job.name]
        if given[d.job.name] == wanted[d.job.name].workers
        else _held_back(d, wanted[d.job.name], given[d.job.name])
        for d in demands
    }


def find_stuck(wanted: Mapping[str, KindAllocation], demands: Sequence[KindDemand], totals: ByKind) -> set[str]:
    """Names of the jobs that would never get to the kind where they are to go: each waits for the place of another.

    What is wanted is carried out in thought, until nothing changes any more: so the answer is the same on the way.
    """
    going = [d.job.name for d in demands if d.total and d.home and wanted[d.job.name].home != d.home]
    while going:
        held = {demand.job.name: demand.workers for demand in demands}
        given = release(wanted, demands, held, totals)
        after = [_with(demand, given[demand.job.name].workers) for demand in demands]
        if all(new.workers == old.workers for new, old in zip(after, demands, strict=True)):
            there = {demand.job.name: demand.workers for demand in demands}
            return {name for name in going if there[name].keys() - wanted[name].workers.keys()}
        demands = after
    return set()


def stand_still(demand: KindDemand) -> KindDemand:
    """The job as one that may not change its kind for now."""
    return replace(demand, mobility="stays", bound=True)


def _with(demand: KindDemand, workers: ByKind) -> KindDemand:
    at_home = workers.get(demand.home, 0)
    lent = {kind: count for kind, count in workers.items() if kind != demand.home}
    return replace(demand, job=replace(demand.job, allocated=at_home), lent=lent)


def _of(workers: ByKind, kind: str) -> int:
    return workers.get(kind, 0)


def _keep(demand: KindDemand, wanted: ByKind) -> dict[str, int]:
    """What a job keeps of what it has, as long as nothing is given to it."""
    have = demand.workers
    kept = {kind: min(count, _of(wanted, kind)) for kind, count in have.items()}
    if wanted:
        for kind, count in have.items():  # its own kind first
            lacks = max(demand.job.minimum - sum(kept.values()), 0)
            kept[kind] = min(count, kept[kind] + lacks)
    return {kind: count for kind, count in kept.items() if count}


def _held_back(demand: KindDemand, wanted: KindAllocation, given: ByKind) -> KindAllocation:
    """The allocation of a job that has to wait for others' workers to leave."""
    count = counted(sum(wanted.workers.values()), "worker")
    kinds = [kind for kind in wanted.workers if kind]
    on = f" on {' and '.join(kinds)}" if kinds and not given.keys() <= wanted.workers.keys() else ""
    reason = f"{count}{on} as soon as those of others have left: {wanted.reason}"
    home = wanted.home if not given or given.keys() <= wanted.workers.keys() else demand.home
    return KindAllocation(given, home, reason, min(wanted.on_demand, sum(given.values())))
