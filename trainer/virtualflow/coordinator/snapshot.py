"""What a membership decision is made of, and what it says: plain values, no behaviour of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from virtualflow.protocol.messages import NO_GENERATION, Cause, Doing, Generation, Pace, Plan
from virtualflow.protocol.settings import MAX_REASON, PassClass


@dataclass(frozen=True)
class LoadTime:
    """What a worker measured under one load, its virtual nodes counted in whole passes."""

    load: float
    pace: Pace
    """The latest."""
    first: Pace
    """The first one since the worker's speed last changed."""
    at: float
    """When the latest was told, by the coordinator's monotonic clock."""
    visits: int = 1
    """How often it has come to this load, and found it like before."""


@dataclass(frozen=True)
class Worker:
    """A worker as the coordinator knows it, or one of its processes; times are of the coordinator's monotonic clock."""

    name: str
    incarnation: str
    last_heard: float
    connected: bool = True
    disconnected_at: float = 0.0
    known_in_person: bool = True
    """``False``: only named by others since the coordinator started; it may be on its way."""
    entered: Generation | None = None
    """The newest generation that it is known to have entered: it has the state of the training."""
    stranded: bool = False
    """The communicator of the generation that it has entered is broken for it: it waits to be called elsewhere."""
    ready_at: float | None = None
    draining: bool = False
    deadline: float | None = None
    failures: int = 0
    """Generations in a row that could not be built and in which it was to arrive, or took no part."""
    gone: str | None = None
    """Why it is known to be gone for ever."""
    left: bool = False
    deserted: bool = False
    """It has left by itself, and not by a generation that all had agreed on."""
    done: bool = False
    guess: float | None = None
    """Seconds per virtual node with a whole pass, by a profile of its device."""
    pace: Pace | None = None
    """The same as measured, the latest that it has told."""
    times: tuple[LoadTime, ...] = ()
    """The same under each load that it had since its speed last changed."""
    capacity: int | None = None
    """Bytes of its device's memory for the training."""
    doing: Doing | None = None
    """What its training thread does, if that is the latest news of it."""
    place: str = ""
    """Where that thread was when it was asked, if it did not come on."""
    launch: str = ""
    local_rank: int = 0
    local_world_size: int = 1
    """As in ``Hello``."""

    @property
    def launch_id(self) -> str:
        """Names the start of its worker: its own process, or ``launch``."""
        return self.launch or self.incarnation

    @property
    def present(self) -> bool:
        """Whether a generation can count on it: it is neither gone nor has it left."""
        return self.gone is None and not self.left

    @property
    def may_have_state(self) -> bool:
        """Whether the training could go on from it alone; of one that has not come yet, nobody knows better."""
        return self.entered is not None or not self.known_in_person

    @property
    def through(self) -> bool:
        """It has seen the end and closed its connection: it comes to no further generation."""
        return self.done and not self.connected and self.known_in_person


Processes = tuple[Worker, ...]
"""The processes of a worker that are there: they enter a generation together, and leave it together."""


