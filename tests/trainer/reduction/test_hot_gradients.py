"""Gradients that are added up inside the backward pass have the bits of those that wait, whatever a script does.

The workers are threads over collectives in memory. What a script sees in ``.grad`` counts as well as what comes of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from gradient_scripts import (
    SCRIPTS,
    Body,
    Model,
    clipped,
    forgotten,
    frozen_by_turns,
    graph_without_use,
    in_two_halves,
    norms_every_time,
    norms_now_and_then,
    own_hook_from_before,
    plain,
    replaced,
    thrown_away,
    twice,
    weighed,
    weighed_late,
    weight,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_collectives import take_seats, together
from torch import Tensor

from tiers import examples, nightly, slow
from virtualflow.protocol import messages as m
from virtualflow.reduction import Addition, AttemptSpoiled, choose_summation
from virtualflow.reduction.settings import Exchange, ReductionSettings
from virtualflow.step import OptimizerOptions, Reduced, SpotChecker, Update
from virtualflow.transport.interface import Collectives

NODES, SAMPLES, STEPS = 8, 4, 7
EARLY = Exchange("reduce-scatter", overlap=True)
COLD = ReductionSettings(one_by_one=1 << 30)
HOT = {
    "gathered whole": ReductionSettings(one_by_one=0),
    "in buckets": ReductionSettings(one_by_one=0, exchange=EARLY, bucket=64),
}
RANGES = {
    "alone": [range(8)],
    "halves": [range(4), range(4, 8)],
    "unaligned": [range(3), range(3, 8)],
    "one and the rest": [range(1), range(1, 8)],
}
TIERS = {("in buckets", "unaligned"): pytest.param, ("gathered whole", "alone"): slow}
"""The others are nightly."""


@dataclass
class Worker:
    """One member."""

    settings: ReductionSettings
    script: Callable[[Body], None]
    reproducibility: Any = "bitwise"
    verify: bool = False
    dtype: torch.dtype | None = None
    """In which gradients are summed up, if not in their own."""
    drops: bool = False
    """Whether samples of some steps are dropped, as its workers learn from the headers."""
    seen: list[Any] = field(default_factory=list)
    """What its script has seen in attempts that count."""
    repeated: int = 0
    now: list[Any] = field(default_factory=list)
    """What it has seen in the present one."""

    def __post_init__(self) -> None:
        self.model = Model()
        if self.script is own_hook_from_before:
            self.model.weight.register_post_accumulate_grad_hook(self._look)
        checker = SpotChecker(self.model, seed=1, virtual_nodes=NODES, sample=1.0) if self.verify else None
        self.checker = checker
        self.update = Update(
            self.model,
            OptimizerOptions(torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)),
            choose_summation(NODES, self.reproducibility, self.dtype),
            micro_batch=SAMPLES,
            reduction=self.settings,
            spot_checker=checker,
        )
        self.update.enter()

    def _look(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.now.append(float(parameter.grad.sum()))

    def step(self, seat: Collectives, holdings: Sequence[Sequence[int]], step: int) -> list[Any]:
        """Attempt a step until it counts; the bits of the state after it."""
        while True:
            seen: list[Any] = []
            self.now = seen
            try:
                reduced = self._attempt(seat, holdings, step, seen)
            except AttemptSpoiled:
                self.repeated += 1
                self.update.abandon()
                continue
            self.seen += seen
            self.update.apply(reduced, epoch_ends=False)
            return [v.reshape(-1).view(torch.uint8).tolist() for v in self.model.state_dict().values()]

    def _attempt(self, seat: Collectives, holdings: Sequence[Sequence[int]], step: int, seen: list[Any]) -> Reduced:
        sync, nodes = self.update.sync, holdings[seat.rank]
        if self.script is frozen_by_turns:
            self.model.out.requires_grad_(step % 3 != 0)
        samples = [SAMPLES - (node == 7 and step % 2) for node in range(NODES)]
        planned = sum(samples)
        self.update.begin(nodes, max(map(len, holdings)), planned=planned)
        if self.drops and step in (4, 5):
            samples[2] -= 2
        if self.checker is not None:
            self.checker.choose(step, holdings)
        for node in nodes:
            if node == nodes[-1]:
                sync.expect_last(seat, holdings, samples[node], planned)
            else:
                sync.expect(samples[node])
            draw = torch.Generator().manual_seed(100 * step + node)
            x = torch.randn(samples[node], 4, generator=draw)
            told: list[float] = []

            def weigh(weight: float, told: list[float] = told) -> None:
                told.append(weight)
                sync.weigh(weight)

            self.script(Body(self.model, x, step, node, seen, weigh))
            check = None if self.checker is None else self.checker.check
            if self.checker is not None and check is not None and check.virtual_node == node:
                self.checker.note()
            sync.take(samples[node], {}, weight=told[-1] if told else None)
        return self.update.synchronize(seat, holdings, step, m.Generation(0, 0), more=True)


def train(workers: Sequence[Worker], holdings: Sequence[Sequence[int]], steps: int = STEPS) -> list[list[Any]]:
    """The state of each worker after each step."""
    seats = take_seats(len(workers))

    def work(rank: int) -> list[Any]:
        try:
            return [workers[rank].step(seats[rank], holdings, step) for step in range(1, steps + 1)]
        finally:
            workers[rank].update.close()

    found = [states for states in together(seats, work) if states is not None]
    assert len(found) == len(workers)
    return found


@pytest.fixture
def hot(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The places that were added up inside of a backward pass."""
    places: list[int] = []
    give = Addition.give

    def counting(self: Addition, place: int, tensor: Tensor, *, own: bool) -> Tensor:
        places.append(place)
        return give(self, place, tensor, own=own)

    monkeypatch.setattr(Addition, "give", counting)
    return places


