"""Jobs that share a device in turns: one computes at a time, whatever happens to them, and to the same bits."""

from __future__ import annotations

import os
import signal
import time
import weakref
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from elastic_jobs import PATIENCE, PAUSE, ElasticJob, Trained, alone, trained
from injected import inject
from torch.utils.data import TensorDataset
from turn_servers import turn_server

import virtualflow as vf
from virtualflow.protocol.settings import ENV_TURNS, ENV_VERIFY
from virtualflow.worker.turns import name_device

STEPS = 12


class Turn(NamedTuple):
    """A micro-batch that was computed, and when."""

    begin: float
    end: float
    job: str


def training(name: str, log: str, marker: str | None = None) -> Trained:
    """Note when micro-batches are computed; whoever is first in step 6 stops there, if there is a ``marker``."""
    inject(turns={"answer": PATIENCE})
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(48, 3), torch.randint(0, 2, (48,)))

    def rows(batch: list[torch.Tensor]) -> torch.Tensor:
        return model(batch[0])

    with vf.elastic(model, optimizer, data, batch_size=16, steps=STEPS, virtual_nodes=4) as run:
        for step in run:
            for x, y in step:
                begin = time.monotonic()
                F.cross_entropy(model(x), y).backward()
                if marker is not None and step.number == 6:
                    stop_once(Path(marker))
                with open(log, "a") as file:
                    file.write(f"{begin} {time.monotonic()} {name}\n")
        vf.evaluate(model, data, rows, batch_size=16)
    return trained(run, model, optimizer)


class Kept:
    """An activation that autograd keeps for the backward pass; the log says when it is there and when it is freed."""

    def __init__(self, activation: torch.Tensor, name: str, log: str) -> None:
        self.activation = activation
        note(log, f"{name} keeps")
        weakref.finalize(self, note, log, f"{name} frees")


def note(log: str, text: str) -> None:
    """Add a line at once, behind those of all processes."""
    with open(log, "a") as file:
        file.write(text + "\n")


def kept(log: Path) -> Counter[str]:
    """How many activations of each job are in memory; those of two jobs never are at the same time."""
    count = Counter[str]()
    for line in log.read_text().splitlines() if log.exists() else ():
        name, change = line.split()
        count[name] += 1 if change == "keeps" else -1
        assert sum(number > 0 for number in count.values()) < 2, count
    return count


def keeping(name: str, log: str, go_on: str | None = None) -> Trained:
    """Note which activations are in memory; free none until the file ``go_on`` is there, if one is named."""
    inject(turns={"answer": PATIENCE})
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(48, 3), torch.randint(0, 2, (48,)))
    noted = torch.autograd.graph.saved_tensors_hooks(lambda tensor: Kept(tensor, name, log), lambda it: it.activation)
    with vf.elastic(model, optimizer, data, batch_size=16, steps=STEPS, virtual_nodes=4) as run:
        for step in run:
            for x, y in step:
                with noted:
                    loss = F.cross_entropy(model(x), y)
                limit = time.monotonic() + PATIENCE
                while go_on is not None and not Path(go_on).exists():
                    assert time.monotonic() < limit
                    time.sleep(PAUSE)
                loss.backward()
    return trained(run, model, optimizer)


def stop_once(marker: Path) -> None:
    """Do nothing more, unless another process does."""
    try:
        with marker.open("x") as file:
            file.write(os.environ["VIRTUALFLOW_WORKER"])
    except FileExistsError:
        return
    signal.pause()


def turns_of(log: Path) -> list[Turn]:
    """What was computed, in the order in which it was begun."""
    lines = (line.split() for line in log.read_text().splitlines())
    return sorted(Turn(float(begin), float(end), job) for begin, end, job in lines)


@pytest.fixture
def undisturbed(tmp_path: Path) -> Trained:
    found = alone(training, "alone", str(tmp_path / "alone"))
    assert isinstance(found, Trained)
    return found


@pytest.mark.slow
def test_jobs_that_share_a_device_compute_one_at_a_time_and_to_the_same_bits(
    start_job: Callable[..., ElasticJob], tmp_path: Path, undisturbed: Trained
) -> None:
    log, path = tmp_path / "log", tmp_path / "turns"
    with turn_server(path) as server:
        shared = {ENV_TURNS: str(path)}
        one = start_job(training, "one", str(log), workers=2, hold=3, environment=shared)
        other = start_job(training, "other", str(log), workers=2, hold=6, environment={**shared, ENV_VERIFY: "1.0"})
        one.reach(3)
        one.join()
        one.reach(6)  # while the other one is held, or computes
        one.drain("worker-0")
        other.hold(None)
        found = [*one.results(), *other.results()]
        assert not server._devices, "whoever has ended shares nothing"
    assert {result.digest for result in found} == {undisturbed.digest}
    turns = turns_of(log)
    assert {turn.job for turn in turns} == {"one", "other"}
    for before, after in pairwise(turns):
        assert before.job == after.job or before.end <= after.begin, "two jobs computed at the same time"


@pytest.mark.slow
def test_a_job_keeps_activations_only_when_another_one_has_freed_its_own(
    start_job: Callable[..., ElasticJob], tmp_path: Path
) -> None:
    log, path, go_on = tmp_path / "log", tmp_path / "turns", tmp_path / "go-on"
    with turn_server(path) as server:
        shared = {ENV_TURNS: str(path)}
        one = start_job(keeping, "one", str(log), str(go_on), workers=2, environment=shared)
        one.wait_for(lambda status: kept(log)["one"] > 0, "activations of one job")
        other = start_job(keeping, "other", str(log), workers=2, environment=shared)
        other.wait_for(lambda status: any(device.waiting for device in server._devices.values()), "a wait")
        assert kept(log)["one"] > 0
        assert "other" not in kept(log)
        go_on.touch()
        assert len({result.digest for job in (one, other) for result in job.results()}) == 1
    assert "other keeps" in log.read_text()
    assert kept(log).total() == 0


@pytest.mark.slow
def test_a_worker_that_is_killed_in_its_turn_holds_up_nobody(
    start_job: Callable[..., ElasticJob], tmp_path: Path, undisturbed: Trained
) -> None:
    log, path, marker = tmp_path / "log", tmp_path / "turns", tmp_path / "stopped"
    with turn_server(path) as server:
        shared = {ENV_TURNS: str(path)}
        one = start_job(training, "one", str(log), str(marker), workers=2, environment=shared)
        one.wait_for(lambda status: marker.exists() and marker.read_text() != "", "a worker that stops in its turn")
        other = start_job(training, "other", str(log), workers=2, environment=shared)
        other.wait_for(lambda status: any(device.waiting for device in server._devices.values()), "a wait")
        assert other.status().step == 0, "the device is not free"
        victim = marker.read_text()
        os.kill(one.workers[victim].process.pid, signal.SIGKILL)
        one.workers[victim].process.join(PATIENCE)
        one.call("gone", worker=victim, reason="killed by SIGKILL")
        found = [*one.results(), *other.results()]
    assert {result.digest for result in found} == {undisturbed.digest}


def test_processes_on_the_same_processors_share_a_device() -> None:
    before = os.sched_getaffinity(0)
    first, *others = sorted(before)
    try:
        os.sched_setaffinity(0, {first})
        assert name_device(torch.device("cpu")) == f"cpu {first}"
    finally:
        os.sched_setaffinity(0, before)
    if others:
        assert name_device(torch.device("cpu")) != f"cpu {first}"
