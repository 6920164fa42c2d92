"""The membership of a process without a coordinator: a job of one member, with nobody to tell.

It answers as a :class:`Session` does, so that nothing else asks whether there is a coordinator.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable
from typing import NoReturn

from virtualflow.errors import Drained, Leave
from virtualflow.protocol import messages as m
from virtualflow.protocol.lineage import number_above
from virtualflow.state import Kind, Reserve
from virtualflow.transport import Activity, Communicator
from virtualflow.worker.member_state import MemberState
from virtualflow.worker.session import Session
from virtualflow.worker.settings import WorkerSettings

logger = logging.getLogger("virtualflow.worker")


class StandaloneSession:
    """All virtual nodes are assigned to this process."""

    coordinated = False
    worker = "alone"
    rank = 0

    def __init__(self, state: MemberState, settings: WorkerSettings) -> None:
        self.state = state
        self.activity = Activity()
        self.incarnation = uuid.uuid4().hex
        self.give_up: Callable[[Leave], None] | None = None
        self.reserve = Reserve()
        self.communicator: Communicator | None = None
        self._settings = settings

    @property
    def generation(self) -> m.Generation:
        return m.NO_GENERATION if self.state.plan is None else self.state.plan.generation

    @property
    def draining(self) -> bool:
        return self.state.drain_reason is not None

    stopping = draining

    def connect(self) -> bool:
        return False

    def holds_lease(self) -> bool:
        return True

    def note(self, kind: Kind, text: str) -> None:
        logger.log(logging.INFO if kind == "checkpoint" else logging.WARNING, "%s", text)

    def held(self, step: int) -> bool:
        return False

    def await_hold(self, step: int) -> float:
        return 0.0

    def request_drain(self, reason: str, seconds: float) -> None:
        self.state.drain_reason = reason

    def offer(self, evaluating: bool, stops: bool = True) -> m.Generation:
        return m.NO_GENERATION

    def agreed_plan(self, offers: Iterable[m.Generation]) -> m.Plan | None:
        return None

    def is_member(self, plan: m.Plan) -> bool:
        return True

    def await_entry(self) -> m.Plan:
        member = m.Member(self.worker, self.incarnation, "127.0.0.1", 0, self.state.virtual_nodes)
        number = number_above(self.state.floor, time.time())
        return m.Plan(number, "planned", (member,), (), "start", "runs alone")

    def enter(self, plan: m.Plan) -> Communicator:
        self.state.plan = plan
        self.communicator = Communicator(plan, 0, (), lambda: None, self._settings.communicator)
        return self.communicator

    def say_entered(self, restored: bool) -> None:
        if restored:
            logger.warning("resumed from the checkpoint of step %d", self.state.step)

    def interruption(self, plan: m.Plan | None) -> str | None:
        return None

    def leave(self, generation: m.Generation, reason: str = "") -> NoReturn:
        raise Drained(reason or self.state.drain_reason or "left")

    def _nothing(self, *_: object, **__: object) -> None:
        """There is nobody to tell, to wait for or to part from."""

    start = send = be_ready = say_broken = keep_broken = check = _nothing
    leave_alone = remember = tidy = report_done = report_failed = close = _nothing


class PastRunSession(StandaloneSession):
    """The membership of a worker that comes to a run of the script when the job is in a later one.

    It takes up by itself what that run has ended with: from its checkpoints or, where these do not reach, by computing
    it again. Nobody waits for it, and it leads nothing.
    """

    def holds_lease(self) -> bool:
        return False

    def note(self, kind: Kind, text: str) -> None:
        logger.info("%s", text)

    def say_entered(self, restored: bool) -> None:
        run, step = self.state.run, self.state.step
        how = (
            f"reads its checkpoint of step {step}" if restored else "computes it again, as there is no checkpoint of it"
        )
        logger.warning("run %d of the script is over; this worker, which came later, %s", run, how)


AnySession = Session | StandaloneSession
"""The membership of a process, in a job or alone."""