@cache
def reference(script: Callable[[Body], None], dtype: torch.dtype | None = None) -> tuple[list[Any], list[Any]]:
    """The states, and what the script has seen, where nothing is done early."""
    worker = Worker(COLD, script, dtype=dtype)
    (states,) = train([worker], RANGES["alone"])
    assert worker.repeated == 0
    return states, worker.seen


@pytest.mark.parametrize(
    ("how", "ranges", "dtype"),
    [
        *(TIERS.get(pair, nightly)(*pair, None, id=f"{pair[0]}-{pair[1]}") for pair in product(HOT, RANGES)),
        slow("in buckets", "unaligned", torch.float64, id="in buckets-unaligned-in wider sums"),
        nightly("gathered whole", "alone", torch.float64, id="gathered whole-alone-in wider sums"),
    ],
)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_the_bits_and_what_a_script_sees_are_those_of_waiting(
    script: Callable[[Body], None], how: str, ranges: str, dtype: torch.dtype | None, hot: list[int]
) -> None:
    states, seen = reference(script, dtype)
    hot.clear()
    workers = [Worker(HOT[how], script, dtype=dtype) for _ in RANGES[ranges]]
    assert train(workers, RANGES[ranges]) == [states] * len(workers)
    assert sorted(found for worker in workers for found in worker.seen) == sorted(seen)
    goes_hot, surprises = SCRIPTS[script]
    assert bool(hot) == goes_hot
    if ranges == "alone":
        assert [worker.repeated for worker in workers] == [int(surprises)]
    elif not surprises:
        assert not any(worker.repeated for worker in workers)


@pytest.mark.parametrize("ranges", ["halves", nightly("unaligned")])
def test_samples_that_are_dropped_make_all_repeat_one_attempt_and_expect_it_from_then_on(ranges: str) -> None:
    (states,) = train([Worker(COLD, plain, drops=True)], RANGES["alone"])
    assert states[3] != reference(plain)[0][3]
    workers = [Worker(HOT["in buckets"], plain, drops=True) for _ in RANGES[ranges]]
    assert train(workers, RANGES[ranges]) == [states] * len(workers)
    assert [worker.repeated for worker in workers] == [1] * len(workers)


