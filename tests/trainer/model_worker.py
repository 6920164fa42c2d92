"""A worker of the model of one lineage: the real session and membership, over connections that exist in memory.

Each worker's training is a thread that runs only while the model lets it, up to where it would wait for somebody else.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from msgspec import structs
from torch import Tensor

from virtualflow.errors import CommunicatorBroken, Leave
from virtualflow.protocol import messages as m
from virtualflow.protocol.environment import WorkerEnvironment
from virtualflow.reduction import Exchange
from virtualflow.state import Checkpointer, Reserve, Transfer
from virtualflow.state.checkpoint_order import NO_CHECKPOINT, Mark
from virtualflow.transport import Communicator, Link
from virtualflow.worker.communicators import Communicators
from virtualflow.worker.member_state import MemberState
from virtualflow.worker.membership import Membership
from virtualflow.worker.session import Session
from virtualflow.worker.settings import WorkerSettings
from virtualflow.worker.stopwatch import Stopwatch
from virtualflow.worker.train_state import Training

if TYPE_CHECKING:
    from model_network import Mesh, Network

T = TypeVar("T")
VIRTUAL_NODES = 4
SETTINGS = WorkerSettings()
ENVIRONMENT = WorkerEnvironment("http://nowhere", "secret", "", "127.0.0.1", *[None] * 6, 1, None, None)  # type: ignore[arg-type]


class Killed(BaseException):
    """The process of this thread has ended."""


class Strand:
    """A thread that runs while :meth:`resume` waits for it, until it pauses or ends."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._killed = False
        self._error: BaseException | None = None
        self.over = False
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        self._go.acquire()
        try:
            if not self._killed:
                self._run()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - the model raises it
            self._error = error
        self.over = True
        self._back.release()

    def pause(self) -> None:
        """Let the model go on, until it resumes this strand."""
        self._back.release()
        self._go.acquire()
        if self._killed:
            raise Killed

    def resume(self) -> None:
        """Run it up to its next pause."""
        if self.over:
            return
        self._go.release()
        self._back.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def kill(self) -> None:
        """End it where it is."""
        self._killed = True
        self.resume()
        self._thread.join()


class Wire(Link):
    """A connection to a coordinator of the model; the queue, what is kept, and what news do are the real ones."""

    def __init__(self, worker: Worker, session: Session) -> None:
        super().__init__("", "", session._hello, session._on_plan, SETTINGS.link)
        self.worker = worker

    def wait(self, predicate: Callable[[], T], timeout: float) -> T:
        """Wait as long as it takes: no time-out of a worker is as short as a history."""
        while not (value := predicate()):
            self.worker.strand.pause()
        return value

    @property
    def silent_for(self) -> float:
        """No worker gives up for want of a coordinator."""
        return 0.0

    def connect(self) -> m.Hello:
        """Begin as ``_converse`` does; the first message."""
        self._queue_anew()
        self.connected = True
        hello = self._hello()
        seconds = hello.drain_deadline
        return hello if seconds is None else structs.replace(hello, drain_deadline=float(round(seconds)))

    def next_message(self) -> m.FromWorker | None:
        """What is sent next."""
        return self._short(self._queue.popleft()) if self._queue else None

    def close(self) -> None:
        """The model hangs up once all is said."""


class Builders(Communicators):
    """Communicators that stand as soon as all members have begun to build them and reach one another."""

    def __init__(self, worker: Worker, session: Session) -> None:
        super().__init__(
            session.link, session.state, session.incarnation, SETTINGS, session.interruption, session.offered
        )
        self.building: dict[m.Generation, m.Plan] = {}
        self._worker = worker

    def prepare(self, plan: m.Plan, rank: int) -> None:
        """Begin to build."""
        self.building[plan.generation] = plan
        self._worker.network.mesh(plan).begun.add(rank)

    def build(self, plan: m.Plan) -> None:
        """The mesh stands, or does not in time."""
        del self.building[plan.generation]
        rank = plan.rank_of(self._worker.name, self._worker.incarnation)
        assert rank is not None
        self._build(plan, rank)
        if self._link.failure is not None:
            raise self._link.failure

    def _close_behind(self, communicators: Any) -> None:
        for communicator in communicators:
            communicator.close()