@dataclass(frozen=True)
class Cluster:
    """All that a decision is made of. Workers and members are keyed by their incarnation: a name may come again."""

    virtual_nodes: int | None
    wanted: int
    waiting_since: float
    """Since when the job waits for its first workers."""
    workers: Mapping[str, Worker] = field(default_factory=dict)
    classes: tuple[PassClass, ...] = ()
    """Of equally large parts of all virtual nodes, how far their backward passes go; none: all are whole."""
    minimum: int = 1
    """Fewer workers than this start no first generation; a running one goes on with whoever survives."""
    running: Plan | None = None
    """The newest generation that a worker has entered."""
    running_since: float = 0.0
    proposed: Plan | None = None
    """The newest generation, while nobody has entered it."""
    proposed_at: float = 0.0
    prepared: bool = False
    """All members of the proposed generation have its communicator."""
    absent: frozenset[str] = frozenset()
    """Members of the proposed generation, if it is broken, that have taken no part in building its communicator."""
    broken: Mapping[Generation, float] = field(default_factory=dict)
    """Since when a collective of that generation is reported broken."""
    contested: tuple[Plan, ...] = ()
    """Further generations that may count: a worker has said so."""
    settled: Generation = NO_GENERATION
    """The newest of which a step is complete."""
    ended: frozenset[str] = frozenset()
    """Processes that have ended or left, confirmed by themselves or by whoever runs them."""
    failures_counted: Generation = NO_GENERATION
    """The newest generation whose members have its failure counted against them."""
    rebuilds: int = 0
    """Communicators rebuilt in a row over unchanged members without a step in between."""
    excused_at: float = float("-inf")
    """When the coordinator last ran again, or heard of its workers again, and did not before."""
    returned_at: float = float("-inf")
    """When the latest of those who :meth:`may_return` did."""
    evaluating: bool = False
    stop: str | None = None
    trained: bool = False
    """A generation has run before (its members may all be lost)."""
    unheard: frozenset[str] | None = frozenset()
    """Names of those that may be in a generation elsewhere; ``None``: whoever runs the workers has still to say."""
    confirmed: bool = False
    """It has said that there is nobody but those who are here."""

    @property
    def most(self) -> int | None:
        """How many workers the virtual nodes are enough for, one for each process; ``None``: nobody has said yet."""
        if self.virtual_nodes is None:
            return None
        processes = max((worker.local_world_size for worker in self.workers.values() if worker.present), default=1)
        return max(1, self.virtual_nodes // processes)

    @property
    def fewest(self) -> int:
        """How few workers may start the first generation: the minimum, as far as there are virtual nodes for them."""
        return max(1, min(self.minimum, self.most or self.minimum))

    def names(self, members: Iterable[str]) -> list[str]:
        """What the workers of these processes are called, each once."""
        return [processes[0].name for processes in self.by_worker(members)]

    def by_worker(self, members: Iterable[str]) -> list[Processes]:
        """These processes by their workers, in the order in which each worker's first one comes."""
        found: dict[str, list[Worker]] = {}
        for member in members:
            worker = self.workers[member]
            found.setdefault(worker.launch_id, []).append(worker)
        return [tuple(processes) for processes in found.values()]

    @property
    def training(self) -> list[Worker]:
        """Those who train, as far as is known: where nobody has said so yet, those who are to begin."""
        plan = self.running or self.proposed
        return [] if plan is None else [self.workers[member.incarnation] for member in plan.members]

    def may_return(self, worker: Worker, grace: float) -> bool:
        """Whether a worker is away only because this coordinator is new, or was cut off from all of them.

        Args:
            worker: that is not connected.
            grace: seconds within which all connections close when the coordinator is cut off.
        """
        return not worker.known_in_person or worker.disconnected_at <= self.excused_at + grace

    @property
    def isolated(self) -> bool:
        """None of those who train is connected: that is no news of any of them, but of this coordinator."""
        awaited = _holders([worker for worker in self.training if worker.present and not worker.through])
        return bool(awaited) and not any(worker.connected for worker in awaited)

    @property
    def heard_at(self) -> float:
        """When somebody who trains was last heard of; ``-inf``: never."""
        heard = _holders([worker for worker in self.training if worker.known_in_person])
        return max((worker.last_heard for worker in heard), default=float("-inf"))


def _holders(workers: list[Worker]) -> list[Worker]:
    """Those who have the state of the training: others tell nothing of them. All, if nobody has it yet."""
    return [worker for worker in workers if worker.may_have_state] or workers


@dataclass(frozen=True)
class Proposal:
    """A generation to be made: its members by incarnation, in the order of their ranks."""

    mode: Literal["planned", "recovery"]
    members: tuple[str, ...]
    joiners: tuple[str, ...]
    cause: Cause


@dataclass(frozen=True)
class Decision:
    """What to do now, and why."""

    reason: str
    proposal: Proposal | None = None
    over: bool = False
    """The running and the proposed generation are over: forget both, and decide again."""
    fail: bool = False
    """The job cannot go on."""
    wake_at: float | None = None
    """Decide again then at the latest."""


def ready_workers(cluster: Cluster, lost: Mapping[str, str]) -> list[Processes]:
    """Workers all of whose processes could enter a generation: those that never failed to first, then those that have
    waited longest.
    """
    ready = [
        worker.incarnation
        for worker in cluster.workers.values()
        if worker.ready_at is not None
        and worker.connected
        and worker.incarnation not in lost
        and not (worker.draining or worker.left or worker.done)
    ]
    complete = [x for x in cluster.by_worker(ready) if len(x) == x[0].local_world_size]
    return sorted(complete, key=lambda x: (_failures(x), ready_since(x), x[0].name, x[0].launch_id))


def ready_since(processes: Processes) -> float:
    """When the last process of a worker became ready."""
    return max(worker.ready_at or 0.0 for worker in processes)


def _failures(processes: Processes) -> int:
    return max(worker.failures for worker in processes)


def within(workers: Sequence[Processes], places: int | None) -> list[Processes]:
    """The first of these workers whose processes have so many places together; ``None``: all."""
    chosen: list[Processes] = []
    for processes in workers:
        if places is not None:
            places -= len(processes)
            if places < 0:
                break
        chosen.append(processes)
    return chosen


def processes_of(workers: Iterable[Processes]) -> list[Worker]:
    return [process for processes in workers for process in processes]


def listed(parts: list[str]) -> str:
    """A sentence of ``parts`` that stays short however many there are."""
    shown = parts if len(parts) <= 8 else [*parts[:7], f"and {len(parts) - 7} more"]
    return "; ".join(part[:MAX_REASON] for part in shown)
