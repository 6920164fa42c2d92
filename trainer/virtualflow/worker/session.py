"""A worker's membership: which generation it is in, which one it could enter, and when it has to let go.

The link's thread brings plans; a thread for each builds its communicator beside the training (``communicators``); the
training thread asks between two steps. No state of the model is here (``membership`` synchronizes it on entering).
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from typing import NoReturn

from msgspec import structs

from virtualflow.errors import CommunicatorBroken, ConfigurationError, Drained, Evicted, JobEnded, JobFailed, Leave
from virtualflow.protocol import messages as m
from virtualflow.protocol.environment import WorkerEnvironment
from virtualflow.protocol.settings import MAX_CHANGES, MAX_RUNS, MAX_TEXT, MAX_TRACEBACK, RECORD_KEEPERS
from virtualflow.protocol.versions import PROCESSES_PROTOCOL, this_speaker
from virtualflow.state import Kind
from virtualflow.transport import Communicator, Link, Signer
from virtualflow.worker.communicators import Communicators
from virtualflow.worker.member_state import MemberState
from virtualflow.worker.settings import WorkerSettings

logger = logging.getLogger("virtualflow.worker")


class RunIsOver(Exception):
    """The job is in a later run of the script than this process."""

    def __init__(self, over: m.RunOver) -> None:
        super().__init__(f"run {over.current} of the script is under way")
        self.over = over


class Session:
    """The membership of one worker process in a job with a coordinator.

    The training thread calls it and writes its ``state``. What the link's thread brings (plans, holds, drains, the end)
    is immutable and read under the link's lock, as are the communicators that a thread for each plan builds.
    """

    coordinated = True
    stopping = False
    """Leaving takes the agreement of all."""

    def __init__(
        self,
        environment: WorkerEnvironment,
        state: MemberState,
        settings: WorkerSettings,
        incarnation: str | None = None,
        signer: Signer | None = None,
        *,
        asks: bool = False,
    ) -> None:
        assert environment.coordinator is not None
        self.state = state
        self.worker = environment.worker
        self.incarnation = incarnation or uuid.uuid4().hex
        self._place = environment.place
        self.communicator: Communicator | None = None
        self._address = environment.address
        self._settings = settings.link
        self._report_limit = settings.report_limit
        self._offered: m.Plan | None = None
        self._agreed: m.Plan | None = None
        """The last one that all have offered to enter."""
        self.link = Link(
            environment.coordinator, environment.credential, self._hello, self._on_plan, settings.link, self._on_over
        )
        self.activity = self.link.activity
        self.give_up: Callable[[Leave], None] | None = None
        """Ends this process from another thread, where the training thread hangs."""
        self._noticed = threading.Event()
        """The training thread knows that this process is not to go on."""
        self.communicators = Communicators(
            self.link, state, self.incarnation, settings, self.interruption, self.offered, signer, asks
        )
        self.reserve = self.communicators.reserve

    # --- for the training thread --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Connect.

        Raises:
            ConfigurationError: the coordinator cannot be reached or refuses this worker.
            Leave: this process is not admitted, or the job is over.
            RunIsOver: the job is in a later run of the script.
        """
        self.link.start()
        self.raise_if_over()
        if self.link.run_over is not None:
            raise RunIsOver(self.link.run_over)
        assert self.link.welcome is not None
        self.state.running, self.state.draws_early = self.link.welcome.running, self.link.welcome.draws_early

    def connect(self) -> bool:
        """Whether there is a connection on which to report something, made now if need be."""
        if not self.link.started:
            self.state.failing = True
            try:
                self.link.start(self._report_limit)
            except ConfigurationError:
                return False
        return self.link.rejected is None and self.link.refused is None

    @property
    def rank(self) -> int:
        return 0 if self.communicator is None else self.communicator.rank

    @property
    def generation(self) -> m.Generation:
        return m.NO_GENERATION if self.state.plan is None else self.state.plan.generation

    def tidy(self) -> None:
        if self.communicators.retired:
            self.communicators.tidy()

    @property
    def draining(self) -> bool:
        return self.state.drain_reason is not None or self.link.drain is not None

    def request_drain(self, reason: str, seconds: float) -> None:
        """Ask to leave; safe to call from a signal handler's thread-less context (it only queues)."""
        if not self.draining:
            self.state.drain_reason, self.state.drain_until = reason, time.monotonic() + seconds
            self.link.send(m.DrainRequest(reason), keep=True)
            self.link.notify()

    def be_ready(self) -> None:
        self.state.ready = True
        self.link.send(m.Ready())

    def offer(self, evaluating: bool, stops: bool = True) -> m.Generation:
        """The planned generation that this worker could enter after the coming exchange.

        One that it is not in needs no preparation. An evaluation goes on without joiners: they have no part in it.

        Args:
            stops: the job may end here. Its last checkpoint says that the script's code behind the step has run.
        """
        with self.link.changed:
            self._offered = None
            newest = self.link.plan
            if newest is None or newest.mode != "planned" or newest.generation <= self.generation:
                return m.NO_GENERATION
            if (evaluating and newest.joiners) or not (stops or newest.members):
                return m.NO_GENERATION
            if self.is_member(newest) and newest.generation not in self.communicators:
                return m.NO_GENERATION
            self._offered = newest
            self.state.lineage.attempt(newest)
            return newest.generation

    def is_member(self, plan: m.Plan) -> bool:
        return plan.rank_of(self.worker, self.incarnation) is not None

    def agreed_plan(self, offers: Iterable[m.Generation]) -> m.Plan | None:
        """The plan that all have just offered to enter; ``None`` when somebody was not ready."""
        with self.link.changed:
            plan = self._offered
        lineage = self.state.lineage
        lineage.settle(self.generation)
        if plan is None:
            return None
        if not all(offer == plan.generation for offer in offers):
            lineage.refute(plan)
            return None
        lineage.count(plan, "attempted")
        self._agreed = plan
        return plan

    def offered(self) -> list[m.Plan]:
        """Plans that this worker may be about to enter."""
        return [plan for plan in (self._offered, self._agreed) if plan is not None]

    def enter(self, plan: m.Plan) -> Communicator:
        """Make ``plan`` the generation of this worker; its communicator stands already."""
        communicator = self.communicators.take(plan.generation, self.communicator)
        self.state.plan, self.communicator, self._agreed = plan, communicator, None
        self.link.record.fetches = communicator.rank < RECORD_KEEPERS
        self.state.lineage.attempt(plan)
        self.link.forget(m.Prepared)
        self.link.forget(m.Broken)
        if self.state.has_state:
            self.say_entered(restored=False)
        return communicator

    def say_entered(self, restored: bool) -> None:
        assert self.state.plan is not None
        self.link.send(m.Entered(self.state.plan, self.state.step, restored))

    def say_broken(
        self, generation: m.Generation, detail: str, contested: m.Plan | None = None, convicted: str | None = None
    ) -> None:
        """Tell the coordinator that ``generation`` is over: its communicator is lost, it does not count, or a member
        of it was wrong.
        """
        self.link.send(m.Broken(generation, self.state.step, detail, contested, convicted), keep=True)

    def keep_broken(self, generation: m.Generation, detail: str) -> None:
        """Let go of ``generation`` because the coordinator said so; another one has to hear of it.

        The generation that was to take over may end with the coordinator, and the others of this one would wait.
        """
        self.link.keep(m.Broken(generation, self.state.step, detail))

    def await_entry(self) -> m.Plan:
        """Wait for the newest plan that this worker may enter without an agreement.

        That is a recovery or, for a worker without state, any that it is in.
        """

        def enterable() -> m.Plan | None:
            newest = self.link.plan
            if newest is None or newest.generation <= self.generation or newest.generation not in self.communicators:
                return None
            return newest if newest.mode == "recovery" or not self.state.has_state else None

        def over() -> bool:
            return (
                self.link.failure is not None
                or self.link.refused is not None
                or self.link.ended is not None
                or (self.draining and not self.state.has_state)
            )

        said = False
        while True:
            self.link.wait(lambda: enterable() is not None or over(), self._settings.retry_most)
            self.raise_if_over()
            plan = enterable()
            if plan is not None:
                return plan
            if self.draining and not self.state.has_state:
                self.leave(m.NO_GENERATION)
            silent = self.link.silent_for
            if silent > self._settings.orphan_limit:
                raise JobFailed(f"no coordinator for {self._settings.orphan_limit:g} s")
            if silent > self._settings.connect_timeout and not said:
                said = True
                logger.warning(
                    "%s waits for the coordinator at %s", self.worker, os.environ.get("VIRTUALFLOW_COORDINATOR")
                )

    def holds_lease(self) -> bool:
        """Whether nobody has taken this worker's place, as far as can be known; asks the coordinator if need be."""
        link, lease = self.link, self.state.lease
        if link.refused is not None or link.failure is not None:
            return False
        if lease.holds(self._settings.lease if link.welcome is None else link.welcome.lease):
            return True
        lease.begin()
        wait = self._settings.lease_wait
        if link.silent_for < wait and link.renew_lease(wait):
            lease.renew()
            return True
        logger.warning("%s is not the leader now: no coordinator confirms that it still has its place", self.worker)
        return False

    def send(self, message: m.FromWorker, *, keep: bool = False) -> None:
        self.link.send(message, keep=keep)

    def note(self, kind: Kind, text: str) -> None:
        self.link.send(m.Note(kind, text[:MAX_TEXT]))

    def held(self, step: int) -> bool:
        """Whether no step after ``step`` may start yet."""
        hold = self.link.hold
        return hold is not None and step >= hold

    def await_hold(self, step: int) -> float:
        """Wait while no step after ``step`` may start; seconds that it took.

        Ends early when a recovery is called for, or this process is not to go on.
        """
        began = time.monotonic()

        def free() -> bool:
            hold = self.link.hold
            return hold is None or step < hold or self.interruption(self.state.plan) is not None

        while not self.link.wait(free, self._settings.orphan_limit):
            logger.info("held before step %d", step + 1)
        return time.monotonic() - began

    def interruption(self, plan: m.Plan | None) -> str | None:
        """Why a collective of ``plan`` is not to be waited for any longer."""
        if self.link.failure is not None:
            return f"{type(self.link.failure).__name__} behind the training"
        if self.link.refused is not None:
            return self.link.refused
        if self.link.ended is not None and (self.link.ended.failed or not self.state.has_state):
            return self.link.ended.reason
        newest = self.link.plan
        if newest is None or plan is None or newest.generation <= plan.generation:
            return None
        if newest.mode == "recovery" or not self.state.has_state:
            return f"generation {newest.generation} takes over: {newest.reason}"
        return None

    def check(self) -> None:
        """Look whether what goes on in the present generation still makes sense."""
        reason = self.interruption(self.state.plan)
        if reason is not None:
            raise CommunicatorBroken(reason)

    def raise_if_over(self) -> None:
        """Raise when this process is not to go on.

        Raises:
            Evicted: it was declared lost or refused.
            JobFailed: the job has failed elsewhere.
            JobEnded: the job is complete or was stopped.
            Exception: a defect has ended something behind the training thread.
        """
        if self.link.failure is not None:
            raise self.link.failure
        leave = self._told_to_leave()
        if leave is None:
            return
        self._noticed.set()
        if isinstance(leave, Evicted):
            logger.error("%s", leave.reason)
        raise leave

    def leave(self, generation: m.Generation, reason: str = "") -> NoReturn:
        """Leave for good, with the agreement of all or before having entered.

        Args:
            reason: if not because this worker drains.
        """
        self.link.send(m.Left(generation, self.state.step), keep=True)
        self._await_release()
        self.close()
        drain = self.link.drain.reason if self.link.drain else self.state.drain_reason
        raise Drained(reason or drain or "left")

    def leave_alone(self) -> None:
        """Leave at once, without the agreement of the others: they repeat an attempt."""
        self.link.send(m.Left(m.NO_GENERATION, self.state.step), keep=True)
        self.link.flush(self._settings.connect_timeout)

    def report_done(self, done: m.Done, take_part: Callable[[], object]) -> None:
        """Report the result and wait until nobody needs this worker any more.

        Args:
            take_part: enters a recovery that is called for meanwhile: others may need this worker's state to finish.
        """
        self.state.done = True
        self.link.send(done, keep=True)
        limit = time.monotonic() + self._settings.goodbye
        while time.monotonic() < limit:

            def called() -> bool:
                return (
                    self.link.released or self.link.ended is not None or self.interruption(self.state.plan) is not None
                )

            if not self.link.wait(called, max(0.0, limit - time.monotonic())):
                break
            ended = self.link.ended
            if ended is not None and (ended.failed or not self.link.released):
                self.raise_if_over()
            if self.link.released or self.link.refused is not None:
                return
            take_part()
        logger.warning("nobody has taken the result of %s within %g s", self.worker, self._settings.goodbye)

    def report_failed(
        self,
        error: str,
        trace: str,
        non_finite: m.NonFinite | None = None,
        odd: tuple[str, ...] = (),
        does_not_fit: bool = False,
        machine_fault: bool = False,
    ) -> None:
        """Report an error of the user's code, and see that it has left this process."""
        step = self.state.step + 1 if trace else 0
        failed = m.Failed(step, error[:MAX_TEXT], trace[-MAX_TRACEBACK:], non_finite, odd, does_not_fit, machine_fault)
        self.link.send(failed, keep=True)
        self.link.flush(self._settings.connect_timeout)

    def remember(self, change: m.Change) -> None:
        change = structs.replace(change, run=self.state.run)
        self.state.changes[change.generation] = change
        while len(self.state.changes) > MAX_CHANGES:
            del self.state.changes[min(self.state.changes)]
        self.link.send(m.Resumed(change))

    def close(self) -> None:
        self._noticed.set()
        self.link.close()
        running, self.communicator = self.communicator, None
        self.communicators.close(running)

    def _told_to_leave(self) -> Leave | None:
        if self.link.refused is not None:
            # Whoever is to leave, and hears that the job has gone on without it, has nothing more to hand over.
            return Drained(self.link.refused) if self.draining else Evicted(self.link.refused)
        if self.link.ended is not None:
            return (JobFailed if self.link.ended.failed else JobEnded)(self.link.ended.reason)
        return None

    # --- behind it ----------------------------------------------------------------------------------------------------

    def _await_release(self) -> None:
        self.link.wait(lambda: self.link.released or self.link.ended or self.link.refused, self._settings.goodbye)

    def _hello(self) -> m.Hello:
        state, us, newest, place = self.state, this_speaker(self.worker), self.link.plan, self._place
        deadline = self.link.drain_until if self.link.drain is not None else self.state.drain_until
        return m.Hello(
            protocol=us.newest,
            oldest_protocol=us.oldest if place is None else max(us.oldest, PROCESSES_PROTOCOL),
            version=us.version,
            worker=self.worker,
            incarnation=self.incarnation,
            address=self._address,
            pid=os.getpid(),
            virtual_nodes=state.virtual_nodes,
            fingerprint=state.fingerprint,
            ready=state.ready,
            draining=self.draining,
            drain_deadline=max(0.0, deadline - time.monotonic()) if self.draining else None,
            plan=self.state.plan if self.state.has_state else None,
            step=state.step,
            total_steps=state.total_steps,
            done=state.done,
            changes=tuple(sorted(state.changes.values(), key=lambda change: change.generation)),
            pace=state.pace,
            reproducibility=state.reproducibility,
            device=state.device,
            self_test=state.self_test,
            draws_early=state.draws_early,
            heard=m.NO_GENERATION if newest is None else newest.generation,
            floor=state.floor if newest is None else max(state.floor, newest.generation),
            failing=state.failing,
            memory=state.memory,
            classes=state.classes,
            capacity=state.capacity,
            run=state.run,
            runs=state.runs[-MAX_RUNS:],
            launch="" if place is None else place.launch,
            local_rank=0 if place is None else place.local_rank,
            local_world_size=1 if place is None else place.local_world_size,
        )

    def _on_over(self) -> None:
        """This process is not to go on (link's thread): see that it ends even if the training thread hangs."""
        leave = self._told_to_leave()
        if isinstance(leave, Evicted | JobFailed | Drained):
            threading.Thread(target=self._see_to_end, args=(leave,), name="virtualflow-end", daemon=True).start()

    def _see_to_end(self, leave: Leave) -> None:
        while not self._noticed.wait(self._settings.retry_most):
            if self.give_up is not None and self.activity.stuck > self._settings.deaf_limit:
                self.give_up(leave)

    def _on_plan(self, plan: m.Plan) -> None:
        """A new plan has arrived (link's thread): build its communicator beside whatever runs."""
        if not self.state.has_state:
            # It enters the newest plan only. Others may have agreed on a former one, and would wait for it for ever.
            self.communicators.let_go(plan.generation)
        rank = plan.rank_of(self.worker, self.incarnation)
        if rank is not None and plan.generation > self.generation:
            self.communicators.prepare(plan, rank)
