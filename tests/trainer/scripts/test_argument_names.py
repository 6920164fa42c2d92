"""A misspelt argument is named, with the one that was meant, wherever the library takes options by name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

import virtualflow as vf
from virtualflow._arguments import checked, checked_class
from virtualflow.errors import ConfigurationError
from virtualflow.integrations.trackers import MLflow, TensorBoard, WeightsAndBiases


@pytest.fixture(autouse=True)
def former_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


def training() -> tuple[Any, Any, Any]:
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), 0.1), torch.utils.data.TensorDataset(torch.randn(16, 2))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        pytest.param(
            lambda: vf.elastic(*training(), batchsize=8, steps=1),  # type: ignore[call-arg]
            r"vf\.elastic has no argument batchsize \(did you mean batch_size\?\)",
            id="elastic",
        ),
        pytest.param(
            lambda: vf.elastic(*training(), batch_size=8, steps=1, num_worker=2),  # type: ignore[call-arg]
            r"vf\.elastic has no argument num_worker \(did you mean num_workers\?\)",
            id="of the data loader",
        ),
        pytest.param(
            lambda: vf.elastic(*training(), batch_size=8, steps=1, persistent=True),  # type: ignore[call-arg]
            r"vf\.elastic has no argument persistent; what it passes on to the data loader is num_workers, ",
            id="not of the data loader",
        ),
        pytest.param(
            lambda: vf.evaluate(training()[0], training()[2], len, batchsize=8),  # type: ignore[call-arg, arg-type]
            r"vf\.evaluate has no argument batchsize \(did you mean batch_size\?\)",
            id="evaluate",
        ),
        pytest.param(
            lambda: vf.predict(training()[0], training()[2], batch_size=8, folder="f"),  # type: ignore[call-arg]
            r"vf\.predict has no argument folder; what it passes on to the data loader is num_workers, ",
            id="predict",
        ),
        pytest.param(
            lambda: vf.CheckpointPolicy("d", every_step=2),  # type: ignore[call-arg]
            r"vf\.CheckpointPolicy has no argument every_step \(did you mean every_steps\?\)",
            id="CheckpointPolicy",
        ),
        pytest.param(
            lambda: vf.Memory("1GiB", blcoks=[]),  # type: ignore[call-arg]
            r"vf\.Memory has no argument blcoks \(did you mean blocks\?\)",
            id="Memory",
        ),
        pytest.param(
            lambda: vf.Exchange(bucket_byte=1),  # type: ignore[call-arg]
            r"vf\.Exchange has no argument bucket_byte \(did you mean bucket_bytes\?\)",
            id="Exchange",
        ),
        pytest.param(
            lambda: vf.PartialBackward(virtual_node=[1]),  # type: ignore[call-arg]
            r"vf\.PartialBackward has no argument virtual_node",
            id="PartialBackward",
        ),
        pytest.param(
            lambda: MLflow("e", tracking_url="x"),  # type: ignore[call-arg]
            r"MLflow has no argument tracking_url \(did you mean tracking_uri\?\)",
            id="MLflow",
        ),
        pytest.param(lambda: TensorBoard(dir="x"), "TensorBoard has no argument dir", id="TensorBoard"),  # type: ignore[call-arg]
        pytest.param(
            lambda: WeightsAndBiases("p", directry="x"),  # type: ignore[call-arg]
            r"WeightsAndBiases has no argument directry \(did you mean directory\?\)",
            id="WeightsAndBiases",
        ),
    ],
)
def test_a_misspelt_argument_is_named_with_the_one_that_was_meant(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{says}"):
        call()


@pytest.mark.parametrize(
    ("name", "kind", "needs"),
    [
        ("transformers", "ElasticTrainer", "transformers"),
        ("accelerate", "ElasticAccelerator", "accelerate"),
        ("lightning", "ElasticStrategy", "lightning"),
        ("fabric", "ElasticStrategy", "lightning"),
    ],
)
def test_so_is_one_of_another_librarys_class(name: str, kind: str, needs: str) -> None:
    pytest.importorskip(needs)
    made = getattr(import_module(f"virtualflow.integrations.{name}"), kind)
    with pytest.raises(ConfigurationError, match=rf"^{kind} has no argument virtual_node \(did you mean virtual_nodes"):
        made(virtual_node=4)


def test_an_argument_of_the_class_that_is_extended_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs:
        def __init__(self, one: int = 0, *, train_dataset: int = 0) -> None:
            self.given = one, train_dataset

    @checked_class("Ours")
    class Ours(Theirs):
        def __init__(self, *arguments: Any, virtual_nodes: int = 8, **options: Any) -> None:
            super().__init__(*arguments, **options)

    class Users(Ours):
        def __init__(self, mine: int, **options: Any) -> None:
            super().__init__(**options)

    assert Users(3, one=1, train_dataset=2).given == (1, 2)
    with pytest.raises(ConfigurationError, match=r"^Ours has no argument train_datasets \(did you mean train_dataset"):
        Users(3, train_datasets=2)


def test_a_class_whose_parents_take_anything_takes_anything() -> None:
    class Theirs:
        def __init__(self, **options: Any) -> None:
            self.options = options

    @checked_class("Ours")
    class Ours(Theirs):
        def __init__(self, *, virtual_nodes: int = 8, **options: Any) -> None:
            super().__init__(**options)

    assert Ours(anything=1).options == {"anything": 1}


def test_a_checked_function_looks_as_it_is_written() -> None:
    @checked("f")
    def function(one: int, *, two: str = "") -> str:
        """What it does."""
        return two * one

    assert (function(2, two="a"), function.__doc__) == ("aa", "What it does.")
    assert list(inspect.signature(function).parameters) == ["one", "two"]
