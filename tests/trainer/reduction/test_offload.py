"""Sums that wait in host memory: which, that no bit depends on it, and that a device needs a constant amount of memory.

The device is played: all tensors are on the CPU, and the host memory of these tests counts what is in it.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
from counted_memory import CountedMemory
from hypothesis import given
from hypothesis import strategies as st
from test_gradient_memory import living
from thread_collectives import ALONE, Seat, Table
from torch import Tensor, nn

from tiers import nightly
from virtualflow.protocol import messages as m
from virtualflow.reduction import Accumulator, Offload, Tensors, choose_offloaded, choose_summation, plan_offload
from virtualflow.reduction.settings import Exchange, ReductionSettings
from virtualflow.reduction.tree import Key
from virtualflow.step import OptimizerOptions, Update

# --- which ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "room", "chosen"),
    [
        pytest.param([], 2, [], id="nothing waits"),
        pytest.param([(0, 4), (4, 6)], 2, [], id="there is room for all"),
        pytest.param([(0, 4), (4, 6), (6, 7)], 2, [(0, 4)], id="the widest goes first"),
        pytest.param([(0, 4), (4, 6), (6, 7)], 1, [(0, 4), (4, 6)], id="the narrowest stays"),
        pytest.param([(3, 4), (4, 8)], 1, [(4, 8)], id="the widest may lie on the right"),
        pytest.param([(0, 2), (3, 4), (5, 6)], 1, [(0, 2), (3, 4)], id="of equal ones the left one goes"),
        pytest.param([(0, 8)], 0, [], id="one always stays: it is the result"),
    ],
)
def test_which_sums_wait_in_host_memory(keys: list[Key], room: int, chosen: list[Key]) -> None:
    assert choose_offloaded(keys, room) == frozenset(chosen)


@given(virtual_nodes=st.integers(1, 200), room=st.integers(1, 4))
def test_the_next_additions_find_the_sums_that_are_needed_soonest_on_the_device(virtual_nodes: int, room: int) -> None:
    summation = choose_summation(virtual_nodes, "bitwise")
    accumulator = Accumulator(summation)
    for node in range(virtual_nodes):
        accumulator.add(node, [])
        keys = [key for key, _ in accumulator.parts]
        chosen = choose_offloaded(keys, room)
        assert len(keys) - len(chosen) == min(len(keys), room)
        # Sums are joined from the right, so those on the left wait longest.
        assert set(keys[: len(chosen)]) == chosen


def test_on_the_cpu_all_sums_stay_where_they_are() -> None:
    assert plan_offload(torch.device("cpu"), 1 << 30, ReductionSettings()) is None


# --- bits -------------------------------------------------------------------------------------------------------------


def add_all(
    virtual_nodes: int,
    contributed: Sequence[Tensors],
    order: Sequence[int],
    offload: Offload | None,
    hot: Sequence[bool],
) -> list[tuple[Key, list[list[int] | None]]]:
    """The sums' bits; some virtual nodes are added place by place as they come."""
    accumulator = Accumulator(choose_summation(virtual_nodes, "bitwise"), offload)
    for node in order:
        tensors = [None if value is None else value.clone() for value in contributed[node]]
        added: dict[int, Tensor] = {}
        if hot[node]:
            addition = accumulator.prepare(node, weight=0.75)
            for place, tensor in enumerate(tensors):
                if addition.merged and tensor is not None and place % 4 != 3:
                    addition.give(place, tensor, own=True)
                    tensors[place] = None
            added = addition.sums
        accumulator.add(node, tensors, weight=0.75, added=added)
    accumulator.await_offloaded()
    return [
        (key, [None if t is None else t.view(-1).view(torch.uint8).tolist() for t in tensors])
        for key, tensors in accumulator.parts
    ]


