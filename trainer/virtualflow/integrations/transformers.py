"""Hugging Face's ``Trainer`` over virtual nodes: what it does around a step stays its own, the steps are ours.

The script keeps its ``TrainingArguments``, callbacks and metrics. A global batch has
``per_device_train_batch_size * gradient_accumulation_steps`` samples on any number of workers. Every worker runs the
script, and calls the callbacks; the leader alone writes.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback
from transformers.integrations.neftune import deactivate_neftune
from transformers.optimization import GreedyLR
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import TrainOutput, speed_metrics

from virtualflow._arguments import checked_class
from virtualflow.data import MicroBatch
from virtualflow.errors import ConfigurationError
from virtualflow.integrations.loaders import (
    fsdp_is_asked_for,
    order_of,
    refuse_saving,
    seed_collate,
    virtual_nodes_of,
)
from virtualflow.protocol.settings import ENV_COORDINATOR, Redundancy
from virtualflow.worker.entry import elastic
from virtualflow.worker.evaluation import evaluate_in_parts
from virtualflow.worker.options import Sharded
from virtualflow.worker.run import Run
from virtualflow.worker.step import Step

# What ``ElasticTrainer`` needs beside the ``Trainer``: what travels to joiners, which data, and what is refused.

STATE = "trainer_state.json"
"""The last file of a checkpoint that the ``Trainer`` writes."""

# --- what travels with the model --------------------------------------------------------------------------------------

_OWN = {"is_local_process_zero", "is_world_process_zero", "stateful_callbacks"}
"""Of a ``TrainerState``, what is of one process."""
_TIMES = ("_runtime", "_per_second")


class Story:
    """How far a trainer has come, for joiners and checkpoints: its state, and that of its callbacks."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, str]:
        """Return it, the same on all workers: without the times that each has taken."""
        return self._told(_OWN)

    def result_dict(self) -> dict[str, str]:
        """Return it without what follows from where this run writes."""
        return self._told(_OWN | {"best_model_checkpoint"})

    def _told(self, left_out: Set[str]) -> dict[str, str]:
        trainer = self._trainer
        state = {name: value for name, value in asdict(trainer.state).items() if name not in left_out}
        state["log_history"] = [
            {name: value for name, value in entry.items() if not name.endswith(_TIMES)}
            for entry in state["log_history"]
        ]
        callbacks = {name: each.state()["attributes"] for name, each in self._callbacks.items()}
        losses = [trainer._tr_loss.item(), trainer._total_loss_scalar, trainer._globalstep_last_logged]
        return {"told": json.dumps({"state": state, "callbacks": callbacks, "losses": losses}, sort_keys=True)}

    def load_state_dict(self, saved: Mapping[str, str]) -> None:
        trainer, told = self._trainer, json.loads(saved["told"])
        callbacks = self._callbacks
        pairs = [(callbacks[name], attributes) for name, attributes in told["callbacks"].items()]
        for holder, values in [(trainer.state, told["state"]), *pairs]:
            for name, value in values.items():
                setattr(holder, name, value)
        unlogged, trainer._total_loss_scalar, trainer._globalstep_last_logged = told["losses"]
        trainer._tr_loss.fill_(unlogged)

    @property
    def _callbacks(self) -> dict[str, ExportableState]:
        found: dict[str, ExportableState] = {}
        for each in self._trainer.callback_handler.callbacks:
            if isinstance(each, ExportableState):
                count = sum(type(other) is type(each) for other in found.values())
                found[f"{type(each).__name__} {count}"] = each
        return found


# --- data -------------------------------------------------------------------------------------------------------------


class Batches(torch.utils.data.Dataset[Any]):
    """The batches of a loader, by number, collated."""

    def __init__(self, loader: Any) -> None:
        self._dataset, self._indices = loader.dataset, list(loader.batch_sampler)
        self._collate = seed_collate(loader.collate_fn)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, number: int) -> Any:
        indices = self._indices[number]
        if hasattr(self._dataset, "__getitems__"):
            return self._collate(self._dataset.__getitems__(indices))
        return self._collate([self._dataset[index] for index in indices])


def take_only(batches: list[Any]) -> Any:
    """A batch of one batch."""
    (batch,) = batches
    return batch


def on_host(nest: Any) -> Any:
    if isinstance(nest, Tensor):
        return nest.detach().cpu()
    if isinstance(nest, Mapping):
        return {name: on_host(value) for name, value in nest.items()}
    return tuple(map(on_host, nest)) if isinstance(nest, tuple | list) else nest