def test_alone_all_additions_of_the_tree_are_hot_from_the_second_step_on(hot: list[int]) -> None:
    train([Worker(HOT["gathered whole"], plain)], RANGES["alone"], steps=1)
    assert not hot
    train([Worker(HOT["gathered whole"], plain)], RANGES["alone"], steps=3)
    # Of eight virtual nodes every second one is added to what is before it; eleven parameters, one not used by node 3.
    assert len(hot) == 2 * (4 * 11 - 1)


def test_a_script_that_has_looked_once_gets_to_see_all_gradients_for_ever_after(hot: list[int]) -> None:
    worker = Worker(HOT["gathered whole"], norms_now_and_then)
    train([worker], RANGES["alone"], steps=12)
    assert worker.repeated == 1
    assert [step for step, _, _ in worker.seen] == [step for step in (3, 6, 9, 12) for _ in range(NODES)]


@pytest.mark.parametrize("script", [plain, weighed], ids=lambda script: script.__name__)
def test_virtual_nodes_that_run_as_one_are_added_up_hot(script: Callable[[Body], None], hot: list[int]) -> None:
    states = []
    for how in (COLD, HOT["gathered whole"]):
        workers = [Worker(how, script, "statistical") for _ in RANGES["halves"]]
        states.append(train(workers, RANGES["halves"]))
    assert hot
    assert states[0] == states[1]


@pytest.mark.parametrize("ranges", ["halves", "unaligned"])
def test_a_virtual_node_that_is_checked_is_hashed_as_autograd_left_it(ranges: str, hot: list[int]) -> None:
    hashes: list[list[int]] = []
    for how in (COLD, HOT["gathered whole"], HOT["in buckets"]):
        workers = [Worker(how, plain, verify=True) for _ in RANGES[ranges]]
        for worker in workers:
            assert worker.checker is not None
            worker.checker.differs = lambda values: None  # type: ignore[method-assign, assignment]
        values: list[int] = []
        for worker in workers:
            note = worker.checker.note  # type: ignore[union-attr]

            def noting(worker: Worker = worker, note: Callable[[], None] = note, values: list[int] = values) -> None:
                note()
                values.append(worker.checker.value)  # type: ignore[union-attr]

            worker.checker.note = noting  # type: ignore[method-assign, union-attr]
        train(workers, RANGES[ranges])
        hashes.append(values)
    assert hot
    assert len(hashes[0]) == STEPS
    assert hashes[1:] == [hashes[0]] * 2


def test_a_script_that_holds_a_gradient_to_look_at_it_later_is_found_out() -> None:
    held: dict[tuple[int, int], Tensor] = {}

    def held_back_late(body: Body) -> None:
        before = held.pop((body.step, body.node - 1), None)
        if before is not None:
            body.seen.append((body.step, body.node, before.tolist()))
        body.loss().backward()
        if body.step >= 4 and body.node % 2:
            assert body.model.weight.grad is not None
            held[body.step, body.node] = body.model.weight.grad

    _, seen = reference(held_back_late)
    held.clear()
    worker = Worker(HOT["gathered whole"], held_back_late)
    train([worker], RANGES["alone"])
    assert worker.seen == seen
    assert len(seen) == (STEPS - 3) * 3
    assert worker.repeated == 1


def test_a_gradient_that_is_given_to_another_parameter_counts_for_both() -> None:
    def shared_late(body: Body) -> None:
        body.loss().backward()
        if body.step >= 4 and body.node % 3 == 0:
            body.model.sometimes.grad = body.model.norm.bias.grad  # it has none of its own there

    states, _ = reference(shared_late)
    for how in HOT.values():
        workers = [Worker(how, shared_late) for _ in range(2)]
        assert train(workers, RANGES["halves"]) == [states] * 2
        assert workers[0].repeated, "its virtual node 3 is added up hot"


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < (2, 5), reason="needs a newer torch: 2.4 compiles no ParameterList")
def test_a_compiled_model_is_added_up_hot_too(hot: list[int]) -> None:
    """It is compiled once more in the middle, for shorter micro-batches."""
    torch._dynamo.reset()
    gone: list[int] = []

    def compiled(body: Body) -> None:
        forward = vars(body.model).setdefault("compiled", [torch.compile(body.model, backend="aot_eager")])[0]
        forward(body.x, 1).square().mean().backward()
        gone.append(hot.count(0))

    states = []
    for how in (COLD, HOT["gathered whole"]):
        worker = Worker(how, compiled)
        states.append(train([worker], RANGES["alone"]))
        assert worker.repeated == 0
    assert states[0] == states[1]
    assert hot.count(0) == (STEPS - 1) * NODES // 2


