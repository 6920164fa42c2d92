"""What the coordinator knows of its job and decides about it: a state machine without I/O.

Messages (``record``) and calls come in with the time, answers to workers collect in ``outbox``, and :meth:`Job.decide`
carries out the membership decision. The server (``coordinator``) does nothing but move bytes. Everything here can be
lost: a new coordinator learns the same from the Hellos of the workers.
"""

from __future__ import annotations

import logging

from virtualflow import calls
from virtualflow import messages as m
from virtualflow.balance import predicted_step, split
from virtualflow.cluster import Cluster, Decision, Proposal
from virtualflow.history import MAX_TEXT
from virtualflow.membership import decide, find_lost, next_limit
from virtualflow.record import NONE, Record
from virtualflow.roster import Contact, UnknownWorker
from virtualflow.status import describe

logger = logging.getLogger("virtualflow.coordinator")

_ROUNDS = 8
"""Decisions that may follow from one another at one moment; the rules settle after two or three."""


class Job(Record):
    """One job; calls and decisions change its record, all at the time that was set last."""

    # --- signalling parties ------------------------------------------------------------------------------------------

    def drain(self, call: calls.DrainCall) -> str:
        """Announce that workers will be taken away; the answer is one sentence.

        Raises:
            UnknownWorker: none of the job's workers bears one of the names.
        """
        found = [self.roster.named(name) for name in call.workers]
        seconds = self.settings.drain_grace if call.deadline is None else call.deadline
        for worker in found:
            if self._mark_draining(worker, self.now + seconds, call.reason):
                self._send(worker.incarnation, m.Drain(seconds, call.reason))
        return f"{', '.join(call.workers)} will leave within {seconds:g} s"

    def gone(self, call: calls.GoneCall) -> str:
        """Take note that a worker's process has ended; to say so again does no harm.

        Raises:
            UnknownWorker: no worker bears that name (and incarnation).
        """
        try:
            worker = self.roster.named(call.worker, call.incarnation)
        except UnknownWorker:
            if not self.roster.was_here(call.worker, call.incarnation):
                if call.incarnation is not None and call.incarnation not in self.roster.workers:
                    # A coordinator that has just started may hear of the generation that it was in later than this.
                    self.roster.remember_over(call.worker, call.incarnation, call.reason)
                raise
            return f"{call.worker} is gone already"
        self._give_up(worker.incarnation, call.reason)
        return f"{worker.name} is gone: {call.reason}"

    def scale(self, workers: int, minimum: int | None = None) -> str:
        """Set how many workers are wanted, and how few may begin (``None``: as before)."""
        if workers != self.wanted:
            self.event("scale", f"{workers} workers wanted instead of {self.wanted}")
        self.wanted = workers
        if minimum is not None and minimum != self.minimum:
            self.minimum = minimum
            self._changed()
        return f"{workers} workers wanted"

    def set_hold(self, step: int | None) -> str:
        """No step after ``step`` may start; ``None`` lets go."""
        self.hold = step
        for incarnation in self.roster.workers:
            self._send(incarnation, m.Hold(step))
        self._changed()
        return "nothing is held" if step is None else f"no step after {step} starts"

    def request_stop(self, reason: str) -> str:
        """All workers leave at the same step; before the first one they end at once."""
        if self.stop is None:
            self.stop = reason
            self.event("stop", f"stopping: {reason}")
            if self.running is None:
                self._withdraw()
        return f"stopping: {reason}"

    def fail(self, reason: str) -> str:
        """Give the job up."""
        if self.phase not in ("done", "stopped", "failed"):
            self.history.error = reason
            self._fail(reason)
        return f"the job has failed: {self.history.error}" if self._failed else f"the job is {self.phase} already"

    # --- decisions ---------------------------------------------------------------------------------------------------

    def decide(self) -> float | None:
        """Carry out the membership decision at :attr:`now`; the time at which to come back, if any."""
        wake_at = None
        for _ in range(_ROUNDS):
            self._count_failures()
            for incarnation, why in find_lost(self.now, self._cluster(), self.settings).items():
                self._give_up(incarnation, why)
            if self.phase in ("done", "stopped", "failed"):
                self._dismiss()
                break
            decision = decide(self.now, self._cluster(), self.settings)
            wake_at = decision.wake_at
            if not self._carry_out(decision):
                break
        self._release()
        self._relay()
        members = {x.incarnation for plan in (self.running, self.proposed) if plan for x in plan.members}
        self.roster.prune(members, lambda incarnation: self.roster.contacts[incarnation].waits_for_release)
        times = [wake_at, next_limit(self.now, self._cluster(), self.settings)]
        # A limit that has passed was taken into account above: to wake for it again would be a busy loop.
        return min((t for t in times if t is not None and t > self.now), default=None)

    def _carry_out(self, decision: Decision) -> bool:
        """Do as decided; whether that may call for a further decision."""
        if decision.reason != self.reason:
            self.reason = decision.reason[:MAX_TEXT]
            logger.info("%s", self.reason)
            self._changed()
        if decision.fail:
            self.history.error = decision.reason
            self._fail(decision.reason)
            return True
        if decision.over:
            self.trained = self.trained or self.running is not None
            self.running = self.history.progress = None
            self._rebuilds, self._founded_at = 0, self.now
            self._withdraw()
            self._changed()
            return True
        if decision.proposal is not None:
            self._propose(decision.proposal, decision.reason)
        return decision.proposal is not None

    def _cluster(self) -> Cluster:
        return Cluster(
            virtual_nodes=self.virtual_nodes,
            wanted=self.wanted,
            founded_at=self._founded_at,
            minimum=self.minimum,
            workers=self.roster.workers,
            running=self.running,
            running_since=self._running_since,
            proposed=self.proposed,
            proposed_at=self._proposed_at,
            prepared=self.is_prepared,
            broken=self._broken,
            rebuilds=self._rebuilds,
            evaluating=self.history.evaluating,
            stop=self.stop,
            trained=self.trained,
        )

    def _count_failures(self) -> None:
        """A proposed generation cannot be built and nobody of it is lost: note whom that may be due to."""
        plan = self.proposed
        if plan is None or plan.generation <= self._counted or plan.generation not in self._broken:
            return
        members = [member.incarnation for member in plan.members]
        if any(self.roster.is_lost(i) or not self.roster.workers[i].connected for i in members):
            return
        grace = self.settings.reconnect_grace if plan.mode == "planned" else self.settings.suspicion_grace
        if self.now < self._broken[plan.generation] + grace:
            return
        self._counted = plan.generation
        absent = {i for i in members if not self._rendezvous.takes_part(plan.generation, i)}
        if plan.mode == "planned":
            running = {member.incarnation for member in self.running.members} if self.running else set()
            arriving = set(members) - running
            suspects = arriving & absent or arriving
        else:
            built_for = self.now - self._proposed_at
            suspects = absent if built_for >= self.settings.heartbeat_limit and len(absent) < len(members) else set()
        for incarnation in suspects:
            self.roster.update(incarnation, failures=self.roster.workers[incarnation].failures + 1)

    def _propose(self, proposal: Proposal, reason: str) -> None:
        self._counter += 1
        ranges = split(self._cluster(), proposal.members, self.settings) if proposal.members else []
        workers, contacts = self.roster.workers, self.roster.contacts
        plan = m.Plan(
            m.Generation(self.incarnation, self._counter),
            proposal.mode,
            tuple(
                m.Member(workers[i].name, i, contacts[i].address, r.start, r.stop)
                for i, r in zip(proposal.members, ranges, strict=True)
            ),
            tuple(workers[i].name for i in proposal.joiners),
            proposal.cause,
            reason[:MAX_TEXT],
        )
        told = {x.incarnation: None for known in (self.running, self.proposed, plan) if known for x in known.members}
        if proposal.mode == "recovery":
            # A communicator that broke with nobody lost; after a loss the counting begins anew.
            broke = self.proposed if self.proposed and self.proposed.mode == "recovery" else self.running
            same = broke is not None and {x.incarnation for x in broke.members} == set(proposal.members)
            self._rebuilds = self._rebuilds + 1 if same else 0
        self.proposed, self._prepared, self._proposed_at = plan, set(), self.now
        self._plans.append(plan)
        self._rendezvous.forget_before(self.running_generation)
        for incarnation in told:
            self._send(incarnation, plan)
        self._changed()

    def _dismiss(self) -> None:
        """The job is over: tell everyone who does not know it."""
        phase = self.phase
        if self.history.settle():
            self._changed()
        if phase == "done" and not self._told_done and self.history.result is not None:
            self._told_done = True
            self.event("done", f"training complete after {self.history.result.step} steps")
        for incarnation, worker in self.roster.workers.items():
            contact = self.roster.contacts[incarnation]
            if (
                contact.told_end
                or not worker.connected
                or worker.gone
                or worker.left
                or (worker.done and phase == "done")
            ):
                continue
            if phase == "stopped" and worker.entered is not None and self.running is not None:
                continue  # it completes the step at which all leave, and says so
            contact.told_end = True
            if phase == "failed":
                self._send(incarnation, m.End(True, f"the job has failed: {self.history.error}"[:MAX_TEXT]))
            else:
                text = "the job is complete" if phase == "done" else f"the job was stopped: {self.stop}"
                self._send(incarnation, m.End(False, text[:MAX_TEXT]))

    def _release(self) -> None:
        """Let those go who are through, once nobody needs their connections any more."""
        over = self.phase in ("done", "failed")
        for incarnation, contact in self.roster.contacts.items():
            if contact.waits_for_release and (over or self._is_relieved(incarnation, contact)):
                contact.waits_for_release = False
                self._send(incarnation, m.Release())

    def _is_relieved(self, incarnation: str, contact: Contact) -> bool:
        """Whether all others are in the generation by which that worker left, or a later one, or have left as well."""
        workers = self.roster.workers
        if self.running is not None and not self.running.members:
            others = [i for i, worker in workers.items() if worker.entered is not None]
            return all(self.roster.is_lost(i) or self.roster.contacts[i].told_end for i in others)
        others = [x.incarnation for x in self.running.members] if self.running is not None else []
        return workers[incarnation].left and all(
            self.roster.is_lost(i) or (workers[i].entered or NONE) >= (contact.left_by or NONE) for i in others
        )

    def predicted_step(self) -> float | None:
        """Seconds that a step of the running generation should take by the workers' paces, once all are known."""
        return predicted_step(self._cluster())

    def status(self, brief: bool = False) -> calls.Status:
        """What ``GET /v1/status`` answers; ``brief``: with the latest few changes and events only."""
        return describe(self, brief)
