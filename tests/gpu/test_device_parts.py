"""What the library does with tensors of a device: sums, buffers, hashes, states, random numbers, micro-batches."""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from device_models import adamw, images, loss_of, network
from meshes import mesh
from states import assert_same
from thread_collectives import ALONE, Seat, Table
from torch import Tensor, nn

from virtualflow.data import MicroBatch, seed_virtual_node
from virtualflow.data.rng import seeded
from virtualflow.device import MemoryGauge
from virtualflow.reduction import Accumulator, Reducer, choose_summation
from virtualflow.reduction.accumulation import Tensors
from virtualflow.reduction.bucket_exchange import flatten, unflatten
from virtualflow.reduction.settings import Algorithm, Exchange, ReductionSettings
from virtualflow.state import capture, transfer
from virtualflow.state.transfer import Moved, move_state, pack_state
from virtualflow.step.buffers import BufferTracker, same_at_once
from virtualflow.step.guard import add_bits
from virtualflow.step.header import Schema, read_numbers, read_together
from virtualflow.step.state_watch import bytes_of, condense, hash_of, hashes_of
from virtualflow.worker.loading import Staging

SHAPES = [(3, 5), (), (1,), (65,), (2, 3, 4), (1_000,)]
NODES = 8


def contributions(device: torch.device, dtype: torch.dtype) -> list[Tensors]:
    """Of each virtual node, with some missing."""
    draw = torch.Generator().manual_seed(3)
    found: list[Tensors] = []
    for node in range(NODES):
        tensors: Tensors = [torch.randn(shape, generator=draw).to(device, dtype) for shape in SHAPES]
        tensors[node % len(SHAPES)] = None
        found.append(tensors)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", ["reduce-scatter", "gather"])
def test_sums_do_not_depend_on_who_adds_them(device: torch.device, dtype: torch.dtype, way: Algorithm) -> None:
    found = []
    for ranges in ([range(8)], [range(4), range(4, 8)], [range(3), range(3, 5), range(5, 8)]):
        table, summation = Table(len(ranges)), choose_summation(NODES, "bitwise")

        def work(rank: int, ranges: Any = ranges, table: Any = table, summation: Any = summation) -> Tensors:
            reducer = Reducer(summation, ReductionSettings(exchange=Exchange(way), bucket=256))
            accumulator = Accumulator(summation)
            given = contributions(device, dtype)
            for node in ranges[rank]:
                accumulator.add(node, given[node])
            seat = Seat(table, rank) if len(ranges) > 1 else ALONE
            templates = [torch.zeros(shape, device=device, dtype=dtype) for shape in SHAPES]
            present = [True] * len(SHAPES)
            reduced = reducer.reduce(seat, ranges, accumulator.parts, templates=templates, present=present, scale=1 / 3)
            reducer.close()
            return [None if tensor is None else tensor.clone() for tensor in reduced]

        with ThreadPoolExecutor(len(ranges)) as threads:
            found += list(threads.map(work, range(len(ranges))))
    for other in found[1:]:
        assert_same(other, found[0])
    assert all(tensor is not None and tensor.device.type == device.type for tensor in found[0])


def test_tensors_come_back_from_a_message_in_memory_that_begins_as_any_other(device: torch.device) -> None:
    templates = [torch.zeros(shape, device=device) for shape in SHAPES]
    tensors: Tensors = [torch.randn(shape, device=device) for shape in SHAPES]
    row = torch.zeros(sum(math.prod(shape) for shape in SHAPES))
    flatten(row, tensors, templates)
    back = unflatten(row, templates)
    assert_same(back, tensors)
    if device.type == "cuda":
        assert all(tensor.data_ptr() % 256 == 0 for tensor in back)


def test_numbers_are_read_together_as_one_by_one(device: torch.device) -> None:
    tensors = [
        torch.tensor(0.1),
        torch.tensor(1e30),
        torch.tensor([2.5]),
        torch.tensor(0.1, dtype=torch.bfloat16),
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor(2**53 + 1),
        torch.tensor(True),
        torch.tensor(float("-inf")),
    ]
    there = [tensor.to(device) for tensor in tensors]
    expected = [float(tensor) for tensor in tensors]
    assert read_numbers([*there, 0.5, None]) == [*expected, 0.5, None]
    assert [number for tensor in there for number in read_together([tensor])] == expected


