"""One worker of a step-time measurement: the same model and micro-batches under three regimes.

``plain``: one process, gradients accumulated over the micro-batches. ``ddp``: DistributedDataParallel, micro-batches
but the last under ``no_sync``. ``virtualflow``: the elastic loop. It prints one JSON line with the step times in
milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTHS = {"small": 64, "large": 1_448}
"""Hidden width of the perceptron: 21 kB or 25 MB of gradients."""

BATCH, FEATURES, CLASSES = 256, 64, 10


def make(size: str) -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    torch.manual_seed(0)
    width = WIDTHS[size]
    model = nn.Sequential(
        nn.Linear(FEATURES, width), nn.ReLU(), *(m for _ in range(3) for m in (nn.Linear(width, width), nn.ReLU())),
        nn.Linear(width, CLASSES),
    )  # fmt: skip
    data = TensorDataset(torch.randn(2_048, FEATURES), torch.randint(CLASSES, (2_048,)))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), data


def micro_batches(data: TensorDataset, workers: int, virtual_nodes: int, rank: int) -> Iterator[list[torch.Tensor]]:
    """What a DataLoader gives this worker, for ever."""
    sampler = DistributedSampler(data, workers, rank)
    loader = DataLoader(data, batch_size=BATCH // virtual_nodes, sampler=sampler)
    while True:
        yield from loader


def timed(step: Callable[[int], None], steps: int) -> list[float]:
    times = []
    for number in range(steps):
        began = time.perf_counter()
        step(number)
        times.append(1_000 * (time.perf_counter() - began))
    return times[steps // 5 :]


def by_hand(size: str, steps: int, virtual_nodes: int, distributed: bool) -> list[float]:
    rank, world = 0, 1
    if distributed:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer, data = make(size)
    wrapped = nn.parallel.DistributedDataParallel(model) if distributed else model
    share = virtual_nodes // world
    stream = micro_batches(data, world, virtual_nodes, rank)

    def step(number: int) -> None:
        optimizer.zero_grad()
        for place in range(share):
            x, y = next(stream)
            loss = F.cross_entropy(wrapped(x), y) / share
            if isinstance(wrapped, nn.parallel.DistributedDataParallel) and place < share - 1:
                with wrapped.no_sync():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()

    times = timed(step, steps)
    if distributed:
        dist.destroy_process_group()
    return times if rank == 0 else []


def elastic(size: str, steps: int, virtual_nodes: int) -> list[float]:
    import virtualflow as vf

    model, optimizer, data = make(size)
    times, began = [], time.perf_counter()
    with vf.elastic(
        model,
        optimizer,
        data,
        batch_size=BATCH,
        steps=steps,
        virtual_nodes=virtual_nodes,
        reproducibility="statistical",
    ) as run:
        for step in run:
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            now = time.perf_counter()
            times.append(1_000 * (now - began))
            began = now
        return times[steps // 5 :] if run.leader else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("regime", choices=["plain", "ddp", "virtualflow"])
    parser.add_argument("--size", choices=list(WIDTHS), default="small")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--virtual-nodes", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.regime == "virtualflow":
        times = elastic(args.size, args.steps, args.virtual_nodes)
    else:
        times = by_hand(args.size, args.steps, args.virtual_nodes, args.regime == "ddp")
    if times:
        print(json.dumps({"times": times, "pid": os.getpid()}), flush=True)


if __name__ == "__main__":
    main()
