"""A metric that becomes NaN or infinite: everybody hears of it, and the training ends there if it is to."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_jobs import ElasticJob, alone
from torch import nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow.errors import NonFiniteMetric
from virtualflow.protocol.messages import NonFinite
from virtualflow.protocol.settings import ENV_ON_NON_FINITE

STEPS = 8
BAD = 5


def train(directory: str = "", bad: int = BAD, until: int = STEPS + 1) -> Any:
    """One virtual node of the steps from ``bad`` to before ``until`` logs a loss of NaN; all are written down."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    dataset = TensorDataset(torch.randn(16, 3, generator=torch.Generator().manual_seed(1)))
    policy = vf.CheckpointPolicy(directory, every_steps=1, keep=100) if directory else None
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with vf.elastic(model, optimizer, dataset, batch_size=8, steps=STEPS, virtual_nodes=4, checkpoint=policy) as run:
        for step in run:
            for (x,) in step:
                loss = model(x).square().mean()
                loss.backward()
                spoiled = bad <= step.number < until and 0 in run._context.session.state.assigned
                step.log(loss=loss.detach() * float("nan") if spoiled else loss, always=1.0)
        return dict(run.metrics)


@pytest.mark.slow
def test_the_status_names_metric_and_first_step_and_shows_nan(start_job: Callable[..., ElasticJob]) -> None:
    job = start_job(train, workers=2, hold=BAD)
    status = job.reach(BAD)
    assert (status.metrics["loss"], status.metrics["always"]) == ("NaN", 1.0)
    assert status.non_finite == NonFinite("loss", "NaN", BAD)
    # One that comes later gets it with the state, and a coordinator hears it from whoever leads.
    job.join()
    job.reach(BAD + 2)
    job.drain("worker-0")
    status = job.reach(BAD + 2)
    job.results()
    status = job.status()
    assert (status.phase, status.metrics["loss"], status.non_finite) == ("done", "NaN", NonFinite("loss", "NaN", BAD))
    assert [e.text for e in status.events if e.kind == "warning"] == [f"loss became NaN in step {BAD}"]


@pytest.mark.slow
def test_a_loss_that_is_finite_again_is_shown_and_what_was_stays_known(start_job: Callable[..., ElasticJob]) -> None:
    job = start_job(train, "", BAD, BAD + 1, workers=2)
    job.results()
    status = job.status()
    assert isinstance(status.metrics["loss"], float)
    assert status.non_finite == NonFinite("loss", "NaN", BAD)


def steps_in(directory: Path) -> list[int]:
    return sorted(int(path.name.split(".")[0].removeprefix("step-")) for path in directory.glob("step-*"))


def test_a_job_that_is_to_stop_fails_before_its_next_checkpoint(
    start_job: Callable[..., ElasticJob], tmp_path: Path
) -> None:
    job = start_job(train, str(tmp_path), workers=2, environment={ENV_ON_NON_FINITE: "Stop"})
    outcomes = job.finish()
    assert {outcome.kind for outcome in outcomes.values()} <= {"NonFiniteMetric", "JobFailed"}, outcomes
    status = job.status()
    assert (status.phase, status.non_finite) == ("failed", NonFinite("loss", "NaN", BAD))
    assert (status.error or "").startswith(f"loss became NaN in step {BAD}, and the job is to stop then")
    assert max(steps_in(tmp_path)) < BAD


def test_without_a_coordinator_it_is_said_or_raised(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "virtualflow"):
        alone(train)
    assert [record.message for record in caplog.records] == [f"loss became NaN in step {BAD}"]
    with pytest.raises(NonFiniteMetric, match=f"loss became NaN in step {BAD}"):
        alone(train, environment={ENV_ON_NON_FINITE: "Stop"})