ANYTHING = [plain, norms_every_time, clipped, replaced, forgotten, twice, thrown_away, graph_without_use, in_two_halves]


@settings(max_examples=examples(20), deadline=None)
@given(
    what=st.dictionaries(
        st.tuples(st.integers(1, STEPS), st.integers(0, NODES - 1)), st.sampled_from(ANYTHING), max_size=12
    ),
    cuts=st.sets(st.integers(1, NODES - 1), max_size=2),
    how=st.sampled_from(list(HOT.values())),
    dtype=st.sampled_from([None, torch.float64]),
)
def test_whatever_scripts_do_when_they_like_the_bits_and_what_they_see_stay(
    what: dict[tuple[int, int], Callable[[Body], None]],
    cuts: set[int],
    how: ReductionSettings,
    dtype: torch.dtype | None,
) -> None:
    def script(body: Body) -> None:
        what.get((body.step, body.node), plain)(body)

    cold = Worker(COLD, script, dtype=dtype)
    (states,) = train([cold], RANGES["alone"])
    ranges = [range(a, b) for a, b in pairwise([0, *sorted(cuts), NODES])]
    workers = [Worker(how, script, dtype=dtype) for _ in ranges]
    assert train(workers, ranges) == [states] * len(workers)
    assert sorted(found for worker in workers for found in worker.seen) == sorted(cold.seen)


def test_what_weights_come_to_is_the_mean_over_what_all_virtual_nodes_weigh() -> None:
    worker = Worker(COLD, weighed)
    start = copy.deepcopy(worker.model.state_dict())
    train([worker], RANGES["alone"], steps=1)

    by_hand = Model()
    by_hand.load_state_dict(start)
    sizes = [SAMPLES - (node == 7) for node in range(NODES)]
    total, loss = 0.0, torch.zeros(())
    for node, size in enumerate(sizes):
        x = torch.randn(size, 4, generator=torch.Generator().manual_seed(100 + node))
        by = weight(Body(by_hand, x, 1, node, [], lambda weight: None))
        total, loss = total + by, loss + by * by_hand(x, node).square().mean()
    (loss / total).backward()
    with torch.no_grad():
        for parameter in by_hand.parameters():
            parameter.sub_(0.1 * parameter.grad)  # type: ignore[operator]
    for one, other in zip(worker.model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_an_exchange_under_way_whose_scale_went_by_samples_is_repeated_when_weights_are_told() -> None:
    states, _ = reference(weighed_late)
    workers = [Worker(HOT["in buckets"], weighed_late) for _ in RANGES["unaligned"]]
    assert train(workers, RANGES["unaligned"]) == [states] * 2
    assert [worker.repeated for worker in workers] == [1, 1]


def test_hooks_are_gone_when_the_run_is_over() -> None:
    worker = Worker(HOT["gathered whole"], plain)
    train([worker], RANGES["alone"])
    for parameter in worker.model.parameters():
        assert not parameter._post_accumulate_grad_hooks


def test_a_copy_of_the_model_can_be_made_in_the_inner_loop() -> None:
    def copying(body: Body) -> None:
        body.loss().backward()
        body.seen.append(len(copy.deepcopy(body.model).state_dict()))

    worker = Worker(HOT["gathered whole"], copying)
    train([worker], RANGES["alone"], steps=3)
    assert worker.repeated == 0
