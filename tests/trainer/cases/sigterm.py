"""A script with a SIGTERM handler of its own, as for a batch system: ``sigterm.py before|inside|ignore [exit]``."""

from __future__ import annotations

import signal
import sys
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import virtualflow as vf

WHERE = sys.argv[1]
flag: list[int] = []


def note(number: int, frame: Any) -> None:
    flag.append(number)
    print("my handler", flush=True)


torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
dataset = TensorDataset(torch.randn(128, 8), torch.randn(128, 1))
if WHERE == "before":
    signal.signal(signal.SIGTERM, note)
with vf.elastic(model, optimizer, dataset, batch_size=16, steps=20) as run:
    if WHERE == "inside":
        signal.signal(signal.SIGTERM, note)
    if WHERE == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for step in run:
        for x, y in step:
            F.mse_loss(model(x), y).backward()
        if flag and "exit" in sys.argv:
            sys.exit(0)
