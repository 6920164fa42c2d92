"""What real workers leave in their termination logs, however they end."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from elastic_jobs import ElasticJob, Trained, alone, trained
from injected import inject
from torch import nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow.protocol import messages as m
from virtualflow.protocol.settings import (
    ENV_CHECKPOINT_DIR,
    ENV_REPRODUCIBILITY,
    ENV_TERMINATION_LOG,
    ENV_THREADS,
    ENV_WORKER,
)
from virtualflow.protocol.termination_message import TerminationMessage, decode_termination_message

PLACE = "VF_TEST_PLACE"


def train(steps: int = 6, fail_at: int = 0, reproducibility: str = "bitwise", loaders: int = 0) -> Trained:
    if PLACE in os.environ:
        os.environ[ENV_TERMINATION_LOG] = str(Path(os.environ[PLACE]) / os.environ[ENV_WORKER])
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dataset = TensorDataset(torch.randn(64, 3, generator=torch.Generator().manual_seed(1)))
    options = {"batch_size": 8, "steps": steps, "virtual_nodes": 4, "num_workers": loaders}
    with vf.elastic(model, optimizer, dataset, reproducibility=reproducibility, **options) as run:  # type: ignore[arg-type]
        for step in run:
            for (x,) in step:
                loss = model(x).square().mean()
                loss.backward()
                step.log(loss=loss)
            if step.number == fail_at:
                raise RuntimeError("the data ran sour")
        enforced = torch.are_deterministic_algorithms_enabled()
    return trained(run, model, optimizer, metrics=dict(run.metrics), more=enforced)


def read(path: Path) -> TerminationMessage | None:
    return decode_termination_message(path.read_bytes()) if path.exists() else None


def told(path: Path) -> TerminationMessage:
    word = read(path)
    assert word is not None, path
    return word


StartJob = Callable[..., ElasticJob]


def started(start_job: StartJob, place: Path, *arguments: object, workers: int = 2, **options: object) -> ElasticJob:
    environment = {PLACE: str(place), **dict(options.pop("environment", {}))}  # type: ignore[call-overload]
    return start_job(train, *arguments, workers=workers, environment=environment, **options)


# --- alone ------------------------------------------------------------------------------------------------------------


def test_a_process_alone_tells_its_result(tmp_path: Path) -> None:
    log = tmp_path / "log"
    result = alone(train, 6, environment={ENV_TERMINATION_LOG: str(log)})
    assert told(log) == TerminationMessage("done", 6, 6, result.digest, result.optimizer, result.metrics)


def test_a_process_alone_tells_why_it_failed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(RuntimeError):
        alone(train, 6, 3, environment={ENV_TERMINATION_LOG: str(log)})
    word = told(log)
    assert (word.kind, word.step, word.total_steps) == ("failed", 3, 6)
    assert word.error == "RuntimeError: the data ran sour"
    assert word.traceback is not None
    assert word.traceback.endswith("RuntimeError: the data ran sour\n")
    assert "in train" in word.traceback
    assert word.metrics.keys() == {"loss"}


@pytest.mark.parametrize(
    ("environment", "steps", "sentence"),
    [
        pytest.param({ENV_THREADS: "many"}, 6, "VIRTUALFLOW_THREADS='many' must be", id="its environment"),
        pytest.param({ENV_REPRODUCIBILITY: "exact"}, 6, "must be Bitwise or Statistical", id="how equal bits are"),
        pytest.param({}, 0, "steps is 0", id="its arguments"),
        pytest.param({ENV_CHECKPOINT_DIR: "/proc/no"}, 6, "/proc/no", id="no place for checkpoints"),
    ],
)
def test_what_is_wrong_with_its_configuration_is_told(
    environment: Mapping[str, str], steps: int, sentence: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with pytest.raises(vf.VirtualFlowError):
        alone(train, steps, environment={ENV_TERMINATION_LOG: str(log), **environment})
    word = told(log)
    assert (word.kind, word.step, word.traceback) == ("failed", 0, None)
    assert sentence in (word.error or "")


def test_a_place_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    expected = alone(train, 6)
    assert alone(train, 6, environment={ENV_TERMINATION_LOG: str(tmp_path)}) == expected


def test_loader_processes_leave_it_to_their_worker(tmp_path: Path) -> None:
    log = tmp_path / "log"
    result = alone(train, 6, 0, "bitwise", 2, environment={ENV_TERMINATION_LOG: str(log)})
    assert told(log).digest == result.digest


@pytest.mark.parametrize(
    ("word", "script", "enforced"),
    [
        (None, "bitwise", True),
        (None, "statistical", False),
        ("Bitwise", "statistical", True),
        ("Statistical", "bitwise", False),
    ],
)
def test_the_environment_says_how_equal_the_bits_must_be(word: str | None, script: str, enforced: bool) -> None:
    environment = {} if word is None else {ENV_REPRODUCIBILITY: word}
    assert alone(train, 2, 0, script, environment=environment).more is enforced


# --- among workers ----------------------------------------------------------------------------------------------------


def test_all_who_see_the_end_tell_the_same_result(start_job: StartJob, tmp_path: Path) -> None:
    job = started(start_job, tmp_path, 6)
    results = job.results()
    words = [told(tmp_path / name) for name in job.workers]
    for word in words:
        assert (word.kind, word.step, word.total_steps) == ("done", 6, 6)
        assert (word.digest, word.optimizer_digest) == (results[0].digest, results[0].optimizer)


def test_one_that_is_drained_tells_why_and_one_that_is_killed_tells_nothing(
    start_job: StartJob, tmp_path: Path
) -> None:
    job = started(start_job, tmp_path, 8, workers=3, hold=2)
    job.reach(2)
    job.kill("worker-1")
    job.reach(3)
    job.drain("worker-2")
    job.results()
    assert read(tmp_path / "worker-1") is None
    left = told(tmp_path / "worker-2")
    assert (left.kind, left.reason, left.digest) == ("left", "asked to", None)
    assert 3 < left.step < 8
    assert told(tmp_path / "worker-0").kind == "done"


def test_those_who_leave_because_the_job_is_stopped_tell_the_reason(start_job: StartJob, tmp_path: Path) -> None:
    job = started(start_job, tmp_path, 6, hold=2)
    job.reach(2)
    job.call("stop", reason="the job is suspended")
    job.finish()
    for name in job.workers:
        word = told(tmp_path / name)
        assert (word.kind, word.reason) == ("left", "stopping: the job is suspended")
        assert word.step == 3


def test_one_that_fails_tells_its_error_and_the_others_that_the_job_is_over(
    start_job: StartJob, tmp_path: Path
) -> None:
    job = start_job(one_fails, workers=2, environment={PLACE: str(tmp_path)})
    job.finish()
    failed, ended = told(tmp_path / "worker-1"), told(tmp_path / "worker-0")
    assert (failed.kind, failed.error) == ("failed", "RuntimeError: the data ran sour")
    assert "Traceback" in (failed.traceback or "")
    assert ended.kind == "ended"
    assert "the data ran sour" in (ended.reason or "")
    assert ended.digest is None


def one_fails() -> Trained:
    return train(8, 3 if os.environ[ENV_WORKER] == "worker-1" else 0)


def test_one_that_is_given_up_tells_that_it_was_refused(start_job: StartJob, tmp_path: Path) -> None:
    job = started(start_job, tmp_path, 8, hold=2)
    job.reach(2)
    job.call("gone", worker="worker-1", reason="its node is lost")
    job.finish()
    word = told(tmp_path / "worker-1")
    assert (word.kind, word.reason) == ("refused", "declared lost: its node is lost")
    assert told(tmp_path / "worker-0").kind == "done"


@pytest.mark.slow
def test_one_that_waits_to_join_when_the_job_is_stopped_tells_so(start_job: StartJob, tmp_path: Path) -> None:
    job = started(start_job, tmp_path, 8, hold=2)
    job.reach(2)
    [waiting] = job.join()
    job.call("stop", reason="enough")
    job.finish()
    word = told(tmp_path / waiting)
    assert (word.kind, word.reason) == ("ended", "the job was stopped: enough")


def test_without_a_coordinator_at_the_end_the_result_is_told_all_the_same(start_job: StartJob, tmp_path: Path) -> None:
    job = start_job(loses_its_coordinator, workers=1, environment={PLACE: str(tmp_path)})
    [result] = job.results()
    word = told(tmp_path / "worker-0")
    assert (word.kind, word.digest) == ("done", result.digest)


def loses_its_coordinator() -> Trained:
    """The link is cut for good before the last step; a short goodbye keeps the test short."""
    from virtualflow.worker.session import Session

    inject(link={"goodbye": 0.3})
    report = Session.report_done

    def cut(self: Session, done: m.Done, take_part: Callable[[], None]) -> None:
        self.link.close()
        report(self, done, take_part)

    Session.report_done = cut  # type: ignore[method-assign]
    return train(4)
