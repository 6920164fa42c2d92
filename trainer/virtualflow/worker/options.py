"""The arguments of :func:`virtualflow.elastic`, checked before anything starts."""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parameter import is_lazy

from virtualflow._arguments import checked_class
from virtualflow.data import LoaderOptions, Sampler, check_whole, micro_batch
from virtualflow.device import device_of
from virtualflow.errors import ConfigurationError
from virtualflow.protocol.environment import WorkerEnvironment
from virtualflow.protocol.settings import BackwardSpec, Redundancy, Reproducibility
from virtualflow.reduction.settings import ALGORITHMS, BACKENDS, MAX_BUCKET, Exchange, ReductionSettings
from virtualflow.state import CheckpointPolicy, optimizers_of, schedulers_of
from virtualflow.step import BatchNorm, BufferKind, PartialBackward, SchedulerInterval, agreed, why_not_separable
from virtualflow.worker.step import Weight
from virtualflow.worker.tracker import Tracker

if TYPE_CHECKING:
    from virtualflow.memory.activations import Memory


@checked_class("vf.ShardParameters")
@dataclass(frozen=True)
class ShardParameters:
    """Parameters that are divided over the workers, as by ``shard="parameters"``, which would find other blocks.

    Args:
        blocks: modules of the model, or their names: each is gathered as a whole while it runs. What is outside of them
            is gathered for the whole pass. Without them, those of an ``nn.ModuleList`` or ``nn.Sequential`` that
            cut the model best, and others of the same class.
        hybrid: whether each worker has all parameters among its processes, as by ``shard="hybrid"``.
    """

    blocks: Sequence[str | nn.Module] | None = None
    hybrid: bool = False


Sharded = Literal["parameters", "hybrid"] | ShardParameters
"""What is divided over the workers, with the state of the optimizer."""

_HALVES = (torch.float16, torch.bfloat16)
_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """All arguments but the model, the optimizer and the dataset; :func:`virtualflow.elastic` describes them."""

    batch_size: int
    epochs: int | None
    steps: int | None
    virtual_nodes: int
    seed: int
    shuffle: bool
    drop_last: bool
    scheduler: Any
    scheduler_interval: SchedulerInterval
    scaler: Any
    clip_grad_norm: float | None
    clip_grad_value: float | None
    checkpoint: CheckpointPolicy | Path | str | None
    reproducibility: Reproducibility
    max_fused: int | None
    batch_norm: BatchNorm
    reduce_dtype: torch.dtype | None
    shard_optimizer: bool
    shard: Sharded | None
    redundancy: Redundancy
    exchange: Exchange | Literal["auto"]
    state: Mapping[str, Any]
    sampler: Sampler | None
    memory: Memory | None
    backward: PartialBackward | None
    weight: Weight | None
    trackers: Sequence[Tracker]
    buffers: Mapping[str, BufferKind] | None
    loader: LoaderOptions
    device: torch.device | None

    @property
    def shards_parameters(self) -> bool:
        return self.shard is not None

    @property
    def hybrid(self) -> bool:
        """Whether each worker has all parameters among its processes."""
        return self.shard == "hybrid" or (isinstance(self.shard, ShardParameters) and self.shard.hybrid)

    @property
    def shards(self) -> bool:
        """Whether the state of the optimizer is divided, alone or with the parameters."""
        return self.shard_optimizer or self.shards_parameters

    def told(self, environment: WorkerEnvironment) -> Options:
        """The same, but for what the job says of what is divided, which overrides the script."""
        shard, redundancy = environment.shard, environment.redundancy or self.redundancy
        if shard is None:
            return replace(self, redundancy=redundancy)
        if shard == "none":
            redundancy = environment.redundancy or "peer"  # the script's is about what it would have divided
        divided: Sharded | None = shard if shard in ("parameters", "hybrid") else None
        if divided is not None and isinstance(self.shard, ShardParameters):
            divided = replace(self.shard, hybrid=divided == "hybrid")
        return replace(self, shard=divided, shard_optimizer=shard == "optimizer", redundancy=redundancy)

    def total_steps(self, steps_per_epoch: int | None) -> int | None:
        """How many updates the training takes; ``None`` when the length of the streams decides."""
        if self.epochs is None:
            return self.steps
        if steps_per_epoch is None:
            return None
        by_epochs = self.epochs * steps_per_epoch
        return by_epochs if self.steps is None else min(by_epochs, self.steps)

    def reduction(self, settings: ReductionSettings) -> ReductionSettings:
        """How gradients travel, where ``settings`` say it by default."""
        return settings if self.exchange == "auto" else replace(settings, exchange=self.exchange)


