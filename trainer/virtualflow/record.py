"""The state of a job, and what the messages of its workers do to it.

What a worker says is checked against what can be true: a message about a generation that it is no member of, or
that is over, changes nothing.
"""

from __future__ import annotations

import logging
from collections import deque

from msgspec import structs

from virtualflow import calls
from virtualflow import messages as m
from virtualflow.admission import describe_refusal, fault_in_plan, is_member, refuse
from virtualflow.cluster import Worker
from virtualflow.history import MAX_TEXT, History
from virtualflow.rendezvous import Rendezvous
from virtualflow.roster import Contact, Roster
from virtualflow.settings import HEARTBEATS, MembershipSettings, Reproducibility

logger = logging.getLogger("virtualflow.coordinator")

NONE = m.Generation(0, 0)
"""The generation before the first."""

_KNOWN = 32
"""Latest generations that are remembered: by number, and as reported broken."""


class Record:
    """The state of one job; :attr:`now` is of one monotonic clock."""

    def __init__(
        self,
        incarnation: int,
        wanted: int,
        settings: MembershipSettings,
        now: float,
        wall: float,
        minimum: int = 1,
    ) -> None:
        self.incarnation = incarnation
        self.wanted = wanted
        self.minimum = minimum
        self.settings = settings
        self.now = now
        self.roster = Roster()
        self.history = History()
        self.history.wall = wall
        self.running: m.Plan | None = None
        """The newest generation that a worker has entered."""
        self.proposed: m.Plan | None = None
        """The newest generation, while nobody has entered it."""
        self.virtual_nodes: int | None = None
        self.reproducibility: Reproducibility | None = None
        self.hold: int | None = None
        self.stop: str | None = None
        self.reason = ""
        self.outbox: list[tuple[str, m.ToWorker]] = []
        self.version = 0
        """Raised whenever the status may have changed."""
        self.news = 0
        """Raised whenever it may have changed in more than how far the training is."""
        self.trained = False
        """A generation has run."""
        self._founded_at = now
        self._proposed_at = now
        self._running_since = now
        self._prepared: set[str] = set()
        self._broken: dict[m.Generation, float] = {}
        self._counted: m.Generation = NONE
        self._rebuilds = 0
        self._counter = 0
        self._plans: deque[m.Plan] = deque(maxlen=_KNOWN)
        self._withdrawn: deque[m.Generation] = deque(maxlen=_KNOWN)
        self._rendezvous = Rendezvous()
        self._failed = False
        self._told_done = False

    def set_time(self, now: float, wall: float) -> None:
        """It is now ``now`` of the monotonic clock and ``wall`` in Unix time."""
        self.now, self.history.wall = now, wall

    # --- workers -----------------------------------------------------------------------------------------------------

    def hello(self, hello: m.Hello) -> str | None:
        """Admit a connection; a sentence instead when that process must not take part."""
        refusal = refuse(self, hello)
        if refusal is not None:
            if hello.plan is not None and hello.incarnation not in self.roster.workers:
                # An earlier coordinator may have given it up: it was in a generation, and has no part in this job.
                self.roster.note_lost(hello.worker, hello.incarnation, hello.address, refusal)
            self.event("refused", describe_refusal(hello.worker, refusal))
            return refusal[:MAX_TEXT]
        known = self.roster.workers.get(hello.incarnation)
        if hello.plan is not None:
            self._learn(hello.plan)
        if hello.plan is None or self._concerns_now(hello.incarnation):
            for namesake in self.roster.namesakes(hello.worker, hello.incarnation):
                self._give_up(namesake, "another process has taken its name")
        self.virtual_nodes = hello.virtual_nodes
        worker = self._described(hello, known)
        self.reproducibility = hello.reproducibility
        contact = Contact(hello.pid, hello.address, hello.fingerprint, hello.device, hello.self_test)
        self.roster.add(worker, contact)
        self.trained = self.trained or hello.plan is not None
        for change in hello.changes:
            self.history.merge_change(change, fresh=False)
        self.history.reached(hello.step)
        if hello.total_steps is not None:
            self.history.total_steps = hello.total_steps
        running = self.running is not None and bool(self.running.members)
        heartbeat = self.settings.heartbeat_limit / HEARTBEATS
        self._send(hello.incarnation, m.Welcome(running, self.history.step, self.hold, heartbeat))
        if known is not None and known.draining and not hello.draining:
            seconds = max(0.0, (worker.deadline or self.now) - self.now)
            self._send(hello.incarnation, m.Drain(seconds, "asked to"))
        for plan in (self.running, self.proposed):
            # Also the running one: it may have been entered by others while this connection was down.
            if plan is not None and self._tells(plan, hello.incarnation) and plan.generation > (worker.entered or NONE):
                self._send(hello.incarnation, plan)
                for keys in self._rendezvous.of(plan.generation):
                    self._send(hello.incarnation, keys)
        if known is None:
            self.event("worker", f"{hello.worker} connected (pid {hello.pid})")
        self._changed()
        return None

    def _described(self, hello: m.Hello, known: Worker | None) -> Worker:
        """The worker as its Hello and what was known before describe it."""
        draining = hello.draining or bool(known and known.draining)
        deadlines = [
            deadline
            for deadline in (
                None if hello.drain_deadline is None else self.now + hello.drain_deadline,
                known.deadline if known else None,
            )
            if deadline is not None
        ]
        entered = hello.plan.generation if hello.plan is not None else None
        if known is not None and known.entered is not None:
            entered = max(entered or NONE, known.entered)
        ready_at = (known.ready_at if known else None) or self.now
        return Worker(
            hello.worker,
            hello.incarnation,
            last_heard=self.now,
            entered=entered,
            ready_at=ready_at if hello.ready else None,
            draining=draining,
            deadline=min(deadlines, default=self.now + self.settings.drain_grace) if draining else None,
            failures=known.failures if known else 0,
            done=bool(known and known.done),
            guess=hello.pace,
            pace=known.pace if known else None,
        )

    def disconnected(self, incarnation: str) -> None:
        """The worker's connection closed; whether that means anything is for the membership decision."""
        worker = self.roster.workers.get(incarnation)
        if worker is not None and worker.connected:
            self.roster.update(incarnation, connected=False, disconnected_at=self.now)
            self._changed()

    def excuse(self, seconds: float) -> None:
        """The coordinator itself did not run for so long: nobody's silence in that time counts."""
        self.roster.shift(seconds, self.now)
        self._broken = {generation: min(self.now, since + seconds) for generation, since in self._broken.items()}
        self._proposed_at = min(self.now, self._proposed_at + seconds)

    def receive(self, incarnation: str, message: m.FromWorker) -> None:
        """Take one message of an admitted worker; what is stale is ignored."""
        worker = self.roster.workers.get(incarnation)
        if worker is None or worker.gone or not worker.connected:
            return
        self.roster.update(incarnation, last_heard=self.now)
        match message:
            case m.Heartbeat() | m.Hello():
                return
            case m.Ready():
                self.roster.update(incarnation, ready_at=worker.ready_at or self.now)
            case m.Prepared(generation):
                if self.proposed is not None and generation == self.proposed.generation:
                    self._prepared.add(incarnation)
            case m.Entered(plan, step, restored):
                self._entered(incarnation, plan, step, restored)
            case m.EnteredTold(generation, step, restored):
                told = self._plan_of(generation)
                if told is not None:
                    self._entered(incarnation, told, step, restored)
            case m.Pace():
                self._paced(worker, message)
                return
            case m.Progress():
                self._progressed(message)
                return
            case m.Resumed(change):
                self.history.merge_change(change)
            case m.Broken(generation, step, detail):
                self._is_broken(worker, generation, step, detail)
            case m.DrainRequest(reason):
                self._mark_draining(worker, self.now + self.settings.drain_grace, reason)
            case m.Left(generation, step):
                self._left(worker, generation, step)
            case m.Failed(step, error, traceback):
                if self.phase not in ("failed", "done", "stopped"):
                    self.history.error, self.history.traceback = error, traceback
                    self._fail(
                        f"{worker.name} failed in step {step}: {error}" if step else f"{worker.name} failed: {error}"
                    )
            case m.Done():
                self._done(worker, message)
            case m.Note(kind, text):
                self.event(kind, text)
            case m.Publish():
                self._publish(incarnation, message)
                return
        self._changed()

    # --- what messages do --------------------------------------------------------------------------------------------

    def _entered(self, incarnation: str, told: m.Plan, step: int, restored: bool) -> None:
        known = self._plan_of(told.generation)
        if known is None and fault_in_plan(told, self.virtual_nodes) is not None:
            return
        plan = known or told
        if not is_member(plan, incarnation):
            return
        if plan.generation in self._withdrawn:
            # It began anew just when one that has the state of the training came back.
            self._give_up(incarnation, f"generation {plan.generation}, which it entered, was withdrawn")
            return
        entered = self.roster.workers[incarnation].entered
        self.roster.update(incarnation, entered=max(entered or NONE, plan.generation), stranded=False, failures=0)
        if plan.generation < self.running_generation:
            return
        first, begins = self.running is None, len(plan.joiners) == len(plan.members)
        fresh = plan.generation > self.running_generation
        self._learn(plan)
        if fresh and plan.generation.incarnation == self.incarnation:
            self.event("generation", f"generation {plan.generation}: {len(plan.members)} workers ({plan.reason})")
        if fresh and restored and first:
            self.event("restored", f"resumed from the checkpoint of step {step}")
        if fresh and begins:
            self.history.began_at(step)
        else:
            self.history.reached(step)
        self.trained = True

    def _learn(self, plan: m.Plan) -> None:
        """A worker is in this generation: it is the running one if it is the newest, and its members exist."""
        self._counter = max(self._counter, plan.generation.counter)
        if plan.generation.incarnation > self.incarnation:
            self.incarnation = plan.generation.incarnation + 1
        if plan.generation <= self.running_generation:
            return
        if self.running is None and self.proposed is not None and plan.generation < self.proposed.generation:
            self._withdraw()  # a founding, but there is a training to go on with
        self.running, self._running_since = plan, self.now
        self._plans.append(plan)
        if self.proposed is not None and self.proposed.generation <= plan.generation:
            self.proposed, self._prepared = None, set()
        for member in plan.members:
            self.roster.add_heard_of(member, self.now)
        self._broken = {
            generation: since for generation, since in self._broken.items() if generation >= plan.generation
        }
        if plan.mode == "planned" and any(self.roster.workers[member.incarnation].stranded for member in plan.members):
            # It could not complete the step after which the others entered: only a recovery calls it away.
            self._broken.setdefault(plan.generation, self.now)
        if plan.members:
            self._give_up_left_behind()
        self._changed()

    def _give_up_left_behind(self) -> None:
        """What is said to whoever comes later holds for those who came before: the job went on without them.

        An earlier coordinator gave them up and they have not heard of it; their state may be of another training.
        """
        newest = [plan for plan in (self.running, self.proposed) if plan is not None]
        for incarnation, worker in list(self.roster.workers.items()):
            behind = worker.entered is not None and worker.entered < self.running_generation
            if behind and not (worker.draining or worker.through or any(is_member(p, incarnation) for p in newest)):
                self._give_up(
                    incarnation, f"the job went on in generation {self.running_generation} without this process"
                )

    def _withdraw(self) -> None:
        """Nobody has entered the proposed generation, and nobody is to."""
        if self.proposed is not None:
            self._withdrawn.append(self.proposed.generation)
            self.proposed, self._prepared = None, set()
            self._changed()

    def _progressed(self, progress: m.Progress) -> None:
        if progress.generation < self.running_generation:
            return
        news = self.history.is_news(progress)
        if self.history.take_progress(progress):
            self._rebuilds = 0
        if self.history.settle(progress) or news:
            self._changed()
        else:
            self.version += 1

    def _paced(self, worker: Worker, pace: m.Pace) -> None:
        if worker.entered is None or pace.generation > worker.entered or not pace.low <= pace.median <= pace.high:
            return
        if worker.pace is None or pace.generation >= worker.pace.generation:
            self.roster.update(worker.incarnation, pace=pace)
            self.version += 1

    def _is_broken(self, worker: Worker, generation: m.Generation, step: int, detail: str) -> None:
        if self.running is not None and not self.running.members and worker.entered is not None:
            # The others have left at the end of a step that it could not complete.
            self._give_up(worker.incarnation, f"it could not leave with the others: {detail}")
            return
        if generation == worker.entered:
            self.roster.update(worker.incarnation, stranded=True)
            running = self.running
            if running is not None and running.mode == "planned" and is_member(running, worker.incarnation):
                generation = max(generation, self.running_generation)
        if generation < self.running_generation or generation in self._broken:
            return
        plan = self._plan_of(generation)
        if plan is not None and not is_member(plan, worker.incarnation):
            return
        if plan is None and len(self._broken) >= _KNOWN:
            return  # of generations that nobody has told of yet, some are enough
        self._broken[generation] = self.now
        logger.info("%s: generation %s broke at step %d: %s", worker.name, generation, step, detail)

    def _left(self, worker: Worker, generation: m.Generation, step: int) -> None:
        plan = self._plan_of(generation)
        if plan is not None and generation not in self._withdrawn and not is_member(plan, worker.incarnation):
            self._learn(plan)
        contact = self.roster.contacts[worker.incarnation]
        contact.waits_for_release, contact.left_by = True, generation
        if not worker.left:
            self.roster.update(worker.incarnation, left=True)
            self.history.step = max(self.history.step, step)
            self.event("left", f"{worker.name} left after step {step}")

    def _done(self, worker: Worker, done: m.Done) -> None:
        self.roster.update(worker.incarnation, done=True)
        self.roster.contacts[worker.incarnation].waits_for_release = True
        result = self.history.result
        bits_count = self.reproducibility != "statistical"  # other devices round their own updates differently
        if result is not None and done.digest != result.digest and bits_count and self.phase != "failed":
            reason = (
                f"{worker.name} ended with weights {done.digest[:12]} and another worker with {result.digest[:12]}: "
                "the training is not deterministic on these machines (see docs/determinism.md)"
            )
            self.history.error = reason
            self._fail(reason)
            return
        self.history.step = done.step
        if result is None or done.timed_steps > result.timed_steps:
            self.history.result = done
        if result is not None and not (result.optimizer_digest and done.optimizer_digest):
            # Of a sharded optimizer, one worker has seen the whole.
            whole = result.optimizer_digest or done.optimizer_digest
            self.history.result = structs.replace(self.history.result or done, optimizer_digest=whole)

    def _publish(self, incarnation: str, message: m.Publish) -> None:
        plan = next((p for p in (self.proposed, self.running) if p and p.generation == message.generation), None)
        if plan is not None and is_member(plan, incarnation):
            self._rendezvous.add(incarnation, message)

    def _relay(self) -> None:
        """Tell the members of a generation the keys that came since the last time."""
        plans = {plan.generation: plan for plan in (self.running, self.proposed) if plan is not None}
        for keys in self._rendezvous.take():
            for member in plans[keys.generation].members if keys.generation in plans else ():
                self._send(member.incarnation, keys)

    def _mark_draining(self, worker: Worker, deadline: float, reason: str) -> bool:
        """Note that a worker will be taken away; whether that is news to it."""
        if not worker.draining:
            self.event("drain", f"{worker.name} drains: {reason}")
        elif worker.deadline is not None and worker.deadline <= deadline:
            return False
        self.roster.update(worker.incarnation, draining=True, deadline=deadline)
        return True

    def _give_up(self, incarnation: str, why: str) -> None:
        worker = self.roster.workers[incarnation]
        if worker.gone is not None or worker.left:
            return
        self.roster.update(incarnation, gone=why[:400])
        if not worker.done:
            self.roster.note_lost(worker.name, incarnation, self.roster.contacts[incarnation].address, why)
            self.event("lost", f"{worker.name} lost: {why}")
        self._send(incarnation, m.Refuse(f"given up: {why}"[:MAX_TEXT]))
        self._changed()

    def _fail(self, reason: str) -> None:
        self._failed = True
        self.event("failed", reason)

    # --- small parts -------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> calls.Phase:
        """What the job is doing."""
        if self._failed:
            return "failed"
        members = self.running.members if self.running is not None else ()
        workers = self.roster.workers
        if self.history.result is not None and all(
            self.roster.is_lost(x.incarnation) or workers[x.incarnation].done for x in members
        ):
            return "done"
        if self.stop is not None and not members and self.proposed is None:
            return "stopped"
        if self.running is None:
            return "waiting"
        return "evaluating" if self.history.evaluating else "training"

    @property
    def running_generation(self) -> m.Generation:
        """The number of the running generation."""
        return self.running.generation if self.running is not None else NONE

    @property
    def is_prepared(self) -> bool:
        """Whether all members of the proposed generation have its communicator."""
        return self.proposed is not None and self._prepared >= {x.incarnation for x in self.proposed.members}

    def _plan_of(self, generation: m.Generation) -> m.Plan | None:
        """The plan of that generation, if it is one of the latest that this coordinator knows."""
        return next((plan for plan in self._plans if plan.generation == generation), None)

    def _tells(self, plan: m.Plan, incarnation: str) -> bool:
        """Whether that worker is to know of ``plan``: it is in it, or leaves by it."""
        return is_member(plan, incarnation) or (self.running is not None and is_member(self.running, incarnation))

    def _concerns_now(self, incarnation: str) -> bool:
        """Whether that worker is in the running or the proposed generation."""
        plans = [plan for plan in (self.running, self.proposed) if plan is not None]
        return any(is_member(plan, incarnation) for plan in plans)

    def _send(self, incarnation: str, message: m.ToWorker) -> None:
        worker = self.roster.workers.get(incarnation)
        if worker is not None and worker.connected:
            self.outbox.append((incarnation, message))

    def event(self, kind: str, text: str) -> None:
        """Tell people something, in the log and in the status."""
        self.history.tell(kind, text)
        self._changed()

    def _changed(self) -> None:
        self.version += 1
        self.news += 1