def test_buffers_that_have_changed_are_found_and_put_back(device: torch.device) -> None:
    model = network(device).train()
    tracker = BufferTracker(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for schema in (Schema(), Schema(averaged=("1.running_mean", "1.running_var"), copied=("1.num_batches_tracked",))):
        tracker.begin()
        loss_of(model, *(tensor[:8].to(device) for tensor in images().tensors))
        averaged, copied = tracker.collect(schema)
        assert (set(averaged), set(copied)) == ({"1.running_mean", "1.running_var"}, {"1.num_batches_tracked"})
        assert tracker.changed(averaged) == set(averaged)
        assert_same(dict(model.named_buffers()), before)
    with torch.no_grad():
        model.constant.add_(1)  # type: ignore[operator, union-attr]
    assert set(tracker.collect(schema)[0]) >= {"constant"}


def test_bits_are_compared_at_once_as_one_by_one(device: torch.device) -> None:
    nan = torch.tensor([float("nan"), 0.0], device=device)
    pairs = [
        (nan, nan.clone()),
        (torch.tensor([0.0], device=device), torch.tensor([-0.0], device=device)),
        (torch.tensor(3, device=device), torch.tensor(3, device=device)),
        (torch.tensor([True], device=device), torch.tensor([False], device=device)),
        (torch.zeros(3, device=device), torch.zeros(1, device=device)),
        (torch.zeros(0, device=device), torch.zeros(0, device=device)),
    ]
    assert same_at_once(pairs) == [True, False, True, False, False, True]
    assert same_at_once(pairs[4:5]) == [False]


def test_hashes_and_sums_of_bits_are_those_of_the_host(device: torch.device) -> None:
    tensors = [torch.randn(3, 1_000), torch.randn(7).to(torch.bfloat16), torch.tensor(5)]
    here = [hash_of(condense(bytes_of(tensor))) for tensor in tensors]
    assert hashes_of([condense(bytes_of(tensor.to(device))) for tensor in tensors]) == here
    assert [int(add_bits(tensor.to(device))) for tensor in tensors] == [int(add_bits(tensor)) for tensor in tensors]


def test_a_state_comes_to_another_worker_bit_by_bit_and_stays_on_the_device(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stepped(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = network(device)
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape).to(device))
        optimizer = adamw(model)
        loss_of(model, *(tensor[:8].to(device) for tensor in images().tensors)).backward()
        optimizer.step()
        return model, optimizer

    monkeypatch.setattr(transfer, "STRIPE", 64)
    monkeypatch.setattr(transfer, "PIECE", 128)
    sides = [stepped(0), stepped(1)]
    tree = capture.capture(*sides[0], None, None, {})
    communicators = mesh(2)

    def land(announced: dict[str, Any], stripes: Any) -> Any:
        own = capture.own_tensors(sides[1][0], stripes)
        assert own
        return {path: own.get(path, torch.empty(like.shape, dtype=like.dtype)) for path, like in stripes.items()}

    def take_part(rank: int) -> Moved:
        packed = pack_state(tree) if rank == 0 else None
        return move_state(communicators[rank], [0], [1], packed=packed, land=land)

    with ThreadPoolExecutor(2) as threads:
        moved = list(threads.map(take_part, range(2)))
    for communicator in communicators:
        communicator.close()
    assert moved[1].tree is not None
    capture.restore(moved[1].tree, *sides[1], None, None, given=True)
    assert_same(capture.capture(*sides[1], None, None, {}), tree)
    for parameter, state in sides[1][1].state.items():
        assert {parameter.device.type, state["exp_avg"].device.type} == {device.type}


def test_a_state_is_sent_and_received_behind_the_kernels_that_were_launched_before(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "STRIPE", 64)
    tensors = [torch.zeros(1 << 20, device=device) for _ in range(2)]
    trees: list[dict[str, Any]] = [{"parameters": {"w": tensor}, "optimizer": {"state": {}}} for tensor in tensors]
    communicators = mesh(2)

    def take_part(rank: int) -> None:
        busy = torch.randn(512, 512, device=device)
        beside = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else contextlib.nullcontext()  # type: ignore[no-untyped-call]
        with beside:
            for _ in range(50):
                busy = torch.tanh(busy @ busy)
            tensors[rank].add_(rank + 1)
            packed = pack_state(trees[rank]) if rank == 0 else None
            move_state(
                communicators[rank],
                [0],
                [1],
                packed=packed,
                land=lambda _, stripes: dict.fromkeys(stripes, tensors[1]),
            )

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(take_part, range(2)))
    for communicator in communicators:
        communicator.close()
    assert [tensor.unique().tolist() for tensor in tensors] == [[1.0], [1.0]]


