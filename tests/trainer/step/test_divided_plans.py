"""Plans of memory beside divided parameters: the bits of a worker that has all of them and keeps all activations."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from broken_collectives import HASTY, break_collective
from divided_models import Tower, run_on_data
from elastic_jobs import ElasticJob, alone
from injected import injected
from torch import nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from tiers import nightly, slow
from virtualflow.memory import Budget, Planner, divided_profile, profile_for
from virtualflow.state import digests
from virtualflow.worker.reporter import PlannedActivations

StartJob = Callable[..., ElasticJob]
STEPS = 6
MEASURED = {"warm_up": 0, "samples": 1, "probe": 1 << 10, "copies": 1}
"""One micro-batch is enough for a plan, so that most of a training runs under it."""

PLANS: dict[str, dict[str, Any]] = {
    "recompute": {"activations": "recompute"},
    "swap": {"activations": "swap"},
    "keep": {"activations": "keep"},
    "parts": {"activations": "recompute", "blocks": ["blocks.0.norm", "blocks.1.up", "blocks.2", "out"]},
}


def train(
    plan: str, divided: bool = True, victim: str = "", number: int = 0, how: str = "", parts: bool = False
) -> tuple[str, float]:
    """Tells the digest and the last loss; a message of that ``number`` breaks.

    ``parts``: what is gathered are parts of the blocks that are planned for.
    """
    torch.manual_seed(1)
    break_collective(victim, number, how)
    model = Tower()
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    options: dict[str, Any] = {}
    if divided:
        options["shard"] = vf.ShardParameters(["blocks.1.up", "blocks.1.down", "out"]) if parts else "parameters"
    if plan:
        blocks = {"blocks": ["blocks.0", "blocks.1", "blocks.2"]} if parts else {}
        options["memory"] = vf.Memory("1GiB", "1GiB", **{**PLANS[plan], **blocks})
    with injected(activations=MEASURED), run_on_data(model, optimizer, STEPS, clip_grad_norm=0.5, **options) as run:
        for step in run:
            for x, y in step:
                loss = F.mse_loss(model(x), y)
                step.log(loss=loss)
                loss.backward()
        training = run._context.training
        return training.digest or digests.digest(model.state_dict()), step.metrics["loss"]


@pytest.mark.parametrize(
    ("plan", "workers", "parts"),
    [
        ("recompute", 3, False),
        slow("swap", 3, False),
        slow("keep", 2, False),
        slow("parts", 3, False),
        slow("recompute", 2, True),
        nightly("recompute", 2, False),
        nightly("swap", 5, False),
    ],
)
def test_bits_are_those_of_no_plan_on_one_worker(start_job: StartJob, plan: str, workers: int, parts: bool) -> None:
    job = start_job(train, plan, True, "", 0, "", parts, workers=workers)
    assert job.results() == [alone(train, "", False)] * workers


def test_one_worker_with_a_plan_has_the_bits_of_none() -> None:
    assert alone(train, "recompute") == alone(train, "", False)


@pytest.mark.parametrize("how", ["broke", "killed"])
@pytest.mark.parametrize("number", [slow(45), *(nightly(number) for number in range(1, 160, 7))])
def test_it_breaks_at_any_message(start_job: StartJob, number: int, how: str) -> None:
    job = start_job(train, "recompute", True, "worker-1", number, how, workers=3, membership=HASTY)
    outcomes = job.finish()
    ended = [outcome.value for outcome in outcomes.values() if outcome.kind != "killed"]
    assert ended == [alone(train, "", False)] * (3 - (outcomes["worker-1"].kind == "killed"))


# --- what depends on the number of workers ----------------------------------------------------------------------------

WIDTH, SAMPLES, NODES = 24, 96, 6


class Wide(nn.Module):
    """A block whose activations take as much as the whole model, and that goes another way where its weights are 0."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.up.weight.any():
            return torch.sin(self.down(x))
        return x + self.down(torch.tanh(self.up(x)))


