"""A worker is lost at any point of a step: the others go on with what they have, and the sums have the same bits.

The workers are threads over collectives in memory, so that all cases that there are take seconds.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from broken_collectives import Counting
from thread_collectives import ALONE, Seat, Table, together
from torch import Tensor, nn

from tiers import nightly
from virtualflow.errors import CommunicatorBroken
from virtualflow.protocol import messages as m
from virtualflow.reduction import choose_summation
from virtualflow.reduction.settings import Exchange, ReductionSettings
from virtualflow.step import OptimizerOptions, Reduced, Update
from virtualflow.transport.interface import Collectives
from virtualflow.worker.repair import Remains, plan_repair

NODES, SAMPLES, STEPS = 6, 2, 5
RANGES = [range(1), range(1, 4), range(4, 6)]
FEWER = [range(3), range(3, 6)]
How = Literal["before", "after"]
MODEL = Counting()
EARLY = Exchange("reduce-scatter", overlap=True)
SETTINGS = {
    "gathered whole": ReductionSettings(),
    "gathered whole, early": ReductionSettings(exchange=Exchange("gather", overlap=True), bucket=64),
    "behind the headers": ReductionSettings(exchange=EARLY, bucket=64, one_by_one=1 << 30),
    "one by one": ReductionSettings(exchange=EARLY, bucket=64, one_by_one=0),
}


@dataclass
class Worker:
    """One member, with what it has computed: how often each (step, virtual node)."""

    settings: ReductionSettings
    computed: Counter[tuple[int, int]] = field(default_factory=Counter)
    metrics: list[dict[str, float]] = field(default_factory=list)
    clips: bool = False
    """Whether its script changes gradients behind the backward pass."""

    def __post_init__(self) -> None:
        self.model = copy.deepcopy(MODEL)
        self.update = Update(
            self.model,
            OptimizerOptions(torch.optim.SGD(self.model.parameters(), 0.1)),
            choose_summation(NODES, "bitwise"),
            micro_batch=SAMPLES,
            reduction=self.settings,
        )
        self.update.enter()

    def attempt(
        self,
        seat: Collectives,
        step: int,
        holdings: Sequence[Sequence[int]],
        computes: Sequence[int],
        *,
        repairs: bool = False,
        stop: int | None = None,
    ) -> Reduced:
        """One attempt; this worker hears of a loss before the ``stop``-th virtual node."""
        update = self.update
        update.begin(computes, max(map(len, holdings)), resumes=repairs)
        for count, node in enumerate(computes):
            if count == stop:
                raise CommunicatorBroken("heard of it")
            draw = torch.Generator().manual_seed(10 * step + node)
            samples = SAMPLES + (node == 0)
            if node == computes[-1]:
                update.sync.expect_last(seat, holdings, samples, NODES * SAMPLES + 1)
            else:
                update.sync.expect(samples)
            loss = self.model(torch.randn(samples, 4, generator=draw)).square().mean()
            loss.backward()
            if self.clips:
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
            self.computed[step, node] += 1
            metrics: dict[str, float | Tensor] = {"loss": loss.detach(), "sum": 0.1 / (node + step)}
            if node == 1:
                metrics["odd"] = float(step)
            update.sync.take(samples, metrics)
        return update.synchronize(seat, holdings, step, m.Generation(0, 0), more=True, repairs=repairs)

    def commit(self, reduced: Reduced) -> None:
        """Apply it."""
        self.metrics.append(reduced.metrics)
        self.update.apply(reduced, epoch_ends=False)

    @property
    def state(self) -> tuple[Any, ...]:
        """The bits of the model, and all metrics."""
        values = self.model.state_dict().values()
        return [value.reshape(-1).view(torch.uint8).tolist() for value in values], self.metrics


def train(workers: Sequence[Worker], ranges: Sequence[range], step: int) -> int:
    """An undisturbed step; how many operations it took."""
    table = Table(len(workers))
    seats = [Seat(table, rank) for rank in range(len(workers))]
    found = together(seats, lambda rank: workers[rank].attempt(seats[rank], step, ranges, ranges[rank]))
    for worker, reduced in zip(workers, found, strict=True):
        assert reduced is not None
        worker.commit(reduced)
    return max(seat.operations for seat in seats)


def go_on(
    workers: Sequence[Worker], ranges: Sequence[range], step: int, failing: tuple[int, int, How] | None = None
) -> list[Reduced | None]:
    """Attempt a step again with what these workers have kept."""
    for worker in workers:
        worker.update.abandon(keep=True)
    repair = plan_repair([Remains(frozenset(worker.update.sync.kept)) for worker in workers], ranges)
    assert repair is not None
    for worker in workers:
        worker.update.enter()
    return attempt(workers, step, repair.holdings, repair.computes, failing, repairs=True)


def attempt(
    workers: Sequence[Worker],
    step: int,
    holdings: Sequence[Sequence[int]],
    computes: Sequence[Sequence[int]],
    failing: tuple[int, int, How] | None,
    *,
    repairs: bool = False,
    stops: Sequence[int | None] = (None, None, None),
) -> list[Reduced | None]:
    """What each finds, if the ``failing`` worker fails at that operation."""
    table = Table(len(workers))
    seats: list[Any] = [Seat(table, rank) for rank in range(len(workers))] if len(workers) > 1 else [ALONE]
    if failing is not None:
        rank, seats[rank].fails_at, seats[rank].how = failing
    return together(
        seats,
        lambda rank: workers[rank].attempt(
            seats[rank], step, holdings, computes[rank], repairs=repairs, stop=stops[rank]
        ),
    )


@pytest.fixture(scope="module")
def reference() -> list[tuple[Any, ...]]:
    """One worker alone: its state after each step."""
    worker = Worker(ReductionSettings())
    states = []
    for step in range(1, STEPS + 1):
        worker.commit(worker.attempt(ALONE, step, [range(NODES)], range(NODES)))
        states.append(copy.deepcopy(worker.state))
    return states


def finish(workers: Sequence[Worker], found: list[Reduced | None], step: int, reference: list[tuple[Any, ...]]) -> None:
    """The repeated step counts, and another one follows it."""
    for worker, reduced in zip(workers, found, strict=True):
        assert reduced is not None
        worker.commit(reduced)
    assert [worker.state for worker in workers] == [reference[step - 1]] * len(workers)
    ranges = FEWER if len(workers) == 2 else [range(NODES)]
    for worker, reduced in zip(workers, attempt(workers, step + 1, ranges, ranges, None), strict=True):
        assert reduced is not None
        worker.commit(reduced)
    assert [worker.state for worker in workers] == [reference[step]] * len(workers)
    for worker in workers:
        worker.update.close()


def prepared(how: str, step: int) -> tuple[list[Worker], int]:
    """Three workers before ``step``, and how many operations it takes."""
    for count in (step, step - 1):
        workers = [Worker(SETTINGS[how]) for _ in RANGES]
        operations = [train(workers, RANGES, number) for number in range(1, count + 1)]
        if count == step:
            most = operations[-1]
            for worker in workers:
                worker.update.close()
    return workers, most


@pytest.mark.parametrize("step", [nightly(1, id="in the first step"), pytest.param(3, id="when all names are known")])
@pytest.mark.parametrize("how", [how if how == "gathered whole" else nightly(how) for how in SETTINGS])
def test_whichever_collective_breaks_only_what_the_lost_worker_had_is_computed_again(
    how: str, step: int, reference: list[tuple[Any, ...]]
) -> None:
    _, most = prepared(how, step)
    tried = 0
    for victim, number in ((victim, number) for victim in range(3) for number in range(1, most + 1)):
        workers, _ = prepared(how, step)
        kind: How = "before" if (victim + number) % 2 else "after"
        found = attempt(workers, step, RANGES, RANGES, (victim, number, kind))
        survivors = [worker for rank, worker in enumerate(workers) if rank != victim]
        if any(reduced is not None for reduced in found):
            continue  # the step counts for somebody, and so for all
        tried += 1
        finish(survivors, go_on(survivors, FEWER, step), step, reference)
        computed = sum((worker.computed for worker in workers), Counter())
        again = {node for node in range(NODES) if computed[step, node] > 1}
        assert again == set(RANGES[victim])
        assert max(computed.values()) == 2
    assert tried >= most


@pytest.mark.parametrize("how", SETTINGS)
@pytest.mark.parametrize(
    "stops", [(0, 1), *(nightly(stops) for stops in [(None, 2), (0, 2), (0, None), (None, 0)])], ids=str
)
def test_a_virtual_node_that_was_not_reached_is_computed_once(
    how: str, stops: tuple[int | None, ...], reference: list[tuple[Any, ...]]
) -> None:
    workers, _ = prepared(how, 3)
    attempt(workers, 3, RANGES, RANGES, (2, 1, "before"), stops=(*stops, None))
    finish(workers[:2], go_on(workers[:2], FEWER, 3), 3, reference)
    computed = sum((worker.computed for worker in workers), Counter())
    assert [computed[3, node] for node in range(NODES)] == [1, 1, 1, 1, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["gathered whole, early", "one by one", *map(nightly, list(SETTINGS)[::2])])
def test_what_was_kept_is_kept_through_a_second_loss(how: str, reference: list[tuple[Any, ...]]) -> None:
    _, most = prepared(how, 3)
    for number in range(1, most + 1):
        workers, _ = prepared(how, 3)
        attempt(workers, 3, RANGES, RANGES, (0, 1, "before"))
        found = go_on(workers[1:], FEWER, 3, (0, number, "before"))
        if any(reduced is not None for reduced in found):
            break
        (alone,) = workers[2:]
        finish([alone], go_on([alone], [range(NODES)], 3), 3, reference)
        assert max(alone.computed[3, node] for node in range(NODES)) == 1
    assert number > 1


def test_gradients_that_were_changed_after_they_had_set_out_are_not_kept() -> None:
    workers, _ = prepared("one by one", 3)
    workers[0].clips = True
    attempt(workers, 3, RANGES, RANGES, (2, 1, "before"))
    for worker in workers:
        worker.update.abandon(keep=True)
    assert [list(worker.update.sync.kept) for worker in workers] == [[], [1, 2, 3], [4, 5]]
