"""Workers that have just joined share an optimizer, and whatever breaks where: all come to the bits of a lone worker.

The workers are threads over collectives in memory. What brings them to one state is the library's own, from the
exchange of where they stand to the plan of a repair; only processes, the coordinator and the script are not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, Literal, get_args

import pytest
import torch
from broken_collectives import Counting
from own_optimizers import BlockwiseMomentum
from thread_collectives import ALONE, Seat, Table, together
from torch import Tensor, nn

from tiers import nightly
from virtualflow.protocol import messages as m
from virtualflow.protocol.lineage import Claim
from virtualflow.reduction import HostMemory, choose_summation
from virtualflow.reduction.settings import ReductionSettings
from virtualflow.state import Reserve, digests
from virtualflow.step import OptimizerOptions, Reduced, Update
from virtualflow.transport.interface import Message
from virtualflow.worker.membership import Membership
from virtualflow.worker.train_state import Training

pytestmark = pytest.mark.usefixtures("small_pieces")

NODES, SAMPLES, STEPS, JOIN = 6, 2, 5, 2
How = Literal["before", "after"]


class Deep(nn.Module):
    """Buffers that are averaged and copied, and one parameter that is larger than all others: it is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.counting = Counting()
        self.wide = nn.Linear(500, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.counting(x) + self.wide(x[:, :1].expand(-1, 500)).sum(1)


MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), 0.01),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9),
    "blocks": lambda model: BlockwiseMomentum(model.parameters(), 1e-4, block=8),
}


@dataclass
class Place(Seat):
    """A seat whose worker is a member of a generation, and moves what is large."""

    plan: Any = None

    def move(self, windows: Iterator[Sequence[Message]], *, timeout: float) -> None:
        """Each window waits for the one before it."""
        for window in windows:
            self.start_messages(window).wait()


class Worker:
    """One member; at first it has no state.

    Args:
        copies: how many workers keep each share; 0: the optimizer is not sharded.
        bucket: bytes; so few that each worker has several slices of the largest parameter.
    """

    def __init__(
        self,
        make: str,
        clip: float | None,
        *,
        copies: int = 2,
        host: HostMemory | None = None,
        bucket: int = 512,
        signature: dict[str, Any] | None = None,
    ) -> None:
        torch.manual_seed(1)
        self.model = Deep()
        optimizer = MAKERS[make](self.model)
        update = self.update = Update(
            self.model,
            OptimizerOptions(optimizer, clip_norm=clip, shard_copies=copies, host=host),
            choose_summation(NODES, "bitwise"),
            micro_batch=SAMPLES,
            reduction=ReductionSettings(norm_block=16, bucket=bucket),
        )
        self.training = Training(self.model, optimizer, None, None, update)
        nothing = SimpleNamespace(begin=lambda: None, renew=lambda: None)
        lineage = SimpleNamespace(claim=lambda plan: Claim(m.NO_GENERATION, True, m.NO_GENERATION), count=lambda *_: 0)
        self.state: Any = SimpleNamespace(
            run=1,
            has_state=False,
            lease=nothing,
            lineage=lineage,
            computes=(),
            virtual_nodes=NODES,
            ranges=(range(NODES),),
            workers=1,
        )
        session: Any = SimpleNamespace(
            state=self.state, reserve=Reserve(), say_entered=lambda **_: None, check=lambda: None
        )
        checkpointer: Any = SimpleNamespace(enter=lambda _: None, take_share=lambda: None, give_up=lambda: None)
        stopwatch: Any = SimpleNamespace(repeat=lambda _: None)
        self.membership = Membership(session, self.training, checkpointer, signature or {}, stopwatch)
        self.holdings: tuple[Sequence[int], ...] = (range(NODES),)
        self.repairs = False

    def enter(self, seat: Place) -> None:
        """Come to one state with the other members, and learn what to compute."""
        ranges = tuple(member.virtual_nodes for member in seat.plan.members)
        repair = self.membership._synchronize(seat)  # type: ignore[arg-type]
        self.state.ranges, self.state.workers = ranges, len(ranges)
        self.repairs = repair is not None
        self.holdings = ranges if repair is None else repair.holdings
        self.state.computes = ranges[seat.rank] if repair is None else repair.computes[seat.rank]
        self.update.enter()

    def attempt(self, seat: Any) -> Reduced:
        """One attempt at the step to come."""
        number, update = self.training.completed_steps + 1, self.update
        update.begin(self.state.computes, max(map(len, self.holdings)), resumes=self.repairs)
        for node in self.state.computes:
            draw = torch.Generator().manual_seed(10 * number + node)
            loss = self.model(torch.randn(SAMPLES, 4, generator=draw)).square().mean()
            loss.backward()
            update.sync.take(SAMPLES, {"loss": loss.detach()})
        return update.synchronize(seat, self.holdings, number, m.NO_GENERATION, more=True, repairs=self.repairs)

    def step(self, seat: Any) -> None:
        """Attempt it, and commit it."""
        self.training.commit(self.attempt(seat), seat.size)
        self.state.computes, self.holdings = self.state.ranges[seat.rank], self.state.ranges
        self.repairs = False

    @property
    def bits(self) -> tuple[str, dict[str, float], int]:
        """Of the model, the last metrics, and how many steps led to them."""
        return digests.digest(self.model.state_dict()), self.training.metrics, self.training.completed_steps