def train_within(
    budget: int | None, divided: bool = True, victim: str = "", number: int = 0, how: str = "", swaps: bool = False
) -> tuple[str, list[tuple[int, int]], int]:
    """Tells the digest, what it takes to keep all and at least, with 1, 2 and 3 workers, where there is a budget, and
    the most bytes that were swapped.
    """
    torch.manual_seed(1)
    break_collective(victim, number, how)
    model = nn.Sequential(*(Wide() for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    draw = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(NODES * SAMPLES, WIDTH, generator=draw))
    options: dict[str, Any] = {"shard": "parameters", "redundancy": "none"} if divided else {}
    if budget is not None:
        options["memory"] = vf.Memory(budget, budget, activations="swap") if swaps else vf.Memory(budget)
    sizes = {"batch_size": NODES * SAMPLES, "steps": 8, "virtual_nodes": NODES}
    with (
        injected(reduction={"norm_block": 4, "bucket": 1_024}, activations=MEASURED),
        vf.elastic(model, optimizer, data, **sizes, **options) as run,
    ):
        for step in run:
            for (x,) in step:
                model(x).square().mean().backward()
        digest = run._context.training.digest or digests.digest(model.state_dict())
        needs, swapped = [], 0
        for part in run._context.parts.all:
            if isinstance(part, PlannedActivations):
                chain = part._activations._chain
                assert chain is not None
                profiles = [profile_for(chain, SAMPLES, NODES)]
                profiles += [divided_profile(chain, SAMPLES, NODES, workers, 1) for workers in (2, 3)]
                swapped = part._activations.executor.ledger.copies.ring.peak
                planners, host = map(Planner, profiles), Budget(1, 0)
                needs = [(planner.keep_bytes(host), planner.smallest(host)) for planner in planners]
        return digest, needs, swapped


def test_a_change_of_workers_changes_the_plan_and_no_bit(start_job: StartJob) -> None:
    wanted, *_ = alone(train_within, None, False)
    told = start_job(train_within, 1 << 30, workers=3).results()
    assert [digest for digest, *_ in told] == [wanted] * 3
    # Optimizers count steps once a slice, of which workers have a few more or fewer.
    budget = max(needs[2][0] for _, needs, _ in told)
    (alone_keeps, alone_least), (two_keep, two_least), (three_keep, three_least) = told[0][1]
    assert three_least < three_keep <= budget < alone_least < alone_keeps
    assert two_least < budget < two_keep
    job = start_job(train_within, budget, workers=3, hold=3)
    job.reach(3)
    job.drain("worker-1")
    job.reach(5)
    job.drain("worker-2")
    job.reach(7)
    outcomes = job.finish()
    assert outcomes["worker-0"].value[0] == wanted
    said = [line for line in outcomes["worker-0"].log.splitlines() if "memory: " in line]
    assert re.search("everything fits$", said[0]), said
    assert re.search("of 4 blocks [0-3] stay, 0 are swapped and [1-4] recomputed", said[1]), said
    assert re.search("with 1 worker now, the model does not fit .* the smallest budget that works is", said[2]), said
    assert len(said) == 4, said


@pytest.mark.slow
def test_no_parameter_is_swapped(start_job: StartJob) -> None:
    digest, _, swapped = alone(train_within, 1 << 30, False, "", 0, "", True)
    assert swapped > 0
    told = start_job(train_within, 1 << 30, True, "", 0, "", True, workers=2).results()
    assert [(each[0], each[2]) for each in told] == [(digest, swapped)] * 2


@pytest.mark.slow
def test_a_budget_that_is_too_small_for_divided_parameters_is_refused(start_job: StartJob) -> None:
    outcomes = start_job(train_within, 20_000, workers=2).finish().values()
    assert {outcome.kind for outcome in outcomes} >= {"DoesNotFit"}


@pytest.mark.parametrize("number", [slow(50), *(nightly(number) for number in range(20, 110, 3))])
def test_nothing_is_computed_again_from_values_that_did_not_come(start_job: StartJob, number: int) -> None:
    """A broken attempt has zeros in their place, with which these blocks would go another way."""
    least = start_job(train_within, 1 << 30, workers=2).results()[0][1][1][1]
    job = start_job(train_within, least, True, "worker-1", number, "broke", workers=2, membership=HASTY)
    assert [value[0] for value in job.results()] == [alone(train_within, None, False)[0]] * 2