def refuse_launchers(environment: WorkerEnvironment) -> None:
    """See that nobody but the library divides the work among processes."""
    processes = os.environ.get("WORLD_SIZE", "1")
    started = "TORCHELASTIC_RUN_ID" in os.environ or (dist.is_available() and dist.is_initialized())
    if environment.coordinator is None and environment.profile_out is None and started and processes not in ("", "1"):
        raise ConfigurationError(
            f"torchrun, or something like it, has started {processes} processes of this script, and each would train "
            f"by itself; start it with: virtualflow run --workers {processes} {os.path.basename(sys.argv[0])}"
        )


def check_model(model: Any) -> None:
    """Check that the model is one, and that nothing in it divides batches or sums gradients among processes."""
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"the model is a {type(model).__name__}; give vf.elastic a torch.nn.Module first, then its optimizer, then "
            "the dataset"
        )
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.")}
        wrapper = next(iter(sorted(kinds & _WRAPPERS)), None)
        if wrapper is not None:
            where = f"its module {name}" if name else "the model"
            shard = ', and shard="parameters" to divide it' if wrapper.startswith(("FSDP", "Fully")) else ""
            raise ConfigurationError(
                f"{where} is wrapped by {wrapper}, and the library divides batches and sums gradients itself; give "
                f"vf.elastic the plain model, with an optimizer made of its parameters{shard}"
            )


def check_sizes(batch_size: int, virtual_nodes: int, epochs: int | None, steps: int | None) -> None:
    check_whole("virtual_nodes", virtual_nodes)
    if virtual_nodes < 1:
        raise ConfigurationError(f"virtual_nodes is {virtual_nodes}; a job has at least 1")
    micro_batch(batch_size, virtual_nodes)
    if epochs is None and steps is None:
        raise ConfigurationError("how long to train is open; pass epochs=, steps= or both to vf.elastic")
    for name, value in (("epochs", epochs), ("steps", steps)):
        if value is not None:
            check_whole(name, value)
        if value is not None and value < 1:
            raise ConfigurationError(f"{name} is {value}; it must be at least 1")


def check_reproducibility(reproducibility: str, max_fused: int | None, batch_norm: str) -> None:
    if reproducibility not in get_args(Reproducibility):
        raise ConfigurationError(f'reproducibility is {reproducibility!r}; it must be "bitwise" or "statistical"')
    if max_fused is not None and max_fused < 1:
        raise ConfigurationError(f"max_fused is {max_fused}; use 1 to run virtual nodes one by one, None for no limit")
    if batch_norm not in get_args(BatchNorm):
        raise ConfigurationError(f'batch_norm is {batch_norm!r}; it must be "virtual-node" or "micro-batch"')


def check_trackers(trackers: Sequence[Any]) -> None:
    for tracker in trackers:
        if isinstance(tracker, type) or not all(hasattr(tracker, name) for name in ("open", "write", "fenced")):
            raise ConfigurationError(
                f"tracker is {tracker!r}; pass one of virtualflow.integrations.trackers, such as "
                'TensorBoard("runs"), or a list of several'
            )


def check_exchange(exchange: Exchange | str) -> None:
    if not isinstance(exchange, Exchange):
        if exchange != "auto":
            raise ConfigurationError(f'exchange is {exchange!r}; it must be "auto" or a vf.Exchange(...)')
        return
    if exchange.algorithm not in ALGORITHMS:
        known = ", ".join(f'"{name}"' for name in ALGORITHMS[:-1])
        raise ConfigurationError(
            f'vf.Exchange(algorithm={exchange.algorithm!r}): it must be {known} or "{ALGORITHMS[-1]}"'
        )
    size: Any = exchange.bucket_bytes
    if size is not None and (type(size) is not int or not 1 <= size <= MAX_BUCKET):
        raise ConfigurationError(
            f"vf.Exchange(bucket_bytes={size!r}): it must be a whole number of bytes between 1 and {MAX_BUCKET}, or "
            "None for the default"
        )
    overlap: Any = exchange.overlap
    if overlap is not None and type(overlap) is not bool:
        raise ConfigurationError(
            f"vf.Exchange(overlap={overlap!r}): it must be True, False, or None for where it is worth it"
        )
    if exchange.backend not in BACKENDS:
        raise ConfigurationError(
            f'vf.Exchange(backend={exchange.backend!r}): it must be "gloo", "nccl", or None for own connections'
        )