@given(virtual_nodes=st.integers(1, 33), places=st.integers(1, 6), data=st.data())
def test_no_bit_depends_on_where_sums_wait_nor_on_when_they_are_added(
    virtual_nodes: int, places: int, data: st.DataObject
) -> None:
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))

    def value() -> Tensor | None:
        kind = int(torch.randint(0, 5, (), generator=draw))
        return None if kind == 0 else torch.full((3,), -0.0) if kind == 1 else torch.randn(3, generator=draw)

    contributed = [[value() for _ in range(places)] for _ in range(virtual_nodes)]
    order = list(range(virtual_nodes)) if data.draw(st.booleans()) else data.draw(st.permutations(range(virtual_nodes)))
    order = order[: data.draw(st.integers(1, virtual_nodes))]
    cold = [False] * virtual_nodes
    hot = data.draw(st.lists(st.booleans(), min_size=virtual_nodes, max_size=virtual_nodes))
    memory = CountedMemory()
    offload = Offload(memory, data.draw(st.integers(1, 3)), data.draw(st.sampled_from([0, 12, 40, 1 << 20])))
    expected = add_all(virtual_nodes, contributed, order, None, cold)
    assert add_all(virtual_nodes, contributed, order, None, hot) == expected
    assert add_all(virtual_nodes, contributed, order, offload, cold) == expected
    assert add_all(virtual_nodes, contributed, order, offload, hot) == expected


@pytest.mark.parametrize(("virtual_nodes", "room", "moved"), [(8, 1, 3), (8, 2, 1), (64, 1, 31), (64, 2, 15)])
def test_each_sum_is_moved_out_once_and_brought_back_once(virtual_nodes: int, room: int, moved: int) -> None:
    memory = CountedMemory()
    accumulator = Accumulator(choose_summation(virtual_nodes, "bitwise"), Offload(memory, room, 1 << 20))
    for node in range(virtual_nodes):
        accumulator.add(node, [torch.ones(100)])
    ((_, (total,)),) = accumulator.parts
    assert total is not None
    assert total.tolist() == [virtual_nodes] * 100
    assert (memory.moved, memory.brought) == (400 * moved, 400 * moved)


# --- memory -----------------------------------------------------------------------------------------------------------

WIDTH, LAYERS = 64, 12
GRADIENT = 4 * WIDTH * WIDTH * LAYERS
AHEAD = 4 * WIDTH * WIDTH
SLACK = 6 * AHEAD
"""Samples, activations, losses, headers, and what autograd has in its hands: a few parameters' size of a dozen."""


