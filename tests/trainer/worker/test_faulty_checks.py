"""A worker that dies anywhere in a spot check: while it computes, asks, judges or votes, itself the guilty one or not.

The workers are threads. What one sends before it dies arrives and nothing else does, so each death at each moment has
one outcome, whatever the threads' speed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from broken_collectives import Counting
from torch import Tensor

from tiers import nightly
from virtualflow.data import MicroBatch
from virtualflow.errors import CommunicatorBroken, Convicted, VirtualFlowError
from virtualflow.protocol.messages import NO_GENERATION
from virtualflow.reduction import choose_summation
from virtualflow.reduction.settings import ReductionSettings
from virtualflow.step import Attempt, Doubted, OptimizerOptions, Reduced, SpotChecker, Update
from virtualflow.step.spot_checks import SpotCheck, choose_check
from virtualflow.transport.interface import DONE, Message, Pending
from virtualflow.worker.divergence import SpotChecking
from virtualflow.worker.repair import Remains, plan_repair

NODES, SIZE, PATIENCE = 6, 2, 60
MODEL = Counting()
NAMES = ["w-0", "w-1", "w-2"]


class Dead(CommunicatorBroken):
    """This worker is killed here."""


@dataclass
class Life:
    """A worker passes a moment before each computation and before each thing that it sends or waits for."""

    ends_at: int = 0
    """Counted from 1; 0: never."""
    moments: int = 0

    def pass_moment(self) -> None:
        self.moments += 1
        if self.moments == self.ends_at:
            raise Dead("killed")


@dataclass
class Wires:
    """Collectives of one member; what its peers sent before they hung up arrives."""

    rank: int
    names: Sequence[str]
    letters: dict[tuple[int, int], SimpleQueue[Tensor | None]]
    life: Life

    @property
    def size(self) -> int:
        return len(self.names)

    @property
    def beside(self) -> Any:
        raise AssertionError("no thread exchanges gradients as small as these")

    @property
    def plan(self) -> Any:
        return SimpleNamespace(members=[SimpleNamespace(worker=name, incarnation=f"i-{name}") for name in self.names])

    def all_gather(self, block: Tensor) -> Tensor:
        peers = [peer for peer in range(self.size) if peer != self.rank]
        for peer in peers:
            self.life.pass_moment()
            self.letters[self.rank, peer].put(block.clone())
        self.life.pass_moment()
        return torch.stack([block if peer not in peers else self._receive(peer) for peer in range(self.size)])

    def start_all_gather(self, out: Tensor, block: Tensor) -> Pending:
        out.copy_(self.all_gather(block).view(out.shape))
        return DONE

    def start_messages(self, messages: Sequence[Message]) -> Pending:
        for message in messages:
            if not message.incoming:
                self.life.pass_moment()
                self.letters[self.rank, message.peer].put(message.stretch.clone())
        self.life.pass_moment()
        for message in messages:
            if message.incoming:
                message.stretch.copy_(self._receive(message.peer))
        return DONE

    def settle(self, outcome: Any) -> Any:
        return outcome.result(timeout=PATIENCE)

    def cut(self) -> None:
        """Hang up."""
        for peer in range(self.size):
            self.letters[self.rank, peer].put(None)

    def _receive(self, peer: int) -> Tensor:
        letter = self.letters[peer, self.rank].get(timeout=PATIENCE)
        if letter is None:
            self.letters[peer, self.rank].put(None)
            raise CommunicatorBroken(f"{self.names[peer]} has hung up")
        return letter


def nothing(*arguments: Any, **options: Any) -> None:
    """What the loop does besides, and no check needs."""


class Worker:
    """One worker, with the parts of the loop around a spot check; ``wrong`` says which of its computations are."""

    def __init__(self, name: str, life: Life, wrong: Callable[[int, int], bool]) -> None:
        self.name, self.life, self._wrong = name, life, wrong
        self.notes: list[tuple[str, str]] = []
        self.model = copy.deepcopy(MODEL)
        checker = self.checker = SpotChecker(self.model, seed=5, virtual_nodes=NODES, sample=1.0)
        self.update = Update(
            self.model,
            OptimizerOptions(torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)),
            choose_summation(NODES, "bitwise"),
            micro_batch=SIZE,
            reduction=ReductionSettings(),
            spot_checker=checker,
        )
        self.state = SimpleNamespace(rank=0, holdings=(), computes=(), repairs=False)
        self.membership = SimpleNamespace(communicator=None, check=nothing)
        context: Any = SimpleNamespace(
            update=self.update,
            session=SimpleNamespace(
                state=self.state,
                activity=SimpleNamespace(mark=nothing),
                note=lambda kind, text: self.notes.append((kind, text)),
            ),
            membership=self.membership,
            guard=SimpleNamespace(check=nothing),
            loading=SimpleNamespace(fetch=lambda nodes: MicroBatch(nodes.start, None, ())),
        )
        self.checking = SpotChecking(checker, context, self._present)
        self._computed: dict[int, int] = {}

    def enter(self, wires: Wires, holdings: Sequence[Sequence[int]], computes: Sequence[int], repairs: bool) -> None:
        self.membership.communicator = wires
        self.state.rank, self.state.holdings = wires.rank, holdings
        self.state.computes, self.state.repairs = computes, repairs
        self.update.enter()

    def attempt(self, step: int) -> Reduced | VirtualFlowError:
        """What an attempt comes to; an error hangs up."""
        try:
            return self._attempt(step)
        except VirtualFlowError as error:
            self.membership.communicator.cut()
            return error

    def _attempt(self, step: int) -> Reduced:
        state, update, wires = self.state, self.update, self.membership.communicator
        update.begin(state.computes, max(map(len, state.holdings)), resumes=state.repairs)
        attempt = Attempt(step, state.computes, state.holdings)
        self.checker.begin(attempt)
        self._run(self.checking.begin(attempt), step)
        for node in state.computes:
            if node == state.computes[-1]:
                update.sync.expect_last(wires, state.holdings, SIZE, NODES * SIZE)
            loss = self._compute(step, node)
            attempt.batch = MicroBatch(node, None, ())
            self.checker.after_node(attempt)
            update.sync.take(SIZE, {"loss": loss})
        try:
            return update.synchronize(wires, state.holdings, step, NO_GENERATION, more=True, repairs=state.repairs)
        except Doubted as error:
            doubted = error
        raise self._run(self.checking.settle(attempt, doubted), step)

    def _run(self, generator: Iterator[int], step: int) -> Any:
        """Be the script."""
        try:
            while True:
                self._compute(step, next(generator))
        except StopIteration as end:
            return end.value

    def _present(self, attempt: Attempt) -> Iterator[int]:
        yield attempt.present.virtual_node

    def _compute(self, step: int, node: int) -> Tensor:
        self.life.pass_moment()
        times = self._computed[node] = self._computed.get(node, 0) + 1
        draw = torch.Generator().manual_seed(100 * step + node)
        loss = self.model(torch.randn(SIZE, 4, generator=draw)).square().mean()
        loss.backward()
        if self._wrong(node, times):
            gradient = self.model.linear.weight.grad
            assert gradient is not None
            gradient.view(torch.int32)[1, 2] ^= 1 << 22
        return loss.detach()

    @property
    def bits(self) -> list[Any]:
        return [value.reshape(-1).view(torch.uint8).tolist() for value in self.model.state_dict().values()]


@dataclass
class Story:
    """What came of one step."""

    left: list[Worker] = field(default_factory=list)
    """Those who have applied it."""
    convicted: set[str] = field(default_factory=set)
    ended: str | None = None
    """Why the job has ended."""
    attempts: int = 0


def ranges(members: int) -> list[range]:
    return [range(NODES * rank // members, NODES * (rank + 1) // members) for rank in range(members)]


def live(workers: list[Worker], step: int) -> Story:
    """Attempt a step until it is applied, each time with whoever is left, as the membership does."""
    story = Story(left=workers)
    repair = None
    while story.left:
        story.attempts += 1
        members = story.left
        letters: dict[tuple[int, int], SimpleQueue[Tensor | None]] = {
            (one, other): SimpleQueue() for one in range(len(members)) for other in range(len(members))
        }
        names = [worker.name for worker in members]
        for rank, worker in enumerate(members):
            holdings = ranges(len(members)) if repair is None else repair.holdings
            computes = ranges(len(members))[rank] if repair is None else repair.computes[rank]
            worker.enter(Wires(rank, names, letters, worker.life), holdings, computes, repair is not None)
        with ThreadPoolExecutor(len(members)) as threads:
            outcomes = list(threads.map(Worker.attempt, members, [step] * len(members)))
        if all(isinstance(outcome, Reduced) for outcome in outcomes):
            for worker, reduced in zip(members, outcomes, strict=True):
                worker.update.apply(reduced, epoch_ends=False)
            return story
        told = [error.incarnation for error in outcomes if isinstance(error, Convicted)]
        story.convicted |= {incarnation.removeprefix("i-") for incarnation in told}
        ends = [str(error) for error in outcomes if not isinstance(error, CommunicatorBroken | Reduced)]
        if ends:
            story.ended = ends[0]
            return story
        story.left = [
            worker
            for worker, outcome in zip(members, outcomes, strict=True)
            if not isinstance(outcome, Dead) and worker.name not in story.convicted
        ]
        repair = (
            plan_repair([remains(worker) for worker in story.left], ranges(len(story.left))) if story.left else None
        )
    return story


def remains(worker: Worker) -> Remains:
    worker.update.abandon(keep=True)
    return Remains(frozenset(worker.update.sync.kept), frozenset())


def find_check(members: int, role: str, rank: int) -> SpotCheck:
    """The first one in which that is the part of that rank."""
    checks = (choose_check(5, step, NODES, 1.0, ranges(members)) for step in range(1, 99))
    return next(check for check in checks if check is not None and getattr(check, role) == rank)


def make(members: int, wrong: Callable[[int, int], bool], victim: int, at: int) -> list[Worker]:
    """Workers of which the second one computes wrongly, and the victim dies at a moment."""
    return [
        Worker(NAMES[rank], Life(at if rank == victim else 0), wrong if rank == 1 else lambda node, times: False)
        for rank in range(members)
    ]


def right_bits(step: int) -> list[Any]:
    (alone,) = live(make(1, lambda node, times: False, 0, 0), step).left
    return alone.bits


def moments_of(members: int, wrong: Callable[[int, int], bool], victim: int, step: int) -> int:
    """How many moments the victim has until the step is applied, or the job ends, without it."""
    workers = make(members, wrong, victim, 0)
    live(workers, step)
    return workers[victim].life.moments


CASES = [(members, role, victim) for members in (2, 3) for role in ("holder", "checker") for victim in range(members)]
"""So many workers, the part of the second one in the check, and who dies."""
FEW = [(2, "checker", 0), (3, "holder", 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("members", "role", "victim"), CASES)
def test_a_death_at_any_moment_convicts_nobody_else_and_the_bits_are_right(
    members: int, role: str, victim: int
) -> None:
    check = find_check(members, role, 1)

    def once(node: int, times: int) -> bool:
        return node == check.virtual_node and times == 1

    wanted, convictions = right_bits(check.step), 0
    for at in range(1, moments_of(members, once, victim, check.step) + 1):
        story = live(make(members, once, victim, at), check.step)
        assert story.ended is None, (at, story.ended)
        assert story.convicted <= {"w-1"}, at
        convictions += bool(story.convicted)
        for worker in story.left:
            # The one that is wrong may be left alone before anybody has seen that it is.
            unseen = len(story.left) == 1 and worker.name == "w-1" and not worker.notes
            assert worker.bits == wanted or unseen, (at, worker.name)
    assert convictions, "no death came after the vote"


@pytest.mark.parametrize(("members", "role", "victim"), [case if case in FEW else nightly(*case) for case in CASES])
def test_a_device_that_is_always_wrong_ends_the_job_or_is_convicted_whoever_dies(
    members: int, role: str, victim: int
) -> None:
    check = find_check(members, role, 1)

    def always(node: int, times: int) -> bool:
        return node == check.virtual_node

    wanted = right_bits(check.step)
    ended = 0
    for at in range(1, moments_of(members, always, victim, check.step) + 1):
        story = live(make(members, always, victim, at), check.step)
        assert story.convicted <= {"w-1"}, at
        if story.ended is not None:
            ended += 1
            assert "nobody can tell who is wrong" in story.ended
            continue
        for worker in story.left:
            # Nobody is left to compare it with.
            assert worker.bits == wanted or [worker.name] == [left.name for left in story.left] == ["w-1"], at
    # Of two nobody can tell, so also where the third one dies before its word.
    assert (ended > 0) == (members == 2 or victim != 1), ended


@pytest.mark.parametrize("survivor", ["holder", "checker"])
def test_a_doubt_that_stays_open_is_told(survivor: str) -> None:
    check = find_check(2, survivor, 1)

    def once(node: int, times: int) -> bool:
        return node == check.virtual_node and times == 1

    holder, checker = NAMES[check.holder], NAMES[check.checker]
    told = (
        f"{holder} and {checker} came to different gradients of virtual node {check.virtual_node} in step "
        f"{check.step}, and a worker was lost before it was known who was wrong: {holder}'s are computed again"
    )
    open_doubts = 0
    for at in range(1, moments_of(2, once, 0, check.step) + 1):
        for left in live(make(2, once, 0, at), check.step).left:
            if left.notes:
                open_doubts += 1
                assert (left.notes, left.bits) == ([("warning", told)], right_bits(check.step))
    # It died when it had sent its header, or before it computed once more, or before it sent what it came to.
    assert open_doubts == 3
