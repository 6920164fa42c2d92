"""Planned membership changes: who joins and who is relieved while the training goes on.

The last rules of :mod:`virtualflow.coordinator.membership`, pure like it. A planned generation is
prepared beside the running one, and what keeps it from coming about must never keep the others from what they need:

- A pending change that still serves is left alone: further joiners wait until it has been entered.
- One that cannot be built is tried again, with the joiners that failed last and one at a time; a worker that fails too
  often is declared lost.
- A worker that drains is relieved together with joiners only as long as there is time: if they are slow, without them.
- Somebody who has the state stays until a joiner has received it: where all drain, first the joiners enter beside
  them, and then those who drain leave.
- While a job evaluates, only members that drain are a reason for a change: a joiner has no part in an evaluation.
- Where nothing else is to be done, the same members may divide the virtual nodes otherwise
  (:mod:`virtualflow.coordinator.balance`); a change that somebody needs goes before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from virtualflow.coordinator.assignment import order_members
from virtualflow.coordinator.balance import better_split
from virtualflow.coordinator.settings import MembershipSettings
from virtualflow.coordinator.snapshot import (
    Cluster,
    Decision,
    Processes,
    Proposal,
    Worker,
    listed,
    processes_of,
    ready_since,
    ready_workers,
    within,
)
from virtualflow.protocol.messages import Cause
from virtualflow.protocol.wording import counted


def plan_change(now: float, cluster: Cluster, settings: MembershipSettings, lost: Mapping[str, str]) -> Decision:
    """The planned change that the running generation needs at ``now``, if any; nobody of it is lost."""
    running, workers = cluster.running, cluster.workers
    assert running is not None
    members = [member.incarnation for member in running.members]
    here = [m for m in members if not workers[m].left]
    late = [
        worker.incarnation
        for worker in (workers[m] for m in here)
        if not worker.through and (worker.entered is None or worker.entered < running.generation)
    ]
    if late:
        names = listed(cluster.names(late))
        return Decision(f"generation {running.generation}: waiting for {names} to enter")
    return _Change(now, cluster, settings, lost, members, here).decide()


class _Change:
    """One decision; the steps of it share what they are made of."""

    def __init__(
        self,
        now: float,
        cluster: Cluster,
        settings: MembershipSettings,
        lost: Mapping[str, str],
        members: list[str],
        here: list[str],
    ) -> None:
        self.now, self.cluster, self.settings, self.lost = now, cluster, settings, lost
        self.members, self.here = members, here
        self.workers = cluster.workers
        self.pending = cluster.proposed
        self.newest = {x.incarnation for x in self.pending.members} if self.pending is not None else set(members)
        self.arriving = self.newest - set(members)
        # Of a worker of several processes, all go with the first.
        relieved = {self.workers[m].launch_id for m in members if self.workers[m].draining or self.workers[m].left}
        self.stay = [m for m in here if self.workers[m].launch_id not in relieved]
        staying = set(self.stay)
        self.leaving = [m for m in members if m not in staying]
        deadlines = [self.workers[m].deadline for m in here if self.workers[m].draining]
        self.deadline = min((now if deadline is None else deadline for deadline in deadlines), default=now)
        """Until when those who drain must be relieved."""

    def decide(self) -> Decision:
        cluster = self.cluster
        if cluster.stop is not None:
            reason = f"stopping: {cluster.stop}"
            if self.pending is not None and not self.newest:
                return Decision(reason)
            return Decision(reason, Proposal("planned", (), (), "stop"))
        if self.pending is not None:
            until = self.serves_until()
            if self.now < until:
                wake_at = until if until < float("inf") else None
                return Decision(self.pending.reason, wake_at=wake_at)
        elif cluster.evaluating and not self.leaving:
            return Decision(f"{counted(len(cluster.by_worker(self.members)), 'worker')} evaluating; changes wait")

        joiners, window = self.choose_joiners()
        if self.stay:
            decision = self.propose(self.stay, joiners, window)
            quiet = self.pending is None and not self.leaving and window is None
            return self.rebalance(decision) if quiet and decision.proposal is None else decision
        leave_at = self.leave_at(self.now if self.pending is None else cluster.proposed_at)
        if self.now >= leave_at:
            return Decision("the last worker leaves", Proposal("planned", (), (), "drain"))
        decision = self.propose(self.beside(joiners), joiners, leave_at)
        if decision.proposal is None:
            names = listed(cluster.names(self.here))
            reason = f"{names} drains and nobody else is there: training on until a replacement is ready"
            return Decision(reason, wake_at=decision.wake_at)
        return decision

    # --- a change that is under way ----------------------------------------------------------------------------------

    def serves_until(self) -> float:
        """Until when the pending generation is what is needed; ``-inf``: it is not."""
        assert self.pending is not None
        if not self.newest and not self.stay:
            return float("inf")  # the last ones leave, and nobody can come between
        if any(not self.may_arrive(self.workers.get(incarnation)) for incarnation in self.arriving):
            return float("-inf")
        if not self.newest >= set(self.stay) or any(self.workers[m].left for m in self.newest & set(self.members)):
            return float("-inf")
        broken_since = self.cluster.broken.get(self.pending.generation)
        limit = float("inf") if broken_since is None else broken_since + self.settings.reconnect_grace
        if not self.stay:
            return min(limit, self.leave_at(self.cluster.proposed_at))
        if self.newest & set(self.leaving):
            return float("-inf")
        if self.pending.cause == "rebalance" and self.choose_joiners()[0]:
            return float("-inf")
        if not self.leaving or not self.arriving:
            return limit
        if self.cluster.evaluating or broken_since is not None:
            return float("-inf")
        last_call = self.deadline - self.settings.drain_margin
        return min(last_call, float("inf") if self.cluster.prepared else self.patience_ends(self.cluster.proposed_at))

    def may_arrive(self, worker: Worker | None) -> bool:
        """Whether a joiner of the pending generation can still be expected."""
        return (
            worker is not None
            and worker.incarnation not in self.lost
            and not (worker.draining or worker.left or worker.done or worker.through)
        )

    def patience_ends(self, since: float) -> float:
        return since + self.settings.join_patience

    def leave_at(self, proposed_at: float) -> float:
        """When the last ones must go, replaced or not; a joiner that is there already gets a fair chance before."""
        leave_at = self.deadline - self.settings.drain_margin
        if self.arriving or ready_workers(self.cluster, self.lost):
            leave_at = max(leave_at, min(self.deadline, self.patience_ends(proposed_at)))
        return leave_at

    # --- a change to be made -----------------------------------------------------------------------------------------

    def choose_joiners(self) -> tuple[list[Processes], float | None]:
        """Who joins now, and until when those who could are waited with for others that are wanted too."""
        cluster, settings = self.cluster, self.settings
        if cluster.evaluating:
            return [], None
        if self.leaving and self.stay:
            broken = self.pending is not None and self.pending.generation in cluster.broken
            overdue = (
                self.pending is not None
                and self.arriving
                and self.newest >= set(self.stay)
                and not (self.newest & set(self.leaving))
                and self.now >= self.patience_ends(cluster.proposed_at)
            )
            if broken or overdue or self.now >= self.deadline - settings.drain_margin:
                return [], None
        members = set(self.members)
        ready = [
            processes for processes in ready_workers(cluster, self.lost) if processes[0].incarnation not in members
        ]
        sound = [processes for processes in ready if not any(worker.failures for worker in processes)]
        # One that keeps a generation from being built must not do so to others for ever.
        joiners = sound or ready[:1]
        least_kept = min((len(processes) for processes in cluster.by_worker(self.here)), default=1)
        joiners = within(joiners, (cluster.virtual_nodes or len(self.members)) - (len(self.stay) or least_kept))
        if joiners and self.stay and len(cluster.by_worker(self.stay)) + len(joiners) < cluster.wanted:
            window_ends = min(map(ready_since, joiners)) + settings.admission_window
            if self.now < window_ends:
                return [], window_ends
        return joiners, None

    def beside(self, joiners: list[Processes]) -> list[str]:
        """Who of those who drain may stay beside ``joiners`` until these have the state."""
        room = (self.cluster.virtual_nodes or len(self.members)) - len(processes_of(joiners))
        return [worker.incarnation for worker in processes_of(within(self.cluster.by_worker(self.here), room))]

    def propose(self, stay: list[str], joiners: list[Processes], wake_at: float | None) -> Decision:
        """Propose these members, unless they are those of the newest generation."""
        first = {} if self.cluster.running is None else {m.incarnation: m.first for m in self.cluster.running.members}
        coming = [*(self.workers[m] for m in stay), *processes_of(joiners)]
        target = order_members(first, {worker.incarnation: (worker.launch_id, worker.local_rank) for worker in coming})
        leaving = self.cluster.by_worker(m for m in self.leaving if m not in target)
        parts = [f"{processes[0].name} joins" for processes in joiners]
        parts += [f"{processes[0].name} {'drains' if _drains(processes) else 'left'}" for processes in leaving]
        cause: Cause = "resize" if joiners and leaving else "join" if joiners else "drain" if leaving else "broken"
        training = counted(len(self.cluster.by_worker(target)), "worker")
        reason = listed(parts) or f"{training} training"
        broken = self.pending is not None and self.pending.generation in self.cluster.broken
        if set(target) == self.newest and not broken:
            return Decision(reason, wake_at=wake_at)
        if not parts and not self.arriving and self.pending is not None:
            return Decision(
                self.pending.reason, Proposal("planned", tuple(target), (), self.pending.cause), wake_at=wake_at
            )
        if not parts:
            names = self.cluster.names(i for i in sorted(self.arriving) if i in self.workers)
            reason = f"{training} training on without {listed(names)}"
        arrivals = tuple(worker.incarnation for worker in processes_of(joiners))
        return Decision(reason, Proposal("planned", tuple(target), arrivals, cause), wake_at=wake_at)

    def rebalance(self, decision: Decision) -> Decision:
        """Divide the virtual nodes of the running generation otherwise, if that is worth it and not too early."""
        reason = better_split(self.cluster, self.settings, self.now)
        if reason is None or not all(self.workers[m].connected and not self.workers[m].done for m in self.members):
            return decision
        earliest = self.cluster.running_since + self.settings.rebalance_interval
        if self.now < earliest:
            return replace(decision, wake_at=earliest)
        return Decision(reason, Proposal("planned", tuple(self.members), (), "rebalance"))


def _drains(processes: Processes) -> bool:
    return any(worker.draining for worker in processes)
