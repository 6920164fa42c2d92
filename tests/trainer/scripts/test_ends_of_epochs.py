"""What a script does once an epoch: by step.ends_epoch it is the same for all, by a variable of its own it is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from elastic_jobs import ElasticJob, Trained, alone, die_here, trained
from torch import nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow.errors import VirtualFlowError
from virtualflow.protocol.settings import ENV_CHECKPOINT_DIR, ENV_CHECKPOINT_STEPS


def learns(own_variable: bool = False, dies: str = "") -> Trained:
    """Three steps an epoch; behind each epoch it evaluates, and lowers the learning rate by what came of it."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.randn(36, 6), torch.randn(36, 1))
    last, ended = -1, []
    with vf.elastic(model, optimizer, data, batch_size=12, epochs=4, virtual_nodes=6) as run:
        for step in run:
            for x, y in step:
                F.mse_loss(model(x), y).backward()
            if step.epoch != last if own_variable else step.ends_epoch:
                last = step.epoch
                ended.append(step.number)
                vf.evaluate(model, data, lambda batch: model(batch[0]), batch_size=12)
                optimizer.param_groups[0]["lr"] *= 0.5
            if step.number == 8:
                die_here(dies)
    assert own_variable or all(number % 3 == 0 for number in ended)
    return trained(run, model, optimizer)


def test_what_is_done_at_an_epochs_end_is_done_by_all_alike(start_job: Callable[..., ElasticJob]) -> None:
    reference = alone(learns)
    job = start_job(learns, False, "worker-1", workers=2, hold=4)
    job.reach(4)
    job.join()
    assert job.results() == [reference] * 2


@pytest.mark.slow
def test_what_is_done_at_an_epochs_end_is_done_once_by_who_resumes(
    start_job: Callable[..., ElasticJob], tmp_path: Path
) -> None:
    reference = alone(learns)
    environment = {ENV_CHECKPOINT_DIR: str(tmp_path), ENV_CHECKPOINT_STEPS: "4"}
    job = start_job(learns, workers=1, hold=5, environment=environment)
    job.reach(5)
    job.await_checkpoint(4)
    job.kill_all()
    job.start_worker()
    assert job.results() == [reference]


def test_a_variable_of_the_scripts_own_is_told_to_differ(start_job: Callable[..., ElasticJob]) -> None:
    job = start_job(learns, True, workers=2, hold=4)
    job.reach(4)
    job.join()
    said = {outcome.text for outcome in job.finish().values()}
    assert any("step.ends_epoch" in text for text in said), said


def test_the_end_is_known_behind_the_micro_batches() -> None:
    model = nn.Linear(2, 1)
    data = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
    with vf.elastic(
        model, torch.optim.SGD(model.parameters(), 0.1), data, batch_size=4, steps=1, virtual_nodes=2
    ) as run:
        for step in run:
            with pytest.raises(VirtualFlowError, match="known after the micro-batches"):
                _ = step.ends_epoch
            for x, y in step:
                F.mse_loss(model(x), y).backward()
            assert not step.ends_epoch


def in_passes(breaks: bool, passes: int) -> tuple[list[int], torch.Tensor]:
    """A loop over epochs around the run, as loops over a ``DataLoader`` have it; how many steps each pass has made."""
    torch.manual_seed(0)
    model, made = nn.Linear(6, 1), []
    data = TensorDataset(torch.randn(36, 6), torch.randn(36, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with vf.elastic(model, optimizer, data, batch_size=12, epochs=3, virtual_nodes=6) as run:
        for _ in range(passes):
            made.append(0)
            for step in run:
                for x, y in step:
                    F.mse_loss(model(x), y).backward()
                made[-1] += 1
                if breaks and step.ends_epoch:
                    break
    return made, model.weight.detach()


def test_another_pass_over_a_run_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    assert in_passes(breaks=False, passes=4)[0] == [9, 0, 0, 0]
    assert [record.levelname for record in caplog.records if "goes through its run again" in record.message] == [
        "WARNING"
    ]
    assert "complete before" not in caplog.text


@pytest.mark.parametrize("passes", [3, 5])
def test_a_pass_for_each_epoch_is_as_good_as_one(passes: int, caplog: pytest.LogCaptureFixture) -> None:
    made, weight = in_passes(breaks=True, passes=passes)
    assert made == [3, 3, 3, 0, 0][:passes]
    assert torch.equal(weight, in_passes(breaks=False, passes=1)[1])
    assert "goes through its run again" not in caplog.text
