"""The model of one lineage: two coordinators, workers, an authority, and a network that loses, delays and parts.

Coordinators are the real state with the real decisions; workers are the real session and membership
(:mod:`model_worker`). Time stands still but for :meth:`Network.pass_time`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

from driven import Driven
from model_worker import Exchanges, Wire, Worker

from virtualflow.coordinator.generations import excuse
from virtualflow.coordinator.roster import UnknownWorker
from virtualflow.coordinator.settings import CoordinatorSettings, MembershipSettings
from virtualflow.errors import CommunicatorBroken
from virtualflow.protocol import http_api
from virtualflow.protocol import messages as m
from virtualflow.transport.settings import LinkSettings
from virtualflow.worker import communicators

SETTINGS = MembershipSettings(startup_grace=5.0)
BUILD_LIMIT = 10.0
PING_LIMIT = 9.0
"""A worker closes its connection to a coordinator that has not answered for so long."""
KEPT = 40
UNHEARD = ("no sign of life", "not connected", "its connections closed")
"""Why a worker is declared lost of which nothing is known."""
MESHES_FAIL = "times in a row with nobody lost"
"""How a job ends whose workers reach their coordinator and not one another."""


@dataclass
class Mesh:
    """The connections among the members of a generation, and what each has sent to all others so far."""

    number: int
    members: tuple[str, ...]
    made_at: float
    begun: set[int] = field(default_factory=set)
    """Ranks that have begun to build it."""
    relayed: bool = False
    """All know the keys of all."""
    closed: set[int] = field(default_factory=set)
    has_read: dict[int, int] = field(default_factory=dict)
    torn: dict[tuple[int, int], tuple[int, bool, bool]] = field(default_factory=dict)
    """By reader and writer: how many posts come through, whether that is silent, whether it is for ever."""

    def __post_init__(self) -> None:
        self.posts: list[list[Any]] = [[] for _ in self.members]

    def post(self, rank: int, block: Any) -> None:
        """Send to all."""
        self.posts[rank].append(block)

    def readable(self, reader: int, count: int) -> bool:
        """Whether everybody's post after ``count`` has arrived."""
        return all(self._arrived(reader, writer, count) for writer in range(len(self.members)))

    def fails(self, reader: int, count: int) -> bool:
        """Whether the reader can tell that one of them never will."""
        for writer in range(len(self.members)):
            if not self._arrived(reader, writer, count):
                torn = self.torn.get((reader, writer))
                if reader in self.closed or writer in self.closed or (torn is not None and not torn[1]):
                    return True
        return False

    def _arrived(self, reader: int, writer: int, count: int) -> bool:
        limit = self.torn[reader, writer][0] if (reader, writer) in self.torn else len(self.posts[writer])
        return count < min(limit, len(self.posts[writer]))

    def tear(self, reader: str, writer: str, *, lose: bool, silent: bool, for_ever: bool) -> None:
        """Nothing more comes through, and with ``lose`` nothing that was not read yet."""
        if reader in self.members and writer in self.members:
            to, by = self.members.index(reader), self.members.index(writer)
            limit = self.has_read.get(to, 0) if lose else len(self.posts[by])
            former = self.torn.get((to, by))
            if former is not None:
                limit, silent, for_ever = min(limit, former[0]), silent and former[1], for_ever or former[2]
            self.torn[to, by] = limit, silent, for_ever or lose

    def mend(self) -> None:
        """What was only held up comes through; where something was lost, the connection turns out to be broken."""
        self.torn = {
            pair: (limit, False, True) for pair, (limit, silent, lost) in self.torn.items() if lost or not silent
        }

    def close(self, rank: int) -> None:
        """A member closes its connections."""
        self.closed.add(rank)


class Coordinator(Driven):
    """One of the job's coordinators."""

    def __init__(self, incarnation: int, wanted: int, now: float) -> None:
        super().__init__(incarnation, wanted, SETTINGS, now)
        self.wake_at: float | None = None
        self.frozen_at: float | None = None
        """Since when it does not run."""
        self.unread: list[Callable[[], None]] = []
        """What has reached it meanwhile."""


