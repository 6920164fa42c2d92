"""Whichever collective breaks, before or after it took effect on some, the workers come back to one state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from broken_collectives import HASTY, Counting, break_collective, regression, train_steps
from elastic_jobs import EXCHANGE, ElasticJob, Trained, alone, trained

import virtualflow as vf
from tiers import nightly
from virtualflow.errors import ConfigurationError, Evicted
from virtualflow.protocol.lineage import Claim
from virtualflow.protocol.messages import NO_GENERATION, Generation
from virtualflow.state import transfer
from virtualflow.state.checkpoint_order import NO_CHECKPOINT, Mark
from virtualflow.state.transfer_plan import SPOILED, Origin, Standing, Transfer, plan_transfer


def train(victim: str = "", number: int = 0, how: str = "") -> Trained:
    """Four steps with an evaluation between; the learning rate is changed by hand and by factors."""
    torch.manual_seed(1)
    break_collective(victim, number, how)
    model = Counting()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    with (
        patch.object(transfer, "STRIPE", 16),  # so that these small tensors travel as large ones do
        vf.elastic(
            model,
            optimizer,
            regression(),
            batch_size=12,
            steps=4,
            virtual_nodes=6,
            scheduler=scheduler,
            scheduler_interval="manual",
        ) as run,
    ):
        told = train_steps(run, model, optimizer, scheduler.step)
    return trained(run, model, optimizer, told, scheduler.last_epoch)


COLLECTIVES = pytest.mark.parametrize(
    ("exchange", "numbers"),
    [
        pytest.param("early", range(6, 28, 9), id="early"),
        pytest.param("behind", range(4, 28, 18), id="behind"),
        nightly("late", range(2, 19, 2), id="late"),
        nightly("early", range(3, 28, 3), id="early, more"),
        nightly("behind", range(4, 28, 6), id="behind, more"),
    ],
)
"""Which of a worker's collectives fails; exchanges that begin during the backward pass take more of them."""


@pytest.mark.slow
@COLLECTIVES
def test_one_worker_is_told_that_a_collective_broke_after_it_had_worked_for_the_others(
    exchange: str, numbers: range, start_job: Callable[..., ElasticJob]
) -> None:
    reference = alone(train)
    for number in numbers:
        environment = {EXCHANGE: exchange}
        job = start_job(train, "worker-1", number, "broke", workers=3, membership=HASTY, environment=environment)
        assert job.results() == [reference] * 3, f"collective {number}"


@pytest.mark.slow
@COLLECTIVES
def test_a_worker_is_killed_at_any_collective(
    exchange: str, numbers: range, start_job: Callable[..., ElasticJob]
) -> None:
    reference = alone(train)
    for number in numbers:
        job = start_job(train, "worker-1", number, "killed", workers=3, environment={EXCHANGE: exchange})
        assert job.results() == [reference] * 2, f"collective {number}"


@pytest.mark.nightly
@COLLECTIVES
@pytest.mark.parametrize("victim", ["worker-0", "worker-1"])
def test_each_death_in_a_job_of_two_costs_at_most_one_repeated_step(
    victim: str, exchange: str, numbers: range, start_job: Callable[..., ElasticJob]
) -> None:
    reference = alone(train)
    for number in numbers:
        job = start_job(train, victim, number, "killed", workers=2, environment={EXCHANGE: exchange})
        assert job.results() == [reference], f"collective {number}"
        assert job.status().repeated_steps <= 1, f"collective {number}"


def standing(**facts: Any) -> Standing:
    return Standing(**{"has_state": False, "exchanges": 0, "step": 0, "signature": 9, "claim": NEW, **facts})


NEW = Claim(NO_GENERATION, True, NO_GENERATION)
FRESH, LACKS = Origin(NO_CHECKPOINT, 7), Origin(NO_CHECKPOINT, SPOILED)
BEFORE, AFTER = Generation(9, 1), Generation(9, 2)


@pytest.mark.parametrize(
    ("origins", "wanted"),
    [
        pytest.param([FRESH, FRESH], Transfer(None, (0, 1), ()), id="fresh equal models need nothing"),
        pytest.param([Origin(Mark(BEFORE, 3), 7), FRESH], Transfer(0, (0,), (1,)), id="one has a checkpoint"),
        pytest.param(
            [Origin(Mark(BEFORE, 3), 7), Origin(Mark(BEFORE, 5), 7), Origin(Mark(BEFORE, 5), 7)],
            Transfer(1, (1,), (0, 2)),
            id="the newest checkpoint wins, read once",
        ),
        pytest.param(
            [Origin(Mark(BEFORE, 120), 7), Origin(Mark(AFTER, 100), 7)],
            Transfer(1, (1,), (0,)),
            id="that of a newer generation goes before one of a higher step",
        ),
        pytest.param(
            [LACKS, Origin(Mark(BEFORE, 5), SPOILED)], Transfer(1, (1,), (0,)), id="a checkpoint mends a spoiled model"
        ),
        pytest.param([LACKS, FRESH, LACKS, FRESH], Transfer(None, (1, 3), (0, 2)), id="fresh ones begin anew"),
    ],
)
def test_where_nobody_has_a_state_it_comes_from_where_it_can(origins: list[Origin], wanted: Transfer) -> None:
    assert plan_transfer([standing()] * len(origins), origins) == wanted


@pytest.mark.parametrize(
    ("standings", "wanted"),
    [
        pytest.param(
            [standing(has_state=True, exchanges=4), standing(has_state=True, exchanges=5), standing()],
            Transfer(None, (1,), (0, 2)),
            id="the newest state wins",
        ),
        pytest.param(
            [standing(has_state=True, exchanges=5), standing(), standing(has_state=True, exchanges=5)],
            Transfer(None, (0, 2), (1,)),
            id="all who have it give",
        ),
        pytest.param([standing(has_state=True)] * 3, Transfer(None, (0, 1, 2), ()), id="nobody lacks it"),
    ],
)
def test_the_newest_state_goes_to_all_who_lack_it(standings: list[Standing], wanted: Transfer) -> None:
    assert plan_transfer(standings, []) == wanted


def test_fresh_models_that_differ_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="seed before building it"):
        plan_transfer([standing(), standing()], [Origin(NO_CHECKPOINT, 1), Origin(NO_CHECKPOINT, 2)])


def test_where_nothing_is_left_the_processes_are_to_be_started_again() -> None:
    with pytest.raises(Evicted) as raised:
        plan_transfer([standing(), standing()], [LACKS, LACKS])
    assert "begins anew" in raised.value.reason


def test_an_origin_survives_the_wire() -> None:
    assert Origin.from_bytes(LACKS.to_bytes()) == LACKS


def test_a_standing_survives_the_wire() -> None:
    sent = standing(has_state=True, exchanges=2**40, step=3)
    assert Standing.from_bytes(sent.to_bytes()) == sent
