"""No ``if __name__ == "__main__":``, and loader processes that are spawned: each of them runs the script again."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import virtualflow as vf

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.05)
dataset = TensorDataset(torch.randn(128, 8), torch.randn(128, 1))
with vf.elastic(
    model, optimizer, dataset, batch_size=16, steps=8, num_workers=1, multiprocessing_context="spawn"
) as run:
    for step in run:
        for x, y in step:
            F.mse_loss(model(x), y).backward()
