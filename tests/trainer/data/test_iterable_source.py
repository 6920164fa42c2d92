"""Every virtual node reads its own stream on, to the same bits, whoever carries it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded_samples import (
    NODES,
    Stripes,
    follow_a_random_script,
    loader_processes,
    opened,
    stream_reference,
)
from torch.utils.data import IterableDataset

from tiers import examples
from virtualflow.data import MicroBatch
from virtualflow.data.iterable_source import StreamSource
from virtualflow.data.map_source import MapSource
from virtualflow.errors import ConfigurationError

STREAM_STEPS = 7  # the longest shard has 12 samples, two a step, and one step more finds every stream at its end


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("script", range(2))
def test_streams_give_the_same_bits_through_resizes_and_repeats(processes: int, script: int) -> None:
    with opened(Stripes(), num_workers=processes) as source:
        assert source.steps_per_epoch is None
        follow_a_random_script(source, random.Random(script), STREAM_STEPS, stream_reference)


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 2**32))
def test_any_script_gives_the_same_bits_when_streams_are_read_in_place(script: int) -> None:
    with opened(Stripes()) as source:
        follow_a_random_script(source, random.Random(script), STREAM_STEPS, stream_reference)


@pytest.mark.parametrize("processes", [0, 1])
def test_streams_of_unequal_length_end_short_and_then_empty(processes: int) -> None:
    with opened(Stripes(size=15), num_workers=processes) as source:
        source.assign(range(NODES), 0, 0)
        sizes = [[source.fetch(0, step, node).size for node in range(NODES)] for step in range(3)]
        assert sizes == [[2] * 6, [1, 1, 1, 0, 0, 0], [0] * 6]
        assert source.fetch(0, 3, 2) == MicroBatch(2, None, ())


def test_a_stream_that_is_read_on_is_not_opened_again() -> None:
    opened_at = []

    class Counted(Stripes):
        def shard(self, index: int, count: int, epoch: int, start: int) -> Iterator[torch.Tensor]:
            opened_at.append((index, epoch, start))
            return super().shard(index, count, epoch, start)

    with opened(Counted()) as source:
        source.assign(range(2), 0, 0)
        for step in range(3):
            if step == 2:
                source.assign(range(1, 3), 0, 2)
            for node in range(2) if step < 2 else range(1, 3):
                source.fetch(0, step, node)
    assert opened_at == [(0, 0, 0), (1, 0, 0), (2, 0, 4)]


def test_streams_have_no_process_for_what_is_not_assigned() -> None:
    with opened(Stripes(), num_workers=4) as source:
        source.assign(range(3), 0, 0)
        for node in range(3):
            source.fetch(0, 0, node)
        assert len(loader_processes()) == 3
        source.assign(range(1), 0, 1)
        assert len(loader_processes()) == 1
        assert source.fetch(0, 1, 5).size == 2  # in the place of a worker that was lost
        assert len(loader_processes()) == 1
    assert not loader_processes()


class Unreadable:
    def shard(self, index: int, count: int, epoch: int, start: int) -> Iterator[int]:
        yield from range(start, 4)
        raise LookupError("the file ends in the middle of a sample")


@pytest.mark.parametrize("processes", [0, 1])
def test_an_error_in_a_stream_surfaces_each_time(processes: int) -> None:
    with opened(Unreadable(), num_workers=processes) as source:
        source.assign(range(1), 0, 0)
        assert [source.fetch(0, step, 0).data.tolist() for step in range(2)] == [[0, 1], [2, 3]]
        for _ in range(2):
            with pytest.raises(LookupError, match="in the middle of a sample"):
                source.fetch(0, 2, 0)


class Unsharded(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class OtherwiseSharded(Unsharded):
    def shard(self, num_shards: int, index: int) -> Unsharded:
        return self


class Endless:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        (Unsharded(), r"give it a method shard\(index, count, epoch, start\)"),
        (OtherwiseSharded(), "must take the arguments index, count, epoch and start"),
        (Endless(), "has no __len__"),
    ],
    ids=["iterable without shards", "shards of another protocol", "no length"],
)
def test_a_dataset_of_which_nobody_knows_the_parts_is_refused(dataset: Any, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence), opened(dataset):
        pass


def test_the_source_is_picked_by_the_kind_of_dataset() -> None:
    with opened(list(range(24))) as indexed, opened(Stripes()) as streamed:
        assert isinstance(indexed, MapSource)
        assert isinstance(streamed, StreamSource)
