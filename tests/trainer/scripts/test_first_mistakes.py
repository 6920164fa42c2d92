"""What people try first, and is wrong: each ends with one sentence that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_jobs import ElasticJob
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import virtualflow as vf
from virtualflow.errors import ConfigurationError, VirtualFlowError, line_of_script

ROWS = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
Arguments = dict[str, Any]


def usual() -> Arguments:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return {"model": model, "optimizer": optimizer, "dataset": ROWS, "batch_size": 16, "steps": 2}


def train(arguments: Arguments) -> int:
    model = arguments["model"]
    with vf.elastic(**arguments) as run:
        for step in run:
            for x, y in step:
                F.mse_loss(model(x), y).backward()
    return run.completed_steps


def logging_some(every: int) -> float:
    """As loops over a ``DataLoader`` have it; each worker counts its own micro-batches."""
    given = usual()
    model = given["model"]
    with vf.elastic(**given, virtual_nodes=4) as run:
        for step in run:
            for i, (x, y) in enumerate(step):
                loss = F.mse_loss(model(x), y)
                loss.backward()
                if i % every == 0:
                    step.log(loss=loss)
    return run.metrics["loss"]


@pytest.mark.parametrize("every", [100, 2])
def test_logging_some_micro_batches_by_their_count_is_refused_in_a_job(
    every: int, start_job: Callable[..., ElasticJob]
) -> None:
    assert logging_some(every) > 0
    (outcome,) = start_job(logging_some, every, workers=1).finish().values()
    assert outcome.kind == "ConfigurationError"
    assert "step.log told of loss in one computation of a virtual node and not in another" in outcome.text


class WithEpoch:
    """A schedule as another library has it."""

    def step(self, epoch: int, metric: float | None = None) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Frame:
    """As a data frame: its index is a column's name."""

    iloc = None

    def __len__(self) -> int:
        return 64

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)


class Stateless:
    def step(self) -> None: ...


MISTAKES: dict[str, tuple[Callable[[Arguments], Arguments], str]] = {
    "a DataLoader": (lambda a: {"dataset": DataLoader(ROWS, 16)}, r"a DataLoader.*\(loader.dataset\)"),
    "a dict of data sets": (lambda a: {"dataset": {"train": ROWS, "test": ROWS}}, r"'train', 'test'.*data\[.train.\]"),
    "columns": (lambda a: {"dataset": ROWS.tensors}, r"a tuple of 2 Tensors.*TensorDataset\(\*columns\)"),
    "a data frame": (lambda a: {"dataset": Frame()}, "pandas.*frame.iloc"),
    "a generator": (lambda a: {"dataset": (row for row in ROWS)}, "a generator, which can be gone through once"),
    "nothing": (lambda a: {"dataset": None}, "the dataset is None"),
    "a file's name": (lambda a: {"dataset": "rows.csv"}, "the dataset is 'rows.csv'"),
    "a class": (lambda a: {"dataset": TensorDataset}, r"the class TensorDataset; give an object of it"),
    "an empty one": (lambda a: {"dataset": TensorDataset(torch.zeros(0, 4))}, "the dataset is empty"),
    "one shorter than a batch": (
        lambda a: {"dataset": TensorDataset(torch.zeros(10, 4)), "drop_last": True},
        "drop_last leaves no batch of 16 in a dataset of 10 samples",
    ),
    "half a batch size": (lambda a: {"batch_size": 16.0}, "batch_size is 16.0; it must be a whole number"),
    "a batch size in quotes": (lambda a: {"batch_size": "16"}, "batch_size is '16'; it must be a whole number"),
    "no steps": (lambda a: {"steps": 0}, "steps is 0; it must be at least 1"),
    "steps as 1e3": (lambda a: {"steps": 1e3}, "steps is 1000.0; it must be a whole number"),
    "model and optimizer in each other's place": (
        lambda a: {"model": a["optimizer"], "optimizer": a["model"]},
        "the model is a SGD; give vf.elastic a torch.nn.Module first",
    ),
    "a wrapped model": (lambda a: {"model": nn.DataParallel(a["model"])}, "the model is wrapped by DataParallel"),
    "a model with a wrapped part": (
        lambda a: {"model": nn.Sequential(nn.DataParallel(a["model"]))},
        "its module 0 is wrapped by DataParallel",
    ),
    "the optimizer of another model": (
        lambda a: {"model": nn.Linear(4, 1)},
        r"SGD holds none of the model's parameters.*SGD\(model.parameters\(\)",
    ),
    "an optimizer that is a class": (lambda a: {"optimizer": torch.optim.SGD}, "the optimizer is SGD"),
    "parameters for an optimizer": (lambda a: {"optimizer": a["model"].parameters()}, "the optimizer is a generator"),
    "a schedule with step(epoch)": (
        lambda a: {"scheduler": WithEpoch()},
        r'WithEpoch.step cannot be called without arguments.*scheduler_interval="manual"',
    ),
    "a schedule that is a class": (lambda a: {"scheduler": lr_scheduler.StepLR}, "the scheduler is the class StepLR"),
    "a function for a schedule": (lambda a: {"scheduler": lambda epoch: 0.1}, "the scheduler is a function"),
    "a schedule without a state": (lambda a: {"scheduler": Stateless()}, "Stateless has no state_dict"),
    "a schedule that ends before": (
        lambda a: {"scheduler": lr_scheduler.OneCycleLR(a["optimizer"], 0.1, total_steps=1)},
        r"OneCycleLR ends after 1 steps \(total_steps=1\).*make it with total_steps=2",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_arguments_is_one_sentence_with_its_line(name: str) -> None:
    mistake, said = MISTAKES[name]
    arguments = usual()
    with pytest.raises(ConfigurationError, match=said) as found:
        train({**arguments, **mistake(arguments)})
    assert (line_of_script(found.value) or "").rpartition(":")[0].endswith("test_first_mistakes.py")


@pytest.mark.parametrize(
    "dataset",
    [list(ROWS), {index: ROWS[index] for index in range(len(ROWS))}, tuple(ROWS)],
    ids=["a list", "a dict by index", "a tuple of samples"],
)
def test_whatever_has_samples_by_index_is_a_dataset(dataset: Any) -> None:
    assert train({**usual(), "dataset": dataset}) == 2


def test_a_schedule_with_arguments_is_stepped_by_the_script() -> None:
    arguments = {**usual(), "scheduler": WithEpoch(), "scheduler_interval": "manual"}
    assert train(arguments) == 2


def test_torchrun_is_refused_before_each_process_trains_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigurationError, match="start it with: virtualflow run --workers 4"):
        train(usual())


@pytest.mark.parametrize("left", ["skipped", "in the middle"])
def test_a_step_that_is_left_names_the_line_of_the_loop(left: str) -> None:
    arguments = usual()

    def leave() -> None:
        with vf.elastic(**arguments) as run:
            for step in run:  # this line
                if left == "in the middle":
                    for x, y in step:
                        F.mse_loss(arguments["model"](x), y).backward()
                        break

    with pytest.raises(VirtualFlowError, match="a step was left before its end") as found:
        leave()
    line = int((line_of_script(found.value) or "").rpartition(":")[2])
    assert "# this line" in Path(__file__).read_text().split("\n")[line - 1]


def test_a_loss_over_a_batch_is_no_row_a_sample() -> None:
    model = nn.Linear(4, 1)
    with pytest.raises(ConfigurationError, match=r'one row a sample.*reduction="none"'):
        vf.evaluate(model, ROWS, lambda batch: F.mse_loss(model(batch[0]), batch[1]), batch_size=16)
