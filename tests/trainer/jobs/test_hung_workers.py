"""A training thread that hangs in a process that lives: its worker is evicted, and the bits are the same in the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_jobs import MEMBERSHIP, ElasticJob, Trained, alone, trained
from injected import inject
from jobs import Finished, run_job
from torch.utils.data import TensorDataset

import virtualflow as vf
from tiers import nightly
from virtualflow.protocol.settings import ENV_TERMINATION_LOG
from virtualflow.protocol.termination_message import EXIT_EVICTED, decode_termination_message

LIMIT = 2.0
"""Seconds; a first step, or code between steps, has six times as long."""


def training(marker: str | None) -> Trained:
    """Whoever is first in step 5 takes a lock that nobody gives back."""
    inject(link={"deaf_limit": 0.5})
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(48, 3), torch.randint(0, 2, (48,)))
    with vf.elastic(model, optimizer, data, batch_size=16, epochs=4, virtual_nodes=4) as run:
        for step in run:
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
                if marker is not None and step.number == 5:
                    hang_once(Path(marker))
    return trained(run, model, optimizer)


def hang_once(marker: Path) -> None:
    """Hang, unless another process does."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def test_a_worker_whose_training_thread_hangs_is_evicted_and_ends_by_itself(
    start_job: Callable[..., ElasticJob], tmp_path: Path
) -> None:
    undisturbed = alone(training, None)
    marker, log = tmp_path / "hung", tmp_path / "termination"
    job = start_job(
        training,
        str(marker),
        workers=2,
        hold=5,  # the survivor writes its own termination message when this one has been read
        membership=replace(MEMBERSHIP, hang_limit=LIMIT),
        environment={ENV_TERMINATION_LOG: str(log)},
    )
    lost = job.wait_for(lambda status: bool(status.lost), "an eviction").lost[0]
    assert "its training thread hangs: computing in step 5 for" in lost.reason
    assert "waits for it, at test_hung_workers.py:" in lost.reason
    assert "in hang_once" in lost.reason
    warnings = [event.text for event in job.status().events if event.kind == "warning"]
    assert any(f"{lost.worker} makes no progress" in text and "in training" in text for text in warnings)
    job.await_end(lost.worker)
    assert job.workers[lost.worker].process.exitcode == EXIT_EVICTED
    word = decode_termination_message(log.read_bytes())
    assert word is not None
    assert (word.kind, word.step) == ("refused", 4)
    assert word.reason is not None
    assert "training thread hangs" in word.reason
    assert word.traceback is not None
    assert "in hang_once" in word.traceback
    assert "hang_once" in job.workers[lost.worker].log.read_text(), "its output has the stacks as well"
    job.wait_for(lambda status: status.lost[0].ended, "the word that it has ended")
    del job.workers[lost.worker]
    (survivor,) = job.results()
    assert survivor == undisturbed


# --- through the command line -----------------------------------------------------------------------------------------

STEPS = 30


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    directory = tmp_path_factory.mktemp("undisturbed")
    return run_digits(directory, "nothing", "--workers", 1)


def run_digits(directory: Path, how: str, *options: Any) -> Finished:
    script = ("tests/trainer/digits_hanging.py", how, directory / "hung", "--steps", STEPS)
    return run_job(directory, "--virtual-nodes", 8, "--hang-seconds", LIMIT, *options, *script)


@pytest.mark.parametrize(
    ("how", "workers", "told", "limit"),
    [
        nightly("lock", 3, "computing in step", LIMIT, id="a lock that is never given back"),
        nightly("dataset", 2, "in Samples.__getitem__", LIMIT, id="a dataset that sleeps for ever"),
        nightly("loader", 2, "which is stopped by a signal (state T)", LIMIT, id="a loader process that is stopped"),
        nightly("between", 2, "after the inner loop in step 5", 6 * LIMIT, id="code after a step"),
    ],
)
def test_a_hang_costs_its_limit_and_a_repeated_step(
    how: str, workers: int, told: str, limit: float, undisturbed: Finished, tmp_path: Path
) -> None:
    finished = run_digits(tmp_path, how, "--workers", workers)
    assert finished.bits == undisturbed.bits
    (change, *_) = [change for change in finished.report["changes"] if change["cause"] == "lost"]
    assert "its training thread hangs" in change["reason"]
    assert told in change["reason"]
    assert change["repeated_steps"] == 1
    assert limit <= change["pause_ms"] / 1_000 <= limit + 10.0


@pytest.mark.nightly
def test_one_alone_that_hangs_goes_back_to_its_checkpoint(undisturbed: Finished, tmp_path: Path) -> None:
    checkpoints = ("--checkpoint-dir", tmp_path / "checkpoints", "--checkpoint-steps", 2)
    finished = run_digits(tmp_path, "lock", "--workers", 1, *checkpoints)
    assert finished.bits == undisturbed.bits
    (change,) = [change for change in finished.report["changes"] if change["cause"] == "restart"]
    assert "and there is no other worker" in finished.output + finished.errors
    assert change["step"] > 1


@pytest.mark.nightly
def test_a_joiner_that_never_becomes_ready_is_evicted_and_its_place_given_up(
    undisturbed: Finished, tmp_path: Path
) -> None:
    """It never becomes ready, so the job is held at the step at which it should join until that is clear."""
    finished = run_digits(tmp_path, "joiner", "--workers", 2, "--schedule", "10:=3")
    assert finished.bits == undisturbed.bits
    said = finished.output + finished.errors
    assert "worker-2 lost: its training thread hangs: warming up for" in said
    assert "not started any more" in said
