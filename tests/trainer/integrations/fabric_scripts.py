"""A script with Lightning Fabric, and the same script made elastic; nothing is imported before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from elastic_jobs import Trained, die_here
from loop_scripts import Points, network, outcome
from torch.utils.data import DataLoader


def fresh(elastic: bool = True, **options: Any) -> Any:
    from lightning.fabric import Fabric

    from virtualflow.integrations.fabric import ElasticStrategy

    if not elastic:
        return Fabric(accelerator="cpu", devices=1)
    return Fabric(accelerator="cpu", strategy=ElasticStrategy(max_norm=0.5, **options))


def run(
    fabric: Any,
    *,
    elastic: bool = True,
    samples: int = 96,
    batch_norm: bool = True,
    dropout: float = 0.0,
    victim: str = "",
    saves: str = "",
    resume: str = "",
) -> tuple[Any, Any, list[float]]:
    """Train three epochs; the model, the optimizer, and the loss of each step with the hits of each epoch behind it.

    ``victim`` kills itself in the body of a micro-batch of step 6; ``saves`` is a directory for a file every 4 steps.
    """
    model = network(batch_norm=batch_norm, dropout=dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    model, optimizer = fabric.setup(model, optimizer)
    loader, test_loader = fabric.setup_dataloaders(
        DataLoader(Points(samples), batch_size=16), DataLoader(Points(21, 2), batch_size=4)
    )
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if resume:
        fabric.load(resume, state)
    strategy, told = fabric.strategy, list[float]()
    for _ in strategy.epochs(3, scheduler=scheduler) if elastic else range(3):
        model.train()
        for x, y in loader:
            if victim and strategy.run.completed_steps == 5:
                die_here(victim)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            scheduler.step()
            if not elastic:
                told.append(loss.item())
            elif strategy.stepped:
                told.append(strategy.run.metrics["loss"])
                if saves and strategy.run.completed_steps % 4 == 0:
                    fabric.save(Path(saves, f"step-{strategy.run.completed_steps}"), state)
        model.eval()
        with torch.no_grad():
            told.append(sum((model(x).argmax(1) == y).sum().item() for x, y in test_loader))
    return model.module, optimizer.optimizer, told


def train(options: dict[str, Any]) -> Trained:
    """The bits of a training; of what it has told, all that a worker knows that has not seen the first steps."""
    model, optimizer, told = run(fresh(), **options)
    return outcome(model, optimizer, told[-3:])


def train_divided(options: dict[str, Any], shard: str | None) -> str:
    """The last losses and hits of a training whose parameters nobody has all of."""
    _, _, told = run(fresh(shard=shard, redundancy="none" if shard else "peer"), **options)
    return repr(told[-3:])
