"""A strategy of Lightning Fabric over virtual nodes: the script keeps its loop, the steps are ours (``inverted_loop``).

A batch of the loader is the global batch, on any number of workers. Every worker runs the script; the leader is
``is_global_zero``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.fabric.strategies import SingleDeviceStrategy
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.optim import Optimizer

from virtualflow._arguments import checked_class
from virtualflow.errors import ConfigurationError
from virtualflow.integrations.inverted_loop import InvertedLoop
from virtualflow.integrations.loaders import lend, options_of, order_of, refuse_streams, virtual_nodes_of
from virtualflow.protocol.settings import Redundancy
from virtualflow.worker.entry import elastic
from virtualflow.worker.options import Sharded
from virtualflow.worker.run import Run

PLACE = "virtualflow"
"""What a checkpoint of ``fabric.save`` has beside the script's own: how far the training was."""


@checked_class("ElasticStrategy")
class ElasticStrategy(SingleDeviceStrategy):  # type: ignore[misc]  # seen as Any: it is an extra
    """A strategy whose workers may change at any step; the loop over the epochs is ``epochs(count)``.

    Alone (``python train.py``), the process computes all virtual nodes. Under ``virtualflow run`` or the operator, each
    worker computes those that it is assigned.

    Args:
        device: of this worker; without it, the first GPU that it sees, or the CPU.
        virtual_nodes: equal slices of a global batch. Without it, 8 or what divides the batch; the command line or the
            manifest overrides it.
        shard: ``"parameters"``: each worker keeps its share of the model alone, as ``vf.elastic`` has it; only the
            library's checkpoints have all of it.
        redundancy: who else has a share, as ``vf.elastic`` has it.
        reduce_dtype: in which gradients of narrower types are summed up, likewise.
        max_norm: what ``fabric.clip_gradients`` is called with.
        clip_val: likewise.
        seed: what all random streams follow from.
        state: what else is to travel to joiners, by name: whatever has ``state_dict`` and ``load_state_dict``.
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        *,
        virtual_nodes: int | None = None,
        shard: Sharded | None = None,
        redundancy: Redundancy = "peer",
        reduce_dtype: torch.dtype | None = None,
        max_norm: float | None = None,
        clip_val: float | None = None,
        seed: int = 0,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._loop = InvertedLoop(self._make_run, self._lend)
        super().__init__(device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
        self._virtual_nodes, self._seed, self._companions = virtual_nodes, seed, state
        self._max_norm, self._clip_val = max_norm, clip_val
        self._shard, self._redundancy, self._reduce_dtype = shard, redundancy, reduce_dtype
        self._schedulers: list[Any] = []
        self._loader: Any = None
        self._module: nn.Module | None = None
        self._optimizer: Optimizer | None = None
        self._tell_rank()

    # --- the loop -----------------------------------------------------------------------------------------------------

    def epochs(self, count: int, steps: int | None = None, *, scheduler: Any = None) -> Iterator[int]:
        """Yield the epochs that remain, in place of ``range(count)``: a worker that joins begins with the present one.

        Args:
            count: of the whole training.
            steps: the most optimizer updates of it.
            scheduler: a learning rate scheduler, or a list of them. From now on its ``step`` does something only behind
                a step that was made.
        """
        given = scheduler if isinstance(scheduler, list | tuple) else [scheduler]
        self._schedulers += [self._tie(each) for each in given if each is not None]
        return self._loop.epochs(count, steps)

    @property
    def run(self) -> Run:
        return self._loop.run

    @property
    def stepped(self) -> bool:
        """Whether the script stands behind a step that was made, and not between its micro-batches."""
        return self._loop.stepped

    def backward(self, tensor: Tensor, module: nn.Module | None, *arguments: Any, **options: Any) -> None:
        """As any strategy's; the loss of a step, over all its samples, is in ``run.metrics``."""
        self._loop.refuse_behind_step()
        step = self._loop.step_under_way
        if step is not None:
            step.log(loss=tensor)
        super().backward(tensor, module, *arguments, **options)

    def optimizer_step(self, optimizer: Any, **options: Any) -> None:
        """Ask for the next micro-batch: the step may be made by that.

        Raises:
            ConfigurationError: there is a closure.
        """
        self._loop.step(closure=bool(options))
        self._tell_rank()

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> None:
        """See that the gradients are clipped so, when those of all workers are there; nobody has their norm before.

        Raises:
            ConfigurationError: the constructor was not told.
        """
        if norm_type != 2 or max_norm != self._max_norm:
            raise ConfigurationError(
                f"clip_gradients is called with max_norm={max_norm}, norm_type={norm_type}; gradients are clipped when "
                f"those of all workers are there, by the norm of all of them: pass max_norm={max_norm} to "
                "ElasticStrategy, and leave norm_type at 2"
            )

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Likewise, by value.

        Raises:
            ConfigurationError: the constructor was not told.
        """
        if clip_val != self._clip_val:
            raise ConfigurationError(
                f"clip_gradients is called with clip_val={clip_val}; gradients are clipped when those of all workers "
                f"are there: pass clip_val={clip_val} to ElasticStrategy"
            )

    # --- what is set up -----------------------------------------------------------------------------------------------

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Remember what is trained.

        Raises:
            ConfigurationError: there are several optimizers, or was one before.
        """
        if self._optimizer is not None or len(optimizers) != 1:
            raise ConfigurationError(
                "ElasticStrategy trains one module with one optimizer, which fabric.setup(module, optimizer) gets "
                "together; give it all parameters in groups, or write the loop with vf.elastic"
            )
        self._module, self._optimizer = module, optimizers[0]
        if scheduler is not None:
            self._schedulers.append(self._tie(scheduler))
        return module, optimizers, scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Refuse: an optimizer comes with its module.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError("ElasticStrategy needs the module with its optimizer: fabric.setup(module, optimizer)")

    def process_dataloader(self, dataloader: Any) -> Any:
        """Give what stands for the training's loader, which is the first one; of all others each worker gets all."""
        if self._loader is not None:
            return dataloader
        refuse_streams(dataloader.dataset, "the first loader that fabric.setup_dataloaders gets")
        self._loader = dataloader
        return _Loader(self, dataloader)

    def _tie(self, scheduler: Any) -> Any:
        kind, loop = type(scheduler), self._loop

        def step(scheduler: Any, *arguments: Any, **options: Any) -> None:
            if loop.stepped:
                kind.step(scheduler, *arguments, **options)

        scheduler.__class__ = type(kind.__name__, (kind,), {"step": step})  # as Fabric does with an optimizer
        return scheduler

    def _make_run(self, epochs: int, steps: int | None) -> Run:
        if self._loader is None or self._module is None or self._optimizer is None:
            raise ConfigurationError("set up the module with its optimizer, and the DataLoader, before epochs() begins")
        if getattr(self.precision, "scaler", None) is not None:
            raise ConfigurationError('precision="16-mixed" needs a scaler that ElasticStrategy lacks; use "bf16-mixed"')
        batch = self._loader.batch_sampler.batch_size
        return elastic(
            self._module,
            self._optimizer,
            self._loader.dataset,
            batch_size=batch,
            epochs=epochs,
            steps=steps,
            virtual_nodes=self._virtual_nodes or virtual_nodes_of(batch, 1),
            shard=self._shard,
            redundancy=self._redundancy,
            reduce_dtype=self._reduce_dtype,
            seed=self._seed,
            sampler=order_of(self._loader, len(self._loader) if self._loader.drop_last else None),
            scheduler=self._schedulers or None,
            scheduler_interval="manual",
            clip_grad_norm=self._max_norm,
            clip_grad_value=self._clip_val,
            state=self._companions,
            device=None if self.root_device.type == "cpu" else self.root_device,
            **options_of(self._loader),
        )

    def _lend(self) -> Any:
        return self.batch_to_device(lend(self._loader, self.run._context.request.micro_batch))

    # --- what the leader alone writes ---------------------------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        return self._loop.leader

    @property
    def global_rank(self) -> int:
        return 0 if self._loop.leader else 1

    @global_rank.setter
    def global_rank(self, rank: int) -> None:
        """For the base class, which knows nothing of leaders."""

    local_rank = global_rank

    def _tell_rank(self) -> None:
        rank_zero_only.rank = self.global_rank

    def save_checkpoint(self, path: Any, state: dict[str, Any], *arguments: Any, **options: Any) -> None:
        """As any strategy's, by the leader, with how far the training is.

        Raises:
            ConfigurationError: it is called in the middle of a step.
        """
        self._loop.refuse_before_step("fabric.save()")
        super().save_checkpoint(path, {**state, PLACE: self._loop.place}, *arguments, **options)

    def load_checkpoint(self, path: Any, state: Any = None, *arguments: Any, **options: Any) -> dict[str, Any]:
        """As any strategy's; where an optimizer is loaded, ``epochs`` begins behind the step of the checkpoint."""
        rest: dict[str, Any] = super().load_checkpoint(path, state, *arguments, **options)
        place = rest.pop(PLACE, None) if isinstance(state, dict) else None
        if place is not None and any(isinstance(each, Optimizer) for each in state.values()):
            self._loop.begin_at(place)
        return rest


class _Loader:
    """What stands for the training's ``DataLoader``: this worker's micro-batches of the present epoch."""

    def __init__(self, strategy: ElasticStrategy, loader: Any) -> None:
        self._strategy, self._loader = strategy, loader
        self.dataset, self.batch_size = loader.dataset, loader.batch_size

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._strategy._tell_rank()
        yield from self._strategy._loop.micro_batches()