def test_random_numbers_follow_from_the_virtual_node(device: torch.device) -> None:
    torch.randn(1, device=device)  # generators of a device are there when it was used once

    def drawn(*place: int) -> list[float]:
        seed_virtual_node(*place)
        return torch.rand(4, device=device).tolist()

    first = drawn(0, 1, 2)
    assert drawn(0, 1, 3) != first
    assert drawn(0, 2, 2) != first
    assert drawn(0, 1, 2) == first
    seed_virtual_node(0, 1, 2)
    with seeded(7):
        torch.rand(100, device=device)
    assert torch.rand(4, device=device).tolist() == first


def test_memory_that_was_used_is_measured(device: torch.device) -> None:
    size = 64 << 20
    gauge = MemoryGauge(device)
    gauge.begin()
    used = torch.ones(size, dtype=torch.uint8, device=device)
    del used
    gauge.wait()
    usage = gauge.end()
    if usage is None:
        pytest.skip("memory cannot be told here")
    assert 0.9 * size < usage.used < 2 * size  # on the host in pages, of which it may have had some
    assert usage.room > usage.used


def test_micro_batches_come_to_the_device_in_the_shape_that_they_had(device: torch.device) -> None:
    class Own:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

        def to(self, device: torch.device) -> Own:
            return Own(self.tensor.to(device))

    staging = Staging(device)
    data = {
        "x": torch.arange(6.0).view(2, 3),
        "more": [(torch.ones(2), "text"), None, OrderedDict(n=Own(torch.ones(1)))],
    }
    moved = staging.move(MicroBatch(3, data, (1, 2))).data
    assert moved["more"][0][1] == "text"
    assert moved["more"][1] is None
    for tensor, expected in (
        (moved["x"], data["x"]),
        (moved["more"][0][0], torch.ones(2)),
        (moved["more"][2]["n"].tensor, torch.ones(1)),
    ):
        assert tensor.device.type == device.type
        assert torch.equal(tensor.cpu(), expected)  # type: ignore[arg-type]
    assert staging.move(MicroBatch(3, None, ())).data is None
    repeated = torch.arange(3.0).expand(4, 3)
    assert torch.equal(staging.move(MicroBatch(3, repeated, ())).data.cpu(), repeated)
    last = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert staging.move(MicroBatch(3, last, ())).data.stride() == last.stride()


@pytest.mark.slow
def test_what_is_sent_ahead_of_its_use_arrives_whole_beside_a_busy_device(device: torch.device) -> None:
    staging = Staging(device)
    busy = torch.randn(512, 512, device=device)
    sums, staged = [], staging.start(MicroBatch(0, torch.full((1 << 16,), 0.0), ()))
    for number in range(1, 30):
        batch = staging.finish(staged)
        for _ in range(20):
            busy = torch.tanh(busy @ busy)
        sums.append(batch.data.sum())
        staged = staging.start(MicroBatch(0, torch.full((1 << 16,), float(number)), ()))
        del batch
    assert [float(total) for total in sums] == [float(number << 16) for number in range(29)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pinned", [False, True], ids=["ordinary memory", "pinned memory"])
def test_memory_may_be_written_to_as_soon_as_it_has_been_sent(pinned: bool) -> None:
    staging = Staging(torch.device("cuda"))
    memory = torch.zeros(1 << 24, pin_memory=pinned)
    for number in range(8):
        memory.fill_(number)
        staged = staging.start(MicroBatch(0, memory, ()))
        memory.fill_(-1.0)
        assert staging.finish(staged).data.unique().tolist() == [number]