# --- decisions --------------------------------------------------------------------------------------------------------


def newest_checkpoint(directory: Path) -> str:
    """The newest complete checkpoint in a directory: whoever writes one may be killed in the middle of it."""
    names = (re.fullmatch(r"checkpoint-(\d+)", path.parent.name) for path in directory.glob(f"checkpoint-*/{STATE}"))
    steps = [int(name[1]) for name in names if name]
    if not steps:
        raise ConfigurationError(f"{directory} has no complete checkpoint; leave out resume_from_checkpoint")
    return str(directory / f"checkpoint-{max(steps)}")


def overrides(callback: TrainerCallback, *events: str) -> bool:
    return any(getattr(type(callback), event) is not getattr(TrainerCallback, event) for event in events)


def refuse(args: Any, callbacks: Sequence[Any], dataset: Any, trial: Any) -> None:
    """Check that a training can be elastic."""
    for given, sentence in (
        (
            args.world_size > 1 or args.n_gpu > 1,
            "the script was started as a distributed one, or sees several GPUs; start it with virtualflow run or the "
            "operator, and let each worker see one GPU",
        ),
        (args.fp16, "fp16 needs a scaler that ElasticTrainer does not have; use bf16=True"),
        (args.deepspeed, "deepspeed divides the model by itself; leave it out"),
        (
            args.fsdp or fsdp_is_asked_for(),
            'fsdp divides the model over processes that stay; leave it out, and pass shard="parameters" to '
            "ElasticTrainer",
        ),
        (args.auto_find_batch_size, "auto_find_batch_size would change the result; set per_device_train_batch_size"),
        (args.eval_on_start, "eval_on_start is before a joiner's first step; call trainer.evaluate() before train()"),
        (args.push_to_hub, "push_to_hub would push from every worker; call it for what was saved, when all is done"),
        (args.ignore_data_skip, "ignore_data_skip would use samples twice; leave it out"),
        (
            args.include_num_input_tokens_seen not in (False, "no"),
            "include_num_input_tokens_seen counts the tokens of one worker; leave it out",
        ),
        (trial is not None, "a search for hyperparameters trains several models; start a job for each"),
        (
            not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")),
            "ElasticTrainer needs a dataset with __len__ and __getitem__; for a stream write the loop with vf.elastic",
        ),
    ):
        if given:
            raise ConfigurationError(sentence)
    for callback in callbacks:
        for event in ("on_substep_end", "on_pre_optimizer_step"):
            if overrides(callback, event):
                raise ConfigurationError(
                    f"{type(callback).__name__} has {event}, which has no place between workers: micro-batches may be "
                    "computed again, and the gradient is applied when it arrives; use on_optimizer_step or on_step_end"
                )


