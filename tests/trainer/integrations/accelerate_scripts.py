"""A script with Accelerate, and the same script made elastic; nothing is imported before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from elastic_jobs import Trained, die_here
from loop_scripts import Points, network, outcome
from torch.utils.data import DataLoader


def fresh(elastic: bool = True, **options: Any) -> Any:
    """An accelerator, in a process that may have had others."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DataLoaderConfiguration

    from virtualflow.integrations.accelerate import ElasticAccelerator

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    options = {
        "cpu": True,
        "gradient_accumulation_steps": 4,
        "dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5),
        **options,
    }
    return ElasticAccelerator(max_grad_norm=0.5, **options) if elastic else Accelerator(**options)


def run(
    accelerator: Any,
    *,
    elastic: bool = True,
    samples: int = 96,
    batch: int = 4,
    batch_norm: bool = True,
    dropout: float = 0.0,
    victim: str = "",
    saves: str = "",
    resume: str = "",
) -> tuple[Any, Any, list[float]]:
    """Train three epochs; the model, the optimizer, and the loss of each step with the hits of each epoch behind it.

    ``victim`` kills itself in the body of a micro-batch of step 6; ``saves`` is a directory for a state every 4 steps.
    """
    model = network(batch_norm=batch_norm, dropout=dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    loader = DataLoader(Points(samples), batch_size=batch, shuffle=True)
    test_loader = DataLoader(Points(21, 2), batch_size=4)
    model, optimizer, loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, test_loader, scheduler
    )
    if resume:
        accelerator.load_state(resume)
    told: list[float] = []
    losses: list[float] = []
    for _ in accelerator.epochs(3) if elastic else range(3):
        model.train()
        for x, y in loader:
            if victim and accelerator.run.completed_steps == 5:
                die_here(victim)
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                losses.append(loss.item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                told.append(accelerator.run.metrics["loss"] if elastic else sum(losses) / len(losses))
                losses.clear()
                if saves and accelerator.run.completed_steps % 4 == 0:
                    accelerator.save_state(str(Path(saves, f"step-{accelerator.run.completed_steps}")))
        model.eval()
        hits = 0.0
        for x, y in test_loader:
            with torch.no_grad():
                found = model(x).argmax(1)
            found, wanted = accelerator.gather_for_metrics((found, y))
            hits += (found == wanted).sum().item()
        told.append(hits)
    accelerator.end_training()
    return model, optimizer.optimizer, told


def train(options: dict[str, Any], accumulation: int = 4) -> Trained:
    """The bits of a training; of what it has told, all that a worker knows that has not seen the first steps."""
    model, optimizer, told = run(fresh(gradient_accumulation_steps=accumulation), **options)
    return outcome(model, optimizer, told[-3:])


def train_divided(options: dict[str, Any], shard: str | None) -> str:
    """The last losses and hits of a training whose parameters nobody has all of."""
    accelerator = fresh(gradient_accumulation_steps=1, shard=shard, redundancy="none" if shard else "peer")
    _, _, told = run(accelerator, **options)
    return repr(told[-3:])