def read_device(device: torch.device | str | None) -> torch.device | None:
    try:
        return None if device is None else torch.device(device)
    except RuntimeError:
        raise ConfigurationError(f'device is {device!r}; pass a device of torch, such as "cuda"') from None


def check_device(device: torch.device | None, model: nn.Module, *, layer_major: bool = False) -> None:
    """Check that the model is where its micro-batches go, and that new tensors are where the library needs its own.

    In ``layer_major`` order it is on the host, whatever the device is.
    """
    if torch.get_default_device().type != "cpu":
        name = str(torch.get_default_device())
        raise ConfigurationError(
            f"torch.set_default_device({name!r}) would move messages between workers there; make the model under "
            f"'with torch.device({name!r}):' instead, and call vf.elastic outside of it"
        )
    there = device_of(model)
    if layer_major:
        if any(tensor.device.type != "cpu" for tensor in [*model.parameters(), *model.buffers()]):
            raise ConfigurationError(
                f"in layer-major order the model stays on the host, and it is on {there}; leave it there, and pass "
                f"device={str(there)!r} to vf.elastic"
            )
        return
    if device is not None and (device.type != there.type or device.index not in (None, there.index or 0)):
        raise ConfigurationError(
            f"micro-batches are to go to device={str(device)!r} and the model is on {there}; move the model there "
            "before vf.elastic"
        )


def check_layer_major(memory: Memory | None, environment: WorkerEnvironment, scaler: Any) -> None:
    if memory is None or not memory.layer_major:
        return
    if environment.verify or environment.trace_dir is not None or environment.profile_out is not None:
        raise ConfigurationError(
            "verify, virtualflow check and virtualflow profile look at virtual nodes one by one, and in layer-major "
            'order they run together; leave out order="layer-major" for them'
        )
    if environment.optimizer == "device":
        raise ConfigurationError(
            "in layer-major order the optimizer steps on the host, and the job wants it on the device; leave out "
            "optimizerPlacement, or say Host"
        )
    if scaler is not None:
        raise ConfigurationError(
            "a GradScaler cannot scale in layer-major order, because gradients are on the host; train in bfloat16 "
            "without a scaler"
        )


def check_scratch(directory: Path | None) -> None:
    if directory is None:
        return
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"vf.Memory(scratch={str(directory)!r}): no file can be made there ({error.strerror}); name a directory on "
            "a disk of this machine that is writable"
        ) from None


def check_backward(
    said: PartialBackward | None, told: BackwardSpec | None, virtual_nodes: int, *, layer_major: bool
) -> None:
    """Check that backward passes can end where script and job say.

    Raises:
        ConfigurationError: they cannot, the two differ, or some of the model would never be trained.
    """
    if said is not None and not isinstance(said, PartialBackward):
        raise ConfigurationError(f"backward is {said!r}; it must be a vf.PartialBackward(...), or left out")
    backward = agreed(said, told)
    if backward is None:
        return
    if layer_major:
        raise ConfigurationError(
            "in layer-major order each block runs backward for all virtual nodes together, so none can end earlier "
            'than others; leave out backward=, or order="layer-major"'
        )
    backward.check(virtual_nodes)


