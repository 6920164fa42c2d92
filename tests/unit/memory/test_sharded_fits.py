"""How many workers it takes where parameters are divided: what each has, and the fewest that are enough."""

from __future__ import annotations

from dataclasses import astuple

import msgspec
import pytest

from tiers import needs
from virtualflow.errors import ConfigurationError, DoesNotFit
from virtualflow.memory import Budget, Planner, divided_profile, fit, fit_sharded, what_fits_sharded
from virtualflow.memory.fitting import AHEAD, MOVED_FROM, WAITING
from virtualflow.memory.settings import PlannerSettings
from virtualflow.memory.sharding import GRADIENTS
from virtualflow.protocol.device_profile import BlockProfile, ChainProfile, ChainSize

SIZES = (30, 90, 60, 30)
"""Bytes of the parameters of blocks, and of their gradients."""
OUTSIDE = 10
ALL = sum(SIZES) + OUTSIDE
SAVED = 1000


def chain(**changes: object) -> ChainProfile:
    blocks = tuple(
        BlockProfile(
            name=str(number),
            forward_seconds=1.0,
            backward_seconds=2.0,
            saved_bytes=SAVED,
            boundary_bytes=0,
            parameter_bytes=size,
            gradient_bytes=size,
        )
        for number, size in enumerate(SIZES)
    )
    made = ChainProfile(
        out_bytes_per_second=1.0,
        in_bytes_per_second=1.0,
        optimizer_bytes=2 * ALL,
        fixed_bytes=2 * OUTSIDE,  # parameters and their gradients
        sum_bytes=ALL,
        sizes=(ChainSize(1, blocks),),
    )
    return msgspec.structs.replace(made, **changes)


