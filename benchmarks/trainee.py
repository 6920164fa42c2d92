"""One worker of a comparison: trains a task in turns, in plain PyTorch, under DDP, or with VirtualFlow.

``plain`` accumulates gradients over micro-batches, and with ``WORLD_SIZE`` above 1 it is DistributedDataParallel with
all micro-batches but the last under ``no_sync``, as the documentation of PyTorch has it. ``bitwise`` and
``statistical`` are the elastic loop. Micro-batches, optimizer and threads are the same. ``hosted`` is ``bitwise`` with
the optimizer on the host of a device that is played.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, Sampler

from benchmarks.played_device import play
from benchmarks.tasks import TASKS, VIRTUAL_NODES, Task, elastic_mode, loss_of
from benchmarks.turns import Pace, Turns

ENDLESS = 10_000_000
"""Steps; the turns end the training."""


def micro_batches(data: Dataset[Any], size: int, world: int, rank: int) -> Iterator[Any]:
    """What an ordinary loader gives this worker, epoch after epoch."""
    sampler: Sampler[int] = RandomSampler(data) if world == 1 else DistributedSampler(data, world, rank)  # type: ignore[arg-type]
    loader = DataLoader(data, batch_size=size, sampler=sampler, drop_last=True)
    while True:
        yield from loader


def train_plain(task: Task, pace: Pace) -> None:
    """Without VirtualFlow; alone, or as one of several workers under DDP."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    model, optimizer, data = task.make()
    wrapped = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    share = VIRTUAL_NODES // world
    stream = micro_batches(data, task.batch // VIRTUAL_NODES, world, rank)
    while pace.goes_on():
        optimizer.zero_grad()
        for place in range(share):
            more = isinstance(wrapped, nn.parallel.DistributedDataParallel) and place < share - 1
            with wrapped.no_sync() if more else nullcontext():
                (loss_of(wrapped, next(stream)) / share).backward()
        optimizer.step()
    if world > 1:
        dist.destroy_process_group()


def train_elastic(task: Task, pace: Pace, reproducibility: str, *, hosted: bool = False) -> None:
    """With VirtualFlow; ``hosted``: the optimizer is on the host."""
    import virtualflow as vf

    model, optimizer, data = task.make()
    mode = elastic_mode(reproducibility)
    memory = None
    if hosted:
        memory = play()
        mode["memory"] = vf.Memory(optimizer="host")
    with vf.elastic(
        model,
        optimizer,
        data,
        batch_size=task.batch,
        steps=ENDLESS,
        virtual_nodes=VIRTUAL_NODES,
        drop_last=True,
        **mode,
    ) as run:
        for step in run:
            if step.number and not pace.goes_on():
                break
            if memory is not None:
                memory.back.wait()  # as what runs on the device would
            for batch in step:
                loss_of(model, batch).backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=["plain", "bitwise", "statistical", "hosted"])
    parser.add_argument("task", choices=list(TASKS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    with Turns() as turns:
        if args.side == "plain":
            train_plain(TASKS[args.task], Pace(turns))
        elif args.side == "hosted":
            train_elastic(TASKS[args.task], Pace(turns), "bitwise", hosted=True)
        else:
            train_elastic(TASKS[args.task], Pace(turns), args.side)


if __name__ == "__main__":
    main()
