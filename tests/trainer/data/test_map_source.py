"""Micro-batches hold the same bits whoever loads them, and a resize neither loses nor repeats a sample."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded_samples import (
    NODES,
    SIZE,
    Augmented,
    Where,
    assert_same,
    follow_a_random_script,
    opened,
    plan_of,
    reference,
    wait_until,
)
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate, get_worker_info

from tiers import examples
from virtualflow.data import MicroBatch
from virtualflow.data.map_source import MapSource
from virtualflow.data.sampling import chunks
from virtualflow.errors import ConfigurationError

PROCESSES = pytest.mark.parametrize("processes", [0, 1, 2])


@PROCESSES
@pytest.mark.parametrize("script", range(3))
def test_random_augmentation_gives_the_same_bits_through_resizes_and_repeats(processes: int, script: int) -> None:
    with opened(Augmented(), num_workers=processes) as source:
        assert source.steps_per_epoch == 6
        follow_a_random_script(source, random.Random(script), 6, reference)


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 2**32))
def test_any_script_gives_the_same_bits_when_loading_in_place(script: int) -> None:
    with opened(Augmented()) as source:
        follow_a_random_script(source, random.Random(script), 6, reference)


@pytest.mark.parametrize("factor", [1, 3])
def test_any_prefetch_factor_gives_the_same_bits(factor: int) -> None:
    with opened(Augmented(), num_workers=1, prefetch_factor=factor) as source:
        follow_a_random_script(source, random.Random(factor), 6, reference)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "fork"])
def test_processes_may_be_started_in_any_way(context: str) -> None:
    with opened(Augmented(), num_workers=1, multiprocessing_context=context) as source:
        source.assign(range(2), 0, 0)
        for node in range(2):
            assert_same(source.fetch(0, 0, node), reference(0, 0, node))


def test_every_sample_of_an_epoch_is_loaded_once_by_workers_that_come_and_go() -> None:
    partitions = [
        [range(6)],
        [range(2), range(2, 6)],
        [range(1), range(1, 4), range(4, 6)],
        [range(3), range(3, 6)],
    ]
    seen: list[int] = []
    with (
        opened(Augmented(), num_workers=1) as one,
        opened(Augmented(), num_workers=1) as two,
        opened(Augmented(), num_workers=1) as three,
    ):
        for step in range(6):
            for source, assigned in zip((one, two, three), partitions[step % 4], strict=False):
                source.assign(assigned, 0, step)
                for node in assigned:
                    seen += source.fetch(0, step, node).samples
    assert sorted(seen) == list(range(SIZE))


def test_loading_ahead_happens_and_survives_a_resize(tmp_path: Path) -> None:
    log = tmp_path / "loaded"
    plan, loaded = plan_of(), lambda: [int(line) for line in log.read_text().split()]
    with opened(Augmented(log=log), epochs=1, num_workers=2, prefetch_factor=2) as source:
        source.assign(range(NODES), 0, 0)
        source.fetch(0, 0, 0)
        wait_until(lambda: len(loaded()) == 2 * (1 + 4))  # the one that was fetched and four in flight
        for node in range(1, NODES):
            source.fetch(0, 0, node)
        source.assign(range(2), 0, 1)
        for step in range(1, 6):
            for node in range(2):
                source.fetch(0, step, node)
    counts = {index: loaded().count(index) for index in loaded()}
    assert set(counts.values()) == {1}, "something wanted was loaded twice"
    needed = {i for node in range(NODES) for i in plan.indices(0, 0, node, NODES).tolist()}
    needed |= {i for step in range(1, 6) for node in range(2) for i in plan.indices(0, step, node, NODES).tolist()}
    assert needed <= set(counts)
    assert len(counts) - len(needed) <= 2 * 4, "more was loaded in vain than was in flight"


def test_loading_ahead_crosses_epochs_and_stops_at_the_last(tmp_path: Path) -> None:
    log = tmp_path / "loaded"
    with opened(Augmented(log=log), epochs=2, num_workers=2, prefetch_factor=3) as source:
        source.assign(range(NODES), 0, 5)
        source.fetch(0, 5, 0)
        wait_until(lambda: len(log.read_text().split()) == 7 + 2)  # one short batch, and into the next epoch
        for node in range(1, NODES):
            source.fetch(0, 5, node)
        for step in range(6):
            for node in range(NODES):
                assert_same(source.fetch(1, step, node), reference(1, step, node))
    assert len(log.read_text().split()) == 7 + SIZE


def test_a_repeated_step_is_loaded_again_and_what_was_ahead_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "loaded"
    with opened(Augmented(log=log), epochs=1, num_workers=1) as source:
        for _ in range(5):
            source.assign(range(NODES), 0, 0)
            for node in range(3):
                assert_same(source.fetch(0, 0, node), reference(0, 0, node))
        source.assign(range(NODES), 0, 0)
        for step in range(6):
            for node in range(NODES):
                assert_same(source.fetch(0, step, node), reference(0, step, node))
    assert len(log.read_text().split()) == SIZE + 5 * 3 * 2


def test_failures_in_a_row_do_not_pile_up_what_is_loaded_ahead(tmp_path: Path) -> None:
    log = tmp_path / "loaded"
    with opened(Augmented(log=log), epochs=1, num_workers=2, prefetch_factor=2) as source:
        for _ in range(20):
            source.assign(range(NODES), 0, 0)
            for node in range(2):
                source.fetch(0, 0, node)
        handed_out, ahead = 20 * 2 * 2, 2 * 4 * 2  # twice what is in flight: half of it has arrived and waits
        assert len(log.read_text().split()) <= handed_out + ahead + 2
        for node in range(2, NODES):
            source.fetch(0, 0, node)
        # And yet it goes on loading ahead: four micro-batches of two are on their way.
        wait_until(lambda: len(log.read_text().split()) >= handed_out + 4 * 2 + 4 * 2)


def test_the_same_key_fetched_again_is_loaded_again() -> None:
    with opened(Augmented(), num_workers=1) as source:
        source.assign(range(NODES), 0, 0)
        first = source.fetch(0, 0, 0)
        first.data.zero_()
        assert_same(source.fetch(0, 0, 0), reference(0, 0, 0))
        for node in range(1, NODES):
            assert_same(source.fetch(0, 0, node), reference(0, 0, node))


def test_one_set_of_processes_serves_the_whole_job() -> None:
    with opened(Where(), epochs=3, num_workers=2) as source:
        pids = set()
        for epoch in range(3):
            for step in range(source.steps_per_epoch or 0):
                source.assign(range(step % 3, NODES - step % 2), epoch, step)
                for node in range(step % 3, NODES - step % 2):
                    pids |= set(source.fetch(epoch, step, node).data.tolist())
    assert len(pids) == 2


class Marked(Where):
    """Tells what `mark` did to it in a loader process."""

    mark = 0

    def __getitem__(self, index: int) -> int:
        return self.mark


def mark(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.mark = 100 + worker_id


class Together(Augmented):
    """Samples are to be had together; one by one is refused."""

    def __getitem__(self, index: int) -> torch.Tensor:
        raise AssertionError("a dataset with __getitems__ is asked for all samples of a virtual node at once")

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [Augmented.__getitem__(self, index) for index in indices]


class Forgetful(Where):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices[1:]


@PROCESSES
def test_collate_fn_gets_the_samples_and_its_result_is_the_data(processes: int) -> None:
    with opened(Augmented(), num_workers=processes, collate_fn=len) as source:
        source.assign(range(NODES), 0, 5)
        assert [source.fetch(0, 5, node).data for node in range(NODES)] == [2, 1, 1, 1, 1, 1]


def test_worker_init_fn_finds_the_users_dataset() -> None:
    with opened(Marked(), num_workers=2, worker_init_fn=mark) as source:
        source.assign(range(NODES), 0, 0)
        assert {int(source.fetch(0, 0, node).data[0]) for node in range(NODES)} == {100, 101}


@PROCESSES
@pytest.mark.parametrize("width", [1, 4])
def test_getitems_gives_the_samples_of_a_virtual_node_at_once(processes: int, width: int) -> None:
    with opened(Together(), num_workers=processes) as source, opened(Augmented()) as wanted:
        source.assign(range(NODES), 0, 0, width)
        for step in range(plan_of().steps_per_epoch):
            for chunk in chunks(range(NODES), width):
                place = (0, step, chunk.start, len(chunk))
                assert_same(source.fetch(*place), wanted.fetch(*place))


@PROCESSES
def test_getitems_must_return_a_sample_for_each_index(processes: int) -> None:
    with opened(Forgetful(), num_workers=processes) as source:
        source.assign(range(NODES), 0, 0)
        with pytest.raises(ConfigurationError, match="returned a list of 1 for 2 indices; it must hold one"):
            source.fetch(0, 0, 0)


class Columns(Augmented):
    """Samples come together as columns, which only its own ``collate_fn`` understands."""

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        return {"rows": torch.stack([self[index] for index in indices])}


@PROCESSES
def test_getitems_may_return_anything_that_collate_fn_takes(processes: int) -> None:
    with opened(Columns(), num_workers=processes, collate_fn=lambda columns: columns["rows"]) as source:
        source.assign(range(NODES), 0, 0)
        for node in range(NODES):
            assert_same(source.fetch(0, 0, node), reference(0, 0, node))


def test_what_is_no_list_is_asked_for_at_once_for_several_virtual_nodes() -> None:
    with opened(Columns(), collate_fn=lambda columns: columns["rows"]) as source, opened(Augmented()) as wanted:
        source.assign(range(NODES), 0, 5, 4)
        wanted.assign(range(NODES), 0, 5, 4)
        got, other = source.fetch(0, 5, 0, 3), wanted.fetch(0, 5, 0, 3)
        assert got.samples == other.samples
        assert got.data[:, 0].tolist() == other.data[:, 0].tolist(), "the same samples, otherwise augmented"


class Given(Dataset[Any]):
    def __init__(self, sample: Callable[[int], Any]) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Image(Tensor):
    pass


@pytest.mark.parametrize(
    "sample",
    [
        lambda i: (torch.full((3,), i), torch.tensor(i / 2)),
        lambda i: (torch.full((2, 3), float(i)).t(),),
        lambda i: (torch.full((3,), i), i),
        lambda i: [torch.full((3,), i), torch.tensor(i)],
        lambda i: Pair(torch.tensor(i), torch.tensor(-i)),
        lambda i: {"x": torch.tensor(i)},
        lambda i: (torch.full((3,), i).as_subclass(Image), torch.tensor(i)),
        torch.tensor,
        lambda i: (),
    ],
    ids=["tensors", "one", "number", "list", "named", "dict", "subclass", "alone", "nothing"],
)
def test_the_default_collation_is_torchs_own(sample: Callable[[int], Any]) -> None:
    with opened(Given(sample)) as source:
        source.assign(range(NODES), 0, 0)
        for step in range(plan_of().steps_per_epoch):
            for node in range(NODES):
                got = source.fetch(0, step, node)
                wanted = default_collate([sample(index) for index in got.samples])
                torch.testing.assert_close(got.data, wanted, rtol=0, atol=0)
                assert type(got.data) is type(wanted)
                if isinstance(wanted, list):
                    assert list(map(type, got.data)) == list(map(type, wanted))


def test_samples_of_different_widths_are_refused_as_torch_does() -> None:
    def sample(index: int) -> tuple[Tensor, ...]:
        return (torch.tensor(index),) * (1 + (index == plan_of().indices(0, 0, 0, NODES)[1]))

    with opened(Given(sample)) as source:
        source.assign(range(1), 0, 0)
        with pytest.raises(RuntimeError, match="equal size"):
            source.fetch(0, 0, 0)


@settings(deadline=None)
@given(data=st.data(), width=st.sampled_from([0, 1, 7, 16, 32]), size=st.integers(13, 40), fused=st.integers(1, NODES))
def test_rows_gathered_at_once_are_those_of_a_micro_batch(
    data: st.DataObject, width: int, size: int, fused: int
) -> None:
    dataset = TensorDataset(torch.rand(size, width), torch.arange(8 * size).reshape(size, 8))
    plan = plan_of(size)
    with opened(dataset) as source:
        for _ in range(4):
            first = data.draw(st.integers(0, NODES - 1))
            assigned = range(first, data.draw(st.integers(first + 1, NODES)))
            step = data.draw(st.integers(0, plan.steps_per_epoch - 1))
            source.assign(assigned, 1, step, fused)
            for at in range(step, data.draw(st.integers(step, plan.steps_per_epoch))):
                for chunk in chunks(assigned, fused)[: data.draw(st.integers(1, NODES))]:
                    got = source.fetch(1, at, chunk.start, len(chunk))
                    wanted = plan.indices(1, at, chunk.start, NODES, len(chunk))
                    assert got.samples == tuple(wanted.tolist())
                    if len(wanted) == 0:
                        assert got.data is None
                        continue
                    for ours, tensor in zip(got.data, dataset.tensors, strict=True):
                        assert ours.equal(tensor[wanted])
                        assert ours.data_ptr() % 64 == 0
                        ours.zero_()  # it is the user's


@pytest.mark.parametrize(("width", "once"), [(16, True), (15, False)], ids=["aligned", "not aligned"])
def test_rows_are_gathered_at_once_where_each_micro_batch_is_aligned(width: int, once: bool) -> None:
    with opened(TensorDataset(torch.rand(SIZE, width))) as source:
        source.assign(range(2, NODES), 0, 0)
        rows = [source.fetch(0, 0, node).data[0] for node in (2, 3)]
        places = {row.untyped_storage().data_ptr() for row in rows}
        assert (len(places) == 1) == once


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize(
    "rows",
    [
        torch.arange(float(SIZE * 4)).reshape(SIZE, 4),
        torch.arange(float(SIZE * 4)).reshape(4, SIZE).t(),
        torch.arange(float(SIZE * 12)).reshape(SIZE, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.arange(SIZE).to(torch.uint16),
        torch.arange(float(SIZE)).expand(3, SIZE).t(),
    ],
    ids=["contiguous", "transposed", "channels last", "unsigned scalars", "expanded"],
)
def test_a_tensor_dataset_gives_what_a_data_loader_gives(processes: int, rows: Tensor) -> None:
    dataset = TensorDataset(rows, torch.arange(SIZE))
    with opened(dataset, num_workers=processes) as source:
        source.assign(range(NODES), 0, 0)
        for node in range(NODES):
            got = source.fetch(0, 0, node)
            (wanted,) = DataLoader(dataset, batch_size=len(got.samples), sampler=got.samples)
            assert type(got.data) is type(wanted)
            for ours, theirs in zip(got.data, wanted, strict=True):
                assert ours.equal(theirs)
                assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
            assert got.samples == tuple(got.data[1].tolist())


@PROCESSES
def test_a_virtual_node_without_samples_gets_an_empty_micro_batch(processes: int) -> None:
    with opened(Augmented(size=14), num_workers=processes) as source:
        source.assign(range(NODES), 0, 1)
        sizes = [source.fetch(0, 1, node).size for node in range(NODES)]
        assert sizes == [1, 1, 0, 0, 0, 0]
        assert source.fetch(0, 1, 5) == MicroBatch(5, None, (), (0,))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"shuffle": True}, "shuffle cannot be passed to the data loader"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"prefetch_factor": 2}, "prefetch_factor needs loader processes"),
        ({"timeout": 3}, "timeout needs loader processes"),
        ({"num_workers": 1, "timeout": -3}, "timeout must not be negative"),
        ({"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor is 0"),
        ({"num_workers": 1, "multiprocessing_context": "thread"}, "'thread' is not supported"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence), opened(Augmented(), **options):
        pass


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="does not divide evenly"):
        MapSource(Augmented(), plan_of(), virtual_nodes=5, epochs=None, options={})
