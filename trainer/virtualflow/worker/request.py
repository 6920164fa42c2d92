"""What a user asks for, and what the environment of a worker says to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from virtualflow.data import micro_batch
from virtualflow.device import device_of
from virtualflow.errors import ConfigurationError, installed
from virtualflow.protocol import messages as m
from virtualflow.protocol.environment import WorkerEnvironment
from virtualflow.protocol.settings import Reproducibility
from virtualflow.reduction import Summation, choose_summation
from virtualflow.state import choose_policy
from virtualflow.step import HOST, MetaModel, PartialBackward, agreed
from virtualflow.transport import find_obstacle
from virtualflow.worker.options import (
    Options,
    ShardParameters,
    check_backward,
    check_device,
    check_exchange,
    check_host_optimizer,
    check_layer_major,
    check_optimizer,
    check_reduce_dtype,
    check_redundancy,
    check_reproducibility,
    check_scheduler,
    check_scratch,
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
    meta: MetaModel | None = None
    """Makes the parameters of a model that was built on the meta device; ``None``: it was built elsewhere."""
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
    def summation(self) -> Summation:
        """The order in which virtual nodes are added up, and its precision."""
        return choose_summation(self.virtual_nodes, self.reproducibility, self.options.reduce_dtype)

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
    def scratch(self) -> Path | None:
        """Where sums of gradients wait that are not needed soon, if not in memory."""
        said = None if self.memory is None else self.memory.scratch
        return None if said is None else Path(said)

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


def check_sharded_parameters(request: Request) -> None:
    """See that nothing needs the whole model where each worker keeps a share of it."""
    options = request.options
    if options.shard not in ("parameters", "hybrid") and not isinstance(options.shard, ShardParameters):
        raise ConfigurationError(
            f'shard is {options.shard!r}; it must be "parameters", "hybrid", vf.ShardParameters(...), or left out'
        )
    instead = {
        "backward=": (request.backward is not None, "leave one of the two out"),
        'optimizer="host"': (request.host_optimizer, "leave it out: states are divided, too"),
        'order="layer-major"': (request.layer_major, "leave it out: blocks are gathered one after the other anyway"),
        "verify": (bool(request.environment.verify), "leave one of the two out"),
    }
    for name, (there, advice) in instead.items():
        if there:
            raise ConfigurationError(
                f'shard="parameters" does not go together with {name}, which needs the whole model on a worker; '
                f"{advice}"
            )
    if options.shard == "hybrid" and request.memory is not None and request.memory.plans_activations:
        raise ConfigurationError(
            'shard="hybrid" does not go together with a plan of activations yet, which would take the values that a '
            'worker holds for those of shard="parameters"; choose the latter, or leave out device= of vf.Memory'
        )


def check_backend(request: Request) -> None:
    """See that gradients can travel as they are to; one that is alone sends nothing."""
    exchange, environment = request.options.exchange, request.environment
    backend = None if exchange == "auto" or environment.coordinator is None else exchange.backend
    if backend is None:
        return
    if request.options.shards_parameters:
        raise ConfigurationError(
            f'vf.Exchange(backend="{backend}") does not go together with shard=, whose gradients travel by own '
            "connections only; leave one of the two out"
        )
    obstacle = find_obstacle(backend, device_of(request.model), sealed=not isinstance(environment.credential, str))
    if obstacle is not None:
        raise ConfigurationError(obstacle)


def check_request(request: Request) -> None:
    options = request.options
    refuse_launchers(request.environment)
    check_sizes(options.batch_size, request.virtual_nodes, options.epochs, options.steps)
    check_reproducibility(request.reproducibility, options.max_fused, options.batch_norm)
    check_verify(request.environment.verify, request.reproducibility)
    check_exchange(options.exchange)
    check_backend(request)
    check_trackers(options.trackers)
    check_optimizer(request.model, request.optimizer)
    check_reduce_dtype(options.reduce_dtype, request.model, options.scaler)
    check_scheduler(options.scheduler, options.scheduler_interval)
    check_device(options.device, request.model, layer_major=request.layer_major)
    check_backward(
        options.backward, request.environment.backward, request.virtual_nodes, layer_major=request.layer_major
    )
    check_scratch(request.scratch)
    check_layer_major(request.memory, request.environment, options.scaler)
    if request.host_optimizer:
        check_host_optimizer(request.model, request.optimizer)
    alone = request.environment.coordinator is None
    saves = alone or choose_policy(options.checkpoint, request.environment) is not None
    check_redundancy(options.redundancy, sharded=options.shards, saves=saves)
    if options.shard is not None:
        check_sharded_parameters(request)
    if options.shards:
        block = request.settings.reduction.norm_block
        device = HOST if request.host_optimizer else None
        argument = 'shard="parameters"' if options.shards_parameters else "shard_optimizer"
        check_sharding(request.model, request.optimizer, options.scaler, block, device, argument)
