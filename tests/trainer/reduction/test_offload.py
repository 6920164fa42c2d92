"""Sums that wait in host memory: which, that no bit depends on it, and that a device needs a constant amount of memory.

The device is played: all tensors are on the CPU, and the host memory of these tests counts what is in it.
"""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from counted_memory import CountedMemory
from elastic_jobs import ElasticJob, alone
from hypothesis import given
from hypothesis import strategies as st
from injected import injected
from test_gradient_memory import living
from thread_collectives import ALONE, Seat, Table
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from tiers import nightly
from virtualflow.errors import ConfigurationError
from virtualflow.protocol import messages as m
from virtualflow.protocol.tree import Key
from virtualflow.reduction import (
    Accumulator,
    FileMemory,
    Offload,
    Tensors,
    choose_offloaded,
    choose_summation,
    plan_offload,
)
from virtualflow.reduction.offload import Fetch
from virtualflow.reduction.settings import Exchange, ReductionSettings
from virtualflow.state import digests
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


def test_on_the_cpu_all_sums_stay_where_they_are_unless_a_directory_is_named(tmp_path: Path) -> None:
    assert plan_offload(torch.device("cpu"), 1 << 30, ReductionSettings()) is None
    named = ReductionSettings(scratch=tmp_path)
    assert plan_offload(torch.device("cpu"), 1 << 20, named) is None, "small ones stay"
    planned = plan_offload(torch.device("cpu"), 1 << 30, named)
    assert planned is not None
    assert isinstance(planned.memory, FileMemory)


@pytest.mark.parametrize("ahead", [1, 4_000, 9_000, 1 << 20])
def test_no_more_comes_back_ahead_than_is_said_but_one_tensor(ahead: int) -> None:
    sums: list[list[Tensor | None]] = [[torch.zeros(size) for size in (700, 300, 1_100)] for _ in range(3)]
    memory = CountedMemory()
    fetch = Fetch(Offload(memory, 2, ahead), [(tensors, {0, 1, 2}) for tensors in sums])
    taken = 0
    for place in (2, 1, 0):
        for tensors in sums:
            assert 0 < memory.brought - taken <= max(ahead, 4_400)
            found = fetch.take(tensors, place)
            assert found is not None
            assert memory.brought - taken <= max(ahead, 8_800), "with the one that is asked for"
            taken += found.nbytes
    assert memory.brought == taken == 3 * 8_400


# --- files ------------------------------------------------------------------------------------------------------------


def mapped_bytes(directory: Path) -> int:
    """Of this process, in files of that directory."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    bounds = [line[0].split("-") for line in lines if len(line) > 5 and line[5].startswith(str(directory))]
    return sum(int(end, 16) - int(begin, 16) for begin, end in bounds)


def test_a_sum_in_a_file_has_its_bits_and_layout_and_leaves_nothing_behind(tmp_path: Path) -> None:
    memory = FileMemory(tmp_path)
    draw = torch.Generator().manual_seed(0)
    image = torch.randn(2, 3, 5, 7, generator=draw)
    for tensor in (
        torch.randn(3_000, generator=draw),
        image.to(memory_format=torch.channels_last),
        image[:, :, ::2],
        torch.full((3, 2), -0.0, dtype=torch.bfloat16),
        torch.tensor(1.5),
    ):
        there = memory.store(tensor)
        assert there is not tensor
        assert mapped_bytes(tmp_path) >= tensor.nbytes
        back = memory.bring(there).get()
        assert torch.equal(back, tensor)
        assert torch.equal(back.signbit(), tensor.signbit())
        assert there.is_contiguous() or there.stride() == tensor.stride()
        assert list(tmp_path.iterdir()) == []
        del there
        gc.collect()
        assert mapped_bytes(tmp_path) == 0
    nothing = torch.empty(0)
    assert memory.store(nothing) is nothing


def test_a_sum_that_no_file_can_take_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    tensor = torch.ones(5)
    assert FileMemory(tmp_path).store(tensor) is tensor
    assert "free some space there" in caplog.text


def train_with(memory: vf.Memory | None, divided: bool = False) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    data = TensorDataset(torch.randn(64, 8))
    options: dict[str, Any] = {"shard": "parameters", "redundancy": "none"} if divided else {}
    stored: list[Tensor] = []
    store = FileMemory.store
    with (
        injected(reduction={"offload_from": 1, "sums_on_device": 1, "norm_block": 4}),
        mock.patch.object(FileMemory, "store", lambda self, tensor: stored.append(tensor) or store(self, tensor)),
        vf.elastic(model, optimizer, data, batch_size=32, steps=3, virtual_nodes=16, memory=memory, **options) as run,
    ):
        for step in run:
            for (x,) in step:
                model(x).square().mean().backward()
    assert bool(stored) == (memory is not None)
    return run._context.training.digest or digests.digest(model.state_dict())


def test_a_run_whose_sums_wait_in_files_has_the_same_bits(tmp_path: Path) -> None:
    assert alone(train_with, vf.Memory(scratch=tmp_path)) == alone(train_with, None)


def test_divided_sums_wait_in_files_too(start_job: Callable[..., ElasticJob], tmp_path: Path) -> None:
    job = start_job(train_with, vf.Memory(scratch=tmp_path), True, workers=3)
    assert job.results() == [alone(train_with, None)] * 3


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no file can be made there"):
        train_with(vf.Memory(scratch=tmp_path / "none"))


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
