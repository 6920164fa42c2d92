"""One worker fails once: ``transient.py KIND MARKER``, of a kind that its machine or its script may have.

``building``: a loader process is shot while the script still counts its samples.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import virtualflow as vf

KIND, MARKER = sys.argv[1], sys.argv[2]


def first_time() -> bool:
    try:
        os.close(os.open(MARKER, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Samples(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 77 and first_time():
            if KIND in ("loader", "building"):
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(5, "Input/output error")
        return torch.randn(8, generator=torch.Generator().manual_seed(index)), torch.ones(1)


torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.05)
if KIND == "building":
    print("mean", sum(x.mean() for x, _ in DataLoader(Samples(), 16, num_workers=1)))
processes = 1 if KIND == "loader" else 0
with vf.elastic(model, optimizer, Samples(), batch_size=16, steps=32, num_workers=processes) as run:
    for step in run:
        for x, y in step:
            F.mse_loss(model(x), y).backward()