@dataclass(frozen=True)
class Fault:
    """Somebody fails at an operation, and is lost or only told that it broke."""

    victim: int
    number: int
    how: How
    lost: bool


def seats_of(workers: Sequence[Worker], fault: Fault | None, mode: str = "recovery") -> list[Place]:
    bounds = [NODES * rank // len(workers) for rank in range(len(workers) + 1)]
    members = [
        SimpleNamespace(incarnation=f"{rank}", virtual_nodes=range(*bounds[rank : rank + 2]))
        for rank in range(len(workers))
    ]
    plan = SimpleNamespace(generation=m.NO_GENERATION, members=members, mode=mode)
    table = Table(len(workers))
    seats = [Place(table, rank, plan=plan) for rank in range(len(workers))]
    if fault is not None:
        seats[fault.victim].fails_at, seats[fault.victim].how = fault.number, fault.how
    return seats


def complete(seats: Sequence[Place], work: Callable[[int], None]) -> bool:
    """Let threads do it; whether it worked for all."""

    def one(rank: int) -> bool:
        work(rank)
        return True

    return None not in together(seats, one)


def enter(workers: Sequence[Worker], fault: Fault | None = None, mode: str = "recovery") -> tuple[bool, list[Place]]:
    seats = seats_of(workers, fault, mode)
    done = complete(seats, lambda rank: workers[rank].enter(seats[rank]))
    for seat in seats:
        seat.fails_at = 0
    return done, seats


def recover(workers: list[Worker], fault: Fault) -> list[Worker]:
    """What is left of them begins again."""
    left = [worker for rank, worker in enumerate(workers) if not (fault.lost and rank == fault.victim)]
    for worker in left:
        worker.update.abandon(keep=True)
    return left


def run(
    make: str,
    clip: float | None,
    entry: Fault | None,
    step: Fault | None,
    again: Fault | None,
    build: Callable[[str, float | None], Worker] = Worker,
) -> list[int]:
    """Two workers train; two more join; faults in that entry, in the step behind it, and in the recovery from that.

    Returns:
        How many operations the entry, the step and the recovery took.
    """
    workers = [build(make, clip) for _ in range(2)]
    for worker in workers:
        worker.state.has_state = True
    taken = []
    _, seats = enter(workers, mode="planned")
    for _ in range(JOIN):
        assert complete(seats, lambda rank: workers[rank].step(seats[rank]))
    workers += [build(make, clip) for _ in range(2)]
    done, seats = enter(workers, entry, "planned")
    taken.append(max(seat.operations for seat in seats))
    if not done:
        assert entry is not None
        workers = recover(workers, entry)
        done, seats = enter(workers)
        assert done
    before = [seat.operations for seat in seats]
    if step is not None:
        seats[step.victim].fails_at, seats[step.victim].how = before[step.victim] + step.number, step.how
    done = complete(seats, lambda rank: workers[rank].step(seats[rank]))
    taken.append(max(seat.operations - old for seat, old in zip(seats, before, strict=True)))
    if not done:
        assert step is not None
        workers = recover(workers, step)
        done, seats = enter(workers, again)
        taken.append(max(seat.operations for seat in seats))
        if not done:
            assert again is not None
            workers = recover(workers, again)
            done, seats = enter(workers)
            assert done
    while workers[0].training.completed_steps < STEPS:
        assert len({worker.training.completed_steps for worker in workers}) == 1
        assert complete(seats, lambda rank: workers[rank].step(seats[rank]))
    assert {str(worker.bits) for worker in workers} == {str(reference(make, clip)[0])}, (entry, step, again)
    if workers[0].update.shards is not None:
        assert complete(seats, lambda rank: workers[rank].membership._resharding.complete_leader(seats[rank]))  # type: ignore
    assert digests.optimizer_digest(workers[0].training.optimizer) == reference(make, clip)[1]
    return taken


REFERENCES: dict[tuple[str, float | None], tuple[Any, str]] = {}


def reference(make: str, clip: float | None) -> tuple[Any, str]:
    """One worker alone."""
    if (make, clip) not in REFERENCES:
        worker = Worker(make, clip)
        worker.state.computes = range(NODES)
        for _ in range(STEPS):
            worker.step(ALONE)
        REFERENCES[make, clip] = worker.bits, digests.optimizer_digest(worker.training.optimizer)
    return REFERENCES[make, clip]


KINDS = pytest.mark.parametrize(
    ("make", "clip", "victims"),
    [
        ("AdamW", 0.5, 1),
        nightly("blocks", None, 1),
        *(nightly(make, clip, 4) for make in ("AdamW", "blocks") for clip in (None, 0.5)),
    ],
)
"""``victims``: how many of the workers fail at each operation, one after the other."""
LOST, TOLD = pytest.param(True, 2, id="lost"), nightly(False, 2, id="told that it broke")
ONCE = pytest.param(False, 1, id="told that it broke, kept once")
"""What becomes of who fails, and how many keep each share: of one alone nothing is left when it is lost."""


def faults(operations: int, victims: int, lost: bool) -> Iterator[Fault]:
    """Faults at each operation."""
    for number, turn, how in product(range(1, operations + 1), range(victims), get_args(How)):
        yield Fault((number + turn) % 4, number, how, lost)


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize(("lost", "copies"), [LOST, TOLD, nightly(False, 1, id="told that it broke, kept once")])
def test_any_operation_of_the_entry_of_joiners_may_break(
    make: str, clip: float | None, victims: int, lost: bool, copies: int
) -> None:
    build = partial(Worker, copies=copies)
    most, _ = run(make, clip, None, None, None, build)
    for fault in faults(most, victims, lost):
        run(make, clip, fault, None, None, build)


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize(("lost", "copies"), [LOST, TOLD, ONCE])
def test_any_operation_of_the_step_behind_it_may_break(
    make: str, clip: float | None, victims: int, lost: bool, copies: int
) -> None:
    build = partial(Worker, copies=copies)
    _, most = run(make, clip, None, None, None, build)
    for fault in faults(most, victims, lost):
        run(make, clip, None, fault, None, build)


@pytest.mark.slow
@KINDS
def test_the_recovery_from_that_may_break_once_more(make: str, clip: float | None, victims: int) -> None:
    _, most = run(make, clip, None, None, None)
    for number in range(1, most + 1, 5 - victims):
        first = Fault(number % 4, number, "after", lost=True)
        _, _, *recovery = run(make, clip, None, first, None)
        for again in range(1, sum(recovery) + 1):
            second = Fault(again % 3, again, "before" if again % 2 else "after", lost=False)
            run(make, clip, None, first, second)
