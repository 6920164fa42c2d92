"""Trains with relative imports; prints where modules are looked for first."""

import sys

import torch
import torch.nn.functional as F

import virtualflow as vf

from .conf import WIDTH

torch.manual_seed(0)
model = torch.nn.Linear(WIDTH, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.05)
dataset = torch.utils.data.TensorDataset(torch.randn(128, WIDTH), torch.randn(128, 1))
with vf.elastic(model, optimizer, dataset, batch_size=16, steps=8) as run:
    for step in run:
        for x, y in step:
            F.mse_loss(model(x), y).backward()
print("trained", sys.path[0], sys.argv[1:])
