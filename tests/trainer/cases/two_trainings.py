"""Pretrain, then finetune the same model, in one script."""

import torch
import torch.nn.functional as F

import virtualflow as vf

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
data = torch.utils.data.TensorDataset(torch.randn(128, 8), torch.randn(128, 8))
for phase, lr in (("pretrained", 0.1), ("finetuned", 0.01)):
    optimizer = torch.optim.SGD(model.parameters(), lr)
    with vf.elastic(model, optimizer, data, batch_size=16, steps=10) as run:
        for step in run:
            for x, y in step:
                F.mse_loss(model(x), y).backward()
    print(phase, run.completed_steps)