@checked_class("ElasticTrainer")
class ElasticTrainer(Trainer):  # type: ignore[misc]  # seen as Any: it is an extra
    """A ``Trainer`` whose workers may change at any step.

    Alone (``python train.py``), the process computes all virtual nodes. Under ``virtualflow run`` or the operator, each
    worker computes those that it is assigned.

    Args:
        virtual_nodes: equal slices of a global batch. Without it, ``gradient_accumulation_steps`` where that is above
            1, else 8 or what divides the batch; the command line or the manifest overrides it.
        shard: ``"parameters"``: each worker keeps its share of the model alone, as ``vf.elastic`` has it; only the
            library's checkpoints have all of it.
        redundancy: who else has a share, as ``vf.elastic`` has it.
        reduce_dtype: in which gradients of narrower types are summed up, likewise.
        *arguments: those of ``Trainer``.
        **options: likewise.
    """

    state: Any
    control: Any
    lr_scheduler: Any
    _created_lr_scheduler: bool

    def __init__(
        self,
        *arguments: Any,
        virtual_nodes: int | None = None,
        shard: Sharded | None = None,
        redundancy: Redundancy = "peer",
        reduce_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        self._leads = ENV_COORDINATOR not in os.environ
        self._run: Run | None = None
        self._virtual_nodes, self._reduce_dtype = virtual_nodes, reduce_dtype
        self._shard, self._redundancy = shard, redundancy
        super().__init__(*arguments, **options)

    # --- training -----------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **options: Any) -> TrainOutput:
        """As ``Trainer.train``. ``resume_from_checkpoint=True`` goes on from the newest checkpoint that is complete."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = newest_checkpoint(Path(self.args.output_dir))
        return super().train(resume_from_checkpoint, *arguments, **options)

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        args = self.args
        refuse(args, self.callback_handler.callbacks, self.train_dataset, trial)
        self.accelerator.free_memory()
        loader = self.get_train_dataloader()
        epochs, steps_per_epoch, _, samples, batch, batches, max_steps = self.set_initial_training_values(args, loader)
        self._init_training_state(max_steps, steps_per_epoch, epochs, resume_from_checkpoint, trial)
        self._prepare_for_training(max_steps, loader, resume_from_checkpoint)
        accumulated, began = args.gradient_accumulation_steps, time.time()
        self._initial_global_step = self._globalstep_last_logged = self.state.global_step
        self._tr_loss, self._total_loss_scalar = torch.zeros((), dtype=torch.float64), 0.0
        self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
        run = elastic(
            self.model,
            self.optimizer,
            loader.dataset,
            batch_size=batch,
            steps=max_steps,
            virtual_nodes=self._virtual_nodes or virtual_nodes_of(batch, accumulated),
            shard=self._shard,
            redundancy=self._redundancy,
            reduce_dtype=self._reduce_dtype,
            seed=args.seed,
            sampler=order_of(loader, len(loader) if args.dataloader_drop_last else None),
            scheduler=self.lr_scheduler,
            scheduler_interval="manual",
            clip_grad_norm=args.max_grad_norm or None,
            state={"trainer": Story(self)},
            device=None if args.device.type == "cpu" else args.device,
            collate_fn=seed_collate(loader.collate_fn),
            num_workers=args.dataloader_num_workers,
        )
        if args.save_strategy != "no":
            refuse_saving(run, 'set save_strategy="no"')
        with run:
            if resume_from_checkpoint is not None:
                run._context.training.begin_behind(self.state.global_step, steps_per_epoch)
            self._run, first = run, True
            try:
                for step in run:
                    self._begin_step(step, steps_per_epoch, first=first)
                    for inputs in step:
                        self._compute(step, inputs)
                    if run.completed_steps < step.number:
                        continue  # it goes on from behind the last step
                    first = False
                    self._end_step(step, batches, began, ignore_keys_for_eval)
                    if self.control.should_training_stop and step.number < max_steps:
                        break
                self._leads = run.leader
            finally:
                self._run = None
        return self._finish(began, samples)

    def _prepare_for_training(self, max_steps: int, loader: Any, resume_from_checkpoint: str | None) -> Any:
        """As ``Trainer`` does it, but that the optimizer stays as it is: the library steps it."""
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_optimizer()
        prepared = self.accelerator.prepare(self.model)
        if prepared is not self.model:
            raise ConfigurationError(
                f"accelerate has wrapped the model in a {type(prepared).__name__}, which ElasticTrainer cannot train; "
                "leave out what wraps it, such as torch_compile"
            )
        self.model_wrapped = self.model
        self.create_scheduler(num_training_steps=max_steps)
        self._load_optimizer_and_scheduler(resume_from_checkpoint)
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        handler.train_dataloader = loader
        return self.model, loader

    def _begin_step(self, step: Step, steps_per_epoch: int, *, first: bool) -> None:
        handler = self.callback_handler
        if any(overrides(callback, "on_step_begin", "on_epoch_begin") for callback in handler.callbacks):
            _ = step.number  # a joiner enters now, so that they see where all are, and does not warm up
        if first or self.state.global_step % steps_per_epoch == 0:
            self.control = handler.on_epoch_begin(self.args, self.state, self.control)
        self.control = handler.on_step_begin(self.args, self.state, self.control)

    def _compute(self, step: Step, inputs: Any) -> None:
        _, items = self.get_batch_samples(iter([inputs]), 1, self.args.device)
        if items is not None:
            step.weight(items)
        self.current_gradient_accumulation_steps = 1
        step.log(loss=self.training_step(self.model, inputs, items))

    def _end_step(self, step: Step, batches: int, began: float, ignore_keys_for_eval: list[str] | None) -> None:
        """What the ``Trainer`` does when the optimizer has stepped: on every worker, in the same order."""
        args, state, handler = self.args, self.state, self.callback_handler
        self._note_leader()
        self.control = handler.on_optimizer_step(args, state, self.control)
        learning_rate = self._get_learning_rate()
        if not isinstance(self.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau | GreedyLR):
            self.lr_scheduler.step()
        loss = step.metrics["loss"]
        if args.logging_nan_inf_filter and not math.isfinite(loss):
            self._tr_loss += self._tr_loss / (1 + state.global_step - self._globalstep_last_logged)
        else:
            self._tr_loss += loss
        steps_per_epoch = math.ceil(batches / args.gradient_accumulation_steps)
        state.global_step = step.number
        made = step.number - step.epoch * steps_per_epoch
        state.epoch = step.epoch + min(made * args.gradient_accumulation_steps, batches) / batches
        self.control = handler.on_step_end(args, state, self.control)

        def tell() -> None:
            self._maybe_log_save_evaluate(
                self._tr_loss,
                None,
                self.model,
                None,
                step.epoch,
                ignore_keys_for_eval,
                began,
                learning_rate=learning_rate,
            )

        tell()
        if self.control.should_epoch_stop:
            raise ConfigurationError(
                "a callback has set should_epoch_stop, and an elastic training cannot leave out the rest of an epoch; "
                "set should_training_stop, or give a dataset of another length"
            )
        if made == steps_per_epoch or self.control.should_training_stop:
            self.control = handler.on_epoch_end(args, state, self.control)
            tell()

    def _note_leader(self) -> None:
        """Find out who leads. Callbacks that write do it where the state says so, and begin when it comes to say so."""
        if self._run is None:
            return
        led, self._leads = self._leads, self._run.leader
        self.state.is_local_process_zero = self.state.is_world_process_zero = self._leads
        if self._leads and not led:
            stops = self.control.should_training_stop
            self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
            self.control.should_training_stop = stops or self.control.should_training_stop

    def _finish(self, began: float, samples: float) -> TrainOutput:
        """The end of the ``Trainer``'s training, when all workers have made the last step."""
        state, made = self.state, self.state.global_step - self._initial_global_step
        self._total_loss_scalar += self._tr_loss.item()
        train_loss = self._total_loss_scalar / max(made, 0.001)
        metrics = speed_metrics("train", began, num_samples=samples * made / max(state.max_steps, 1), num_steps=made)
        metrics |= {"total_flos": state.total_flos, "train_loss": train_loss}
        self._memory_tracker.stop_and_update_metrics(metrics)
        self.log(metrics)
        if self.args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._load_best_model()
        self.control = self.callback_handler.on_train_end(self.args, state, self.control)
        if self.neftune_noise_alpha is not None:
            deactivate_neftune(self.model, self.neftune_hook_handle, self.accelerator)
        self.is_in_train = False
        return TrainOutput(state.global_step, train_loss, metrics)

    # --- what the leader alone writes ---------------------------------------------------------------------------------

    def is_world_process_zero(self) -> bool:
        return self._leads

    def is_local_process_zero(self) -> bool:
        return self._leads

    def save_model(self, *arguments: Any, **options: Any) -> None:
        """As ``Trainer.save_model``, by the leader."""
        if self._leads:
            super().save_model(*arguments, **options)

    def save_state(self) -> None:
        """As ``Trainer.save_state``, by the leader."""
        if self._leads:
            super().save_state()

    def _save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        state = self.state
        self._note_leader()  # the former one may have been lost while all evaluated
        if self._leads:
            super()._save_checkpoint(*arguments, **options)
        if state.best_global_step:
            state.best_model_checkpoint = os.path.join(self.args.output_dir, f"checkpoint-{state.best_global_step}")

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        """As ``Trainer.evaluation_loop``; during a training all workers share the batches, and have all results."""
        if self._run is None or dataloader.batch_sampler is None:
            return super().evaluation_loop(dataloader, description, prediction_loss_only, *arguments, **options)
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        ignore_keys = arguments[0] if arguments else options.get("ignore_keys")

        def predict(batch: MicroBatch) -> Any:
            return on_host(self.prediction_step(self.model, batch.data, loss_only, ignore_keys=ignore_keys))

        found = evaluate_in_parts(
            self.model, Batches(dataloader), predict, batch_size=self._run._request.virtual_nodes, collate_fn=take_only
        )
        with self._replaying(iter(found)):
            return super().evaluation_loop(dataloader, description, prediction_loss_only, *arguments, **options)

    @contextmanager
    def _replaying(self, found: Iterator[Any]) -> Iterator[None]:
        self.__dict__["prediction_step"] = lambda *arguments, **options: next(found)
        try:
            yield
        finally:
            del self.__dict__["prediction_step"]
