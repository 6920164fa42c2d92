"""One worker of a job that shares a core: trains a task, and its leader notes when each step was done.

``python -m benchmarks.packed_job TASK STEPS FILE``; the times are those of the machine's monotonic clock.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

import virtualflow as vf
from benchmarks.tasks import TASKS, VIRTUAL_NODES, loss_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("steps", type=int)
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    task = TASKS[args.task]
    model, optimizer, data = task.make()
    times: list[float] = []
    with vf.elastic(
        model, optimizer, data, batch_size=task.batch, steps=args.steps, virtual_nodes=VIRTUAL_NODES, drop_last=True
    ) as run:
        for step in run:
            for batch in step:
                loss_of(model, batch).backward()
            times.append(time.monotonic())
        if run.leader:
            args.file.write_text(json.dumps(times))


if __name__ == "__main__":
    main()
