"""What Lightning's ``ElasticStrategy`` needs beside the loops: what is logged, what travels, what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    Callback,
    Checkpoint,
    GradientAccumulationScheduler,
    ProgressBar,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.trainer.trainer import _log_hyperparams
from torch import Tensor

from virtualflow.errors import ConfigurationError
from virtualflow.integrations.loaders import refuse_streams

# --- what is logged ---------------------------------------------------------------------------------------------------

_KEPT = ("prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx")
"""Of the options of ``self.log``, those that a mean over all workers leaves open."""


@dataclass
class Notes:
    """Stands for Lightning's results while micro-batches are computed: values count when the step is made."""

    values: dict[str, Tensor] = field(default_factory=dict)
    """Of the present micro-batch."""
    known: dict[str, dict[str, Any]] = field(default_factory=dict)
    """How each name was logged, of any micro-batch so far."""
    samples: int = 0
    """Of the present step."""

    def begin(self) -> None:
        """Another micro-batch comes."""
        self.values = {}

    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        """What ``self.log`` calls.

        Raises:
            ConfigurationError: the mean over micro-batches is not what is wanted.
        """
        if not isinstance(value, Tensor):
            raise ConfigurationError(
                f"training_step has logged {name}, a {type(value).__name__}, which has seen the samples of one worker; "
                "log a number, and keep metrics for validation_step"
            )
        if options["reduce_fx"] not in ("mean", torch.mean):
            raise ConfigurationError(f"training_step has logged {name} with a reduce_fx; only means are combined")
        self.values[name] = value
        self.known[name] = {"fx": fx} | {option: options[option] for option in _KEPT}

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """For the hooks of another name, whose values Lightning resets."""

    def tell(self, results: Any, metrics: Mapping[str, float], device: torch.device) -> None:
        """Let the means over all samples of the step be what was logged."""
        for name, options in self.known.items():
            if name in metrics:
                results.log(
                    name=name, value=torch.tensor(metrics[name], device=device), batch_size=self.samples, **options
                )


# --- what travels with the model --------------------------------------------------------------------------------------


