"""Trainings with Lightning's ``Trainer``; lightning is imported when this is, and what imports it comes later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from elastic_jobs import Trained, die_here
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger
from loop_scripts import Points, network, outcome
from torch import Tensor
from torch.utils.data import DataLoader

from virtualflow.integrations.lightning import ElasticStrategy


class Classifier(pl.LightningModule):  # type: ignore[misc, unused-ignore]
    """As anybody would write it."""

    victim = ""

    def __init__(self, batch_norm: bool = True, dropout: float = 0.0, monitor: str = "") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = network(batch_norm=batch_norm, dropout=dropout)
        self.monitor = monitor

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.victim and self.global_step == 5:
            die_here(self.victim)
        x, y = batch
        found = self.network(x)
        loss = F.cross_entropy(found, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"hits": (found.argmax(1) == y).float().mean()}, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.network(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if self.monitor:
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": self.monitor}}
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Told(Logger):  # type: ignore[misc, unused-ignore]
    """Keeps what is logged."""

    name, version = "told", 0

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.entries.append((step or 0, dict(metrics)))

    def log_hyperparams(self, *arguments: Any, **options: Any) -> None:
        """Do nothing."""


def fit(
    directory: str,
    *,
    elastic: bool = True,
    samples: int = 96,
    batch: int = 4,
    accumulated: int = 4,
    victim: str = "",
    resume: str | None = None,
    module: dict[str, Any] | None = None,
    callbacks: Any = (),
    **options: Any,
) -> tuple[Any, Any, Told, ModelCheckpoint]:
    """Train; the trainer, the module, what was logged, and the callback that has saved."""
    classifier = Classifier(**(module or {}))
    classifier.victim = victim
    told = Told()
    saves = ModelCheckpoint(directory, "{step}", monitor="val_loss", save_top_k=2, save_last=True)
    steps = ModelCheckpoint(Path(directory, "steps"), "{step}", every_n_train_steps=4, save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=ElasticStrategy() if elastic else "auto",
        logger=[told, CSVLogger(directory)],
        log_every_n_steps=2,
        gradient_clip_val=0.5,
        accumulate_grad_batches=accumulated,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saves, steps, LearningRateMonitor("step"), *callbacks],
        **{"max_epochs": 3, **options},
    )
    loader = DataLoader(Points(samples), batch_size=batch)
    trainer.fit(classifier, loader, DataLoader(Points(21, 2), batch_size=4), ckpt_path=resume)
    return trainer, classifier, told, saves


def train(directory: str, options: dict[str, Any]) -> Trained:
    """The bits of a training, and what all workers know at its end."""
    if options.pop("stops", False):
        options["callbacks"] = [EarlyStopping("train_loss_epoch", 10.0, patience=2)]
    trainer, module, _, saves = fit(directory, **options)
    numbers = {name: value.item() for name, value in trainer.callback_metrics.items()}
    names = sorted(Path(path).name for path in saves.best_k_models), Path(saves.best_model_path).name
    return outcome(module.network, trainer.optimizers[0], (trainer.global_step, trainer.current_epoch, numbers, names))


def train_divided(directory: str, shard: str | None, saves: bool = False) -> str:
    """What a training has told whose parameters nobody has all of."""
    told = Told()
    strategy = ElasticStrategy(shard=shard, redundancy="none" if shard else "peer")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        logger=[told],
        log_every_n_steps=2,
        default_root_dir=directory,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=saves,
        max_epochs=2,
    )
    loaders = DataLoader(Points(99), batch_size=16), DataLoader(Points(21, 2), batch_size=4)
    trainer.fit(Classifier(batch_norm=False), *loaders)
    return repr({name: value.item() for name, value in trainer.callback_metrics.items()})
