"""Three folds, each with a model of its own; what follows depends on what the folds before it have come to."""

import torch
import torch.nn.functional as F

import virtualflow as vf


def train(lr: float, chosen: torch.Tensor, rest: torch.Tensor) -> float:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    folds = [torch.utils.data.TensorDataset(x[rows], y[rows]) for rows in (chosen, rest)]
    with vf.elastic(model, optimizer, folds[0], batch_size=16, steps=8) as run:
        for step in run:
            for inputs, targets in step:
                loss = F.mse_loss(model(inputs), targets)
                loss.backward()
                step.log(loss=loss)
        errors = vf.evaluate(model, folds[1], lambda batch: (model(batch[0]) - batch[1]) ** 2, batch_size=16)
    return errors.mean().item()


generator = torch.Generator().manual_seed(5)
x, y = torch.randn(96, 8, generator=generator), torch.randn(96, 1, generator=generator)
scores, lr = [], 0.01
for fold in range(3):
    held_out = torch.arange(fold * 32, fold * 32 + 32)
    kept = torch.tensor([n for n in range(96) if not fold * 32 <= n < fold * 32 + 32])
    scores.append(train(lr, kept, held_out))
    lr = lr / 2 if scores[-1] > 1.0 else 2 * lr  # the next fold's, by what this one has come to
print("scores", *(f"{score:.9f}" for score in scores), "lr", lr)
