"""What the coordinator knows of its job: plain data, and what follows from it.

It changes by a message (:mod:`virtualflow.coordinator.worker_messages`), a call (:mod:`virtualflow.coordinator.calls`)
or a decision (:mod:`virtualflow.coordinator.decisions`), each a function of it and the time. Everything here can be
lost: a new coordinator learns the same from the Hellos of the workers.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from virtualflow.coordinator.history import History
from virtualflow.coordinator.roster import Roster
from virtualflow.coordinator.settings import KEYS, KNOWN_GENERATIONS, MAX_BUNDLE, SHOWN_EVENTS, MembershipSettings
from virtualflow.coordinator.snapshot import Cluster
from virtualflow.protocol import http_api
from virtualflow.protocol import messages as m
from virtualflow.protocol.http_api import MemoryCopyState
from virtualflow.protocol.messages import Generation, Keys, Publish
from virtualflow.protocol.settings import PassClass, Reproducibility

# What the members of a generation tell each other to connect, relayed by the coordinator; bounded.
#
# Keys are relayed in bundles, the same ones to all members: with n members that is a few times n messages instead of n
# times n, each of which is encoded once.


class Rendezvous:
    """The published keys of the generations that may still be built."""

    def __init__(self) -> None:
        self._keys: dict[Generation, dict[str, dict[str, bytes]]] = {}
        self._fresh: dict[Generation, dict[str, bytes]] = {}
        """What was published since the last :meth:`take`."""

    def add(self, incarnation: str, message: Publish) -> bool:
        """Take a key of a member; whether there was room for it."""
        keys = self._keys.setdefault(message.generation, {}).setdefault(incarnation, {})
        if len(keys) >= KEYS and message.key not in keys:
            return False
        keys[message.key] = message.value
        self._fresh.setdefault(message.generation, {})[message.key] = message.value
        return True

    def of(self, generation: Generation) -> Iterator[Keys]:
        """All keys of a generation, in messages of bounded size."""
        published = self._keys.get(generation, {}).values()
        return _bundled(generation, [item for keys in published for item in keys.items()])

    def take(self) -> Iterator[Keys]:
        """What was published since the last time, in messages of bounded size."""
        fresh, self._fresh = self._fresh, {}
        for generation, keys in fresh.items():
            yield from _bundled(generation, keys.items())

    def takes_part(self, generation: Generation, incarnation: str) -> bool:
        """Whether that member has published anything for that generation."""
        return bool(self._keys.get(generation, {}).get(incarnation))

    def forget_before(self, generation: Generation) -> None:
        """Generations older than ``generation`` are history."""
        self._keys = {of: keys for of, keys in self._keys.items() if of >= generation}
        self._fresh = {of: keys for of, keys in self._fresh.items() if of >= generation}


def _bundled(generation: Generation, items: Iterable[tuple[str, bytes]]) -> Iterator[Keys]:
    bundle: dict[str, bytes] = {}
    size = 0
    for key, value in items:
        if bundle and size + len(value) > MAX_BUNDLE:
            yield Keys(generation, bundle)
            bundle, size = {}, 0
        bundle[key] = value
        size += len(key) + len(value)
    if bundle:
        yield Keys(generation, bundle)


@dataclass
class JobState:
    """The state of one job; times are seconds of one monotonic clock. What ``Cluster`` has too is described there."""

    incarnation: int
    wanted: int
    settings: MembershipSettings
    waiting_since: float
    minimum: int = 1
    wanted_reason: str = ""
    """Why so many, in words of whoever decides that."""
    run: int = 1
    """The run of the script that all below is about, but for the workers."""
    runs: tuple[m.RunResult, ...] = ()
    """What those before it have ended with, the latest."""
    earlier_steps: int = 0
    """Steps of all runs before it."""
    virtual_nodes: int | None = None
    reproducibility: Reproducibility | None = None
    classes: tuple[PassClass, ...] = ()
    roster: Roster = field(default_factory=Roster)
    history: History = field(default_factory=History)
    rendezvous: Rendezvous = field(default_factory=Rendezvous)

    running: m.Plan | None = None
    running_since: float = 0.0
    proposed: m.Plan | None = None
    proposed_at: float = 0.0
    prepared: set[str] = field(default_factory=set)
    plans: deque[m.Plan] = field(default_factory=lambda: deque(maxlen=KNOWN_GENERATIONS))
    """The latest that this coordinator has made or heard of."""
    withdrawn: deque[m.Generation] = field(default_factory=lambda: deque(maxlen=KNOWN_GENERATIONS))
    """The latest that were proposed and that nobody may enter any more."""
    broken: dict[m.Generation, float] = field(default_factory=dict)
    contested: dict[m.Generation, m.Plan] = field(default_factory=dict)
    """Generations that some worker knows, and without a majority of which another could not count."""
    settled: m.Generation = m.NO_GENERATION
    counter: int = 0
    """The highest that any generation bears."""
    rebuilds: int = 0
    failures_counted: m.Generation = m.NO_GENERATION
    trained: bool = False
    excused_at: float = float("-inf")
    returned_at: float = float("-inf")
    silent: frozenset[str] = frozenset()
    """Who was not heard of for several heartbeat limits, though its connection stands: of a machine without power
    nothing else may show for long, and one that trains alone is not declared lost for its silence."""
    ticket: int | None = None
    """While it is set, nothing begins without a predecessor: a word that bears it is needed (``BeginCall``)."""
    next_ticket: int | None = None
    """The number of the next one; ``None``: nobody is asked for such a word."""
    others: tuple[http_api.LivingWorker, ...] | None = None
    """Those that may be in a generation elsewhere, by the latest such word; ``None``: there was none."""

    hold: int | None = None
    """No step after this one may start, counted over all runs of the script."""
    stop: str | None = None
    failed: bool = False
    told_done: bool = False
    reason: str = ""
    """The membership decision in force, in words."""

    plaintext: bool = False
    """Nothing that its processes say is encrypted."""
    copy_limit: int = 0
    """Bytes of the largest copy of a training's state that this coordinator keeps."""
    memory_copy: MemoryCopyState | None = None

    record_interval: float = 0.0
    """Seconds between two records that workers fetch for coordinators to come; 0: none is kept."""
    records: int = 0
    """The highest number of a record of this job."""
    inherited: int = 0
    """That of the one with which this coordinator goes on; 0: none yet."""

    outbox: list[tuple[str, m.ToWorker]] = field(default_factory=list)
    """What is to be sent, and to which process."""
    version: int = 0
    """Raised whenever the status may have changed."""
    news: int = 0
    """Raised whenever it may have changed in more than how far the training is."""

    # --- what follows from it ----------------------------------------------------------------------------------------

    @property
    def phase(self) -> http_api.Phase:
        if self.failed:
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
        return self.running.generation if self.running is not None else m.NO_GENERATION

    @property
    def newest(self) -> list[m.Plan]:
        return [plan for plan in (self.running, self.proposed) if plan is not None]

    @property
    def hold_in_run(self) -> int | None:
        """No step of this run after this one may start."""
        return None if self.hold is None else max(0, self.hold - self.earlier_steps)

    @property
    def is_prepared(self) -> bool:
        """Whether all members of the proposed generation have its communicator."""
        return self.proposed is not None and self.prepared >= {x.incarnation for x in self.proposed.members}

    @property
    def unheard(self) -> frozenset[str] | None:
        """Names of those of ``others`` that are not connected to this coordinator."""
        if self.others is None:
            return None
        workers, contacts = self.roster.workers, self.roster.contacts
        connected = [x for x in workers.values() if x.connected and x.gone is None]
        processes = Counter(x.launch_id for x in connected)
        whole = [x for x in connected if processes[x.launch_id] >= x.local_world_size]
        here = {(x.name, contacts[x.incarnation].address) for x in whole}
        here |= {(name, "") for name, _ in here}
        return frozenset(x.worker for x in self.others if (x.worker, x.address) not in here)

    def plan_of(self, generation: m.Generation) -> m.Plan | None:
        """The plan of that generation, if it is one of the latest that this coordinator knows."""
        return next((plan for plan in self.plans if plan.generation == generation), None)

    def snapshot(self) -> Cluster:
        """What the membership decision is made of."""
        proposed, absent = self.proposed, frozenset[str]()
        if proposed is not None and proposed.generation in self.broken:
            absent = frozenset(
                x.incarnation
                for x in proposed.members
                if not self.rendezvous.takes_part(proposed.generation, x.incarnation)
            )
        return Cluster(
            virtual_nodes=self.virtual_nodes,
            wanted=self.wanted,
            waiting_since=self.waiting_since,
            minimum=self.minimum,
            classes=self.classes,
            workers=self.roster.workers,
            running=self.running,
            running_since=self.running_since,
            proposed=proposed,
            proposed_at=self.proposed_at,
            prepared=self.is_prepared,
            absent=absent,
            broken=self.broken,
            contested=tuple(self.contested.values()),
            settled=self.settled,
            ended=frozenset(self.roster.ended),
            failures_counted=self.failures_counted,
            rebuilds=self.rebuilds,
            excused_at=self.excused_at,
            returned_at=self.returned_at,
            evaluating=self.history.evaluating,
            stop=self.stop,
            trained=self.trained,
            unheard=frozenset() if self.ticket is None else self.unheard,
            confirmed=self.ticket is None and self.others is not None,
        )

    # --- what every change of it is made of --------------------------------------------------------------------------

    def ask_who_may_train(self) -> None:
        """Let nothing begin before whoever runs the workers has said who may train elsewhere, if it is to be asked."""
        if self.next_ticket is not None:
            self.ticket, self.others, self.next_ticket = self.next_ticket, None, self.next_ticket + 1

    def send(self, incarnation: str, message: m.ToWorker) -> None:
        """Queue a message for a worker, if it is connected."""
        worker = self.roster.workers.get(incarnation)
        if worker is not None and worker.connected:
            self.outbox.append((incarnation, message))

    def tell(self, kind: http_api.EventKind, text: str, refusal: http_api.Refusal | None = None) -> None:
        self.history.tell(kind, text, refusal)
        self.note_news()

    def note_news(self) -> None:
        """More has changed than how far the training is."""
        self.version += 1
        self.news += 1

    @property
    def latest_events(self) -> tuple[http_api.Event, ...]:
        """Those that are shown, also of coordinators before this one: workers tell this one of changes again."""
        earlier = self.history.earlier
        known = {_change_in(event) for event in earlier} - {None}
        return (*earlier, *(event for event in self.history.events if _change_in(event) not in known))[-SHOWN_EVENTS:]

    def count_goodput(self, now: float) -> None:
        """Take note of how many workers there are, and how far they have come; at its end nobody is paid any more."""
        if self.phase in http_api.ENDED:
            return
        history, progress = self.history, self.history.progress
        history.goodput.look(
            now,
            len({worker.launch_id for worker in self.roster.workers.values() if worker.present}),
            self.running.workers if self.running is not None else 0,
            self.earlier_steps + history.highest_step if progress is not None else None,
            progress.step_ms / 1_000 if progress is not None and progress.step_ms is not None else None,
        )

    def note_non_finite(self, found: m.NonFinite | None) -> None:
        """A worker says which metric of the training was the first that is not finite; ``None``: all are."""
        if found is not None and found != self.history.non_finite:
            self.history.non_finite = found
            self.tell("warning", str(found))

    def fail(self, error: str, traceback: str | None = None, *, event: str | None = None) -> None:
        """The job has failed.

        Args:
            traceback: of a worker's script, if it raised.
            event: how people are told; ``None``: by ``error``.
        """
        self.failed, self.history.error, self.history.traceback = True, error, traceback
        self.tell("failed", event or error)


def _change_in(event: http_api.Event) -> str | None:
    """Which membership change an event is about, without what it cost; ``None``: it is about something else."""
    return event.text.partition("): ")[0] if event.kind == "change" else None