@pytest.fixture
def nothing_else() -> Iterator[None]:
    """What lives already is not looked at by those who count."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def peak(
    virtual_nodes: int, workers: int, room: int | None, one_by_one: int, steps: int = 3
) -> tuple[float, list[Any]]:
    """The most that lives on the device beside models, optimizers and messages in the last step, in gradients, and the
    bits of the models.
    """
    table, made = Table(workers), []
    for _ in range(workers):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        update = Update(
            model,
            OptimizerOptions(torch.optim.SGD(model.parameters(), 0.1)),
            choose_summation(virtual_nodes, "bitwise"),
            micro_batch=1,
            reduction=ReductionSettings(
                one_by_one=one_by_one, exchange=Exchange("reduce-scatter", overlap=True), bucket=GRADIENT // 3
            ),
        )
        memory = CountedMemory()
        update.sync.offload = None if room is None else Offload(memory, room, AHEAD)
        update.enter()
        made.append((model, update, memory))
    edges = [virtual_nodes * rank // workers for rank in range(workers + 1)]
    ranges = [range(a, b) for a, b in pairwise(edges)]
    seats: list[Any] = [Seat(table, rank) for rank in range(workers)] if workers > 1 else [ALONE]
    most, barrier = [0], threading.Barrier(workers, timeout=60)

    def look(rank: int) -> None:
        barrier.wait()
        if rank == 0:
            held = [parameter.grad for model, _, _ in made for parameter in model.parameters()]  # seen by Python, too
            most[0] = max(most[0], living() - sum(memory.bytes for _, _, memory in made))
            del held
        barrier.wait()

    def step(rank: int, number: int) -> None:
        model, update, _ = made[rank]
        update.begin(ranges[rank], len(ranges[rank]))
        for node in ranges[rank]:
            last = node == ranges[rank][-1]
            if last:
                update.sync.expect_last(seats[rank], ranges, 1, virtual_nodes)
            else:
                update.sync.expect(1)
            handles = []
            at, count = node - ranges[rank][0], len(ranges[rank])
            if number == steps and (at in (0, 2, count - 2, count - 1) or at % 9 == 5):
                handles = [p.register_hook(lambda grad: look(rank)) for p in list(model.parameters())[::4]]
            draw = torch.Generator().manual_seed(100 * number + node)
            model(torch.randn(1, WIDTH, generator=draw)).square().mean().backward()
            if handles:
                look(rank)
            for handle in handles:
                handle.remove()
            update.sync.take(1, {})
        reduced = update.synchronize(seats[rank], ranges, number, m.Generation(0, 0), more=True)
        update.apply(reduced, epoch_ends=False)
        del reduced
        for parameter in model.parameters():
            parameter.grad = None

    before = 0
    with ThreadPoolExecutor(workers) as pool:
        for number in range(1, steps + 1):
            gc.collect()
            before = living()
            list(pool.map(lambda rank, number=number: step(rank, number), range(workers)))  # type: ignore[misc]
    bits = [[p.detach().clone() for p in model.parameters()] for model, _, _ in made]
    for _, update, _ in made:
        update.close()
    return (most[0] - before) / GRADIENT / workers, bits


def equal(left: list[Any], right: list[Any]) -> bool:
    return all(torch.equal(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("room", "workers", "hot"),
    [
        pytest.param(1, 1, True, id="room for one, alone, hot"),
        pytest.param(2, 2, False, id="room for two, two workers, cold"),
        nightly(1, 1, False, id="room for one, alone, cold"),
        nightly(1, 2, True, id="room for one, two workers, hot"),
        nightly(1, 2, False, id="room for one, two workers, cold"),
        nightly(2, 1, True, id="room for two, alone, hot"),
        nightly(2, 1, False, id="room for two, alone, cold"),
        nightly(2, 2, True, id="room for two, two workers, hot"),
    ],
)
def test_gradients_take_as_much_of_the_device_for_64_virtual_nodes_as_for_8(
    room: int, workers: int, hot: bool, nothing_else: None
) -> None:
    one_by_one = 0 if hot else 1 << 30
    few, _ = peak(8, workers, room, one_by_one)
    many, bits = peak(64, workers, room, one_by_one)
    # The sums that may wait and one that grows; behind, what the tensors of a parameter take.
    limit = room + 1 + SLACK / GRADIENT
    assert few <= limit
    assert many <= limit
    unlimited, same = peak(64, workers, None, one_by_one)
    assert equal(bits, same)
    assert unlimited > room + 2 + SLACK / GRADIENT, "otherwise this shows nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("virtual_nodes", "workers", "cold", "hot", "offloaded"),
    [nightly(8, 1, 4, 3, 3), (64, 1, 7, 6, 3), (8, 2, 3, 2, 2), nightly(64, 2, 6, 5, 3)],
)
def test_the_counts_of_the_documentation(
    virtual_nodes: int, workers: int, cold: int, hot: int, offloaded: int, nothing_else: None
) -> None:
    """The table in docs/explanation/performance.md, "Memory and start"."""
    found = [
        peak(virtual_nodes, workers, room, one_by_one)
        for room, one_by_one in [(None, 1 << 30), (None, 0), (ReductionSettings().sums_on_device, 0)]
    ]
    assert [most for most, _ in found] == [pytest.approx(count, abs=0.2) for count in (cold, hot, offloaded)]
    assert all(equal(found[0][1], bits) for _, bits in found)
