"""Spot checks: who checks whom in which step, who was wrong, and that a check leaves no trace but its hash.

The workers of the second half are threads over collectives in memory.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from broken_collectives import Counting
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_collectives import Seat, Table

from tiers import examples, nightly
from virtualflow.protocol.messages import NO_GENERATION
from virtualflow.reduction import choose_summation
from virtualflow.reduction.settings import Exchange, ReductionSettings
from virtualflow.step import Doubted, OptimizerOptions, Reduced, SpotChecker, Update
from virtualflow.step.spot_checks import SpotCheck, choose_check, choose_judges, choose_virtual_node, judge

SEEDS = st.integers(0, 2**32)
SAMPLES = st.floats(0.0, 1.0)

# --- which virtual node, and who --------------------------------------------------------------------------------------


@settings(max_examples=examples(100), deadline=None)
@given(
    seed=SEEDS, first=st.integers(0, 10**6), steps=st.integers(1, 300), virtual_nodes=st.integers(1, 64), sample=SAMPLES
)
def test_so_many_steps_have_a_check_as_the_sample_says(
    seed: int, first: int, steps: int, virtual_nodes: int, sample: float
) -> None:
    found = [choose_virtual_node(seed, step, virtual_nodes, sample) for step in range(first + 1, first + steps + 1)]
    checks = [check for check in found if check is not None]
    assert abs(len(checks) - sample * steps) <= 1 + 1e-6
    numbers = [number for number, _ in checks]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
    for begin in range(len(checks) - virtual_nodes + 1):
        assert {node for _, node in checks[begin : begin + virtual_nodes]} == set(range(virtual_nodes))


@pytest.mark.parametrize(("sample", "checks"), [(0.0, 0), (0.01, 10), (0.25, 250), (1.0, 1_000)])
def test_a_thousand_steps_have_so_many_checks(sample: float, checks: int) -> None:
    assert sum(choose_virtual_node(7, step, 8, sample) is not None for step in range(1, 1_001)) == checks


@st.composite
def holdings(draw: st.DrawFn) -> list[list[int]]:
    """Virtual nodes of two workers or more, in any order, as after a kill."""
    nodes = draw(st.permutations(range(draw(st.integers(2, 24)))))
    bounds = sorted(draw(st.sets(st.integers(1, len(nodes) - 1), min_size=1, max_size=7)))
    return [sorted(nodes[a:b]) for a, b in zip([0, *bounds], [*bounds, len(nodes)], strict=True)]


@settings(max_examples=examples(100), deadline=None)
@given(seed=SEEDS, step=st.integers(1, 10**6), held=holdings())
def test_another_worker_checks_and_a_third_one_judges(seed: int, step: int, held: list[list[int]]) -> None:
    nodes = sum(map(len, held))
    check = choose_check(seed, step, nodes, 1.0, held)
    assert check is not None
    assert check.virtual_node in held[check.holder]
    assert check.checker in set(range(len(held))) - {check.holder}
    judges = choose_judges(check, len(held))
    assert set(judges) == set(check.pair) if len(held) == 2 else len(judges) == 1 and judges[0] not in check.pair


@pytest.mark.parametrize("workers", range(2, 9))
def test_each_worker_is_checked_by_each_other_one_in_turn(workers: int) -> None:
    held = [[rank] for rank in range(workers)]
    rounds = [choose_check(3, step, workers, 1.0, held) for step in range(1, workers * (workers - 1) + 1)]
    pairs = [check.pair for check in rounds if check is not None]
    assert len(set(pairs)) == len(pairs) == workers * (workers - 1)


def test_one_alone_is_not_checked() -> None:
    assert choose_check(0, 1, 4, 1.0, [range(4)]) is None


# --- who was wrong ----------------------------------------------------------------------------------------------------

WHAT = "of virtual node 5 in step 9"
BOTH = "w-1 and w-0 came to different gradients"
NAMES = ["w-0", "w-1", "w-2"]
CHECK = SpotCheck(0, 9, 5, holder=1, checker=0)


@pytest.mark.parametrize(
    ("again", "odd", "says"),
    [
        pytest.param({2: 22}, 0, f"it came to other gradients {WHAT} than w-1 and w-2", id="the checker"),
        pytest.param({2: 11}, 1, f"it came to other gradients {WHAT} than w-0 and w-2", id="the holder"),
        pytest.param({2: 33}, None, f"{BOTH} {WHAT}, and w-2 to yet others", id="all different"),
        pytest.param({0: 22, 1: 22}, 0, "once more, and w-1 to the same", id="of two, the checker changes"),
        pytest.param({0: 11, 1: 11}, 1, "once more, and w-0 to the same", id="of two, the holder changes"),
        pytest.param({0: 33, 1: 22}, 0, "once more, and w-1 to the same", id="of two, one changes to yet another"),
        pytest.param({0: 11, 1: 22}, None, f"{BOTH} {WHAT}, and neither to others again", id="of two, neither changes"),
        pytest.param({0: 22, 1: 11}, None, f"{BOTH} {WHAT}, and both to others again", id="of two, both change"),
    ],
)
def test_who_was_wrong_follows_from_what_is_computed_once_more(
    again: dict[int, int], odd: int | None, says: str
) -> None:
    verdict = judge(CHECK, {1: 22, 0: 11}, again, NAMES)
    assert verdict.odd == odd
    assert says in verdict.reason


# --- an attempt -------------------------------------------------------------------------------------------------------

NODES, STEPS, SIZE = 6, 8, 2
RANGES = [range(1), range(1, 4), range(4, 6)]
MODEL = Counting()
EARLY = Exchange("reduce-scatter", overlap=True)
MODES = {
    "gathered whole": ReductionSettings(),
    "behind the headers": ReductionSettings(exchange=EARLY, bucket=64, one_by_one=1 << 30),
    "one by one": ReductionSettings(exchange=EARLY, bucket=64, one_by_one=0),
}


class Worker:
    """One of three, which checks as the loop does; ``flip`` may change the gradient of the weight."""

    def __init__(self, reduction: ReductionSettings, sample: float) -> None:
        self.model = copy.deepcopy(MODEL)
        self.metrics: list[dict[str, float]] = []
        self.flip: Callable[[int], torch.Tensor] | None = None
        self.checker = SpotChecker(self.model, seed=5, virtual_nodes=NODES, sample=sample) if sample else None
        self.update = Update(
            self.model,
            OptimizerOptions(torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)),
            choose_summation(NODES, "bitwise"),
            micro_batch=SIZE,
            reduction=reduction,
            spot_checker=self.checker,
        )
        self.update.enter()

    def attempt(self, seat: Seat, step: int, flipped: tuple[int, Callable[[torch.Tensor], None]] | None) -> Reduced:
        update, checker, rank = self.update, self.checker, seat.rank
        update.begin(RANGES[rank], 3)
        check = None
        if checker is not None:
            checker.choose(step, RANGES)
            check = checker.check
        if checker is not None and check is not None and check.checker == rank:
            self._compute(step, check.virtual_node, flipped)
            checker.note()
            update.sync.discard()
        for node in RANGES[rank]:
            if node == RANGES[rank][-1]:
                update.sync.expect_last(seat, RANGES, SIZE, NODES * SIZE)
            else:
                update.sync.expect(SIZE)
            loss = self._compute(step, node, flipped)
            if checker is not None and check is not None and check.virtual_node == node:
                checker.note()
            update.sync.take(SIZE, {"loss": loss})
        return update.synchronize(seat, RANGES, step, NO_GENERATION, more=True)

    def _compute(
        self, step: int, node: int, flipped: tuple[int, Callable[[torch.Tensor], None]] | None
    ) -> torch.Tensor:
        handle = None
        if flipped is not None and flipped[0] == node:

            def change(gradient: torch.Tensor) -> torch.Tensor:
                changed = gradient.clone()
                flipped[1](changed)
                return changed

            handle = self.model.linear.weight.register_hook(change)
        draw = torch.Generator().manual_seed(100 * step + node)
        loss = self.model(torch.randn(SIZE, 4, generator=draw)).square().mean()
        loss.backward()
        if handle is not None:
            handle.remove()
        return loss.detach()

    @property
    def state(self) -> Any:
        bits = [value.reshape(-1).view(torch.uint8).tolist() for value in self.model.state_dict().values()]
        return bits, self.metrics


def attempt(
    workers: list[Worker], seats: list[Seat], step: int, flips: tuple[int, int, Callable[[torch.Tensor], None]] | None
) -> list[Reduced | Doubted]:
    """What each comes to, if the worker ``flips[0]`` flips something in a virtual node."""

    def one(rank: int) -> Reduced | Doubted:
        try:
            return workers[rank].attempt(seats[rank], step, flips[1:] if flips and flips[0] == rank else None)
        except Doubted as doubted:
            return doubted

    with ThreadPoolExecutor(len(workers)) as threads:
        return list(threads.map(one, range(len(workers))))


def sit() -> list[Seat]:
    table = Table(len(RANGES))
    return [Seat(table, rank) for rank in range(len(RANGES))]


def commit(workers: list[Worker], found: list[Reduced | Doubted]) -> None:
    for worker, reduced in zip(workers, found, strict=True):
        assert isinstance(reduced, Reduced), reduced
        worker.metrics.append(reduced.metrics)
        worker.update.apply(reduced, epoch_ends=False)


@pytest.fixture(scope="module")
def unchecked() -> list[Any]:
    """The state after each step without checks."""
    workers, seats = [Worker(ReductionSettings(), 0.0) for _ in RANGES], sit()
    states = []
    for step in range(1, STEPS + 1):
        commit(workers, attempt(workers, seats, step, None))
        states.append(copy.deepcopy(workers[0].state))
    return states


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sample", [0.4, 1.0])
def test_a_check_leaves_no_trace(sample: float, mode: str, unchecked: list[Any]) -> None:
    workers, seats = [Worker(MODES[mode], sample) for _ in RANGES], sit()
    for step in range(1, STEPS + 1):
        commit(workers, attempt(workers, seats, step, None))
        assert [worker.state for worker in workers] == [unchecked[step - 1]] * len(workers)
    for worker in workers:
        worker.update.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("flips", [8, nightly(200)])
def test_one_bit_of_a_gradient_is_found_by_all_before_anything_is_applied(
    flips: int, mode: str, unchecked: list[Any]
) -> None:
    draw = random.Random(flips)
    workers, seats = [Worker(MODES[mode], 1.0) for _ in RANGES], sit()
    for turn in range(flips):
        step = turn % STEPS + 1
        if step == 1 and turn:
            workers, seats = [Worker(MODES[mode], 1.0) for _ in RANGES], sit()
        check = choose_check(5, step, NODES, 1.0, RANGES)
        assert check is not None
        victim, place, bit = draw.choice(check.pair), draw.randrange(20), draw.randrange(32)

        def flip(gradient: torch.Tensor, place: int = place, bit: int = bit) -> None:
            gradient.view(torch.int32).view(-1)[place] ^= -(1 << 31) if bit == 31 else 1 << bit

        found = attempt(workers, seats, step, (victim, check.virtual_node, flip))
        assert all(isinstance(doubted, Doubted) and doubted.check == check for doubted in found), (found, victim, bit)
        assert len({tuple(doubted.first.items()) for doubted in found if isinstance(doubted, Doubted)}) == 1
        for worker in workers:
            worker.update.abandon()
        assert not any(parameter.grad is not None for worker in workers for parameter in worker.model.parameters())
        # The collectives are as good as before.
        commit(workers, attempt(workers, seats, step, None))
        assert [worker.state for worker in workers] == [unchecked[step - 1]] * len(workers)
    for worker in workers:
        worker.update.close()


def test_a_bit_that_nobody_checks_is_not_found(unchecked: list[Any]) -> None:
    """What the sample leaves out is left out: the other tests could not fail if nothing ever passed."""
    workers, seats = [Worker(ReductionSettings(), 1.0) for _ in RANGES], sit()
    check = choose_check(5, 1, NODES, 1.0, RANGES)
    assert check is not None
    node = next(node for node in RANGES[1] if node != check.virtual_node)

    def negate(gradient: torch.Tensor) -> None:
        gradient.neg_()

    commit(workers, attempt(workers, seats, 1, (1, node, negate)))
    assert workers[0].state != unchecked[0]


def test_parameters_without_gradients_are_compared_as_well() -> None:
    def value(change: Callable[[torch.nn.Linear], None]) -> int:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        checker = SpotChecker(model, seed=0, virtual_nodes=2, sample=1.0)
        model(torch.ones(2, 3)).sum().backward()
        change(model)
        checker.note()
        return checker.value

    def forget(model: torch.nn.Linear) -> None:
        model.bias.grad = None

    def clear(model: torch.nn.Linear) -> None:
        model.bias.grad = torch.zeros(2)

    same = value(lambda model: None)
    assert value(lambda model: None) == same
    assert len({same, value(forget), value(clear)}) == 3