@dataclass
class Exchanges:
    """The collectives of one member of a generation."""

    plan: m.Plan
    rank: int
    mesh: Mesh
    worker: Worker
    count: int = 0
    idle = True

    @property
    def size(self) -> int:
        """Of the group."""
        return len(self.plan.members)

    def all_gather(self, block: Tensor) -> Tensor:
        """Wait for everybody's, unless something speaks against it."""
        return torch.stack(self.swap(block))

    def swap(self, block: Any) -> list[Any]:
        """Give this and get everybody's."""
        self.mesh.post(self.rank, block)
        while True:
            if self.mesh.readable(self.rank, self.count):
                self.count += 1
                self.mesh.has_read[self.rank] = self.count
                return [posts[self.count - 1] for posts in self.mesh.posts]
            if self.mesh.fails(self.rank, self.count):
                raise CommunicatorBroken("connection closed by peer")
            reason = self.worker.session.interruption(self.plan)
            if reason is not None:
                raise CommunicatorBroken(reason)
            self.worker.strand.pause()

    def close(self) -> None:
        """Close the sockets."""
        self.mesh.close(self.rank)


@dataclass
class History:
    """What a training is to the model: where it began, and the generation in which each step was made."""

    steps: tuple[Any, ...] = ()
    completed_steps: int = 0
    id: str = ""
    exchanges: int = 0
    transfer: None = None
    changes: dict[m.Generation, m.Change] = field(default_factory=dict)
    optimizer: torch.optim.Optimizer = field(default_factory=lambda: torch.optim.SGD([torch.zeros(1)], 0.1))
    scheduler: None = None
    built: dict[str, str] = field(default_factory=dict)
    shards: None = None
    sharded: None = None
    pending: None = None
    wish: Exchange = field(default_factory=Exchange)
    kept: tuple[int, ...] = ()
    finished: tuple[int, ...] = ()
    """Virtual nodes: none is computed."""

    @property
    def update(self) -> History:
        """There is nothing to it."""
        return self

    @property
    def wish_number(self) -> int:
        """The wish as it is told."""
        return self.wish.to_number()

    @property
    def sync(self) -> History:
        """There is nothing to it."""
        return self

    @property
    def reducer(self) -> History:
        """There is nothing to it."""
        return self

    def agree(self, communicator: Any, wish: Exchange, holdings: Sequence[Sequence[int]]) -> None:
        """Every member asks whether all know the same network; there is nothing to measure."""
        if communicator.size > 1:
            communicator.all_gather(torch.tensor([wish.to_number()]))

    def abandon(self, *, keep: bool = False) -> None:
        """Nothing of an attempt is left."""

    def enter(self) -> None:
        """No collective of a former generation is under way."""

    def room(self) -> tuple[int, ...]:
        """No large tensors."""
        return ()

    def model_hash(self) -> int:
        """All begin with the same model."""
        return 1

    def become(self, steps: tuple[Any, ...]) -> None:
        """Restore."""
        self.steps, self.completed_steps, self.exchanges = steps, len(steps) - 1, len(steps) - 1


class NoCheckpoints:
    """A job without a checkpoint directory."""

    def enter(self, generation: m.Generation) -> None:
        """Nothing bears its number."""

    def find(self) -> Mark:
        """There is none."""
        return NO_CHECKPOINT

    def give_up(self) -> None:
        """None is being written."""

    def save_final(self, training: Training) -> None:
        """Nowhere to."""


class Member(Membership):
    """Decides as ever; its state is a history."""

    worker: Worker

    def _bring_state(self, communicator: Communicator, transfer: Transfer) -> None:
        history = self.worker.history
        exchanges = cast(Exchanges, communicator)
        if not history.steps and communicator.rank in transfer.donors:
            history.become((("began", exchanges.mesh.number),))
        if transfer.receivers:
            given = history.steps if communicator.rank in transfer.donors else None
            if given is None and not self._state.has_state:
                self._spoiled = True
            found = [steps for steps in exchanges.swap(given) if steps is not None]
            assert len(set(found)) == 1, f"donors differ: {found}"
            if given is None:
                history.become(found[0])


