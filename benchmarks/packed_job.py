"""One worker of a job that shares a device: trains a task, and its leader notes when each step was done.

``python -m benchmarks.packed_job TASK STEPS VIRTUAL_NODES FILE [--device FILE]``; a line a step: seconds of the
machine's monotonic clock, and those in which the leader's processor has computed. They stand in the file at once, since
a leader may be killed and another worker go on.
"""

from __future__ import annotations

import argparse
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

import virtualflow as vf
from benchmarks.played_kernels import OneKernelAtATime
from benchmarks.tasks import TASKS, loss_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("steps", type=int)
    parser.add_argument("virtual_nodes", type=int)
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--device", type=Path, help="play a device that runs one kernel at a time, by means of this file"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    task = TASKS[args.task]
    model, optimizer, data = task.make()
    device: AbstractContextManager[object] = OneKernelAtATime(args.device) if args.device else nullcontext()
    with (
        args.file.open("a", buffering=1) as file,
        vf.elastic(
            model,
            optimizer,
            data,
            batch_size=task.batch,
            steps=args.steps,
            virtual_nodes=args.virtual_nodes,
            drop_last=True,
        ) as run,
    ):
        for step in run:
            for batch in step:
                with device:
                    loss_of(model, batch).backward()
            if run.leader:
                file.write(f"{time.monotonic()} {time.process_time()}\n")


if __name__ == "__main__":
    main()
