"""What the coordinator knows of its job: a state machine without I/O.

Messages and calls come in with the time, answers to workers collect in :attr:`Job.outbox`, and :meth:`Job.decide` carries
out the membership decision. The server (``coordinator``) does nothing but move bytes. Everything here can be lost:
a new coordinator learns the same from the Hellos of the workers.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field, replace

from virtualflow import messages as m
from virtualflow.assignment import assign
from virtualflow.membership import Cluster, Decision, Proposal, Worker, decide, find_lost, next_limit
from virtualflow.settings import MAX_CHANGES, MembershipSettings

logger = logging.getLogger("virtualflow.coordinator")

MAX_EVENTS = 200
"""Latest events that the status carries."""


@dataclass
class Contact:
    """What the job remembers of a worker beyond what the membership decision needs."""

    pid: int
    address: str
    fingerprint: str
    entered: m.Generation | None = None
    result: m.Done | None = None
    waits_for_release: bool = False


@dataclass
class Job:
    """The state of one job; all times are of one monotonic clock, ``wall`` is Unix time for events."""

    incarnation: int
    wanted: int
    settings: MembershipSettings
    now: float
    wall: float
    workers: dict[str, Worker] = field(default_factory=dict)
    contacts: dict[str, Contact] = field(default_factory=dict)
    running: m.Plan | None = None
    proposed: m.Plan | None = None
    prepared: set[str] = field(default_factory=set)
    broken: dict[m.Generation, float] = field(default_factory=dict)
    rebuilds: int = 0
    progress: m.Progress | None = None
    step: int = 0
    total_steps: int | None = None
    hold: int | None = None
    stop: str | None = None
    error: str | None = None
    traceback: str | None = None
    result: m.Done | None = None
    restored_from: int | None = None
    changes: dict[m.Generation, m.Change] = field(default_factory=dict)
    events: deque[m.Event] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    reason: str = ""
    outbox: list[tuple[str, m.ToWorker]] = field(default_factory=list)
    version: int = 0
    """Raised whenever the status may have changed."""
    _founded_at: float = 0.0
    _trained: bool = False
    _virtual_nodes: int | None = None
    _counter: int = 0
    _highest_step: int = 0
    _keys: dict[tuple[m.Generation, str], m.Publish] = field(default_factory=dict)
    _event_number: int = 0
    _failed: bool = False

    def __post_init__(self) -> None:
        self._founded_at = self.now

    # --- workers ------------------------------------------------------------------------------------------------------

    def hello(self, hello: m.Hello) -> str | None:
        """Admit a connection; a sentence instead when that process must not take part."""
        if hello.protocol != m.PROTOCOL:
            return f"this worker speaks protocol {hello.protocol} and the coordinator {m.PROTOCOL}; use one version of virtualflow"
        known = self.workers.get(hello.incarnation)
        if known is not None and (known.gone or known.left):
            return known.gone or "it has left"
        if self._virtual_nodes is not None and hello.virtual_nodes != self._virtual_nodes:
            return f"this worker has {hello.virtual_nodes} virtual nodes and the job {self._virtual_nodes}; their number is fixed for a job's life"
        differing = self._foreign_fingerprint(hello)
        if differing is not None:
            return differing
        if hello.plan is not None and self.running is not None and hello.plan.generation > self._newest():
            self._learn(hello.plan)
        for other in self.workers.values():
            if other.name == hello.worker and other.incarnation != hello.incarnation and not (other.gone or other.left or other.done):
                self._give_up(other.incarnation, "another process has taken its name")
        self._virtual_nodes = hello.virtual_nodes
        self.contacts[hello.incarnation] = Contact(hello.pid, hello.address, hello.fingerprint)
        deadline = None if hello.drain_deadline is None else self.now + hello.drain_deadline
        self.workers[hello.incarnation] = Worker(
            hello.worker,
            hello.incarnation,
            last_heard=self.now,
            ready_at=self.now if hello.ready else None,
            draining=hello.draining or bool(known and known.draining),
            deadline=deadline if deadline is not None else (known.deadline if known else None),
        )
        if hello.plan is not None:
            self._learn(hello.plan)
            self.contacts[hello.incarnation].entered = hello.plan.generation
            self._trained = True
        for change in hello.changes:
            self._merge_change(change)
        self.step = max(self.step, hello.step)
        self._highest_step = max(self._highest_step, hello.step)
        self.total_steps = hello.total_steps if hello.total_steps is not None else self.total_steps
        running = self.running is not None and bool(self.running.members)
        self._send(hello.incarnation, m.Welcome(running, self.step, self.hold))
        if self._failed or self.phase in ("done", "stopped"):
            self._send_end(hello.incarnation)
        elif self.proposed is not None and self._concerns(self.proposed, hello.incarnation):
            self._send(hello.incarnation, self.proposed)
            self._resend_keys(hello.incarnation, self.proposed.generation)
        if known is None:
            self.event("worker", f"{hello.worker} connected (pid {hello.pid})")
        self._changed()
        return None

    def disconnected(self, incarnation: str) -> None:
        """The worker's connection closed; whether that means anything is for the membership decision."""
        worker = self.workers.get(incarnation)
        if worker is not None and worker.connected:
            self.workers[incarnation] = replace(worker, connected=False, disconnected_at=self.now)
            self._changed()

    def receive(self, incarnation: str, message: m.FromWorker) -> None:
        """Take one message of an admitted worker; what is stale is ignored."""
        worker = self.workers.get(incarnation)
        if worker is None or worker.gone:
            return
        self.workers[incarnation] = worker = replace(worker, last_heard=self.now)
        match message:
            case m.Heartbeat():
                return
            case m.Ready():
                self.workers[incarnation] = replace(worker, ready_at=worker.ready_at or self.now)
            case m.Prepared(generation):
                if self.proposed is not None and generation == self.proposed.generation:
                    self.prepared.add(incarnation)
            case m.Entered(plan, step, restored):
                self._entered(incarnation, plan, step, restored)
            case m.Progress():
                self._progressed(message)
            case m.Resumed(change):
                self._merge_change(change)
            case m.Broken(generation, step, detail):
                self._is_broken(worker, generation, step, detail)
            case m.DrainRequest(reason):
                self._mark_draining(worker, self.now + self.settings.drain_margin * 6, reason)
            case m.Left(generation, step):
                self._left(worker, generation, step)
            case m.Failed(step, error, traceback):
                if not self._failed:
                    self.error, self.traceback = error, traceback
                    self._fail(f"{worker.name} failed in step {step}: {error}" if step else f"{worker.name} failed: {error}")
            case m.Done():
                self._done(worker, message)
            case m.Note(kind, text):
                self.event(kind, text)
            case m.Publish():
                self._publish(incarnation, message)
            case m.Hello():
                return
        self._changed()

    # --- signalling parties ---------------------------------------------------------------------------------------------

    def drain(self, call: m.DrainCall) -> str:
        """Announce that workers will be taken away; the answer is one sentence.

        Raises:
            KeyError: none of the job's workers bears one of the names (the name is the argument).
        """
        found = [self._named(name) for name in call.workers]
        seconds = self.settings.drain_margin * 6 if call.deadline is None else call.deadline
        for worker in found:
            if not worker.draining:
                self._mark_draining(worker, self.now + seconds, call.reason)
                self._send(worker.incarnation, m.Drain(seconds, call.reason))
        return f"{', '.join(call.workers)} will leave within {seconds:g} s"

    def gone(self, call: m.GoneCall) -> str:
        """Take note that a worker's process has ended.

        Raises:
            KeyError: no worker bears that name (and incarnation).
        """
        worker = self._named(call.worker) if call.incarnation is None else self.workers[call.incarnation]
        if worker.name != call.worker:
            raise KeyError(call.worker)
        self._give_up(worker.incarnation, call.reason)
        return f"{worker.name} is gone: {call.reason}"

    def scale(self, workers: int) -> str:
        """Set how many workers are wanted."""
        if workers != self.wanted:
            self.event("scale", f"{workers} workers wanted instead of {self.wanted}")
        self.wanted = workers
        self._changed()
        return f"{workers} workers wanted"

    def set_hold(self, step: int | None) -> str:
        """No step after ``step`` may start; ``None`` lets go."""
        self.hold = step
        for incarnation, worker in self.workers.items():
            if worker.connected:
                self._send(incarnation, m.Hold(step))
        self._changed()
        return "nothing is held" if step is None else f"no step after {step} starts"

    def request_stop(self, reason: str) -> str:
        """All workers leave at the same step."""
        if self.stop is None:
            self.stop = reason
            self.event("stop", f"stopping: {reason}")
            for incarnation, worker in self.workers.items():
                if self.running is None and worker.connected:
                    self._send(incarnation, m.End(False, f"stopped before the first step: {reason}"))
        return f"stopping: {reason}"

    def fail(self, reason: str) -> str:
        """Give the job up."""
        if not self._failed and self.phase not in ("done", "stopped"):
            self.error = reason
            self._fail(reason)
        return f"the job has failed: {self.error}"

    # --- decisions --------------------------------------------------------------------------------------------------------

    def decide(self) -> float | None:
        """Carry out the membership decision at ``self.now``; the time at which to come back, if any."""
        if self.phase in ("done", "stopped", "failed"):
            self._release()
            return None
        cluster = self._cluster()
        lost = find_lost(self.now, cluster, self.settings)
        if self._complete(lost):
            return None
        decision = decide(self.now, cluster, self.settings)
        for incarnation, why in decision.lost.items():
            self._give_up(incarnation, why)
        if decision.reason != self.reason:
            self.reason = decision.reason
            logger.info("%s", decision.reason)
            self._changed()
        if decision.fail:
            self.error = decision.reason
            self._fail(decision.reason)
            return None
        self._forget_a_lost_generation(decision)
        if decision.proposal is not None:
            self._propose(decision.proposal, decision.reason)
        self._release()
        times = [t for t in (decision.wake_at, next_limit(self._cluster(), self.settings)) if t is not None]
        return min(times, default=None)

    def _cluster(self) -> Cluster:
        return Cluster(
            virtual_nodes=self._virtual_nodes,
            wanted=self.wanted,
            founded_at=self._founded_at,
            workers=self.workers,
            running=self.running,
            proposed=self.proposed,
            broken=self.broken,
            rebuilds=self.rebuilds,
            evaluating=self.progress is not None and self.progress.phase == "evaluating",
            stop=self.stop,
            trained=self._trained,
        )

    def _forget_a_lost_generation(self, decision: Decision) -> None:
        """When nobody of the running generation survives, the job waits for workers as if it began."""
        base = self.proposed if self.proposed is not None and self.proposed.members else self.running
        if base is None or not base.members:
            return
        if all(self._is_lost(member.incarnation) for member in base.members) and (
            self.running is None or all(self._is_lost(member.incarnation) for member in self.running.members)
        ):
            self._trained = self._trained or self.running is not None
            self.running = self.proposed = self.progress = None
            if decision.proposal is None:
                self._founded_at = self.now
            self._changed()

    def _is_lost(self, incarnation: str) -> bool:
        worker = self.workers[incarnation]
        return worker.gone is not None or worker.left

    def _propose(self, proposal: Proposal, reason: str) -> None:
        self._counter += 1
        generation = m.Generation(self.incarnation, self._counter)
        if proposal.members:
            ranges = assign(self._virtual_nodes or len(proposal.members), [1.0] * len(proposal.members))
        else:
            ranges = []
        members = tuple(
            m.Member(self.workers[i].name, i, self.contacts[i].address, r.start, r.stop)
            for i, r in zip(proposal.members, ranges, strict=True)
        )
        joiners = tuple(self.workers[i].name for i in proposal.joiners)
        plan = m.Plan(generation, proposal.mode, members, joiners, proposal.cause, reason)
        told = set(proposal.members) | {member.incarnation for member in (self.running.members if self.running else ())}
        if proposal.cause == "broken" and proposal.mode == "recovery":
            self.rebuilds += 1
        self.proposed, self.prepared = plan, set()
        self._keys = {key: value for key, value in self._keys.items() if key[0] >= self._running_generation()}
        for incarnation in told:
            self._send(incarnation, plan)
        self._changed()

    def _complete(self, lost: dict[str, str]) -> bool:
        """Whether everyone who is left has seen the end; then the job is done."""
        members = [member.incarnation for member in (self.running.members if self.running else ())]
        waiting = [i for i in members if i not in lost and not self.workers[i].left]
        if self.result is None or not all(self.workers[i].done for i in waiting):
            return False
        self.event("done", f"training complete after {self.result.step} steps")
        self._end_all()
        self._changed()
        return True

    @property
    def phase(self) -> m.Phase:
        """What the job is doing."""
        if self._failed:
            return "failed"
        if self.result is not None and all(
            self.workers[member.incarnation].done or self._is_lost(member.incarnation)
            for member in (self.running.members if self.running else ())
        ):
            return "done"
        if self.running is not None and not self.running.members:
            return "stopped"
        if self.stop is not None and self.running is None and self.proposed is None:
            return "stopped"
        if self.running is None:
            return "waiting"
        return "evaluating" if self.progress is not None and self.progress.phase == "evaluating" else "training"

    # --- what messages do ---------------------------------------------------------------------------------------------------

    def _entered(self, incarnation: str, plan: m.Plan, step: int, restored: bool) -> None:
        self.contacts[incarnation].entered = plan.generation
        if plan.generation < self._running_generation():
            return
        if self.running is None or plan.generation > self.running.generation:
            first = self.running is None
            self._learn(plan)
            if plan.generation.incarnation == self.incarnation:
                self.event("generation", f"generation {plan.generation}: {len(plan.members)} workers ({plan.reason})")
            if restored and first:
                self.restored_from = step
                self.event("restored", f"resumed from the checkpoint of step {step}")
        self.step = step
        self._trained = True

    def _learn(self, plan: m.Plan) -> None:
        """A worker is in this generation: it is the running one if it is the newest, and its members exist."""
        self._counter = max(self._counter, plan.generation.counter)
        if plan.generation.incarnation > self.incarnation:
            self.incarnation = plan.generation.incarnation + 1
        if self.running is not None and plan.generation <= self.running.generation:
            return
        self.running = plan
        if self.proposed is not None and self.proposed.generation <= plan.generation:
            self.proposed, self.prepared = None, set()
        for member in plan.members:
            if member.incarnation not in self.workers:
                self.workers[member.incarnation] = Worker(
                    member.worker,
                    member.incarnation,
                    last_heard=self.now,
                    connected=False,
                    disconnected_at=self.now,
                    known_in_person=False,
                )
                self.contacts[member.incarnation] = Contact(0, member.address, "")
        self.broken = {generation: since for generation, since in self.broken.items() if generation >= plan.generation}
        self._changed()

    def _progressed(self, progress: m.Progress) -> None:
        if progress.generation < self._running_generation():
            return
        if progress.step > self.step:
            self.rebuilds = 0
        self.progress = progress
        self.step = progress.step
        self._highest_step = max(self._highest_step, progress.step)
        self.total_steps = progress.total_steps

    def _is_broken(self, worker: Worker, generation: m.Generation, step: int, detail: str) -> None:
        if generation >= self._running_generation() and generation not in self.broken:
            self.broken[generation] = self.now
            logger.info("%s: generation %s broke at step %d: %s", worker.name, generation, step, detail)

    def _left(self, worker: Worker, generation: m.Generation, step: int) -> None:
        if self.proposed is not None and generation == self.proposed.generation:
            self._learn(self.proposed)
        self.workers[worker.incarnation] = replace(worker, left=True)
        self.contacts[worker.incarnation].waits_for_release = True
        self.step = max(self.step, step)
        self.event("left", f"{worker.name} left after step {step}")
        if self.phase == "stopped":
            self._end_all()

    def _done(self, worker: Worker, done: m.Done) -> None:
        self.workers[worker.incarnation] = replace(worker, done=True)
        contact = self.contacts[worker.incarnation]
        contact.result, contact.waits_for_release = done, True
        if self.result is not None and done.digest != self.result.digest:
            reason = (
                f"{worker.name} ended with weights {done.digest[:12]} and another worker with {self.result.digest[:12]}: "
                "the training is not deterministic on these machines (see docs/determinism.md)"
            )
            self.error = reason
            self._fail(reason)
            return
        self.step = done.step
        if self.result is None or done.timed_steps > self.result.timed_steps:
            self.result = done

    def _publish(self, incarnation: str, message: m.Publish) -> None:
        plan = next((p for p in (self.proposed, self.running) if p and p.generation == message.generation), None)
        if plan is None:
            return
        self._keys[message.generation, message.key] = message
        for member in plan.members:
            if member.incarnation != incarnation:
                self._send(member.incarnation, message)

    def _resend_keys(self, incarnation: str, generation: m.Generation) -> None:
        for (of, _), message in self._keys.items():
            if of == generation:
                self._send(incarnation, message)

    def _merge_change(self, change: m.Change) -> None:
        known = self.changes.get(change.generation)
        if known is None:
            repeated = change.repeated_steps
            if change.cause == "restart":
                repeated = max(0, self._highest_step - (change.step - 1))
            self.changes[change.generation] = known = replace_struct(change, repeated_steps=repeated)
            pause = "" if change.pause_ms is None else f", pause {change.pause_ms:.0f} ms"
            self.event("change", f"{known.from_} to {known.to} workers at step {known.step} ({known.reason}){pause}")
            while len(self.changes) > MAX_CHANGES:
                del self.changes[min(self.changes)]
            return
        pauses = [pause for pause in (known.pause_ms, change.pause_ms) if pause is not None]
        self.changes[change.generation] = replace_struct(
            known,
            pause_ms=max(pauses, default=None),
            repeated_steps=max(known.repeated_steps, change.repeated_steps),
        )

    def _mark_draining(self, worker: Worker, deadline: float, reason: str) -> None:
        if not worker.draining:
            self.workers[worker.incarnation] = replace(worker, draining=True, deadline=deadline)
            self.event("drain", f"{worker.name} drains: {reason}")

    def _give_up(self, incarnation: str, why: str) -> None:
        worker = self.workers[incarnation]
        if worker.gone is not None or worker.left:
            return
        self.workers[incarnation] = replace(worker, gone=why)
        if not worker.done:
            self.event("lost", f"{worker.name} lost: {why}")
        if worker.connected:
            self._send(incarnation, m.Refuse(f"given up: {why}"))
        self._changed()

    def _fail(self, reason: str) -> None:
        self._failed = True
        self.event("failed", reason)
        self._end_all()

    def _end_all(self) -> None:
        for incarnation, worker in self.workers.items():
            if worker.connected and worker.gone is None and not worker.left:
                self._send_end(incarnation)
        self._release()

    def _send_end(self, incarnation: str) -> None:
        phase = self.phase
        if phase == "failed":
            self._send(incarnation, m.End(True, f"the job has failed: {self.error}"))
        elif not self.workers[incarnation].done:
            self._send(incarnation, m.End(False, "the job is complete" if phase == "done" else "the job was stopped"))

    def _release(self) -> None:
        """Let those go who are through, once nobody needs them any more."""
        over = self.phase in ("done", "stopped", "failed")
        settled = (
            self.running is not None
            and self.proposed is None
            and all(
                self._is_lost(member.incarnation) or self._entered_it(member.incarnation, self.running.generation)
                for member in self.running.members
            )
        )
        for incarnation, contact in self.contacts.items():
            worker = self.workers[incarnation]
            if contact.waits_for_release and (over or (worker.left and settled)):
                contact.waits_for_release = False
                self._send(incarnation, m.Release())

    def _entered_it(self, incarnation: str, generation: m.Generation) -> bool:
        entered = self.contacts[incarnation].entered
        return entered is not None and entered >= generation

    # --- small parts ----------------------------------------------------------------------------------------------------------

    def _foreign_fingerprint(self, hello: m.Hello) -> str | None:
        """A sentence when a worker's machine would not give the same bits as those that are there."""
        for incarnation, contact in self.contacts.items():
            if self._is_lost(incarnation) or incarnation == hello.incarnation or not contact.fingerprint:
                continue
            if contact.fingerprint != hello.fingerprint:
                return (
                    f"{hello.worker} runs on [{hello.fingerprint}] and the job on [{contact.fingerprint}]: the bits would "
                    "differ; use one machine type, or pass deterministic=False to vf.elastic"
                )
        return None

    def _concerns(self, plan: m.Plan, incarnation: str) -> bool:
        running = self.running.members if self.running else ()
        return any(member.incarnation == incarnation for member in (*plan.members, *running))

    def _running_generation(self) -> m.Generation:
        return self.running.generation if self.running is not None else m.Generation(0, 0)

    def _newest(self) -> m.Generation:
        return self.proposed.generation if self.proposed is not None else self._running_generation()

    def _named(self, name: str) -> Worker:
        for worker in reversed(self.workers.values()):
            if worker.name == name and not (worker.gone or worker.left or worker.done):
                return worker
        raise KeyError(name)

    def _send(self, incarnation: str, message: m.ToWorker) -> None:
        if self.workers[incarnation].connected:
            self.outbox.append((incarnation, message))

    def event(self, kind: str, text: str) -> None:
        """Tell people something, in the log and in the status."""
        self._event_number += 1
        logger.info("%s", text)
        self.events.append(m.Event(self._event_number, self.wall, kind, text))
        self._changed()

    def _changed(self) -> None:
        self.version += 1

    def status(self) -> m.Status:
        """What ``GET /v1/status`` answers."""
        progress, result = self.progress, self.result
        last = self.changes[max(self.changes)] if self.changes else None
        ordered = tuple(self.changes[generation] for generation in sorted(self.changes))
        return m.Status(
            phase=self.phase,
            incarnation=self.incarnation,
            generation=self._running_generation().counter,
            virtual_nodes=self._virtual_nodes,
            wanted=self.wanted,
            workers=tuple(self._worker_status(i) for i, w in self.workers.items() if not (w.gone or w.left)),
            proposed=self.proposed.generation.counter if self.proposed else None,
            proposed_workers=tuple(x.incarnation for x in self.proposed.members) if self.proposed else (),
            prepared=self.proposed is not None and self.prepared >= {x.incarnation for x in self.proposed.members},
            reason=self.reason,
            step=self.step,
            total_steps=self.total_steps,
            epoch=progress.epoch if progress else 0,
            metrics=result.metrics if result else progress.metrics if progress else {},
            steps_per_second=progress.steps_per_second if progress else 0.0,
            step_ms=result.step_ms if result else None,
            hold=self.hold,
            last_change=last,
            changes=ordered,
            repeated_steps=sum(change.repeated_steps for change in ordered),
            events=tuple(self.events),
            digest=result.digest if result else None,
            optimizer_digest=result.optimizer_digest if result else None,
            error=self.error,
            traceback=self.traceback,
        )

    def _worker_status(self, incarnation: str) -> m.WorkerStatus:
        worker, contact = self.workers[incarnation], self.contacts[incarnation]
        carried = range(0)
        for member in self.running.members if self.running else ():
            if member.incarnation == incarnation:
                carried = member.virtual_nodes
        state = (
            "done" if worker.done
            else "silent" if not worker.connected
            else "draining" if worker.draining
            else "training" if carried
            else "ready" if worker.ready_at is not None
            else "starting"
        )  # fmt: skip
        return m.WorkerStatus(worker.name, incarnation, contact.address, contact.pid, state, carried.start, carried.stop)


def replace_struct(change: m.Change, **values: object) -> m.Change:
    """A copy of ``change`` with other values."""
    import msgspec

    return msgspec.structs.replace(change, **values)
