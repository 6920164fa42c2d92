"""Hugging Face's ``Accelerator`` over virtual nodes: the script keeps its loop, the steps are ours (``inverted_loop``).

A global batch has ``batch_size * gradient_accumulation_steps`` samples on any number of workers. Every worker runs the
script; the leader is its main process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import send_to_device
from torch import Tensor, nn

from virtualflow._arguments import checked_class
from virtualflow.atomic_file import write_whole
from virtualflow.errors import ConfigurationError
from virtualflow.integrations.inverted_loop import InvertedLoop
from virtualflow.integrations.loaders import (
    fsdp_is_asked_for,
    lend,
    options_of,
    order_of,
    refuse_streams,
    virtual_nodes_of,
)
from virtualflow.protocol.settings import Redundancy
from virtualflow.worker.entry import elastic
from virtualflow.worker.options import Sharded
from virtualflow.worker.run import Run

PLACE = "virtualflow.json"
"""The last file that ``save_state`` writes: how far the training was."""


@checked_class("ElasticAccelerator")
class ElasticAccelerator(Accelerator):  # type: ignore[misc]  # seen as Any: it is an extra
    """An ``Accelerator`` whose workers may change at any step; the loop over the epochs is ``epochs(count)``.

    Alone (``python train.py``), the process computes all virtual nodes. Under ``virtualflow run`` or the operator, each
    worker computes those that it is assigned.

    Args:
        virtual_nodes: equal slices of a global batch. Without it, ``gradient_accumulation_steps`` where that is above
            1, else 8 or what divides the batch; the command line or the manifest overrides it.
        shard: ``"parameters"``: each worker keeps its share of the model alone, as ``vf.elastic`` has it; only the
            library's checkpoints have all of it.
        redundancy: who else has a share, as ``vf.elastic`` has it.
        reduce_dtype: in which gradients of narrower types are summed up, likewise.
        max_grad_norm: what ``clip_grad_norm_`` is called with.
        max_grad_value: what ``clip_grad_value_`` is called with.
        seed: what all random streams follow from.
        *arguments: those of ``Accelerator``.
        **options: likewise.

    Raises:
        ConfigurationError: something of it cannot be elastic.
    """

    def __init__(
        self,
        *arguments: Any,
        virtual_nodes: int | None = None,
        shard: Sharded | None = None,
        redundancy: Redundancy = "peer",
        reduce_dtype: torch.dtype | None = None,
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        if options.get("fsdp_plugin") is not None or fsdp_is_asked_for():
            raise ConfigurationError(
                "FSDP divides the model over processes that stay; leave out fsdp_plugin and ACCELERATE_USE_FSDP, and "
                'pass shard="parameters" to ElasticAccelerator'
            )
        self._loop = InvertedLoop(self._make_run, self._lend)
        self._shard, self._redundancy, self._reduce_dtype = shard, redundancy, reduce_dtype
        self._virtual_nodes, self._seed = virtual_nodes, seed
        self._max_grad_norm, self._max_grad_value = max_grad_norm, max_grad_value
        self._loader: _Loader | None = None
        self._start_trackers: Callable[[], None] | None = None
        super().__init__(*arguments, **options)
        state = self.gradient_state
        for given, sentence in (
            (
                self.use_distributed,
                "the script was started as a distributed one; start it with virtualflow run or the operator, and not "
                "with accelerate launch, and let each worker see one GPU",
            ),
            (
                self.scaler is not None,
                'mixed_precision="fp16" needs a scaler that ElasticAccelerator does not have; use "bf16"',
            ),
            (
                not self.step_scheduler_with_optimizer,
                "step_scheduler_with_optimizer=False would step the scheduler for each micro-batch of a worker; leave "
                "it out",
            ),
            (not state.sync_with_dataloader, "sync_with_dataloader=False lets batches reach over epochs; leave it out"),
        ):
            if given:
                raise ConfigurationError(sentence)
        state.plugin_kwargs["adjust_scheduler"] = False  # it counts micro-batches, of which workers see different ones

    # --- the loop -----------------------------------------------------------------------------------------------------

    def epochs(self, count: int, steps: int | None = None) -> Iterator[int]:
        """Yield the epochs that remain, in place of ``range(count)``: a worker that joins begins with the present one.

        Args:
            count: of the whole training.
            steps: the most optimizer updates of it.
        """
        return self._loop.epochs(count, steps)

    @property
    def run(self) -> Run:
        return self._loop.run

    def _do_sync(self) -> None:
        """For ``accumulate``: what a step accumulates is the library's."""

    def backward(self, loss: Tensor, **options: Any) -> None:
        """As ``Accelerator.backward``; the loss of a step, over all its samples, is in ``run.metrics``."""
        self._loop.refuse_behind_step()
        step = self._loop.step_under_way
        if step is not None:
            step.log(loss=loss)
        share = self._micro_batches() / self.gradient_accumulation_steps
        (loss if share == 1 else loss * share).backward(**options)

    def _micro_batches(self) -> int:
        """How many batches of its loader the present step has: an ``Accelerator`` divides by those of a whole one."""
        samples = self.run._context.loading.samples()
        assert samples is not None
        assert self._loader is not None
        return math.ceil(samples / self._loader.batch_size)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> None:
        """See that the gradients are clipped so, when those of all workers are there; nobody has their norm before.

        Raises:
            ConfigurationError: the constructor was not told.
        """
        if norm_type != 2 or max_norm != self._max_grad_norm:
            raise ConfigurationError(
                f"clip_grad_norm_ is called with max_norm={max_norm}, norm_type={norm_type}; gradients are clipped "
                f"when those of all workers are there, by the norm of all of them: pass max_grad_norm={max_norm} to "
                "ElasticAccelerator, and leave norm_type at 2"
            )

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Likewise, by value.

        Raises:
            ConfigurationError: the constructor was not told.
        """
        if clip_value != self._max_grad_value:
            raise ConfigurationError(
                f"clip_grad_value_ is called with {clip_value}; gradients are clipped when those of all workers are "
                f"there: pass max_grad_value={clip_value} to ElasticAccelerator"
            )

    def skip_first_batches(self, *arguments: Any, **options: Any) -> NoReturn:
        """Refuse: ``load_state`` goes on where the state was saved.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError("skip_first_batches would skip samples twice: load_state goes on behind its step")

    # --- what is prepared ---------------------------------------------------------------------------------------------

    def prepare_data_loader(self, data_loader: Any, *arguments: Any, **options: Any) -> Any:
        """As the ``Accelerator``'s; the first loader is that of the training, of all others each worker gets all."""
        if isinstance(data_loader, _Loader):
            return data_loader
        prepared = super().prepare_data_loader(data_loader, *arguments, **options)
        if self._loader is not None:
            return prepared
        refuse_streams(prepared.dataset, "the first loader that ElasticAccelerator.prepare gets")
        self._dataloaders.remove(prepared)
        self._loader = _Loader(self, prepared, data_loader.drop_last)
        return self._loader

    def prepare_optimizer(self, optimizer: Any, *arguments: Any, **options: Any) -> Any:
        """As the ``Accelerator``'s; its ``step`` is the library's.

        Raises:
            ConfigurationError: it is the second one.
        """
        if self._optimizers and optimizer not in self._optimizers:
            raise ConfigurationError(
                "ElasticAccelerator steps one optimizer; give it all parameters in groups, or write the loop with "
                "vf.elastic, which takes several"
            )
        prepared = super().prepare_optimizer(optimizer, *arguments, **options)
        if not isinstance(prepared, _Optimizer):
            prepared = self._optimizers[-1] = _Optimizer(self, prepared)
        return prepared

    def prepare_model(self, model: nn.Module, *arguments: Any, **options: Any) -> nn.Module:
        """As the ``Accelerator``'s.

        Raises:
            ConfigurationError: it wraps the model.
        """
        prepared: nn.Module = super().prepare_model(model, *arguments, **options)
        if prepared is not model:
            raise ConfigurationError(
                f"accelerate has wrapped the model in a {type(prepared).__name__}, which ElasticAccelerator cannot "
                "train; leave out what wraps it, such as a dynamo_backend"
            )
        return model

    def free_memory(self, *objects: Any) -> Any:
        self._loader = None
        return super().free_memory(*objects)

    def _make_run(self, epochs: int, steps: int | None) -> Run:
        if self._loader is None or not self._optimizers:
            raise ConfigurationError("prepare the model, its optimizer and its DataLoader before epochs() begins")
        loader, optimizer = self._loader, self._optimizers[0].optimizer
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        models = [model for model in self._models if any(id(each) in stepped for each in model.parameters())]
        if len(models) != 1:
            raise ConfigurationError(
                f"the optimizer has parameters of {len(models)} prepared models, and ElasticAccelerator trains one; "
                "make them one module, and prepare that"
            )
        accumulated = self.gradient_accumulation_steps
        batch = loader.batch_size * accumulated
        return elastic(
            models[0],
            optimizer,
            loader.dataset,
            batch_size=batch,
            epochs=epochs,
            steps=steps,
            virtual_nodes=self._virtual_nodes or virtual_nodes_of(batch, accumulated),
            shard=self._shard,
            redundancy=self._redundancy,
            reduce_dtype=self._reduce_dtype,
            seed=self._seed,
            sampler=order_of(loader.prepared, len(loader) if loader.drop_last else None),
            scheduler=[each.scheduler for each in self._schedulers] or None,
            scheduler_interval="manual",
            clip_grad_norm=self._max_grad_norm,
            clip_grad_value=self._max_grad_value,
            state={"accelerator": _Count(self)}
            | {f"registered {number}": each for number, each in enumerate(self._custom_objects)},
            device=None if self.device.type == "cpu" else self.device,
            **options_of(loader.prepared),
        )

    def _lend(self) -> Any:
        assert self._loader is not None
        return send_to_device(lend(self._loader.prepared, self.run._context.request.micro_batch), self.device)

    # --- what the leader alone writes ---------------------------------------------------------------------------------

    @property
    def is_main_process(self) -> bool:
        return self._loop.leader

    @property
    def is_local_main_process(self) -> bool:
        return self._loop.leader

    @property
    def is_last_process(self) -> bool:
        return self._loop.leader

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """As the ``Accelerator``'s: a function that the leader runs."""
        assert function is not None

        @wraps(function)
        def led(*arguments: Any, **options: Any) -> Any:
            return function(*arguments, **options) if self._loop.leader else None

        return led

    on_local_main_process = on_main_process
    on_last_process = on_main_process

    def print(self, *arguments: Any, **options: Any) -> None:
        """As the ``Accelerator``'s, by the leader."""
        if self._loop.leader:
            super().print(*arguments, **options)

    def save(self, *arguments: Any, **options: Any) -> None:
        """As the ``Accelerator``'s, by the leader."""
        if self._loop.leader:
            super().save(*arguments, **options)

    def save_model(self, *arguments: Any, **options: Any) -> None:
        """As the ``Accelerator``'s, by the leader."""
        if self._loop.leader:
            super().save_model(*arguments, **options)

    def init_trackers(self, *arguments: Any, **options: Any) -> None:
        """As the ``Accelerator``'s, by each leader when it first logs."""
        self._start_trackers = partial(super().init_trackers, *arguments, **options)

    def log(self, *arguments: Any, **options: Any) -> None:
        """As the ``Accelerator``'s, by the leader."""
        if self._loop.leader:
            start, self._start_trackers = self._start_trackers, None
            if start is not None:
                start()
            super().log(*arguments, **options)

    def end_training(self) -> None:
        """As the ``Accelerator``'s; the training is over, also if the script has left its loop."""
        self._loop.finish()
        super().end_training()

    # --- states -------------------------------------------------------------------------------------------------------

    def save_state(self, *arguments: Any, **options: Any) -> str | None:
        """As the ``Accelerator``'s, by the leader; where to, or ``None``.

        Raises:
            ConfigurationError: it is called in the middle of a step.
        """
        self._loop.refuse_before_step("save_state()")
        if not self._loop.leader:
            self.project_configuration.iteration += 1
            return None
        where: str = super().save_state(*arguments, **options)
        write_whole(Path(where) / PLACE, json.dumps(self._loop.place).encode())
        return where

    def load_state(self, input_dir: str | None = None, *arguments: Any, **options: Any) -> None:
        """As the ``Accelerator``'s, before ``epochs``, which then begins behind the step of the state.

        Without ``input_dir``, of the states in the project's folder the newest that is complete.

        Raises:
            ConfigurationError: there is none, or it is not one of ``save_state``.
        """
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            folders = Path(self.project_dir, "checkpoints").glob(f"checkpoint_*/{PLACE}")
            found = sorted((path.parent for path in folders), key=lambda path: int(path.name.rpartition("_")[2]))
            if not found:
                raise ConfigurationError(f"{self.project_dir} has no complete state; leave out load_state")
            input_dir = str(found[-1])
        super().load_state(input_dir, *arguments, **options)
        try:
            self._loop.begin_at(json.loads((Path(input_dir or "") / PLACE).read_bytes()))
        except FileNotFoundError:
            raise ConfigurationError(
                f"{input_dir} has no {PLACE}, so nobody knows how far it is; load what ElasticAccelerator.save_state "
                "has written, or the weights alone before the optimizer is made"
            ) from None


