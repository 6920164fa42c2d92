"""A training that was stopped and goes on elsewhere ends with the same bits as one that never stopped."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpoints import checkpoint_of, flip, steps_in
from elastic_jobs import ElasticJob, alone, trained
from torch import nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from tiers import nightly
from virtualflow.protocol.settings import ENV_CHECKPOINT_DIR, ENV_CHECKPOINT_STEPS, ENV_VIRTUAL_NODES, ENV_WORKER
from virtualflow.state.checkpoint_writer import CheckpointPolicy

STEPS = 9


EVERYBODY = ("worker-0", "worker-1")


def train_beside_a_broken_volume(
    directory: str, broken: str, workers: tuple[str, ...] = ("worker-2",), number: int = errno.ESTALE, times: int = 1000
) -> Any:
    """The script: where these workers run, nobody can list the directory, or write to it, so many times."""
    real: Any = getattr(Path, broken)
    failed = 0

    def fail(path: Path, *arguments: Any, **named: Any) -> Any:
        nonlocal failed
        if Path(directory) in (path, path.parent) and failed < times:
            failed += 1
            raise OSError(number, os.strerror(number))
        return real(path, *arguments, **named)

    if os.environ[ENV_WORKER] in workers:
        setattr(Path, broken, fail)
    return train(directory)[0]


def train(directory: str = "", steps: int = STEPS, **changed: Any) -> Any:
    torch.manual_seed(3)
    width = changed.pop("width", 5)
    size = changed.pop("size", 20)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, STEPS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    draw = torch.Generator().manual_seed(0)
    dataset = TensorDataset(torch.randn(size, 4, generator=draw), torch.randn(size, generator=draw))
    policy = CheckpointPolicy(Path(directory), 2, None, 3) if directory else None
    options = {"batch_size": 12, "virtual_nodes": 4, "seed": 1, "drop_last": True, **changed}
    seen = []
    with vf.elastic(
        model, optimizer, dataset, steps=steps, scheduler=scheduler, scaler=scaler, checkpoint=policy, **options
    ) as run:
        for step in run:
            for x, y in step:
                with torch.autocast("cpu", torch.float16):
                    loss = F.mse_loss(model(x).squeeze(1), y)
                scaler.scale(loss).backward()
                step.log(loss=loss)
            seen.append(step.number)
            if step.number % 4 == 0:
                rows = vf.evaluate(model, dataset, lambda batch: model(batch[0]), batch_size=8)
                run.log(mean=float(rows.mean()))
        metrics = dict(run.metrics)
    return trained(run, model, optimizer, (metrics, scheduler.state_dict()["last_epoch"], scaler.state_dict())), seen


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [nightly(0, 3), (2, 0), (3, 2), nightly(1, 4)], ids=str)
def test_it_goes_on_with_other_workers(
    before: int, after: int, tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    """Zero workers stand for a process alone."""
    wanted, _ = alone(train)

    def go(workers: int, steps: int) -> list[Any]:
        arguments = (str(tmp_path / "kept"), steps)
        return start_job(train, *arguments, workers=workers).results() if workers else [alone(train, *arguments)]

    for _, seen in go(before, 5):
        assert seen == [1, 2, 3, 4, 5]
    for found, seen in go(after, STEPS):
        assert seen == [6, 7, 8, 9]
        assert found == wanted
    for found, seen in go(after, STEPS):
        assert seen == []
        assert (found.digest, found.optimizer) == (wanted.digest, wanted.optimizer)


def test_a_job_whose_workers_all_died_goes_on_from_its_checkpoint(
    tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    wanted, _ = alone(train)
    environment = {ENV_CHECKPOINT_DIR: str(tmp_path / "kept"), ENV_CHECKPOINT_STEPS: "1"}
    job = start_job(train, workers=2, hold=5, environment=environment)
    job.reach(5)
    # A checkpoint that is due while one is being written is skipped: which the newest is, the disk decides.
    job.wait_for(lambda _: bool(steps_in(tmp_path / "kept")), "a checkpoint")
    job.kill_all()
    newest = max(steps_in(tmp_path / "kept"))
    for _ in range(3):
        job.start_worker()
    results = job.results()
    assert [found for found, _ in results] == [wanted] * len(results)
    # Two were wanted; the third one joins when it is there.
    assert min(seen[0] for _, seen in results) == newest + 1


@pytest.mark.slow
def test_a_stop_leaves_a_checkpoint_of_the_same_step_everywhere(
    tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    directory = str(tmp_path / "kept")
    wanted, _ = alone(train)
    job = start_job(train, directory, workers=3, hold=3)
    job.reach(3)
    job.call("stop", reason="the test says so")
    outcomes = job.finish()
    assert {outcome.kind for outcome in outcomes.values()} == {"Drained"}
    status = job.status()
    assert (status.phase, status.checkpoint and status.checkpoint.step) == ("stopped", status.step), "it is confirmed"
    stopped_at = steps_in(tmp_path / "kept")[-1]
    results = start_job(train, directory, workers=2).results()
    assert [found for found, _ in results] == [wanted] * 2
    assert {seen[0] for _, seen in results} == {stopped_at + 1}


@pytest.mark.slow
def test_a_checkpoint_that_has_rotted_is_read_by_one_worker_and_the_one_before_it_counts(
    tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    wanted, _ = alone(train)
    directory = tmp_path / "kept"
    for steps in (4, 6):
        alone(train, str(directory), steps)
    assert steps_in(directory)[-2:] == [4, 6]
    flip(checkpoint_of(directory, 6) / "state.safetensors", 3000)
    job = start_job(train, str(directory), workers=3)
    results = job.results()
    assert [found for found, _ in results] == [wanted] * 3
    assert {seen[0] for _, seen in results} == {5}
    told = [event.text for event in job.status().events if "damaged" in event.text]
    why = "the content of state.safetensors is not what was written (its SHA-256 differs)"
    assert told == [f"skipped the damaged checkpoint {checkpoint_of(directory, 6)}: {why}"], "one has read it"
    assert "resumed from the checkpoint of step 4" in [event.text for event in job.status().events]


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        pytest.param({"virtual_nodes": 2}, "virtual nodes", id="other virtual nodes"),
        pytest.param({"seed": 2}, "seed", id="another seed"),
        pytest.param({"batch_size": 16}, "batch", id="another batch size"),
        pytest.param({"width": 6}, "0.weight", id="another model"),
        pytest.param({"size": 28}, "samples", id="another dataset"),
    ],
)
def test_the_checkpoint_of_another_job_is_refused(changed: dict[str, Any], word: str, tmp_path: Path) -> None:
    train(str(tmp_path), 2)
    with pytest.raises(vf.ConfigurationError, match=word) as caught:
        train(str(tmp_path), 4, **changed)
    assert "\n" not in str(caught.value)


def test_workers_refuse_the_checkpoint_of_another_job_too(tmp_path: Path, start_job: Callable[..., ElasticJob]) -> None:
    train(str(tmp_path / "kept"), 2)
    environment = {ENV_CHECKPOINT_DIR: str(tmp_path / "kept"), ENV_VIRTUAL_NODES: "6"}
    outcomes = start_job(train, workers=2, environment=environment).finish()
    assert {outcome.kind for outcome in outcomes.values()} <= {"ConfigurationError", "JobFailed"}
    assert any("virtual nodes" in outcome.text for outcome in outcomes.values()), outcomes


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["iterdir", "open"])
def test_a_worker_joins_whose_checkpoint_directory_cannot_be_used(
    tmp_path: Path, start_job: Callable[..., ElasticJob], broken: str
) -> None:
    """It gets its state from the others. Found by a campaign of faults: all workers ended with an error."""
    wanted, _ = alone(train)
    job = start_job(train_beside_a_broken_volume, str(tmp_path), broken, workers=2)
    job.reach(3)
    job.join()
    assert job.results() == [wanted] * 3
    assert any("Stale file handle" in event.text for event in job.status().events), "what could not be done is told"


@pytest.mark.parametrize(("broken", "said"), [("iterdir", "cannot be read"), ("open", "no checkpoint can be written")])
def test_workers_that_are_to_begin_from_a_directory_say_why_they_cannot(
    tmp_path: Path, start_job: Callable[..., ElasticJob], broken: str, said: str
) -> None:
    job = start_job(train_beside_a_broken_volume, str(tmp_path), broken, EVERYBODY, errno.EACCES, workers=2)
    outcomes = job.finish().values()
    assert all(outcome.kind != "returned" for outcome in outcomes)
    assert any(said in outcome.text and "Permission denied" in outcome.text for outcome in outcomes), outcomes


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["iterdir", "open", "rename"])
def test_workers_that_begin_while_a_volume_fails_wait_for_it(
    tmp_path: Path, start_job: Callable[..., ElasticJob], broken: str
) -> None:
    """Found by a campaign of faults: with an error that passes the job ended for good."""
    wanted, _ = alone(train)
    alone(train, str(tmp_path), 5)
    job = start_job(train_beside_a_broken_volume, str(tmp_path), broken, EVERYBODY, errno.EIO, 4, workers=2)
    assert job.results() == [wanted] * 2
    assert any("this worker tries again" in event.text for event in job.status().events)