def check_verify(sample: float, reproducibility: str) -> None:
    if sample and reproducibility == "statistical":
        raise ConfigurationError(
            "verify compares gradients bit for bit, and workers of a statistical job come to different bits; leave out "
            "verify, or ask for bitwise reproducibility"
        )


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Check that the library can step this optimizer.

    Raises:
        ConfigurationError: it needs a closure, holds parameters that are not the model's, or this torch steps them
            wrongly; or two of several hold the same one.
    """
    named: list[tuple[str, Any]] = list(model.named_parameters())
    shapeless = next((name for name, parameter in named if is_lazy(parameter)), None)
    if shapeless is not None:
        raise ConfigurationError(
            f"parameter {shapeless} has no shape yet, because its module is lazy; run the model on one batch before "
            "vf.elastic, alike in all workers"
        )
    held: dict[int, str] = {}
    for part in optimizers_of(optimizer):
        if not hasattr(part, "param_groups") or isinstance(part, type):
            what = part.__name__ if isinstance(part, type) else f"a {type(part).__name__}"
            raise ConfigurationError(
                f"the optimizer is {what}; give vf.elastic one of torch.optim, made of the model's parameters, behind "
                "the model"
            )
        _check_one(model, part)
        kind = type(part).__name__
        for parameter in [parameter for group in part.param_groups for parameter in group["params"]]:
            if id(parameter) in held:
                shared = next(name for name, of in named if of is parameter)
                raise ConfigurationError(
                    f"parameter {shared} belongs to two optimizers ({held[id(parameter)]} and {kind}), which would "
                    "both change it in a step; give each parameter to one of them"
                )
        held |= {id(parameter): kind for group in part.param_groups for parameter in group["params"]}


def _check_one(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigurationError(
            f"{name} evaluates the loss several times a step through a closure, which one exchange a step cannot "
            "serve; use an optimizer whose step() needs no closure, such as AdamW"
        )
    owned = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if held and not any(id(parameter) in owned for parameter in held):
        raise ConfigurationError(
            f"{name} holds none of the model's parameters; make it of this very model, after the model was copied, "
            f"moved or wrapped: {name}(model.parameters(), ...)"
        )
    for group in optimizer.param_groups:
        if any(id(parameter) not in owned for parameter in group["params"]):
            raise ConfigurationError(
                f"{name} holds a parameter that is not the model's, so joiners would not get it; make it part of the "
                "model"
            )
        halves = {p.dtype for p in group["params"] if p.device.type == "cpu" and p.dtype in _HALVES}
        for dtype in halves if isinstance(optimizer, torch.optim.SGD) and group["fused"] else ():
            if not fused_sgd_steps(dtype):
                raise ConfigurationError(
                    f"torch {torch.__version__} leaves parameters of {dtype} as they are when SGD is fused on the CPU "
                    "(pytorch issue 191763); leave out fused=True"
                )


def fused_sgd_steps(dtype: torch.dtype) -> bool:
    """Whether this torch's fused SGD moves parameters of ``dtype`` on the CPU at all.

    Up to 2.13 it passes over whole vectors of half precision, and its momentum has what was in memory before.
    """
    parameter = torch.ones(64, dtype=dtype)
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=0.5, fused=True).step()
    return bool((parameter == 0.5).all())


def check_reduce_dtype(dtype: Any, model: nn.Module, scaler: Any) -> None:
    """Check in which type gradients are to be summed up.

    Raises:
        ConfigurationError: it is none, cannot hold some of them, or a scaler would unscale them in another one.
    """
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigurationError(
            f"reduce_dtype is {dtype!r}; it must be a floating-point type of torch, such as torch.float32, or left out"
        )
    for name, parameter in model.named_parameters():
        own = parameter.dtype
        if own.is_floating_point and own != dtype and own.itemsize >= dtype.itemsize:
            raise ConfigurationError(
                f"parameter {name} is of {own}, and sums in reduce_dtype={dtype} would lose bits of its gradients; "
                "name a type that holds those of all parameters, such as torch.float32, or leave it out"
            )
        if own.is_floating_point and own != dtype and scaler is not None:
            raise ConfigurationError(
                f"a GradScaler unscales the gradient of {name} in {own}, behind the sums in reduce_dtype={dtype}; "
                "train in bfloat16 without a scaler, or leave out reduce_dtype"
            )


def check_host_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for part in optimizers_of(optimizer):
        name = type(part).__name__
        for group in part.param_groups:
            if group.get("capturable"):
                raise ConfigurationError(
                    f"{name} has capturable=True, so it steps on a device only; leave that out, or leave the optimizer "
                    'on the device (vf.Memory(optimizer="device"))'
                )
            for key, value in group.items():
                if isinstance(value, Tensor) and value.device.type != "cpu":
                    raise ConfigurationError(
                        f"{key} of {name} is a tensor of {value.device}, which an optimizer on the host cannot use; "
                        "make it a tensor of the CPU, or a number"
                    )
    for key, parameter in model.named_parameters():
        if not torch._has_compatible_shallow_copy_type(parameter, torch.empty(0, dtype=parameter.dtype)):
            raise ConfigurationError(
                f"parameter {key} is no plain tensor of {parameter.device} that could be on the host for a step; leave "
                'the optimizer on the device (vf.Memory(optimizer="device"))'
            )
    _refuse_overlaps(model, "and each would be stepped apart on the host", 'vf.Memory(optimizer="host")')


def check_redundancy(redundancy: str, *, sharded: bool, saves: bool) -> None:
    """Check what a loss costs that nobody has announced.

    Args:
        saves: whether the training writes checkpoints, or is alone.
    """
    if redundancy not in get_args(Redundancy):
        raise ConfigurationError(f'redundancy is {redundancy!r}; it must be "peer", "checkpoint" or "none"')
    if redundancy != "peer" and not sharded:
        raise ConfigurationError(
            f"redundancy={redundancy!r} is about shares of the optimizer's state, and every worker keeps all of it; "
            'give shard="parameters" or shard_optimizer=True, or leave it out'
        )
    if redundancy == "checkpoint" and not saves:
        raise ConfigurationError(
            'redundancy="checkpoint" goes on from a checkpoint when a worker is lost, and none is written; give '
            'checkpoint= or VIRTUALFLOW_CHECKPOINT_DIR, or say redundancy="none" to begin anew then'
        )


def check_sharding(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    block: int,
    device: torch.device | None,
    argument: str = "shard_optimizer",
) -> None:
    """Check that shares of the optimizer's state can be kept apart; ``argument``: what of the script asks for that."""
    for part in optimizers_of(optimizer):
        reason = why_not_separable(part, block, device)
        if reason is not None:
            raise ConfigurationError(
                f"{type(part).__name__} cannot be sharded, because {reason}; use an optimizer that treats each element "
                f"for itself, such as AdamW, or leave out {argument}"
            )
    if scaler is not None:
        raise ConfigurationError(
            "a GradScaler looks at the whole gradient, which no worker has when the optimizer is sharded; train in "
            f"bfloat16 without a scaler, or leave out {argument}"
        )
    _refuse_overlaps(model, "so two workers would step it", argument)


