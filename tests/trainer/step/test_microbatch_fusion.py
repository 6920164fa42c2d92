"""Micro-batches of several virtual nodes: the samples of each, to the bit, in their order."""

from __future__ import annotations

import random
from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch
from loaded_samples import NODES, SIZE, Augmented, Stripes, assert_same, opened, plan_of, reference, stream_reference
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from virtualflow.data import MicroBatch
from virtualflow.data.iterable_source import fuse
from virtualflow.data.sampling import chunks

STEPS = plan_of().steps_per_epoch
Pair = namedtuple("Pair", ["x", "name"])


def joined(parts: list[MicroBatch]) -> MicroBatch:
    """What ``parts`` hold, as one."""
    filled = [part.data for part in parts if part.size]
    return MicroBatch(
        parts[0].virtual_node,
        torch.cat(filled) if filled else None,
        tuple(sample for part in parts for sample in part.samples),
        tuple(part.size for part in parts) if len(parts) > 1 else (),
    )


@pytest.mark.parametrize("processes", [0, 2])
def test_a_chunk_holds_what_its_virtual_nodes_hold(processes: int) -> None:
    with opened(Augmented(), num_workers=processes) as source:
        assert source.fuses
        source.assign(range(NODES), 0, 0, 4)
        for epoch in range(2):
            for step in range(STEPS):
                for chunk in chunks(range(NODES), 4):
                    batch = source.fetch(epoch, step, chunk.start, len(chunk))
                    expected = joined([reference(epoch, step, node) for node in chunk])
                    assert_same(batch, expected)
                    assert batch.counts == expected.counts
                    assert list(batch.apart()) == [(node, reference(epoch, step, node).samples) for node in chunk]


@pytest.mark.parametrize("processes", [0, 1, 2])
def test_sizes_may_change_at_any_step(processes: int) -> None:
    draw = random.Random(processes)
    with opened(Augmented(), num_workers=processes) as source:
        source.assign(range(NODES), 0, 0)
        assigned, width = range(NODES), 1
        for epoch in range(3):
            for step in range(STEPS):
                if draw.random() < 0.5:
                    first = draw.randrange(NODES)
                    assigned, width = range(first, draw.randint(first + 1, NODES)), draw.randint(1, NODES)
                    source.assign(assigned, epoch, step, width)
                for chunk in chunks(assigned, width):
                    batch = source.fetch(epoch, step, chunk.start, len(chunk))
                    assert_same(batch, joined([reference(epoch, step, node) for node in chunk]))


def test_what_is_loaded_ahead_is_what_is_fetched(tmp_path: Any) -> None:
    log = tmp_path / "log"
    with opened(Augmented(log=log), num_workers=1, epochs=1) as source:
        source.assign(range(NODES), 0, 0, NODES)
        for step in range(STEPS):
            source.fetch(0, step, 0, NODES)
    loaded = [int(line) for line in log.read_text().split()]
    assert sorted(loaded) == list(range(SIZE))


def test_tensors_are_gathered_for_a_chunk_as_for_a_virtual_node() -> None:
    dataset = TensorDataset(torch.arange(67), torch.rand(67))
    with opened(dataset) as source:
        source.assign(range(NODES), 0, 0, 3)
        for step in range(STEPS):
            x, y = source.fetch(0, step, 3, 3).data
            indices = [index for node in (3, 4, 5) for index in plan_of().indices(0, step, node, NODES).tolist()]
            assert x.tolist() == indices
            assert torch.equal(y, dataset.tensors[1][indices])


def test_a_chunk_without_samples_is_empty() -> None:
    with opened(TensorDataset(torch.arange(13))) as source:  # a second step of one sample
        source.assign(range(NODES), 0, 0, 3)
        assert source.fetch(0, 1, 0, 3).counts == (1, 0, 0)
        empty = source.fetch(0, 1, 3, 3)
        assert (empty.data, empty.samples, empty.counts) == (None, (), (0, 0, 0))
        assert list(empty.apart()) == [(3, ()), (4, ()), (5, ())]


@pytest.mark.parametrize("processes", [0, 1])
def test_streams_are_put_together(processes: int) -> None:
    with opened(Stripes(), num_workers=processes) as source:
        assert source.fuses
        source.assign(range(NODES), 0, 0, 4)
        for step in range(7):
            for chunk in chunks(range(NODES), 4):
                batch = source.fetch(0, step, chunk.start, len(chunk))
                assert_same(batch, joined([stream_reference(0, step, node) for node in chunk]))


def test_streams_that_are_collated_by_hand_are_left_apart() -> None:
    with opened(Stripes(), collate_fn=torch.stack) as source:
        assert not source.fuses
    with opened(Augmented(), collate_fn=torch.stack) as source:
        assert source.fuses


SAMPLES: dict[str, Any] = {
    "tensors": [torch.full((2,), float(i)) for i in range(6)],
    "numbers": list(range(6)),
    "pairs": [(torch.tensor(i), float(i)) for i in range(6)],
    "texts": [f"sample {i}" for i in range(6)],
    "texts beside tensors": [(f"sample {i}", torch.tensor(i)) for i in range(6)],
    "dicts": [{"x": torch.rand(3), "more": {"name": str(i), "at": (i, [i + 1, i + 2])}} for i in range(6)],
    "named tuples": [Pair(torch.tensor(i), str(i)) for i in range(6)],
    "other mappings": [UserDict(x=torch.tensor(i)) for i in range(6)],
}


def assert_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict | UserDict):
        assert list(found) == list(expected)
        for name in expected:
            assert_equal(found[name], expected[name])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 0, 2, 1), (6, 0)], ids=str)
def test_putting_together_gives_what_collating_at_once_gives(kind: str, sizes: tuple[int, ...]) -> None:
    samples = SAMPLES[kind]
    parts, at = [], 0
    for node, size in enumerate(sizes):
        mine = samples[at : at + size]
        parts.append(MicroBatch(node, default_collate(mine) if mine else None, tuple(range(at, at + size))))
        at += size
    whole = fuse(parts)
    assert_equal(whole.data, default_collate(samples))
    assert (whole.virtual_node, whole.samples, whole.sizes) == (0, tuple(range(6)), sizes)
