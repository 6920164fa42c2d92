"""Every sample of an epoch is used exactly once, by whoever asks in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtualflow.data.sampling import SamplePlan, micro_batch, split
from virtualflow.errors import ConfigurationError

shares = st.integers(1, 6)
nodes = st.integers(1, 9)
sizes = st.integers(1, 200)
seeds = st.integers(0, 2**40)


def batches(plan: SamplePlan, epoch: int, virtual_nodes: int) -> list[list[int]]:
    return [
        [i for node in range(virtual_nodes) for i in plan.indices(epoch, step, node, virtual_nodes).tolist()]
        for step in range(plan.steps_per_epoch)
    ]


@given(st.integers(0, 1000), nodes)
def test_a_batch_is_split_as_evenly_as_it_goes(samples: int, virtual_nodes: int) -> None:
    counts = split(samples, virtual_nodes)
    assert sum(counts) == samples
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


@given(sizes, shares, nodes, seeds, st.booleans(), st.integers(0, 5))
def test_every_sample_of_an_epoch_is_planned_once(
    size: int, share: int, virtual_nodes: int, seed: int, shuffle: bool, epoch: int
) -> None:
    plan = SamplePlan(size, share * virtual_nodes, seed, shuffle, drop_last=False)
    planned = batches(plan, epoch, virtual_nodes)
    assert sorted(index for batch in planned for index in batch) == list(range(size))
    assert all(len(batch) == plan.batch_size for batch in planned[:-1])
    for step, batch in enumerate(planned):
        counts = [plan.size(step, node, virtual_nodes) for node in range(virtual_nodes)]
        assert counts == split(len(batch), virtual_nodes)
        assert counts == [len(plan.indices(epoch, step, node, virtual_nodes)) for node in range(virtual_nodes)]


@given(sizes, nodes, nodes, seeds, st.booleans())
def test_the_global_batch_does_not_depend_on_the_number_of_virtual_nodes(
    size: int, one: int, other: int, seed: int, shuffle: bool
) -> None:
    plan = SamplePlan(size, one * other, seed, shuffle, drop_last=False)
    assert batches(plan, 1, one) == batches(plan, 1, other)


@given(sizes, seeds, st.lists(st.integers(0, 6), min_size=1, max_size=12))
def test_an_answer_does_not_depend_on_what_was_asked_before(size: int, seed: int, epochs: list[int]) -> None:
    asked = SamplePlan(size, 4, seed, shuffle=True, drop_last=False)
    for epoch in epochs:
        fresh = SamplePlan(size, 4, seed, shuffle=True, drop_last=False)
        assert asked.indices(epoch, 0, 1, 2).equal(fresh.indices(epoch, 0, 1, 2))


def test_epochs_and_seeds_differ_in_their_order() -> None:
    def first(seed: int, epoch: int) -> list[int]:
        return SamplePlan(1000, 100, seed, shuffle=True, drop_last=False).indices(epoch, 0, 0, 1).tolist()

    assert len({tuple(first(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_without_shuffling_samples_come_in_order() -> None:
    plan = SamplePlan(10, 4, seed=0, shuffle=False, drop_last=False)
    assert batches(plan, 3, 2) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_drop_last_leaves_out_the_short_batch() -> None:
    plan = SamplePlan(10, 4, seed=0, shuffle=False, drop_last=True)
    assert batches(plan, 0, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_short_batch_may_leave_virtual_nodes_without_samples() -> None:
    plan = SamplePlan(6, 4, seed=0, shuffle=False, drop_last=False)
    assert [plan.indices(0, 1, node, 4).tolist() for node in range(4)] == [[4], [5], [], []]


@pytest.mark.parametrize(
    ("batch_size", "virtual_nodes", "sentence"),
    [
        (250, 8, "batch_size 250 does not divide evenly over 8 virtual nodes; use 248 or 256"),
        (5, 8, "batch_size 5 does not divide evenly over 8 virtual nodes; use 8"),
        (0, 8, "batch_size is 0; a step needs at least 1 sample"),
        (8, 0, "virtual_nodes is 0; a job needs at least 1"),
        (8, -2, "virtual_nodes is -2; a job needs at least 1"),
    ],
    ids=["uneven", "fewer than virtual nodes", "no sample", "no virtual node", "negative virtual nodes"],
)
def test_a_division_that_does_not_come_out_is_refused_with_a_way_out(
    batch_size: int, virtual_nodes: int, sentence: str
) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        micro_batch(batch_size, virtual_nodes)
    assert str(refusal.value) == sentence


@pytest.mark.parametrize(
    ("size", "batch_size", "drop_last", "sentence"),
    [
        (0, 4, False, "the dataset is empty"),
        (3, 4, True, "drop_last leaves no batch of 4 in a dataset of 3 samples"),
        (3, 0, False, "batch_size is 0"),
    ],
    ids=["empty dataset", "nothing but a short batch, dropped", "empty batch"],
)
def test_a_plan_without_a_batch_is_refused(size: int, batch_size: int, drop_last: bool, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        SamplePlan(size, batch_size, 0, shuffle=True, drop_last=drop_last)


@pytest.mark.parametrize(("step", "node"), [(3, 0), (-1, 0), (0, 2), (0, -1)])
def test_a_position_outside_of_the_epoch_is_an_error(step: int, node: int) -> None:
    with pytest.raises(IndexError):
        SamplePlan(12, 4, 0, shuffle=False, drop_last=False).indices(0, step, node, 2)


def test_indices_refuse_an_uneven_division() -> None:
    with pytest.raises(ConfigurationError, match="use 3 or 6"):
        SamplePlan(12, 4, 0, shuffle=False, drop_last=False).indices(0, 0, 0, 3)
