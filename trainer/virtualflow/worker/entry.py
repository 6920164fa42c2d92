"""The door to the library: :func:`elastic`, and what each of its arguments means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
from torch import nn

from virtualflow._arguments import checked
from virtualflow.data import LoaderOptions, Sampler
from virtualflow.protocol.settings import VIRTUAL_NODES, Redundancy, Reproducibility
from virtualflow.reduction.settings import Exchange
from virtualflow.state import CheckpointPolicy, join_schedulers
from virtualflow.step import BatchNorm, BufferKind, PartialBackward, SchedulerInterval
from virtualflow.worker.options import Options, Sharded, read_device
from virtualflow.worker.run import Run
from virtualflow.worker.settings import WorkerSettings
from virtualflow.worker.step import Weight
from virtualflow.worker.tracker import Tracker

if TYPE_CHECKING:
    from virtualflow.memory.activations import Memory


@checked("vf.elastic", LoaderOptions.__annotations__)
def elastic(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    dataset: Any,
    *,
    batch_size: int,
    epochs: int | None = None,
    steps: int | None = None,
    virtual_nodes: int = VIRTUAL_NODES,
    seed: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
    scheduler: Any = None,
    scheduler_interval: SchedulerInterval = "step",
    scaler: Any = None,
    clip_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
    checkpoint: CheckpointPolicy | Path | str | None = None,
    reproducibility: Reproducibility = "bitwise",
    max_fused: int | None = None,
    batch_norm: BatchNorm = "virtual-node",
    reduce_dtype: torch.dtype | None = None,
    shard_optimizer: bool = False,
    shard: Sharded | None = None,
    redundancy: Redundancy = "peer",
    exchange: Exchange | Literal["auto"] = "auto",
    state: Mapping[str, Any] | None = None,
    sampler: Sampler | None = None,
    device: torch.device | str | None = None,
    memory: Memory | None = None,
    backward: PartialBackward | None = None,
    weight: Weight | None = None,
    tracker: Tracker | Sequence[Tracker] = (),
    buffers: Mapping[str, BufferKind] | None = None,
    **loader: Unpack[LoaderOptions],
) -> Run:
    """Make a training loop elastic; use the result as ``with vf.elastic(...) as run:``.

    Args:
        model: built and seeded the same in every worker.
        optimizer: over the model's parameters; one that needs a closure is refused. Or several, as a list, each over
            parameters of its own: every step steps all of them, in this order.
        dataset: map-style, or iterable with a method ``shard(index, count, epoch, start)``.
        batch_size: samples of a global batch, divisible by the number of virtual nodes.
        epochs: how often to go through the dataset; with ``steps`` too, whichever ends first. At least one is needed.
        steps: how many optimizer updates to make.
        virtual_nodes: equal slices of every global batch, 8 unless said otherwise; the command line or the manifest
            overrides it.
        seed: what the order of the samples and all random streams follow from.
        shuffle: a new order every epoch.
        drop_last: leave out a last short batch, which otherwise weighs by its samples.
        scheduler: a learning rate scheduler, stepped once an update (``scheduler_interval="step"``), once an epoch
            (``"epoch"``), or by your own code after the virtual nodes of a step (``"manual"``). Or a list of several.
        scaler: a ``GradScaler``; your code calls ``scaler.scale(loss).backward()``, the rest is the library's.
        clip_grad_norm: the most that the norm of the reduced gradient may be.
        clip_grad_value: the most that each element of the reduced gradient may be.
        checkpoint: a directory or a policy; ``VIRTUALFLOW_CHECKPOINT_DIR`` and its kin override it.
        reproducibility: ``"bitwise"``: the same bits on any number of workers; kernels and workers that would give
            others are refused. ``"statistical"``: the same in distribution, and faster: a worker runs neighbouring
            virtual nodes as one larger micro-batch. ``VIRTUALFLOW_REPRODUCIBILITY`` overrides it.
        max_fused: the most virtual nodes of such a micro-batch (``VIRTUALFLOW_MAX_FUSED``); without it, as many as
            memory allows and make it faster, which is measured.
        batch_norm: whether batch norm goes on normalising over each ``"virtual-node"`` of such a micro-batch, or over
            the whole ``"micro-batch"``.
        reduce_dtype: in which gradients of parameters of narrower types are summed up, as ``torch.float32`` for
            parameters in bfloat16: each virtual node's is cast before its weight and the first addition, and the
            clipped sum once, for the optimizer. They travel in it, too. Without it each is summed up in its own type.
            It stays the same for a job's life.
        shard_optimizer: each worker keeps only its share of the optimizer's state, and that of another
            (``redundancy``). For optimizers that treat each element for itself (SGD, Adam and their kin). After a step
            a worker has the gradients of those parameters only that it keeps whole.
        shard: ``"parameters"``: each worker keeps only its share of parameters and of the optimizer's state, for models
            that are too large for a worker. A block (of an ``nn.ModuleList`` or ``nn.Sequential``) is gathered before
            its forward and its backward pass, and freed behind it; its gradients leave at once. Between passes a
            parameter shows NaN. ``"hybrid"``: the same, but the processes of each worker have all parameters among
            them, so that blocks are gathered within a worker. ``vf.ShardParameters(blocks=[...])`` names other blocks.
            The command line or the manifest overrides what is divided, and ``redundancy``.
        redundancy: who else keeps a worker's share, which decides what a loss costs that nobody has announced: another
            worker (``"peer"``; at most a step), or nobody, for half of the memory and fewer messages: then all workers
            start again from the newest ``"checkpoint"``, or with ``"none"`` perhaps from the beginning, and no other
            copy shows a bit of it that flips.
        exchange: how gradients travel between workers, which changes no bit: ``"auto"`` chooses by what messages take
            between them, measured on the running job; a ``vf.Exchange`` says otherwise.
        state: what else is to travel to joiners and into checkpoints, by name: whatever has ``state_dict`` and
            ``load_state_dict``, such as an average of weights. Code after a step changes it, alike on all workers.
        sampler: which samples an epoch has, and in which order, instead of ``shuffle``: a function of (seed, epoch),
            the epoch from 0, that returns indices (int64 ``[n]`` or a sequence of int, as many in every epoch), or one
            of torch's samplers. While it is asked, the global random generators follow from the two. For map-style
            datasets.
        device: where the inner loop gets its micro-batches, that of the model: tensors in lists, tuples and dicts, and
            whatever has a method ``to``. A CUDA device gets them through pinned memory, beside its computation, and the
            next one ahead of its turn. Without it they come as ``collate_fn`` made them.
        memory: how much memory this worker may use, what becomes of activations (they are kept, recomputed or swapped
            to the host), and whether the optimizer is on the host. No bits depend on it but for the last, which is
            alike in all workers. With a plan of activations, a ``statistical`` job's worker runs its virtual nodes one
            by one.
        backward: lets the backward passes of some virtual nodes end before they have reached the model's first blocks
            (structured partial backpropagation). It changes what is trained, alike on any number of workers, and stays
            the same for a job's life. A ``statistical`` job then runs its virtual nodes one by one.
        weight: called with each micro-batch that the inner loop gets; returns what it counts by, such as how many of
            its tokens the loss is a mean over. Without it, and without ``step.weight``, it counts by its samples: by
            those that ``collate_fn`` has kept, where the dataset gave the others as ``None``, and else by those that
            were loaded.
        tracker: where each committed step is written to, once, by whoever leads: one of
            ``virtualflow.integrations.trackers``, or several.
        buffers: what becomes of buffers that the forward pass changes, by their names in ``named_buffers`` or by
            patterns: with ``{"seen": "sum", "*.load": "sum"}`` the changes that the virtual nodes of a step make are
            added up, as counters need it. Without it, one of floating-point numbers becomes the mean over the virtual
            nodes, as batch norm's statistics do, and of any other the first virtual node's value counts.
        **loader: passed through to the ``DataLoader``. A ``collate_fn`` may return ``None`` where nothing is left of a
            micro-batch, which then counts for nothing.

    Returns:
        The run; iterate over it inside its ``with`` block.
    """
    return Run(
        model,
        optimizer,
        dataset,
        Options(
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
            virtual_nodes=virtual_nodes,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            scheduler=join_schedulers(scheduler),
            scheduler_interval=scheduler_interval,
            scaler=scaler,
            clip_grad_norm=clip_grad_norm,
            clip_grad_value=clip_grad_value,
            checkpoint=Path(checkpoint).absolute() if checkpoint and isinstance(checkpoint, Path | str) else checkpoint,
            reproducibility=reproducibility,
            max_fused=max_fused,
            batch_norm=batch_norm,
            reduce_dtype=reduce_dtype,
            shard_optimizer=shard_optimizer,
            shard=shard,
            redundancy=redundancy,
            exchange=exchange,
            state=state or {},
            sampler=sampler,
            memory=memory,
            backward=backward,
            weight=weight,
            trackers=tuple(tracker) if isinstance(tracker, Sequence) else (tracker,),
            buffers=buffers,
            loader=loader,
            device=read_device(device),
        ),
        WorkerSettings(),
    )
