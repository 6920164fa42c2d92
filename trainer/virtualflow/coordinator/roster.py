"""Who has ever said Hello to this coordinator: the living, and as long as it matters the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from msgspec import structs

from virtualflow.coordinator.settings import MAX_LOST, REMEMBERED
from virtualflow.coordinator.snapshot import Worker
from virtualflow.protocol import http_api
from virtualflow.protocol import messages as m
from virtualflow.protocol.settings import MAX_REASON


class UnknownWorker(LookupError):
    """The job has no such worker; the argument is what it was looked up by."""


@dataclass
class Contact:
    """What is remembered of a worker beyond what the membership decision needs."""

    pid: int
    address: str
    fingerprint: str
    device: str = ""
    self_test: str = ""
    left_by: m.Generation | None = None
    waits_for_release: bool = False
    asked_for_stacks: bool = False
    """Since it has made no progress."""
    memory: m.MemoryPlan | None = None
    """``None``: it has no budget of memory to plan within."""
    crashed: bool = False
    """Its script failed, as it has said itself."""
    usage: m.Usage | None = None
    """What it takes of its machine, as it said last."""
    told_end: bool = False


class _Over(NamedTuple):
    name: str
    why: str
    left: bool
    """In good order."""


class Roster:
    """The workers by their incarnation, in the order in which they came."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.contacts: dict[str, Contact] = {}
        self.lost: OrderedDict[str, http_api.LostWorker] = OrderedDict()
        """Workers that were declared lost, by their starts; forgetting the worker itself does not end it here."""
        self._over: OrderedDict[str, _Over] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()

    def add(self, worker: Worker, contact: Contact) -> None:
        """Take a worker in, or take note of what it says about itself now."""
        self.workers[worker.incarnation], self.contacts[worker.incarnation] = worker, contact

    def add_heard_of(self, member: m.Member, now: float) -> None:
        """Take in a member of a generation that has not come itself yet."""
        if member.incarnation in self.workers:
            return
        over = self._over.get(member.incarnation) or self._over.get(member.launch_id)
        if over is not None and not over.left:
            self.note_lost(member.worker, member.launch_id, member.address, over.why)
        if member.launch_id in self._ended:
            self.note_ended(member.incarnation)
        worker = Worker(
            member.worker,
            member.incarnation,
            last_heard=now,
            connected=False,
            disconnected_at=now,
            known_in_person=False,
            gone=over.why if over is not None else None,
            launch=member.launch,
        )
        self.add(worker, Contact(0, member.address, ""))

    def update(self, incarnation: str, **facts: Any) -> Worker:
        worker = self.workers[incarnation] = replace(self.workers[incarnation], **facts)
        return worker

    def is_lost(self, incarnation: str) -> bool:
        """Whether no generation can count on it any more."""
        worker = self.workers.get(incarnation)
        return worker is None or not worker.present

    def siblings(self, worker: Worker) -> list[Worker]:
        """All known processes of that worker, itself among them."""
        if not worker.launch:
            return [worker]
        return [x for x in self.workers.values() if x.launch == worker.launch]

    def named(self, name: str, incarnation: str | None = None) -> Worker:
        """A process of the worker that bears the name now, or of that very start of it.

        Raises:
            UnknownWorker: there is none.
        """
        if incarnation is not None:
            found = [x for x in self.workers.values() if x.name == name and incarnation in (x.incarnation, x.launch)]
            if not found:
                raise UnknownWorker(name)
            return next((worker for worker in found if worker.present), found[0])
        for worker in reversed(self.workers.values()):
            if worker.name == name and worker.present:
                return worker
        raise UnknownWorker(name)

    def was_here(self, name: str, incarnation: str | None) -> bool:
        """Whether such a worker is known to be over."""
        if incarnation is None:
            return any(worker.name == name for worker in self.workers.values()) or any(
                over.name == name for over in self._over.values()
            )
        if incarnation in self.lost:
            return self.lost[incarnation].worker == name
        known = self.workers.get(incarnation) or self._over.get(incarnation)
        return known is not None and known.name == name

    def refusal(self, incarnation: str) -> str | None:
        """Why that process must not come back, if so, or the worker of that start."""
        worker = self.workers.get(incarnation)
        if worker is not None:
            return "it has left" if worker.gone is None and worker.left else worker.gone
        return self._over[incarnation].why if incarnation in self._over else None

    def is_suspected(self, incarnation: str) -> bool:
        """Whether it is refused only because this coordinator could not hear it, not because it has ended or left."""
        worker = self.workers.get(incarnation)
        if incarnation in self._ended:
            return False
        return worker.gone is not None if worker is not None else incarnation in self.lost

    def trust_again(self, incarnation: str) -> None:
        """It was declared lost and lives: forget that."""
        for known in (self.workers, self.contacts, self.lost, self._over):
            known.pop(incarnation, None)

    def note_lost(self, name: str, incarnation: str, address: str, why: str, **blame: bool) -> None:
        """That process was declared lost; the first reason stays. ``blame`` is what ``LostWorker`` tells of it."""
        if incarnation not in self.lost:
            self.lost[incarnation] = http_api.LostWorker(
                name, incarnation, address, why[:MAX_REASON], incarnation in self._ended, **blame
            )
            while len(self.lost) > REMEMBERED:
                confirmed = (i for i, lost in self.lost.items() if lost.ended)
                del self.lost[next(confirmed, next(iter(self.lost)))]

    def note_ended(self, incarnation: str) -> bool:
        """Its end is confirmed; whether that is news."""
        if incarnation in self._ended:
            return False
        self._ended[incarnation] = None
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        if incarnation in self.lost:
            self.lost[incarnation] = structs.replace(self.lost[incarnation], ended=True)
        return True

    @property
    def listed_lost(self) -> tuple[http_api.LostWorker, ...]:
        """The latest of those lost, as they came; first of all those whose end is to be confirmed, as others wait."""
        if len(self.lost) <= MAX_LOST:
            return tuple(self.lost.values())
        open_ = [i for i, lost in self.lost.items() if not lost.ended][-MAX_LOST:]
        confirmed = [i for i, lost in self.lost.items() if lost.ended]
        listed = {*open_, *confirmed[len(confirmed) - (MAX_LOST - len(open_)) :]}
        return tuple(lost for i, lost in self.lost.items() if i in listed)

    @property
    def ended(self) -> Set[str]:
        """Processes that take no part any more, by their own word or that of whoever runs them."""
        return self._ended.keys()

    def remember_over(self, name: str, incarnation: str, why: str, left: bool = False) -> None:
        """That process must not come back, also if nobody has told of it yet."""
        self._over[incarnation] = _Over(name, why[:MAX_REASON], left)
        while len(self._over) > REMEMBERED:
            self._over.popitem(last=False)

    def namesakes(self, hello: m.Hello) -> list[str]:
        """Other workers of that name whose end is not known: a process of each that lives, and the starts of those that
        were declared lost.
        """
        living = [
            i
            for i, worker in self.workers.items()
            if worker.name == hello.worker and worker.present and not worker.done and not _is_sibling(worker, hello)
        ]
        lost = [i for i, worker in self.lost.items() if worker.worker == hello.worker and not worker.ended]
        return [i for i in (*living, *lost) if i != hello.incarnation]

    def shift(self, seconds: float, now: float) -> None:
        """Nobody could be heard for so long: that silence does not count."""
        for incarnation, worker in self.workers.items():
            self.update(
                incarnation,
                last_heard=min(now, worker.last_heard + seconds),
                disconnected_at=min(now, worker.disconnected_at + seconds),
            )

    def prune(self, members: Set[str], needed: Callable[[str], bool]) -> None:
        """Forget whom no decision needs any more, but for what a process that comes back would be told.

        Args:
            members: of the running and the proposed generation.
            needed: whether something remains to be told to that worker.
        """
        for incarnation, worker in list(self.workers.items()):
            finished = not worker.present or worker.done or not worker.known_in_person
            if worker.connected or incarnation in members or not finished or needed(incarnation):
                continue
            refusal = self.refusal(incarnation)
            if refusal is not None:
                self.remember_over(worker.name, incarnation, refusal, left=worker.left)
            del self.workers[incarnation], self.contacts[incarnation]


def _is_sibling(worker: Worker, hello: m.Hello) -> bool:
    """Whether that is another process of the same start; of one that has not come yet, nobody has said which it is."""
    known = worker.known_in_person
    return (
        bool(worker.launch) and worker.launch == hello.launch and not (known and worker.local_rank == hello.local_rank)
    )
