"""``vf.evaluate``: every sample once, in dataset order, on every worker, whatever happens to some of them meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_jobs import ElasticJob, alone, die_here, trained
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from tiers import nightly
from virtualflow.protocol.settings import ENV_CHECKPOINT_DIR, ENV_WORKER

SIZE = 33
BATCH = 12  # three batches; the last one of 9 leaves virtual nodes with 2 and 1 samples


def built() -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    x = torch.arange(SIZE * 3, dtype=torch.float32).view(SIZE, 3) / 50
    return model, torch.optim.SGD(model.parameters(), 0.05), TensorDataset(x, torch.arange(SIZE))


def step_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y % 2)


SHAPES: dict[str, Callable[[nn.Module, Any], Any]] = {
    "a tensor": lambda model, batch: model(batch[0]),
    "a tuple": lambda model, batch: (model(batch[0]), batch[1]),
    "a dict of a list": lambda model, batch: {"inner": [model(batch[0]).argmax(1) == 0, batch[1]]},
}


def flatten(rows: Any) -> list[Any]:
    if isinstance(rows, dict):
        return [flatten(value) for _, value in sorted(rows.items())]
    if isinstance(rows, tuple):
        return [flatten(value) for value in rows]
    return [str(rows.dtype), rows.tolist()]


def evaluate_each_epoch(shape: str, victim: str = "", fatal_call: int = 0, drain: bool = False) -> Any:
    """Three epochs with an evaluation after each, and one after the loop; ``victim`` goes at its ``fatal_call``."""
    model, optimizer, dataset = built()
    found, calls = [], 0

    def rows(batch: Any) -> Any:
        nonlocal calls
        assert not model.training
        assert not torch.is_grad_enabled()
        calls += 1
        if calls == fatal_call:
            if drain and os.environ.get(ENV_WORKER) == victim:
                signal.raise_signal(signal.SIGTERM)
            elif not drain:
                die_here(victim)
        return SHAPES[shape](model, batch)

    model[2].train(False)  # modes come back as they were, one by one
    with vf.elastic(model, optimizer, dataset, batch_size=12, epochs=3, virtual_nodes=6, drop_last=True) as run:
        for step in run:
            for x, y in step:
                step_loss(model, x, y).backward()
            if step.number % 2 == 0:
                found.append(flatten(vf.evaluate(model, dataset, rows, batch_size=BATCH)))
                assert model.training
                assert not model[2].training
        found.append(flatten(vf.evaluate(model, dataset, rows, batch_size=BATCH)))
    return trained(run, model, optimizer, found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "workers"),
    [("a tensor", 4), ("a tuple", 2), ("a dict of a list", 2), *(nightly(each, n) for each in SHAPES for n in (3, 5))],
)
def test_rows_come_in_dataset_order_on_any_number_of_workers(
    shape: str, workers: int, start_job: Callable[..., ElasticJob]
) -> None:
    reference = alone(evaluate_each_epoch, shape)
    if shape == "a tuple":
        assert reference.metrics[0][1] == ["torch.int64", list(range(SIZE))]
    assert start_job(evaluate_each_epoch, shape, workers=workers).results() == [reference] * workers


@pytest.mark.slow
@pytest.mark.parametrize("fatal_call", [1, 5, 19, *map(nightly, (4, 7, 18, 24))], ids=lambda call: f"call {call}")
def test_a_worker_killed_during_an_evaluation_does_not_show(
    fatal_call: int, start_job: Callable[..., ElasticJob]
) -> None:
    # Two nodes on each of three workers: six calls an evaluation; with a survivor's share it is more.
    reference = alone(evaluate_each_epoch, "a tuple")
    results = start_job(evaluate_each_epoch, "a tuple", "worker-1", fatal_call, workers=3).results()
    assert results == [reference] * 2


@pytest.mark.slow
@pytest.mark.parametrize("fatal_call", [1, 6, *map(nightly, (5, 20))], ids=lambda call: f"call {call}")
def test_a_worker_drained_during_an_evaluation_leaves_in_it(
    fatal_call: int, start_job: Callable[..., ElasticJob]
) -> None:
    reference = alone(evaluate_each_epoch, "a tensor")
    job = start_job(evaluate_each_epoch, "a tensor", "worker-2", fatal_call, True, workers=3)
    outcomes = job.finish()
    assert [outcomes[f"worker-{n}"].value for n in (0, 1)] == [reference] * 2
    assert outcomes["worker-2"].kind in ("Drained", "returned")  # the last ones may come too late to leave early


def without_a_run(shape: str) -> Any:
    model, _, dataset = built()
    rows = vf.evaluate(model, dataset, lambda batch: SHAPES[shape](model, batch), batch_size=7)
    assert model.training
    return flatten(rows)


class Merging(torch.nn.Linear):
    """An adapter as some libraries have it: in evaluation mode it is merged into the weight."""

    merged = False

    def train(self, mode: bool = True) -> Merging:
        self.merged = not mode
        return super().train(mode)


def test_a_module_that_does_more_than_to_set_its_mode_does_it_on_the_way_back_too() -> None:
    model = torch.nn.Sequential(Merging(3, 3), torch.nn.Dropout(), Merging(3, 3))
    model[1].train(False)
    model[2].train(False)
    seen = []

    def rows(batch: Any) -> Any:
        seen.append(model[0].merged)
        return model(batch[0])

    vf.evaluate(model, torch.utils.data.TensorDataset(torch.randn(6, 3)), rows, batch_size=3)
    assert set(seen) == {True}
    assert [model[0].merged, model[2].merged] == [False, True]
    assert [part.training for part in model.modules()] == [True, True, False, False]


def test_without_a_run_one_process_does_everything() -> None:
    model, _, dataset = built()
    model.eval()
    x, y = dataset.tensors
    with torch.no_grad():
        wanted = torch.cat([model(part) for part in x.split(7)])
    assert alone(without_a_run, "a tuple") == [["torch.float32", wanted.tolist()], ["torch.int64", y.tolist()]]


class Striped:
    """Rows of an iterable dataset, in shards of 9, 8, 8 and 8, or in one."""

    def shard(self, index: int, count: int, epoch: int, start: int) -> Iterator[int]:
        return iter(range(index + start * count, SIZE, count))


def test_rows_of_a_stream_come_in_the_order_of_its_stripes() -> None:
    model, optimizer, dataset = built()
    found = [vf.evaluate(model, Striped(), lambda batch: batch, batch_size=8)]
    with vf.elastic(model, optimizer, dataset, batch_size=12, steps=1, virtual_nodes=4) as run:
        for step in run:
            for x, y in step:
                step_loss(model, x, y).backward()
        found.append(vf.evaluate(model, Striped(), lambda batch: batch, batch_size=8))
    assert [rows.tolist() for rows in found] == [list(range(SIZE))] * 2


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        pytest.param(lambda batch: batch[0].mean(), "one row a sample, without reducing", id="a mean"),
        pytest.param(lambda batch: batch[0][:1], "one row a sample, without reducing", id="too few rows"),
        pytest.param(lambda batch: 1.0, "returned a float", id="no tensor"),
        pytest.param(lambda batch: {"a": [batch[0], None]}, "returned a NoneType", id="none inside"),
    ],
)
def test_rows_that_cannot_be_put_in_order_are_refused(rows: Callable[[Any], Any], sentence: str) -> None:
    model, _, dataset = built()
    with pytest.raises(vf.ConfigurationError, match=sentence):
        vf.evaluate(model, dataset, rows, batch_size=11)
    assert model.training


def misplaced(where: str) -> None:
    model, optimizer, dataset = built()

    def look() -> None:
        vf.evaluate(model, dataset, lambda batch: model(batch[0]), batch_size=BATCH)

    with vf.elastic(model, optimizer, dataset, batch_size=12, epochs=1, virtual_nodes=6, drop_last=True) as run:
        if where == "before the loop":
            look()
        for step in run:
            if where == "at the head of a step":
                look()
            for x, y in step:
                step_loss(model, x, y).backward()
                if where == "in a micro-batch":
                    look()
            if where == "on the leader" and step.number == 1 and run.leader:
                look()
        if where == "on the leader at the end" and run.leader:
            look()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("before the loop", "call vf.evaluate after the first step"),
        ("at the head of a step", "call vf.evaluate after the micro-batches of a step"),
        ("in a micro-batch", "call vf.evaluate after the micro-batches of a step"),
        ("on the leader", "every worker must call vf.evaluate at the same step"),
        ("on the leader at the end", "every worker must call vf.evaluate at the same step"),
    ],
    ids=str,
)
def test_a_misplaced_evaluation_is_one_sentence_everywhere(
    where: str, sentence: str, start_job: Callable[..., ElasticJob]
) -> None:
    outcomes = start_job(misplaced, where, workers=2).finish()
    assert all(outcome.kind in ("VirtualFlowError", "JobFailed") for outcome in outcomes.values()), outcomes
    assert any(sentence in outcome.text for outcome in outcomes.values()), outcomes


def lowered_by_evaluations() -> Any:
    model, optimizer, dataset = built()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
    options = {"scheduler": scheduler, "scheduler_interval": "manual"}
    with vf.elastic(
        model, optimizer, dataset, batch_size=12, steps=6, virtual_nodes=6, drop_last=True, **options
    ) as run:
        for step in run:
            for x, y in step:
                step_loss(model, x, y).backward()
            rows = vf.evaluate(model, dataset, lambda batch: model(batch[0]), batch_size=BATCH)
            scheduler.step(float(rows.mean()))
    return trained(run, model, optimizer, more=optimizer.param_groups[0]["lr"])


def test_a_stop_that_was_agreed_on_waits_until_the_code_behind_the_step_has_run(
    start_job: Callable[..., ElasticJob], tmp_path: Path
) -> None:
    """Whoever goes on from its checkpoint does not run that code."""
    environment = {ENV_CHECKPOINT_DIR: str(tmp_path)}
    job = start_job(lowered_by_evaluations, workers=2, hold=2, environment=environment)
    job.reach(2)
    job.call("stop", reason="the job is suspended")
    job.wait_for(lambda status: status.prepared, "a plan to stop")
    assert not any(outcome.kind == "returned" for outcome in job.finish().values())
    resumed = start_job(lowered_by_evaluations, workers=2, environment=environment)
    assert resumed.results() == [alone(lowered_by_evaluations)] * 2
