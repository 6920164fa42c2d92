"""What a kill costs: the virtual nodes of the dead, and nothing that a survivor has computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from broken_collectives import Counting, regression
from elastic_jobs import BEGUN_EARLY, EXCHANGE, ElasticJob, Trained, alone, die_here, trained

import virtualflow as vf
from tiers import nightly

STEPS, FATAL, NODES = 6, 4, 8


def train(victim: str) -> Trained:
    """Train; the victim dies in its second virtual node of a step. How many this worker has computed for that step."""
    torch.manual_seed(0)
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    computed = 0
    with vf.elastic(model, optimizer, regression(), batch_size=NODES, steps=STEPS, virtual_nodes=NODES) as run:
        for step in run:
            for x, y in step:
                computed += step.number == FATAL
                if step.number == FATAL and computed == 2:
                    die_here(victim)
                loss = F.mse_loss(model(torch.cat([x, x + 1])), torch.cat([y, y]))
                loss.backward()
                step.log(loss=loss)
    return trained(run, model, optimizer, dict(step.metrics), computed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "exchange"),
    [("worker-1", "early"), nightly("worker-0", "early"), nightly("worker-3", "behind"), nightly("worker-2", "")],
)
def test_only_the_virtual_nodes_of_a_killed_worker_are_computed_again(
    victim: str, exchange: str, start_job: Callable[..., ElasticJob]
) -> None:
    job = start_job(train, victim, workers=4, environment={EXCHANGE: exchange})
    outcomes = job.finish()
    change = job.status().last_change
    wanted = alone(train, "")
    survivors = [outcome for name, outcome in outcomes.items() if name != victim]
    assert [outcome.kind for outcome in survivors] == ["returned"] * 3, outcomes
    assert {(o.value.digest, o.value.optimizer, o.value.metrics["loss"]) for o in survivors} == {
        (wanted.digest, wanted.optimizer, wanted.metrics["loss"])
    }
    assert sum(outcome.value.more for outcome in survivors) == NODES
    assert change is not None
    assert (change.cause, change.repeated_steps, change.repeated_virtual_nodes) == ("lost", 1, NODES // 4)
    assert all(BEGUN_EARLY in outcome.log for outcome in survivors) == bool(exchange)
