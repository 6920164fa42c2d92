"""One worker of the figure about integrations: trains a task in turns with another library, as it is or made elastic.

``own`` is the library by itself, ``elastic`` the same script with the lines that the integration asks for. Model, data,
micro-batches, optimizer and threads are the same. What counts is the processor time of this process, with all its
threads: other work on the machine must not pass for overhead.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.tasks import TASKS, VIRTUAL_NODES, Task, loss_of
from benchmarks.turns import Pace, Turns

ENDLESS = 10_000_000
"""Steps, or epochs: the turns end the training."""


class WithLoss(nn.Module):
    """A model that computes its loss, as those of Transformers do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The mean over the samples."""
        return {"loss": loss_of(self.model, (x, y))}


def collate(rows: list[tuple[Tensor, Any]]) -> dict[str, Tensor]:
    """Rows as keyword arguments."""
    x, y = torch.utils.data.default_collate(rows)
    return {"x": x, "y": y}


def train_transformers(task: Task, pace: Pace, *, elastic: bool) -> None:
    """With the Trainer of Transformers."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from virtualflow.integrations.transformers import ElasticTrainer

    class InTurns(TrainerCallback):  # type: ignore[misc, unused-ignore]
        """Waits for each step's turn."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not pace.goes_on():
                control.should_training_stop = True

    model, optimizer, data = task.make()
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory,
            max_steps=ENDLESS,
            per_device_train_batch_size=task.batch // VIRTUAL_NODES,
            gradient_accumulation_steps=VIRTUAL_NODES,
            dataloader_drop_last=True,
            lr_scheduler_type="constant",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        (ElasticTrainer if elastic else Trainer)(
            WithLoss(model),
            arguments,
            train_dataset=data,
            data_collator=collate,
            callbacks=[InTurns()],
            optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
        ).train()


def loader_of(task: Task, data: Dataset[Any], size: int) -> DataLoader[Any]:
    """Whole micro-batches, shuffled."""
    return DataLoader(data, batch_size=size, shuffle=True, drop_last=True)


def train_accelerate(task: Task, pace: Pace, *, elastic: bool) -> None:
    """With an Accelerator and a loop of one's own."""
    from accelerate import Accelerator

    from virtualflow.integrations.accelerate import ElasticAccelerator

    kind = ElasticAccelerator if elastic else Accelerator
    accelerator: Any = kind(cpu=True, gradient_accumulation_steps=VIRTUAL_NODES)
    model, optimizer, data = task.make()
    prepared = accelerator.prepare(model, optimizer, loader_of(task, data, task.batch // VIRTUAL_NODES))
    if pace.goes_on():
        _accelerated(accelerator, pace, *prepared, epochs=accelerator.epochs(ENDLESS) if elastic else itertools.count())
    accelerator.end_training()


def _accelerated(
    accelerator: Any, pace: Pace, model: Any, optimizer: Any, loader: Any, *, epochs: Iterator[int]
) -> None:
    for _ in epochs:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and not pace.goes_on():
                return


def train_fabric(task: Task, pace: Pace, *, elastic: bool) -> None:
    """With Fabric and a loop of one's own, which accumulates by itself where it is not elastic."""
    from lightning.fabric import Fabric

    from virtualflow.integrations.fabric import ElasticStrategy

    options = {"strategy": ElasticStrategy(virtual_nodes=VIRTUAL_NODES)} if elastic else {"devices": 1}
    fabric = Fabric(accelerator="cpu", **options)
    made, adam, data = task.make()
    model, optimizer = fabric.setup(made, adam)
    share = 1 if elastic else VIRTUAL_NODES
    loader = fabric.setup_dataloaders(loader_of(task, data, task.batch // share))
    if not pace.goes_on():
        return
    number = 0
    for _ in fabric.strategy.epochs(ENDLESS) if elastic else itertools.count():
        for batch in loader:
            if number % share == 0:
                optimizer.zero_grad()
            number += 1
            fabric.backward(loss_of(model, batch) / share)
            if number % share == 0:
                optimizer.step()
                if (not elastic or fabric.strategy.stepped) and not pace.goes_on():
                    return


def train_lightning(task: Task, pace: Pace, *, elastic: bool) -> None:
    """With the Trainer of Lightning."""
    import lightning.pytorch as pl

    from virtualflow.integrations.lightning import ElasticStrategy

    made, optimizer, data = task.make()

    class Module(pl.LightningModule):  # type: ignore[misc, unused-ignore]
        """As anybody would write it."""

        def __init__(self) -> None:
            super().__init__()
            self.model = made

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return loss_of(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    class InTurns(pl.Callback):  # type: ignore[misc, unused-ignore]
        """Waits for each step's turn: the strategy starts a batch a step, the library one a micro-batch."""

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if (elastic or batch_idx % VIRTUAL_NODES == 0) and not pace.goes_on():
                trainer.should_stop = True

    with tempfile.TemporaryDirectory() as directory:
        pl.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=ElasticStrategy() if elastic else "auto",
            max_epochs=ENDLESS,
            accumulate_grad_batches=VIRTUAL_NODES,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=directory,
            callbacks=[InTurns()],
        ).fit(Module(), loader_of(task, data, task.batch // VIRTUAL_NODES))


LIBRARIES = {
    "transformers": train_transformers,
    "accelerate": train_accelerate,
    "fabric": train_fabric,
    "lightning": train_lightning,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=list(LIBRARIES))
    parser.add_argument("side", choices=["own", "elastic"])
    parser.add_argument("task", choices=list(TASKS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    with Turns() as turns:
        LIBRARIES[args.library](TASKS[args.task], Pace(turns, time.process_time), elastic=args.side == "elastic")


if __name__ == "__main__":
    main()