def is_of_evaluation(exchange: int) -> bool:
    """An evaluation of two exchanges comes behind every second step."""
    return exchange % 4 in (2, 3)


class Worker:
    """A worker process."""

    def __init__(self, network: Network, name: str, number: int) -> None:
        self.network = network
        self.name, self.incarnation, self.address = name, f"{name}.{number}", f"10.0.0.{number}"
        self.alive, self.stopped, self.doomed = True, False, False
        self.touched = False
        """Something has happened to it, for which it may be declared lost."""
        self.harmed_at = float("-inf")
        """When something has last happened to the process or to its connections with others, not with a coordinator."""
        self.ending: Leave | None = None
        self.leads_to: int | None = 0
        """The coordinator that its connections come to."""
        self.mute = False
        """Nothing that it says to its coordinator arrives, though it hears it."""
        self.connected_to: Any = None
        self.reconnect_at = 0.0
        self.inbox: deque[m.ToWorker] = deque()
        self.history = History()
        state = MemberState(VIRTUAL_NODES, "one machine")
        self.session = Session(replace(ENVIRONMENT, worker=name, address=self.address), state, SETTINGS)
        self.session.incarnation = self.incarnation
        self.wire = self.session.link = Wire(self, self.session)  # type: ignore[assignment]
        self.builders = Builders(self, self.session)
        self.session.communicators = self.builders
        self.session.reserve, self.session.tidy = Reserve(), self.builders.tidy
        self.membership = Member(
            self.session,
            cast(Training, self.history),
            cast(Checkpointer, NoCheckpoints()),
            {},
            Stopwatch(),
        )
        self.membership.worker = self
        self.strand = Strand(self._live)

    @property
    def runs(self) -> bool:
        """Whether it can do anything."""
        return self.alive and not self.stopped

    @property
    def could_go_on(self) -> bool:
        """Whether it has the state of the training, and nobody has told it to end."""
        told = self.wire.refused is not None or any(isinstance(x, m.Refuse) for x in self.inbox)
        return self.alive and not self.doomed and bool(self.history.steps) and not told and self.ending is None

    @property
    def plan(self) -> m.Plan | None:
        """The generation that it is in."""
        return self.session.state.plan

    def _live(self) -> None:
        """The loop over the steps, without the numbers."""
        try:
            self.wire.wait(lambda: self.wire.welcome or self.wire.refused, 0.0)
            self.session.raise_if_over()
            self.membership.join()
            while True:
                number, agreed = self.history.completed_steps + 1, self.membership.agreed
                began = is_of_evaluation(number - 1)
                if agreed is not None and (
                    not is_of_evaluation(number) or (began and agreed.members and not agreed.joiners)
                ):
                    self.membership.switch()
                self._step(number)
        except Leave as error:
            self.ending = error
            with suppress(Killed):
                self.session.close()

    def _step(self, number: int) -> None:
        session, history = self.session, self.history
        while history.completed_steps < number:
            try:
                self.membership.check()
                self.strand.pause()
                evaluating = is_of_evaluation(number)
                offer = session.offer(evaluating=evaluating, stops=not evaluating)
                exchanges = cast(Exchanges, session.communicator)
                found = exchanges.swap((number, offer))
            except CommunicatorBroken as error:
                self.membership.recover(error)
            else:
                assert {step for step, _ in found} == {number}, f"steps {found} were added up"
                assert session.state.plan is not None
                history.become((*history.steps, exchanges.mesh.number))
                session.state.step, session.state.repair = number, None
                self.network.note_commit(self)
                self.membership.note_offers([offered for _, offered in found])
                if session.state.leader:
                    session.send(m.Progress(session.generation, number, 0, None, {}, 1.0, "training"))
                session.tidy()
