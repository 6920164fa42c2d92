"""A script with trackers, and what their own readers find of it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_jobs import Trained, trained
from injected import inject
from torch.utils.data import TensorDataset

import virtualflow as vf
from tiers import needs
from virtualflow.integrations import trackers
from virtualflow.protocol.settings import ENV_WORKER

History = dict[str, list[tuple[int, Any]]]
"""By name, the steps with their values, in the order of the reader."""


@dataclass(frozen=True)
class Backend:
    """A tracker, and its package's own reader."""

    package: str
    make: Callable[[Path], Any]
    read: Callable[[Path], dict[str, History]]
    """All runs of a place, by id."""


def read_tensorboard(directory: Path) -> dict[str, History]:
    """As TensorBoard's own server reads, for which all values are tensors."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    found: dict[str, History] = {}
    for folder in directory.iterdir():
        reader = EventAccumulator(str(folder), tensor_size_guidance={"scalars": 0, "text": 0})
        reader.Reload()
        history = found[folder.name] = {}
        for tag in reader.Tags()["tensors"]:
            events = [(event.step, make_ndarray(event.tensor_proto).item()) for event in reader.Tensors(tag)]
            texts = [(step, value.decode() if isinstance(value, bytes) else value) for step, value in events]
            history[tag.removesuffix("/text_summary")] = texts
    return found


def make_mlflow(directory: Path) -> Any:
    return trackers.MLflow("digits", tracking_uri=f"sqlite:///{directory}.db")


def read_mlflow(directory: Path) -> dict[str, History]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{directory}.db")
    found: dict[str, History] = {}
    for run in client.search_runs([client.get_experiment_by_name("digits").experiment_id]):
        assert run.info.status == "FINISHED"
        history = found[run.data.tags["virtualflow.run"]] = {}
        for name in run.data.metrics:
            metrics = client.get_metric_history(run.info.run_id, name)
            history[name] = [(metric.step, metric.value) for metric in metrics]
        marks = (text for name, text in sorted(run.data.tags.items()) if name.startswith("virtualflow.change."))
        split = [mark.removeprefix("step ").split(": ", 1) for mark in marks]
        history["virtualflow/changes"] = [(int(step), mark) for step, mark in split]
    return found


def make_wandb(directory: Path) -> Any:
    return trackers.WeightsAndBiases("digits", directory=directory)


def read_wandb(directory: Path) -> dict[str, History]:
    from virtualflow.integrations.trackers.wandb import read

    found: dict[str, History] = {}
    for path in directory.glob("wandb/offline-run-*/run-*.wandb"):
        *_, (last, _) = records = [(record.WhichOneof("record_type"), record) for record in read(path)]
        assert [kind for kind, _ in records[:2]] == ["header", "run"]
        assert last == "exit"
        run = records[1][1].run.run_id
        assert run not in found
        history = found[run] = {}
        for step in (record.history for kind, record in records if kind == "history"):
            for item in step.item:
                history.setdefault(item.nested_key[0], []).append((step.step.num, json.loads(item.value_json)))
    return found


BACKENDS = {
    "tensorboard": Backend("tensorboard", trackers.TensorBoard, read_tensorboard),
    "mlflow": Backend("mlflow", make_mlflow, read_mlflow),
    "wandb": Backend("wandb", make_wandb, read_wandb),
}
KINDS = [pytest.param(kind, marks=needs(backend.package)) for kind, backend in BACKENDS.items()]


def train(
    kind: str,
    directory: str,
    steps: int,
    checkpoints: str = "",
    pause: float = 0.0,
    fatal: str = "",
    often: bool = True,
) -> Trained:
    """Train, and have it tracked.

    Args:
        kind: of the tracker; empty: none.
        directory: where it writes.
        steps: to make.
        checkpoints: where they go, every few steps.
        pause: for each virtual node.
        fatal: when workers are killed that write: "before STEP", "within STEP" or "behind STEP" of each that leads
            then, but for worker-2.
        often: whether it writes as often as it can.
    """
    torch.manual_seed(0)
    if often:
        inject(tracking={"seconds": 0.0})
    tracker = BACKENDS[kind].make(Path(directory)) if kind else ()
    if fatal:
        kill_at(tracker, *fatal.split())
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)
    data = TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
    with vf.elastic(
        model,
        optimizer,
        data,
        batch_size=12,
        virtual_nodes=6,
        steps=steps,
        scheduler=scheduler,
        checkpoint=vf.CheckpointPolicy(checkpoints, every_steps=4) if checkpoints else None,
        tracker=tracker,
    ) as run:
        for step in run:
            for x, y in step:
                time.sleep(pause)
                loss = F.mse_loss(model(x), y)
                loss.backward()
                step.log(loss=loss)
            if step.number % 5 == 0:
                run.log(fifth=step.metrics["loss"] + step.number)
        run.log(end=step.metrics["loss"])
    return trained(run, model, optimizer, more=run.id)


def kill_at(tracker: Any, when: str, step: str) -> None:
    """SIGKILL this process, if it is not worker-2, when it writes that step for the first time in its life."""
    if os.environ.get(ENV_WORKER, "worker-2") == "worker-2":
        return
    write, last = tracker.write, int(step)

    def fatal(entries: Any) -> None:
        if entries[-1].step < last:
            write(entries)
            return
        if when == "within":
            tear(tracker)
        if when != "before":
            write(entries)
        os.kill(os.getpid(), signal.SIGKILL)

    tracker.write = fatal


def tear(tracker: Any) -> None:
    """Let what it writes end in the middle."""
    from virtualflow.integrations.trackers import tensorboard, wandb

    if isinstance(tracker, trackers.TensorBoard):
        records = tensorboard._records
        tensorboard._records = lambda events: records(events)[: -len(records(events)) // 3]
    if isinstance(tracker, trackers.WeightsAndBiases):
        framed = wandb._Log._framed
        wandb._Log._framed = staticmethod(lambda record, place: framed(record, place)[: -len(record) // 3])
    if isinstance(tracker, trackers.MLflow):
        from sqlalchemy.orm import Session

        def die(session: Any) -> None:
            if session.new:
                session.flush()
                os.kill(os.getpid(), signal.SIGKILL)

        Session.commit = die


def check(kind: str, directory: Path, reference: Path, steps: int) -> History:
    """One run, each step once in its order, with the values of the reference; its history."""
    (history,) = BACKENDS[kind].read(directory).values()
    (wanted,) = BACKENDS[kind].read(reference).values()
    for name in ("loss", "fifth", "end", "virtualflow/learning_rate", "virtualflow/epoch"):
        assert history[name] == wanted[name], name
    for name in ("loss", "virtualflow/workers", "virtualflow/epoch"):
        assert [step for step, _ in history[name]] == list(range(1, steps + 1)), name
    return history
