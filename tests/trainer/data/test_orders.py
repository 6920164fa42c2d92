"""A sampler gives each epoch an order that follows from the seed and the epoch alone, and is refused if it does not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from virtualflow.data.sampling import Orders, SamplePlan, open_orders
from virtualflow.errors import ConfigurationError

SIZE = 30
WEIGHTS = [float(n % 7) for n in range(SIZE)]


class Strided(Sampler[int]):
    """As people write them: it is told of the epoch, and draws from the global generator."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(index + self.epoch) % SIZE for index in torch.randperm(SIZE).tolist()])


def by_epoch(seed: int, epoch: int) -> torch.Tensor:
    """A curriculum: easy samples first."""
    return torch.multinomial(torch.arange(1.0, SIZE + 1) ** -(1 / (1 + epoch)), 50, replacement=True)


DRAWN: dict[str, Callable[[], Any]] = {
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, 50),
    "weighted, each once at most": lambda: WeightedRandomSampler(WEIGHTS, 20, replacement=False),
    "with replacement": lambda: RandomSampler(range(SIZE), replacement=True, num_samples=50),
    "without replacement": lambda: RandomSampler(range(SIZE)),
    "a random subset": lambda: SubsetRandomSampler([3, 1, 4, 15, 9, 26]),
    "one of the user's own": Strided,
    "by epoch": lambda: by_epoch,
    "by Python's generator": lambda: lambda seed, epoch: random.choices(range(SIZE), k=9),
    "by numpy's generator": lambda: lambda seed, epoch: np.random.randint(SIZE, size=9),
}


@pytest.mark.parametrize("make", DRAWN.values(), ids=DRAWN.keys())
def test_an_order_follows_from_the_seed_and_the_epoch_alone(make: Callable[[], Any]) -> None:
    one = Orders(make(), SIZE, seed=3)
    torch.rand(5)
    random.random()
    other = Orders(make(), SIZE, seed=3)
    for epoch in (0, 1, 2):
        assert one.order(epoch).equal(other.order(epoch))
    assert other.order(1).equal(Orders(make(), SIZE, seed=3).order(1)), "whatever it was asked before"
    drawn = {tuple(Orders(make(), SIZE, seed).order(epoch).tolist()) for seed in (3, 4) for epoch in (0, 1)}
    assert len(drawn) == 4, "another one for each seed and epoch"
    assert one.fingerprint == other.fingerprint != Orders(make(), SIZE, seed=4).fingerprint


def test_asking_a_sampler_leaves_the_global_generators_as_they_are() -> None:
    def state() -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[index]

    before = state()
    Orders(lambda seed, epoch: [torch.randint(9, ()).item(), random.randrange(9), np.random.randint(9)], SIZE, 0)
    assert state() == before


@pytest.mark.parametrize(
    "given",
    [
        pytest.param([4, 4, 0], id="list"),
        pytest.param((4, 4, 0), id="tuple"),
        pytest.param(np.array([4, 4, 0], np.int32), id="numpy"),
        pytest.param(torch.tensor([4, 4, 0], dtype=torch.uint8), id="tensor"),
        pytest.param([np.int64(4), np.int64(4), np.int64(0)], id="list of numpy's"),
    ],
)
def test_indices_may_be_given_in_many_ways(given: Any) -> None:
    for sampler in (given, lambda seed, epoch: given):
        order = Orders(sampler, 5, 0).order(7)
        assert order.dtype == torch.int64
        assert order.tolist() == [4, 4, 0]


def test_a_sequential_sampler_gives_the_samples_in_order() -> None:
    assert Orders(SequentialSampler(range(4)), 4, 0).order(2).tolist() == [0, 1, 2, 3]


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 5), st.integers(1, 7), st.booleans(), st.data()
)
def test_each_position_of_an_order_is_planned_once(
    order: list[int], share: int, virtual_nodes: int, shuffle: bool, data: st.DataObject
) -> None:
    orders = Orders(lambda seed, epoch: order[epoch:] + order[:epoch], 10, 0)
    plan = SamplePlan(10, share * virtual_nodes, 0, shuffle, drop_last=False, orders=orders)
    epoch = data.draw(st.integers(0, len(order) - 1))
    planned = [
        index
        for step in range(plan.steps_per_epoch)
        for node in range(virtual_nodes)
        for index in plan.indices(epoch, step, node, virtual_nodes).tolist()
    ]
    assert planned == order[epoch:] + order[:epoch]
    assert sum(plan.samples(step) for step in range(plan.steps_per_epoch)) == len(order)


