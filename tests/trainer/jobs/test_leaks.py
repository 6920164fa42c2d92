"""A run leaves the process as it found it: no threads, no open files, no changed settings."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_jobs import EXCHANGE, ElasticJob, alone
from torch import nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from tiers import nightly
from virtualflow.errors import ConfigurationError
from virtualflow.protocol.environment import WorkerEnvironment
from virtualflow.protocol.settings import ENV_AUDIT_DIR, ENV_CHECKPOINT_DIR
from virtualflow.worker.process import claim_name


def train(loaders: int = 0, fail: str = "") -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    draw = torch.Generator().manual_seed(0)
    dataset = TensorDataset(torch.randn(24, 3, generator=draw), torch.randn(24, generator=draw))
    batch_size = 7 if fail == "at the start" else 12
    options: Any = {"num_workers": loaders} if loaders else {}
    with vf.elastic(model, optimizer, dataset, batch_size=batch_size, epochs=2, virtual_nodes=6, **options) as run:
        for step in run:
            for x, y in step:
                F.mse_loss(model(x).squeeze(1), y).backward()
                if fail == "in a step" and step.number == 3:
                    raise RuntimeError("the data ran sour")
        vf.evaluate(model, dataset, lambda batch: model(batch[0]), batch_size=12)


def open_files() -> dict[str, str]:
    """Descriptors of this process and what they lead to."""
    gc.collect()
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the listing's own
            continue
    return found


def surroundings() -> dict[str, Any]:
    """What a run may change while it lasts."""
    return {
        "threads of torch": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn deterministic": torch.backends.cudnn.deterministic,
        "cudnn benchmark": torch.backends.cudnn.benchmark,
        "SIGTERM": signal.getsignal(signal.SIGTERM),
        "SIGINT": signal.getsignal(signal.SIGINT),
        "gradients": torch.is_grad_enabled(),
        "threads": living_threads(),
    }


def living_threads() -> list[str]:
    """Names of threads, once those have ended that were told to: of closed queues, and of a run that is over."""
    for thread in threading.enumerate():
        if thread.name in ("QueueFeederThread", "virtualflow-end"):
            thread.join(timeout=60)
    return sorted(thread.name for thread in threading.enumerate())


def on_sigterm(number: int, frame: Any) -> None:
    pass


def watched(*arguments: Any) -> dict[str, Any]:
    """The script: what is different after a training, in unusual surroundings."""
    signal.signal(signal.SIGTERM, on_sigterm)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = True
    claim_name(WorkerEnvironment.read())  # which lasts as long as the process
    before, files = surroundings(), open_files()
    error = ""
    try:
        train(*arguments)
    except (RuntimeError, ConfigurationError) as raised:
        error = str(raised)
    after, left = surroundings(), open_files()
    return {
        "error": error,
        "changed": {name: (before[name], value) for name, value in after.items() if value != before[name]},
        "files": sorted(path for name, path in left.items() if name not in files),
    }


@pytest.fixture
def usual() -> Any:
    """Put back what ``watched`` sets up in this process."""
    handler, threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    yield
    signal.signal(signal.SIGTERM, handler)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
    torch.backends.cudnn.benchmark = benchmark


CASES = [
    pytest.param((), "", id="a training"),
    pytest.param((1,), "", id="with a loader process"),
    pytest.param((0, "in a step"), "the data ran sour", id="an error in a step"),
    pytest.param((1, "in a step"), "the data ran sour", id="an error with a loader process"),
    pytest.param((0, "at the start"), "batch_size 7 does not divide", id="an error at the start"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "error"), CASES)
def test_a_run_alone_leaves_nothing(arguments: tuple[Any, ...], error: str, tmp_path: Path, usual: None) -> None:
    train()  # what is opened once and for all
    found = alone(watched, *arguments, environment={ENV_CHECKPOINT_DIR: str(tmp_path)})
    assert error in found.pop("error")
    assert found == {"changed": {}, "files": []}


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "error"), CASES[:3])
def test_a_job_leaves_nothing_in_its_workers(
    arguments: tuple[Any, ...], error: str, tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    environment = {ENV_AUDIT_DIR: str(tmp_path / "audit"), ENV_CHECKPOINT_DIR: str(tmp_path / "checkpoints")}
    outcomes = start_job(watched, *arguments, workers=2, environment=environment).finish().values()
    returned = [outcome.value for outcome in outcomes if outcome.kind == "returned"]
    assert returned, outcomes
    assert {outcome.kind for outcome in outcomes} <= ({"returned", "JobFailed"} if error else {"returned"})
    for found in returned:
        assert error in found.pop("error")
        assert found == {"changed": {}, "files": []}


def hoard() -> list[tuple[int, ...]]:
    """The script: shapes of what is large and waits for Python's collector of circles, which has not come."""
    gc.collect()
    gc.disable()
    torch.manual_seed(0)
    model = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    dataset = TensorDataset(torch.randn(24, 256), torch.randn(24, 256))
    with vf.elastic(model, optimizer, dataset, batch_size=12, steps=80, virtual_nodes=6) as run:
        for step in run:
            for x, y in step:
                time.sleep(0.005)
                F.mse_loss(model(x), y).backward()
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    left = [each for each in gc.garbage if isinstance(each, torch.Tensor)]
    return [tuple(each.shape) for each in left if each.untyped_storage().nbytes() >= model.weight.nbytes // 4]


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["early", nightly("")])
def test_what_an_aborted_attempt_held_is_free_at_once(start_job: Callable[..., ElasticJob], exchange: str) -> None:
    """An error keeps what it came through: gradients, messages and sums of the attempt."""
    job = start_job(hoard, workers=4, hold=60, environment={EXCHANGE: exchange})  # it does not end before it is killed
    for step in (5, 20, 35):
        job.wait_for(lambda status: status.step >= step, "some steps")  # noqa: B023
        before = job.wait_for(lambda status: status.phase == "training", "training").workers
        job.kill(before[-1].worker)
        job.wait_for(lambda status: len(status.workers) < len(before), "news of the loss")  # noqa: B023
    assert job.results() == [[]]
