"""What both digits scripts share, so that they differ in how they train only: data, model, arguments."""

from __future__ import annotations

import argparse
import gzip
import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from arguments import parser

TEST_SAMPLES = 360  # of 1797; the other 1437 are trained on
SPLIT_SEED = 20220829  # fixes which samples are tested on


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return (training set, test set) of scikit-learn's digits: (float [1, 8, 8] in 0..1, label 0..9).

    This reads the file behind ``sklearn.datasets.load_digits`` itself: importing scikit-learn takes a second,
    which every worker that joins a job would spend again.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise SystemExit("the digits come with scikit-learn: pip install scikit-learn")
    with gzip.open(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    images = table[:, :-1].reshape(-1, 1, 8, 8) / 16
    labels = table[:, -1].long()
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(SPLIT_SEED))
    test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


class DigitsNet(nn.Sequential):
    """Two convolutions with batch norm, then dropout and a linear layer: [n, 1, 8, 8] -> logits [n, 10]."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(64 * 2 * 2, 10),
        )


def correct(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Say for each sample of the batch whether the model names its digit: 1.0 or 0.0, shape [n]."""
    images, labels = batch
    logits: Tensor = model(images)
    return (logits.argmax(dim=1) == labels).float()


def parse_arguments(description: str | None) -> argparse.Namespace:
    """Parse the command line."""
    return parser(description, epochs=20, steps=None, batch_size=128).parse_args()
