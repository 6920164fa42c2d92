"""A strategy of Lightning's ``Trainer`` over virtual nodes: what it does around a step stays its own, steps are ours.

The ``LightningModule``, its callbacks and loggers stay as they are. A global batch has ``batch_size *
accumulate_grad_batches`` samples on any number of workers. Every worker runs the script, and calls the callbacks; the
leader alone writes.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
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
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.trainer import _log_hyperparams
from lightning.pytorch.utilities.rank_zero import rank_zero_only as rank_zero_only_of_trainer
from torch import Tensor

from virtualflow._arguments import checked_class
from virtualflow.errors import ConfigurationError
from virtualflow.integrations.loaders import options_of, order_of, refuse_saving, refuse_streams, virtual_nodes_of
from virtualflow.protocol.settings import ENV_COORDINATOR, Redundancy
from virtualflow.worker.entry import elastic
from virtualflow.worker.evaluation import evaluate_in_parts
from virtualflow.worker.options import Sharded
from virtualflow.worker.run import Run
from virtualflow.worker.step import Step

# What Lightning's ``ElasticStrategy`` needs beside the loops: what is logged, what travels, what is refused.

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

    def begin(self) -> None:
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
        for name, options in self.known.items():
            if name in metrics:
                results.log(
                    name=name, value=torch.tensor(metrics[name], device=device), batch_size=self.samples, **options
                )


# --- what travels with the model --------------------------------------------------------------------------------------


class Story:
    """What a training has come to beside the model, for joiners and checkpoints: callbacks, and what was logged."""

    def __init__(self, trainer: Any, notes: Notes) -> None:
        self._trainer, self._notes = trainer, notes

    def state_dict(self) -> dict[str, Any]:
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

    def result_dict(self) -> dict[str, Any]:
        """Return it without what follows from where this run writes: each makes a new ``lightning_logs/version_N``."""
        state = self.state_dict()
        del state["versions"]
        writers = {name for name, each in self._callbacks.items() if isinstance(each, Checkpoint)}
        return state | {"callbacks": {name: of for name, of in state["callbacks"].items() if name not in writers}}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
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
    """Check that a training can be elastic."""
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


LOSS = "loss"
"""What a run calls the loss that ``training_step`` returns."""


@checked_class("ElasticStrategy")
class ElasticStrategy(SingleDeviceStrategy):  # type: ignore[misc]  # seen as Any: it is an extra
    """A strategy whose workers may change at any step.

    Alone (``python train.py``), the process computes all virtual nodes. Under ``virtualflow run`` or the operator, each
    worker computes those that it is assigned.

    Args:
        device: of this worker; without it, the first GPU that it sees, or the CPU.
        virtual_nodes: equal slices of a global batch. Without it, ``accumulate_grad_batches`` where that is above 1,
            else 8 or what divides the batch; the command line or the manifest overrides it.
        shard: ``"parameters"``: each worker keeps its share of the model alone, as ``vf.elastic`` has it; only the
            library's checkpoints have all of it.
        redundancy: who else has a share, as ``vf.elastic`` has it.
        reduce_dtype: in which gradients of narrower types are summed up, likewise.
        seed: what all random streams follow from.
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        *,
        virtual_nodes: int | None = None,
        shard: Sharded | None = None,
        redundancy: Redundancy = "peer",
        reduce_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        self._leads = ENV_COORDINATOR not in os.environ
        self._run: Run | None = None
        self._behind = False
        """Whether a step was made, and code of the script runs behind it."""
        self._virtual_nodes, self._seed = virtual_nodes, seed
        self._shard, self._redundancy, self._reduce_dtype = shard, redundancy, reduce_dtype
        super().__init__(device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
        self._tell_rank()

    def setup(self, trainer: Any) -> None:
        """As any strategy's; a training goes by loops that ask the library for their steps."""
        super().setup(trainer)
        trainer.fit_loop.__class__ = _ElasticFitLoop  # the trainer has given its loops their data and limits already
        trainer.fit_loop.epoch_loop.__class__ = _ElasticEpochLoop

    # --- the run ------------------------------------------------------------------------------------------------------

    def make_run(self, trainer: Any, story: Story) -> Run:
        """The run of a training whose data and optimizer are there."""
        loader, batches, accumulated = (
            trainer.train_dataloader,
            trainer.num_training_batches,
            trainer.accumulate_grad_batches,
        )
        refuse(trainer, loader)
        kept = batches if loader.drop_last or batches < len(loader) else None
        batch = loader.batch_sampler.batch_size * accumulated
        steps, epochs = trainer.max_steps, trainer.fit_loop.max_epochs
        by_norm = trainer.gradient_clip_algorithm in (None, "norm")
        run = elastic(
            self.lightning_module,
            self.optimizers[0],
            loader.dataset,
            batch_size=batch,
            epochs=None if epochs < 0 else epochs,
            steps=None if steps < 0 else steps,
            virtual_nodes=self._virtual_nodes or virtual_nodes_of(batch, accumulated),
            shard=self._shard,
            redundancy=self._redundancy,
            reduce_dtype=self._reduce_dtype,
            seed=self._seed,
            sampler=order_of(loader, kept),
            scheduler=[config.scheduler for config in self.lr_scheduler_configs] or None,
            scheduler_interval="manual",
            clip_grad_norm=(trainer.gradient_clip_val or None) if by_norm else None,
            clip_grad_value=None if by_norm else trainer.gradient_clip_val,
            state={"trainer": story},
            device=None if self.root_device.type == "cpu" else self.root_device,
            **options_of(loader),
        )
        if any(isinstance(callback, Checkpoint) for callback in trainer.callbacks):
            refuse_saving(run, "pass enable_checkpointing=False to the Trainer")
        return run

    def enter(self, run: Run | None) -> None:
        if run is None and self._run is not None:
            self._leads = self._run.leader
        self._run, self._behind = run, False

    def stand(self, *, behind: bool) -> bool:
        """Where the script's code is, ``behind`` a step or before one; whether this worker has become the leader."""
        assert self._run is not None
        led, self._leads = self._leads, self._run.leader
        self._behind = behind
        self._tell_rank()
        return self._leads and not led

    # --- what others ask ----------------------------------------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        return self._leads

    @property
    def global_rank(self) -> int:
        return 0 if self._leads else 1

    @global_rank.setter
    def global_rank(self, rank: int) -> None:
        """For the base class, which knows nothing of leaders."""

    local_rank = global_rank

    def _tell_rank(self) -> None:
        rank_zero_only.rank = rank_zero_only_of_trainer.rank = self.global_rank

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """What the leader has, behind a step, where all workers ask: whether a file is there already, for example."""
        if self._run is None or not self._behind:
            return obj
        nodes = self._run._request.virtual_nodes
        (told,) = evaluate_in_parts(self.lightning_module, [0], lambda batch: obj, batch_size=nodes)
        return told


class _ElasticFitLoop(_FitLoop):  # type: ignore[misc]
    epoch_loop: _ElasticEpochLoop
    _data_fetcher: Any

    def run(self) -> None:
        trainer, strategy = self.trainer, self.trainer.strategy
        self.setup_data()
        if self.skip:
            return
        self._data_fetcher.teardown()  # with processes of its own: the library loads
        self._data_fetcher = None
        torch.set_grad_enabled(True)
        resumed = self.epoch_loop.global_step
        self.epoch_loop.notes = Notes()
        run = strategy.make_run(trainer, Story(trainer, self.epoch_loop.notes))
        steps_per_epoch = math.ceil(self.max_batches / trainer.accumulate_grad_batches)
        with run:
            if resumed and not run._context.training.completed_steps:
                run._context.training.begin_behind(resumed, steps_per_epoch)
            strategy.enter(run)
            try:
                self._follow(run, steps_per_epoch)
            finally:
                strategy.enter(None)
        self._restarting = False
        self.on_run_end()

    def _follow(self, run: Run, steps_per_epoch: int) -> None:
        trainer, strategy, begun, epoch = self.trainer, self.trainer.strategy, False, -1
        for step in run:
            made = step.number - 1  # a joiner enters here: callbacks see where all are
            if strategy.stand(behind=False) or not begun:
                greet(trainer)
            if step.epoch != epoch:
                place(self, made, steps_per_epoch)
            if not begun:
                begun = True
                self.on_iteration_done()
                self.epoch_loop.on_iteration_done()
                self.on_run_start()
            if step.epoch != epoch:
                epoch = step.epoch
                self.on_advance_start()
            self.epoch_loop.make(run, step)
            if run.completed_steps < step.number:
                continue  # it goes on from behind the last step
            strategy.stand(behind=True)
            self.epoch_loop.end(step, last=step.number % steps_per_epoch == 0)
            if self.epoch_loop.done:
                self.on_advance_end()
                if self.done and trainer.should_stop:
                    break


class _ElasticEpochLoop(_TrainingEpochLoop):  # type: ignore[misc]
    notes: Notes
    _results: Any

    def make(self, run: Run, step: Step) -> None:
        """Make a step: what Lightning does with a batch, up to its optimizer, for each micro-batch of this worker."""
        trainer, progress = self.trainer, self.batch_progress
        accumulated = trainer.accumulate_grad_batches
        batches = min(accumulated, self.trainer.num_training_batches - progress.current.ready)
        progress.is_last_batch = progress.current.ready + batches == self.trainer.num_training_batches
        for _ in range(batches):
            progress.increment_ready()
            progress.increment_started()
        trainer._logger_connector.on_batch_start(None)
        call._call_callback_hooks(trainer, "on_train_batch_start", None, self.batch_idx)
        if call._call_lightning_module_hook(trainer, "on_train_batch_start", None, self.batch_idx) == -1:
            raise ConfigurationError(
                "on_train_batch_start has returned -1, and an elastic training cannot leave out the rest of an epoch; "
                "set trainer.should_stop, or limit_train_batches"
            )
        self.notes.samples = run._context.loading.samples() or 0
        for batch in step:
            results, self._results = self._results, self.notes
            try:
                self._compute(step, batch, batches / accumulated)
            finally:
                self._results = results

    def _compute(self, step: Step, data: Any, share: float) -> None:
        trainer, connector = self.trainer, self.trainer._logger_connector
        of_hooks = connector._current_fx
        self.notes.begin()
        batch = trainer.precision_plugin.convert_input(data)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
        arguments = self._build_kwargs(OrderedDict(), batch, self.batch_idx)
        output = call._call_strategy_hook(trainer, "training_step", *arguments.values())
        loss = ClosureResult.from_training_step_output(output).closure_loss
        if loss is None:
            raise ConfigurationError(
                "training_step has returned None, and a micro-batch cannot be left out; return a loss of 0 * its sum"
            )
        call._call_strategy_hook(trainer, "backward", loss if share == 1 else loss * share, trainer.optimizers[0])
        step.log(**{LOSS: loss, **self.notes.values})
        connector._current_fx = of_hooks

    def end(self, step: Step, *, last: bool) -> None:
        trainer, progress = self.trainer, self.batch_progress
        stepped = self.automatic_optimization.optim_progress.optimizer.step
        stepped.increment_ready()
        stepped.increment_completed()
        batches = progress.current.ready - progress.current.processed
        for behind in range(batches):
            progress.increment_processed()
            if behind:
                progress.increment_completed()  # all but the last one, whose hooks are still to come
        self.notes.tell(self._results, step.metrics, trainer.lightning_module.device)
        self.update_lr_schedulers("step", update_plateau_schedulers=False)
        if self._num_ready_batches_reached():
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        outputs = {"loss": torch.tensor(step.metrics[LOSS], device=trainer.lightning_module.device)}
        call._call_callback_hooks(trainer, "on_train_batch_end", outputs, None, self.batch_idx)
        call._call_lightning_module_hook(trainer, "on_train_batch_end", outputs, None, self.batch_idx)
        trainer._logger_connector.on_batch_end()
        progress.increment_completed()
        trainer._logger_connector.update_train_step_metrics()
        self.on_advance_end(None)