class Network:
    """All that there is of a job."""

    def __init__(self, wanted: int) -> None:
        self.now = 1_000.0
        self.wanted = wanted
        self.workers: dict[str, Worker] = {}
        self.coordinators: list[Coordinator | None] = [None, None]
        self.started: set[int] = set()
        self.ear = 0
        """The coordinator that the authority speaks to."""
        self.false_words = 0
        self.meshes: dict[tuple[m.Generation, tuple[str, ...]], Mesh] = {}
        self.plans: dict[m.Generation, m.Plan] = {}
        self.cut: set[tuple[str, str]] = set()
        """Who does not get what by whom, by incarnation."""
        self.deadlines: dict[str, float] = {}
        """When a process ends whose end the authority has confirmed beforehand."""
        self.histories: dict[tuple[Any, ...], None] = {}
        """The latest that a committed step has made."""

    # --- what happens -------------------------------------------------------------------------------------------------

    def start_coordinator(self, which: int, ahead: int = 0) -> None:
        """A new process in that place; its clock is ``ahead`` by so many seconds."""
        self.end_coordinator(which)
        incarnation = int((self.now + 100_000 + ahead) * 1_000)
        while incarnation in self.started:
            incarnation += 1  # no two are started in one millisecond
        self.started.add(incarnation)
        coordinator = self.coordinators[which] = Coordinator(incarnation, self.wanted, self.now)
        # The first of all may begin at once; the word to it may come late.
        coordinator.state.next_ticket = incarnation
        coordinator.state.ask_who_may_train()
        if len(self.started) == 1:
            coordinator.call(http_api.BeginCall(incarnation))

    def end_coordinator(self, which: int) -> None:
        former, self.coordinators[which] = self.coordinators[which], None
        for worker in self.workers.values():
            if former is not None and worker.connected_to is former:
                self.hang_up(worker)

    def start_worker(self, name: str, leads_to: int | None) -> Worker:
        worker = Worker(self, name, len(self.workers))
        worker.leads_to = leads_to
        self.workers[worker.incarnation] = worker
        return worker

    def hang_up(self, worker: Worker, pause: float = 0.1) -> None:
        """The connection to the coordinator closes; what is on its way is lost."""
        worker.touched = True
        coordinator, worker.connected_to = worker.connected_to, None
        worker.inbox.clear()
        worker.wire.connected = False
        worker.reconnect_at = self.now + pause
        if coordinator is not None and coordinator in self.coordinators:
            self.reach(coordinator, lambda: coordinator.lose_connection(worker.incarnation))

    def reach(self, coordinator: Coordinator, act: Callable[[], None], *, decide: bool = True) -> None:
        """Let something reach a coordinator, at once or when it runs again."""
        if coordinator.frozen_at is not None:
            coordinator.unread.append(act)
            return
        coordinator.now = self.now
        act()
        if decide:
            self.decide(coordinator)

    def freeze(self, coordinator: Coordinator) -> None:
        """It does not run any more."""
        coordinator.frozen_at = self.now

    def thaw(self, coordinator: Coordinator) -> None:
        """It runs again, notices for how long it did not, and reads what has come meanwhile."""
        assert coordinator.frozen_at is not None
        seconds, coordinator.frozen_at = self.now - coordinator.frozen_at, None
        if seconds > CoordinatorSettings.stall:
            excuse(coordinator.state, seconds, self.now)
        unread, coordinator.unread = coordinator.unread, []
        for act in unread:
            self.reach(coordinator, act)
        self.decide(coordinator)

    def lead(self, worker: Worker, where: int | None) -> None:
        """The coordinator's address leads elsewhere for that worker from now on."""
        if worker.leads_to != where:
            worker.leads_to = where
            self.hang_up(worker)

    def kill(self, worker: Worker, *, lose: bool = False, silent: bool = False) -> None:
        """The process ends; ``silent``: with its machine, so that no connection closes."""
        worker.alive, worker.harmed_at = False, self.now
        for mesh in self.meshes.values():
            for other in mesh.members:
                mesh.tear(other, worker.incarnation, lose=lose, silent=silent, for_ever=True)
        worker.touched = True
        if silent:
            worker.connected_to = None
        else:
            self.hang_up(worker)
        worker.strand.kill()

    def part(self, pairs: Iterable[tuple[Worker, Worker]], *, lose: bool = False, silent: bool = True) -> None:
        """The first of each pair gets nothing of the second any more."""
        for reader, writer in pairs:
            reader.touched = writer.touched = True
            reader.harmed_at = writer.harmed_at = self.now
            self.cut.add((reader.incarnation, writer.incarnation))
            for mesh in self.meshes.values():
                mesh.tear(reader.incarnation, writer.incarnation, lose=lose, silent=silent, for_ever=False)

    def heal(self) -> None:
        self.cut.clear()
        for mesh in self.meshes.values():
            mesh.mend()
        for worker in self.workers.values():
            worker.mute = False

    # --- the authority ------------------------------------------------------------------------------------------------

    def say_gone(self, worker: Worker, which: int) -> None:
        coordinator = self.coordinators[which]
        if coordinator is not None and coordinator.frozen_at is None:
            try:
                coordinator.call(http_api.GoneCall(worker.name, worker.incarnation))
            except UnknownWorker:
                return
            self.decide(coordinator)

    def confirm_ends(self) -> None:
        """Say of all that have ended that they have."""
        for worker in list(self.workers.values()):
            ended = not worker.alive or (worker.ending is not None and worker.strand.over)
            if ended or worker.doomed:
                for which in (self.ear,) if self.false_words else (0, 1):
                    self.say_gone(worker, which)
        self.say_who_lives()

    def say_who_lives(self) -> None:
        """Say who may be in a generation: all workers that live, but for those whose deletion is recorded.

        And the other coordinator: it begins anew with whoever comes to it, if it may begin or once could.
        """
        coordinator, other = self.coordinators[self.ear], self.coordinators[1 - self.ear]
        if coordinator is None or coordinator.frozen_at is not None or coordinator.state.ticket is None:
            return
        workers = [x for x in self.workers.values() if x.alive and not x.strand.over and not x.doomed]
        living = [http_api.LivingWorker(x.name, x.address) for x in workers]
        if other is not None:
            living.append(http_api.LivingWorker("coordinator"))
        coordinator.call(http_api.BeginCall(coordinator.state.ticket, tuple(living)))
        self.decide(coordinator)

    def say_gone_beforehand(self, worker: Worker, within: float) -> None:
        """Its deletion is recorded; it goes on until it is carried out."""
        worker.doomed = worker.touched = True
        worker.harmed_at = self.now
        self.false_words += 1
        self.deadlines[worker.incarnation] = self.now + within
        self.say_gone(worker, self.ear)

    # --- coordinators -------------------------------------------------------------------------------------------------

    def decide(self, coordinator: Coordinator) -> None:
        if coordinator.frozen_at is not None:
            return
        coordinator.now = self.now
        known = set(coordinator.state.roster.lost)
        coordinator.wake_at = coordinator.decide()
        self.check_losses(coordinator, known)
        for incarnation, message in coordinator.take_outbox():
            worker = self.workers[incarnation]
            if isinstance(message, m.Plan):
                known = self.plans.setdefault(message.generation, message)
                assert known == message, f"the number {message.generation} is used twice"
            if worker.connected_to is coordinator:
                worker.inbox.append(message)
            if isinstance(message, m.Refuse):
                coordinator.lose_connection(incarnation)

    def pass_time(self, seconds: float) -> None:
        """Let time pass, with heartbeats and with the coordinators' own limits."""
        end = self.now + seconds
        while self.now < end:
            living = [one for one in self.coordinators if one is not None and one.frozen_at is None]
            times = [coordinator.wake_at for coordinator in living if coordinator.wake_at is not None]
            self.now = max(min(end, self.now + 0.6, *times), self.now + 1e-6)
            for coordinator in living:
                coordinator.now = self.now
                for worker in self.workers.values():
                    if worker.connected_to is coordinator and worker.runs and not worker.mute:
                        self.speak(worker)  # a sign of life does not overtake what was said before
                        coordinator.hear(worker.incarnation, m.Heartbeat())
                self.decide(coordinator)
            for worker in self.workers.values():
                silent_since = worker.connected_to.frozen_at if worker.connected_to is not None else None
                if silent_since is not None and worker.runs and self.now >= silent_since + PING_LIMIT:
                    self.hang_up(worker)
            for incarnation, deadline in list(self.deadlines.items()):
                if deadline <= self.now:
                    del self.deadlines[incarnation]
                    if self.workers[incarnation].alive:
                        self.kill(self.workers[incarnation])

    # --- workers ------------------------------------------------------------------------------------------------------

    def advance(self, worker: Worker) -> None:
        """Let everything of a worker go on a little, in an order that is as good as any."""
        for act in (self.connect, self.deliver, self.build, self.think, self.speak):
            if worker.runs:
                act(worker)

    def connect(self, worker: Worker) -> None:
        if worker.connected_to is not None or worker.leads_to is None or self.now < worker.reconnect_at:
            return
        coordinator = self.coordinators[worker.leads_to]
        if coordinator is None or worker.wire.refused is not None or worker.strand.over:
            return
        if coordinator.frozen_at is not None:
            worker.reconnect_at = self.now + LinkSettings.retry_most
            return
        coordinator.now = self.now
        worker.inbox.clear()
        worker.connected_to = coordinator
        refusal = coordinator.admit(worker.wire.connect())
        if refusal is not None:
            worker.connected_to = None
            worker.wire._take(m.Refuse(refusal))
            self.check_cause(worker, refusal)
        self.decide(coordinator)

    def deliver(self, worker: Worker, most: int = 8) -> None:
        """What the coordinator has sent arrives."""
        for _ in range(min(most, len(worker.inbox))):
            message = worker.inbox.popleft()
            worker.wire._take(message)
            if isinstance(message, m.Refuse):
                self.check_cause(worker, message.reason)
                worker.connected_to, worker.wire.connected = None, False
                worker.inbox.clear()
                return

    def speak(self, worker: Worker, most: int = 16) -> None:
        """What the worker has said arrives."""
        for _ in range(most):
            coordinator = None if worker.mute else worker.connected_to
            message = worker.wire.next_message() if coordinator is not None else None
            if message is None:
                return
            weighty = not isinstance(message, m.Publish | m.Progress)
            self.reach(coordinator, partial(coordinator.hear, worker.incarnation, message), decide=weighty)

    def build(self, worker: Worker) -> None:
        """Meshes stand whose members all take part, and others fail when their time is over."""
        for plan in list(worker.builders.building.values()):
            mesh = self.mesh(plan)
            by = next((x for x in self.coordinators if x is not None and plan in x.state.plans), None)
            relays = len(mesh.members) == 1 or by is None or by.frozen_at is None
            mesh.relayed |= relays and len(mesh.begun) == len(mesh.members)
            if self.meets(worker, mesh) or self.now >= mesh.made_at + BUILD_LIMIT:
                worker.builders.build(plan)

    def meets(self, worker: Worker, mesh: Mesh) -> bool:
        def reaches(other: str) -> bool:
            pairs = ((worker.incarnation, other), (other, worker.incarnation))
            return self.workers[other].runs and not any(pair in self.cut for pair in pairs)

        return mesh.relayed and all(map(reaches, mesh.members))

    def think(self, worker: Worker) -> None:
        """The training goes on to where it waits for somebody."""
        worker.strand.resume()

    def mesh(self, plan: m.Plan) -> Mesh:
        key = plan.generation, tuple(member.incarnation for member in plan.members)
        if key not in self.meshes:
            self.meshes[key] = Mesh(len(self.meshes), key[1], self.now)
        return self.meshes[key]

    def open(self, plan: m.Plan, rank: int, link: Wire) -> Exchanges:
        """Connect, as far as the network lets it."""
        mesh = self.mesh(plan)
        if not self.meets(link.worker, mesh):
            raise CommunicatorBroken("not all members could be reached in time")
        for reader, writer in self.cut:
            mesh.tear(reader, writer, lose=False, silent=True, for_ever=False)
        return Exchanges(plan, rank, mesh, link.worker)

    # --- what must hold -----------------------------------------------------------------------------------------------

    def note_commit(self, worker: Worker) -> None:
        """A worker has committed a step: one of the lineage, or the last one of a branch that is lost."""
        assert worker.plan is not None
        steps = worker.history.steps
        if any(self.workers[member.incarnation].doomed for member in worker.plan.members):
            return  # what is computed until a recorded deletion is carried out; nobody asks for it
        if self.histories and steps[0] != next(iter(self.histories))[0]:
            others = [
                x.name for x in self.workers.values() if x.could_go_on and not worker.plan.includes(x.incarnation)
            ]
            assert steps[0] > next(iter(self.histories))[0], f"{worker.name} goes on with what was given up"
            assert not others, f"began anew while {others} had the state"
            self.histories.clear()
        if steps in self.histories:
            return
        for known in self.histories:
            shorter = min(len(steps), len(known))
            same = next((n for n in range(shorter) if steps[n] != known[n]), shorter)
            if shorter - same > 1:
                # All who knew more of the other branch have ended: what is left goes on.
                knew = [
                    x.name
                    for x in self.workers.values()
                    if x.could_go_on and x.history.steps[: same + 2] == known[: same + 2]
                ]
                assert not knew, f"two lineages: {known}, which {knew} know, and {steps}"
        self.histories[steps] = None
        while len(self.histories) > KEPT:
            del self.histories[next(iter(self.histories))]

    def check_losses(self, coordinator: Coordinator, known: set[str]) -> None:
        """One complete copy is enough: not all who have the state are lost because nothing was heard of them."""
        lost = coordinator.state.roster.lost
        fresh = [i for i, one in lost.items() if i not in known and any(why in one.reason for why in UNHEARD)]
        # Of a recorded deletion, this coordinator may not have been told: that worker trains on, and is a witness.
        ended = coordinator.state.roster.ended
        witnesses = [x for x in self.workers.values() if x.alive and x.doomed and x.incarnation not in ended]
        holders = [*witnesses, *(worker for worker in self.workers.values() if worker.could_go_on)]
        # Who was heard of in the last moments is a witness against the others, also if it has ended since.
        if not fresh or any(worker.harmed_at > self.now - SETTINGS.heartbeat_limit for worker in self.workers.values()):
            return
        evicted = [worker.name for worker in holders if worker.incarnation in fresh and worker.harmed_at < 0]
        assert not evicted or not all(x.incarnation in lost for x in holders), f"nobody but {evicted} could go on"

    def check_cause(self, worker: Worker, reason: str) -> None:
        told_why = worker.touched or self.false_words or worker.ending is not None
        assert told_why, f"{worker.name} lives and nothing has happened to it: {reason}"

    def close(self) -> None:
        for worker in self.workers.values():
            worker.strand.kill()


@contextmanager
def opened(network: Network) -> Iterator[Network]:
    """Communicators are those of the model, as long as it lasts."""

    class Opener:
        @staticmethod
        def open(plan: m.Plan, rank: int, link: Wire, *_: Callable[[], object], **__: bool) -> Exchanges:
            return network.open(plan, rank, link)

    with patch.object(communicators, "Communicator", Opener), patch.object(communicators, "elder", lambda plan: None):
        try:
            yield network
        finally:
            network.close()
