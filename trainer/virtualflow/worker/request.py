"""What a user asks for, and what the environment of a worker says to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from virtualflow.data import micro_batch
from virtualflow.device import device_of
from virtualflow.errors import installed
from virtualflow.protocol import messages as m
from virtualflow.protocol.environment import WorkerEnvironment
from virtualflow.protocol.settings import Reproducibility
from virtualflow.state import choose_policy
from virtualflow.step import HOST, PartialBackward, agreed
from virtualflow.worker.options import (
    Options,
    check_backward,
    check_device,
    check_exchange,
    check_host_optimizer,
    check_layer_major,
    check_optimizer,
    check_redundancy,
    check_reproducibility,
    check_scheduler,
    check_sharding,
    check_sizes,
    check_trackers,
    check_verify,
    refuse_launchers,
)
from virtualflow.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from virtualflow.memory.activations import Memory


@dataclass(frozen=True)
class FormerRun:
    """A run of the script that has ended in this process."""

    result: m.RunResult
    checkpoints: Path | None
    """Its directory of them, if it had one."""


@dataclass(frozen=True)
class Request:
    """What the user asks for, and what the environment says to it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    dataset: Any
    options: Options
    environment: WorkerEnvironment
    settings: WorkerSettings
    former: tuple[FormerRun, ...] = ()
    """The runs of the script before this one, in this process."""
    over: m.RunOver | None = None
    """The job is in a later run: this worker takes up what the present one has ended with."""

    @property
    def run(self) -> int:
        """Which run of the script this is, from 1."""
        return len(self.former) + 1

    @property
    def virtual_nodes(self) -> int:
        return self.environment.virtual_nodes or self.options.virtual_nodes

    @property
    def reproducibility(self) -> Reproducibility:
        return self.environment.reproducibility or self.options.reproducibility

    @property
    def bitwise(self) -> bool:
        return self.reproducibility == "bitwise"

    @property
    def last_step(self) -> int | None:
        """The last step of the training, as far as it does not follow from its epochs."""
        ended = None if self.over is None else self.over.result
        ends = [end for end in (self.options.steps, None if ended is None else ended.step) if end is not None]
        return min(ends, default=None)

    @property
    def memory(self) -> Memory | None:
        """How much memory this worker may use; ``None``: nobody says."""
        told = self.environment
        words = (told.device_memory, told.host_memory, told.activations, told.optimizer)
        if self.options.memory is None and all(word is None for word in words):
            return None
        with installed():
            from virtualflow.memory.activations import limit
        return limit(self.options.memory, *words)

    @property
    def backward(self) -> PartialBackward | None:
        """How far backward passes go; ``None``: they are whole."""
        return agreed(self.options.backward, self.environment.backward)

    @property
    def capacity(self) -> int | None:
        """Bytes of the device for this training; ``None``: nobody says, and the device has no memory of its own."""
        if self.memory is not None and self.memory.device is not None:
            return self.memory.budget.device
        return torch.cuda.get_device_properties(self.device).total_memory if self.device.type == "cuda" else None

    @property
    def host_optimizer(self) -> bool:
        return self.memory is not None and self.memory.optimizer == "host"

    @property
    def layer_major(self) -> bool:
        """Whether the model is on the host, and its blocks come to the device one after the other."""
        return self.memory is not None and self.memory.layer_major

    @property
    def device(self) -> torch.device:
        there = device_of(self.model)
        return self.options.device or there if self.layer_major else there

    @property
    def micro_batch(self) -> int:
        return micro_batch(self.options.batch_size, self.virtual_nodes)


def check_request(request: Request) -> None:
    options = request.options
    refuse_launchers(request.environment)
    check_sizes(options.batch_size, request.virtual_nodes, options.epochs, options.steps)
    check_reproducibility(request.reproducibility, options.max_fused, options.batch_norm)
    check_verify(request.environment.verify, request.reproducibility)
    check_exchange(options.exchange)
    check_trackers(options.trackers)
    check_optimizer(request.model, request.optimizer)
    check_scheduler(options.scheduler, options.scheduler_interval)
    check_device(options.device, request.model, layer_major=request.layer_major)
    check_backward(
        options.backward, request.environment.backward, request.virtual_nodes, layer_major=request.layer_major
    )
    check_layer_major(request.memory, request.environment, options.scaler)
    if request.host_optimizer:
        check_host_optimizer(request.model, request.optimizer)
    alone = request.environment.coordinator is None
    saves = alone or choose_policy(options.checkpoint, request.environment) is not None
    check_redundancy(options.redundancy, sharded=options.shard_optimizer, saves=saves)
    if options.shard_optimizer:
        block = request.settings.reduction.norm_block
        device = HOST if request.host_optimizer else None
        check_sharding(request.model, request.optimizer, options.scaler, block, device)