class Story:
    """What a training has come to beside the model, for joiners and checkpoints: states of callbacks, what was logged.

    Args:
        trainer: whose.
        notes: of its micro-batches.
    """

    def __init__(self, trainer: Any, notes: Notes) -> None:
        self._trainer, self._notes = trainer, notes

    def state_dict(self) -> dict[str, Any]:
        """Return it, the same on all workers."""
        connector, results = self._trainer._logger_connector, self._trainer.fit_loop.epoch_loop._results
        return {
            "callbacks": {name: each.state_dict() for name, each in self._callbacks.items()},
            "known": {name: dict(options) for name, options in self._notes.known.items()},
            "sums": {
                key: [each.meta.name, each.value, each.cumulated_batch_size, each.has_reset]
                for key, each in results.items()
                if each.is_tensor and key.partition(".")[2] in self._notes.known
            },
            "last": {name: value.detach() for name, value in connector._callback_metrics.items()},
            "hook": [connector._current_fx, connector._first_loop_iter],
            "versions": [getattr(logger, "_version", None) for logger in self._trainer.loggers],
            "stops": self._trainer.should_stop,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Become what :meth:`state_dict` gave."""
        trainer, connector = self._trainer, self._trainer._logger_connector
        results, device = trainer.fit_loop.epoch_loop._results, trainer.lightning_module.device
        for logger, version in zip(trainer.loggers, saved["versions"], strict=True):
            if version is not None:
                logger._version = version
        callbacks = self._callbacks
        for name, state in saved["callbacks"].items():
            if isinstance(callbacks[name], Checkpoint) and "dirpath" in state:
                callbacks[name].dirpath = state["dirpath"]
            callbacks[name].load_state_dict(dict(state))
        self._notes.known = {name: dict(options) for name, options in saved["known"].items()}
        for key, (name, value, size, has_reset) in saved["sums"].items():
            if key not in results:
                zero = torch.zeros((), device=device)
                results.log(name=name, value=zero, batch_size=1, **self._notes.known[name])
            each = results[key]
            each.value, each.cumulated_batch_size = value.to(device), size.to(device)
            each.has_reset, each._computed = has_reset, None
        connector._callback_metrics = {name: value.to(device) for name, value in saved["last"].items()}
        connector._current_fx, connector._first_loop_iter = saved["hook"]
        trainer.should_stop = saved["stops"]

    @property
    def _callbacks(self) -> dict[str, Any]:
        """Those that have a state, by the name that Lightning has for it."""
        return {each.state_key: each for each in self._trainer.callbacks if each.state_dict()}


def place(fit_loop: Any, made: int, steps_per_epoch: int) -> None:
    """Let Lightning's counters say that so many steps were made, and that the present epoch has not been begun."""
    epoch_loop, trainer = fit_loop.epoch_loop, fit_loop.trainer
    epoch, of_epoch = divmod(made, steps_per_epoch)
    batches = of_epoch * trainer.accumulate_grad_batches
    _set(fit_loop.epoch_progress.total, epoch)
    _set(fit_loop.epoch_progress.current, epoch)
    _set(epoch_loop.batch_progress.total, epoch * fit_loop.max_batches + batches)
    _set(epoch_loop.batch_progress.current, batches)
    _set(epoch_loop.automatic_optimization.optim_progress.optimizer.step.total, made)
    _set(epoch_loop.automatic_optimization.optim_progress.optimizer.step.current, of_epoch)
    epoch_loop.scheduler_progress.reset_on_run()
    epoch_loop.val_loop.batch_progress.total.reset()
    epoch_loop.batch_progress.is_last_batch = False
    epoch_loop._batches_that_stepped = made


def _set(tracker: Any, count: int) -> None:
    for name in vars(tracker):
        setattr(tracker, name, count)


def greet(trainer: Any) -> None:
    """This worker begins, or has become the leader: show what the leader shows."""
    leads = trainer.is_global_zero
    for callback in trainer.callbacks:
        if isinstance(callback, ProgressBar):
            (callback.enable if leads else callback.disable)()
    if leads:
        _log_hyperparams(trainer)


# --- decisions --------------------------------------------------------------------------------------------------------

_MODULE = (
    "configure_gradient_clipping",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "optimizer_step",
    "optimizer_zero_grad",
)
_CALLBACK = ("on_before_optimizer_step", "on_before_zero_grad")


def refuse(trainer: Any, loader: Any) -> None:
    """Check that a training can be elastic.

    Raises:
        ConfigurationError: it cannot.
    """
    module, accumulated = trainer.lightning_module, trainer.accumulate_grad_batches
    batches, checked = trainer.num_training_batches, trainer.val_check_batch
    for given, sentence in (
        (
            not module.automatic_optimization or len(trainer.optimizers) != 1,
            "ElasticStrategy steps one optimizer by itself; leave automatic_optimization on, and return one from "
            "configure_optimizers, or write the loop with vf.elastic",
        ),
        (
            getattr(trainer.precision_plugin, "scaler", None) is not None,
            'precision="16-mixed" needs a scaler that ElasticStrategy does not have; use "bf16-mixed"',
        ),
        (
            not hasattr(loader, "batch_sampler"),
            "ElasticStrategy trains on one DataLoader; return one from train_dataloader, and not several",
        ),
        (
            trainer.fit_loop.max_epochs < 0 and trainer.max_steps < 0,
            "how long to train is open; pass max_epochs= or max_steps= to the Trainer",
        ),
        (trainer.overfit_batches, "overfit_batches changes the order of the samples; use limit_train_batches"),
        (
            trainer.reload_dataloaders_every_n_epochs,
            "reload_dataloaders_every_n_epochs would change the data of one worker; leave it out",
        ),
        (
            getattr(trainer, "_val_check_time_interval", None) is not None,
            "a val_check_interval of time differs between workers; give it in batches",
        ),
        (
            checked not in (None, float("inf")) and checked < batches and checked % accumulated,
            f"val_check_interval is {checked} batches, in the middle of a step of {accumulated}; give a multiple of it",
        ),
    ):
        if given:
            raise ConfigurationError(sentence)
    refuse_streams(loader.dataset, "ElasticStrategy")
    holders = [(module, LightningModule, _MODULE), *((callback, Callback, _CALLBACK) for callback in trainer.callbacks)]
    for holder, base, hooks in holders:
        for hook in hooks:
            if getattr(type(holder), hook) is not getattr(base, hook):
                raise ConfigurationError(
                    f"{type(holder).__name__} has {hook}, which has no place between workers: the gradient is applied "
                    "when it arrives; use on_train_batch_end, and gradient_clip_val of the Trainer"
                )
    for callback in trainer.callbacks:
        for kinds, why in (
            (GradientAccumulationScheduler, "changes the global batch; set accumulate_grad_batches"),
            ((StochasticWeightAveraging, WeightAveraging), "keeps an average of its own, which a joiner would lack"),
            (Timer, "stops by the clock of one worker; set max_steps, and no max_time"),
        ):
            if isinstance(callback, kinds):
                raise ConfigurationError(f"{type(callback).__name__} {why}")