def _refuse_overlaps(model: nn.Module, consequence: str, without: str) -> None:
    pair = _overlapping(model)
    if pair is not None:
        raise ConfigurationError(
            f"parameters {pair[0]} and {pair[1]} lie in the same memory, {consequence}; let the model have one "
            f"nn.Parameter in both places, or leave out {without}"
        )


def _overlapping(model: nn.Module) -> tuple[str, str] | None:
    """The names of two parameters that have memory in common; one that several modules have is one."""
    ends: dict[torch.device, tuple[int, str]] = {}
    dense = [(name, p) for name, p in model.named_parameters() if p.layout == torch.strided and p.numel()]
    for name, parameter in sorted(dense, key=lambda pair: pair[1].data_ptr()):
        begin = parameter.data_ptr()
        strides = zip(parameter.shape, parameter.stride(), strict=True)
        end = begin + parameter.itemsize * (1 + sum((size - 1) * stride for size, stride in strides))
        last, other = ends.get(parameter.device, (0, ""))
        if begin < last:
            return other, name
        ends[parameter.device] = end, name
    return None


def check_scheduler(scheduler: Any, interval: str) -> None:
    if interval not in ("step", "epoch", "manual"):
        raise ConfigurationError(f'scheduler_interval is {interval!r}; it must be "step", "epoch" or "manual"')
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    if interval != "manual" and any(isinstance(part, plateau) for part in schedulers_of(scheduler)):
        raise ConfigurationError(
            'ReduceLROnPlateau.step needs a metric; pass scheduler_interval="manual" and call '
            'scheduler.step(step.metrics["loss"]) after the virtual nodes of a step'
        )
    for part in schedulers_of(scheduler):
        _check_schedule(part, interval)


def _check_schedule(scheduler: Any, interval: str) -> None:
    name = scheduler.__name__ if isinstance(scheduler, type) else type(scheduler).__name__
    step = getattr(scheduler, "step", None)
    if isinstance(scheduler, type) or not callable(step):
        raise ConfigurationError(
            f"the scheduler is {'the class ' if isinstance(scheduler, type) else 'a '}{name}; give vf.elastic an "
            "object with a method step(), such as one of torch.optim.lr_scheduler, or a list of several"
        )
    if not (hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")):
        raise ConfigurationError(
            f"{name} has no state_dict and load_state_dict, so workers that join and checkpoints would not have its "
            "state; define both"
        )
    if interval == "manual":
        return
    try:
        inspect.signature(step).bind()
    except ValueError:
        return  # it has no signature that could be read
    except TypeError as error:
        raise ConfigurationError(
            f'{name}.step cannot be called without arguments ({error}); pass scheduler_interval="manual" and call '
            "scheduler.step(...) after the micro-batches of a step, with step.number, step.epoch or step.metrics"
        ) from None


def describe_samples(options: Options, samples: int | None) -> dict[str, str]:
    """What all members must have alike, so that each sample counts once: by what it is called."""
    return {
        "the seed": str(options.seed),
        "the batch size": str(options.batch_size),
        "the number of samples in the dataset": "open" if samples is None else str(samples),
        "shuffle": str(options.shuffle),
        "drop_last": str(options.drop_last),
    }