@pytest.mark.parametrize(
    ("workers", "copies", "kept", "sums"),
    [
        (2, 1, 3 * ALL // 2, 4 * ALL // 2),
        (4, 1, 165, 4 * ALL // 4),
        (4, 2, 2 * 165, 4 * ALL // 4),
        (2, 2, 3 * ALL, 4 * ALL // 2),
    ],
)
def test_what_a_worker_has_where_parameters_are_divided(workers: int, copies: int, kept: int, sums: int) -> None:
    found = fit_sharded(chain(), 8, 8, workers, copies)
    gathered, gradients, activations = OUTSIDE + 90 + 60, 90 + 60 + 30, 4 * SAVED
    device = kept + sums + gathered + gradients + activations
    assert astuple(found) == (workers, kept, sums, gathered, gradients, activations, 2 * 90, device, device)


def test_messages_are_on_the_device_where_its_memory_is_the_hosts() -> None:
    apart, together = (fit_sharded(chain(host_bytes=host), 8, 8, 3, 1) for host in (None, 0))
    assert together.device_bytes == apart.device_bytes + apart.message_bytes


@pytest.mark.parametrize(("virtual_nodes", "sums"), [(1, 1), (2, 2), (3, 3), (8, 4), (9, 5), (64, 7), (96, 8)])
def test_a_sum_of_each_level_of_the_tree_waits(virtual_nodes: int, sums: int) -> None:
    workers = min(2, virtual_nodes)
    found = fit_sharded(chain(), 576, virtual_nodes, workers, 1)
    assert found.sums_bytes == (sums * ALL // 2 if workers > 1 else 0)


def test_the_step_needs_more_than_the_sums_of_few_virtual_nodes() -> None:
    assert fit_sharded(chain(), 8, 2, 2, 2).sums_bytes == 4 * ALL // 2


def test_sums_and_messages_of_wider_gradients_take_more() -> None:
    own, wider = (fit_sharded(made, 8, 8, 4, 1) for made in (chain(), chain(sum_bytes=2 * ALL, gradient_bytes=ALL)))
    assert (wider.sums_bytes, wider.message_bytes) == (2 * own.sums_bytes, 2 * own.message_bytes)
    assert (wider.kept_bytes, wider.gradient_bytes) == (own.kept_bytes, own.gradient_bytes)


def test_a_worker_alone_needs_what_it_needs_without_shares() -> None:
    alone = fit_sharded(chain(), 8, 8, 1, 2)
    assert alone.device_bytes == fit(chain(), 8, 8, Budget(1 << 40), PlannerSettings()).keep_bytes
    assert alone.gathered_bytes == alone.message_bytes == 0
    assert sum(astuple(alone)[1:6]) == alone.device_bytes


def test_the_fewest_workers_that_are_enough_stand_behind_the_most_that_are_not() -> None:
    every = what_fits_sharded(chain(), 8, 8, Budget(1 << 40, 0), 1, more=7)
    sizes = [row.planned_bytes for row in every]
    assert [row.device_bytes for row in every] == [fit_sharded(chain(), 8, 8, n, 1).device_bytes for n in range(1, 9)]
    assert sizes[1:] == sorted(sizes[1:], reverse=True)
    found = what_fits_sharded(chain(), 8, 8, Budget(sizes[4], 0), 1, more=2)
    assert [fit.workers for fit in found] == [1, 4, 5, 6, 7]
    assert [fit.workers for fit in what_fits_sharded(chain(), 8, 8, Budget(max(sizes), 0), 1, more=2)] == [1, 2, 3]
    second = what_fits_sharded(chain(optimizer_bytes=40 * ALL), 8, 8, Budget(10_000, 0), 1, more=1)
    assert [fit.workers for fit in second] == [1, 2, 3]


def test_what_never_fits_is_refused_with_what_would() -> None:
    least = what_fits_sharded(chain(), 8, 8, Budget(1 << 40, 0), 1, more=7)[-1].planned_bytes
    with pytest.raises(DoesNotFit, match=r"not even 8 workers of 1\.00 KiB are enough") as refused:
        what_fits_sharded(chain(), 8, 8, Budget(1024, 0), 1, more=2)
    assert refused.value.smallest == least


def test_a_plan_of_activations_makes_fewer_workers_enough() -> None:
    whole = chain(optimizer_bytes=40 * ALL)
    every = what_fits_sharded(whole, 8, 8, Budget(1 << 40, 0), 1, more=7)
    # One block is computed again at a time, beside one more that is gathered.
    assert every[3].device_bytes - every[3].planned_bytes == (len(SIZES) - 1) * SAVED - 30
    found = what_fits_sharded(whole, 8, 8, Budget(every[3].device_bytes, 0), 1, more=0)
    assert [fit.workers for fit in found] == [1, 2, 4]
    assert found[1].planned_bytes <= every[3].device_bytes < found[1].device_bytes
    planner = Planner(divided_profile(whole, 1, 8, 4, 1))
    assert planner.smallest(Budget(1, 0)) == every[3].planned_bytes
    assert planner.plan(Budget(every[3].planned_bytes, 0)).peak_bytes <= every[3].planned_bytes


@pytest.mark.parametrize(
    ("virtual_nodes", "scale", "alone", "shared"),
    [
        pytest.param(4, 1 << 20, 2, 3, id="as many as wait in memory"),
        pytest.param(64, 1 << 20, 2 + 64 / ALL, 3 + 4 * 64 / ALL, id="others wait in files"),
        pytest.param(64, 1 << 18, 2 + 4 * 64 / ALL, 3 + 4, id="of small ones several come back at a time"),
        pytest.param(64, 1 << 10, 6, 7, id="small ones stay"),
    ],
)
def test_sums_that_wait_in_files_are_not_counted(virtual_nodes: int, scale: int, alone: float, shared: float) -> None:
    """In sums of all gradients, of one worker, and of its quarter, of one of four."""
    made = chain(scratch=True)
    blocks = tuple(
        msgspec.structs.replace(block, parameter_bytes=scale * block.parameter_bytes, gradient_bytes=scale * size)
        for block, size in zip(made.sizes[0].blocks, SIZES, strict=True)
    )
    sizes = (msgspec.structs.replace(made.sizes[0], blocks=blocks),)
    made = msgspec.structs.replace(made, sizes=sizes, sum_bytes=scale * ALL, fixed_bytes=2 * scale * OUTSIDE)
    assert fit_sharded(made, 64, virtual_nodes, 1, 1).sums_bytes == pytest.approx(alone * scale * ALL)
    assert fit_sharded(made, 64, virtual_nodes, 4, 1).sums_bytes == pytest.approx(shared * scale * ALL / 4)


@needs("torch", "make venv installs it")
def test_what_is_counted_of_files_is_what_is_done() -> None:
    from virtualflow.reduction.settings import ReductionSettings

    done = ReductionSettings()
    assert (done.sums_on_device, done.offload_from, done.fetch_ahead) == (WAITING, MOVED_FROM, AHEAD)


@pytest.mark.parametrize(
    ("batch", "virtual_nodes", "workers", "sentence"),
    [(9, 8, 2, "8 virtual nodes do not divide a batch of 9"), (8, 4, 5, "5 workers cannot share 4 virtual nodes")],
)
def test_numbers_that_do_not_go_together_are_refused(
    batch: int, virtual_nodes: int, workers: int, sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        fit_sharded(chain(), batch, virtual_nodes, workers, 1)


@needs("torch", "make venv installs it")
def test_as_many_gradients_are_counted_as_may_be_on_their_way() -> None:
    from virtualflow.step import sharded_parameters

    assert GRADIENTS == sharded_parameters._ON_THE_WAY + 1