class _Loader:
    """What stands for the training's ``DataLoader``: this worker's micro-batches of the present epoch."""

    def __init__(self, accelerator: ElasticAccelerator, prepared: Any, drop_last: bool) -> None:
        self._accelerator, self.prepared, self.drop_last = accelerator, prepared, drop_last
        self.dataset = prepared.dataset
        self.batch_size: int = getattr(prepared.batch_sampler, "batch_size", 0)

    def __len__(self) -> int:
        return len(self.prepared)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the library says which epoch it is."""

    def __iter__(self) -> Iterator[Any]:
        for batch in self._accelerator._loop.micro_batches():
            self._accelerator.gradient_state._set_sync_gradients(True)
            yield batch


class _Optimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """The optimizer, stepped by the library. Behind ``step``, ``sync_gradients`` says whether it was."""

    def __init__(self, accelerator: ElasticAccelerator, prepared: Any) -> None:
        super().__init__(prepared.optimizer, device_placement=False)
        self._accelerator = accelerator

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Ask for the next micro-batch: the step may be made by that."""
        loop = self._accelerator._loop
        loop.step(closure=closure is not None)
        self.gradient_state._set_sync_gradients(loop.stepped)


class _Count:
    """How many states were saved: joiners must number theirs alike."""

    def __init__(self, accelerator: ElasticAccelerator) -> None:
        self._configuration = accelerator.project_configuration

    def state_dict(self) -> dict[str, int]:
        return {"iteration": self._configuration.iteration}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        self._configuration.iteration = saved["iteration"]
