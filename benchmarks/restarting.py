"""The digits job as a user of ``torchrun`` would make it elastic: a snapshot on disk, loaded again after a restart.

``torchrun --nnodes 2:3 ... benchmarks/restarting.py --snapshot FILE --journal FILE`` trains until it is ended. Whenever
the workers change, all their processes start anew and load the newest snapshot. Each worker appends a line to the
journal after each step: how many workers there are, the step, and the moment.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.tasks import TASKS, VIRTUAL_NODES, loss_of
from benchmarks.trainee import micro_batches

TASK = TASKS["digits"]


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write a snapshot so that a restart finds the old one or the new one."""
    fresh = path.with_suffix(".new")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, fresh)
    fresh.replace(path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the snapshot, if there is one; the steps that it has behind it."""
    if not path.exists():
        return 0
    snapshot = torch.load(path, weights_only=True)
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    return int(snapshot["step"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--snapshot", type=Path, required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--every", type=int, default=10, help="steps from snapshot to snapshot")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer, data = TASK.make()
    step = load(args.snapshot, model, optimizer)
    wrapped = nn.parallel.DistributedDataParallel(model)
    # With three workers eight micro-batches do not divide evenly: the first ones take one more, as with VirtualFlow.
    share = VIRTUAL_NODES // world + (rank < VIRTUAL_NODES % world)
    stream = micro_batches(data, TASK.batch // VIRTUAL_NODES, world, rank)
    with args.journal.open("a", buffering=1, encoding="utf-8") as log:
        while True:
            optimizer.zero_grad()
            for place in range(share):
                with wrapped.no_sync() if place < share - 1 else nullcontext():
                    (loss_of(wrapped, next(stream)) * world / VIRTUAL_NODES).backward()
            optimizer.step()
            step += 1
            line = {"pid": os.getpid(), "rank": rank, "workers": world, "step": step, "time": time.time()}
            log.write(json.dumps(line) + "\n")
            if rank == 0 and step % args.every == 0:
                save(args.snapshot, model, optimizer, step)


if __name__ == "__main__":
    main()