def test_drop_last_goes_by_the_samples_of_an_epoch() -> None:
    assert SamplePlan(10, 4, 0, True, drop_last=True, orders=Orders([1] * 9, 10, 0)).steps_per_epoch == 2
    with pytest.raises(ConfigurationError, match="drop_last leaves no batch of 4 in an epoch of 3 samples"):
        SamplePlan(10, 4, 0, True, drop_last=True, orders=Orders([1] * 3, 10, 0))


class Counting(Sampler[int]):
    """Goes on where the last epoch has ended."""

    begin = 0

    def __iter__(self) -> Iterator[int]:
        self.begin += 5
        return iter([(self.begin + n) % SIZE for n in range(5)])


def drawing(generator: torch.Generator) -> Callable[[int, int], torch.Tensor]:
    return lambda seed, epoch: torch.randperm(SIZE, generator=generator)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a state of its own": (Counting, "gives another order when it is asked for the same epoch once more"),
    "a generator in a function": (lambda: drawing(torch.Generator()), "another order when it is asked"),
    "an iterator": (lambda: iter([1, 2, 3]), "gives no sample in epoch 0|another order"),
    "a generator of torch's": (
        lambda: WeightedRandomSampler(WEIGHTS, 5, generator=torch.Generator()),
        "WeightedRandomSampler draws from a generator of its own.*leave out its generator=",
    ),
    "one for several processes": (
        lambda: DistributedSampler(range(SIZE), num_replicas=2, rank=0),  # type: ignore[arg-type]
        "DistributedSampler divides the samples among processes.*leave out sampler=",
    ),
    "batches": (
        lambda: BatchSampler(SequentialSampler(range(SIZE)), 5, drop_last=False),
        r"must give the indices .* int64 \[n\] or a sequence of int, and gives a list",
    ),
    "fractions": (lambda: lambda seed, epoch: torch.rand(5), "and gives a Tensor of something else"),
    "a mask": (lambda: lambda seed, epoch: [True, False], "and gives a list of something else"),
    "a generator expression": (lambda: lambda seed, epoch: (n for n in range(5)), "and gives a generator of"),
    "nothing": (lambda: lambda seed, epoch: None, "and gives a NoneType of something else"),
    "no index": (lambda: lambda seed, epoch: [], "gives no sample in epoch 0; give at least 1"),
    "too high": (lambda: [0, SIZE], f"gives the index {SIZE} in epoch 0, which none of the dataset's {SIZE} samples"),
    "below zero": (lambda: [0, -1], "gives the index -1 in epoch 0"),
    "a function of less": (lambda: lambda epoch: [epoch], r"must be a function of \(seed, epoch\), and does not"),
    "a number": (lambda: 7, "sampler is a int; give a function of"),
}


@pytest.mark.parametrize(("make", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_what_gives_no_such_order_is_refused(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        Orders(make(), SIZE, 0)
    assert "\n" not in str(caught.value)


def test_epochs_of_different_lengths_are_refused() -> None:
    orders = Orders(lambda seed, epoch: range(5 + epoch), SIZE, 0)
    with pytest.raises(ConfigurationError, match="gives 7 samples in epoch 2 and 5 in epoch 0; give as many in each"):
        orders.order(2)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return self.shard(0, 1, 0, 0)

    def shard(self, index: int, count: int, epoch: int, start: int) -> Iterator[int]:
        return iter(range(index + start * count, SIZE, count))


def test_a_stream_has_no_indices_to_be_put_in_order() -> None:
    with pytest.raises(ConfigurationError, match=r"Stream has no indices that a sampler could.*leave out"):
        open_orders([0], Stream(), 0)
    assert open_orders(None, Stream(), 0) is None
