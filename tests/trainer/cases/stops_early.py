"""A script that stops early: all workers leave the outer loop behind the same step."""

import torch
import torch.nn.functional as F

import virtualflow as vf

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
dataset = torch.utils.data.TensorDataset(torch.randn(128, 8), torch.randn(128, 1))
with vf.elastic(model, optimizer, dataset, batch_size=16, steps=80) as run:
    for step in run:
        for x, y in step:
            F.mse_loss(model(x), y).backward()
        if step.number == 5:
            break
