"""A worker on a core of its own that notes, for each step, when it was through and how long it computed for what.

With ``--waits`` it plays a device: it waits for each virtual node or each step as long as is said for its number. With
``--profiles`` it keeps the split that these ask for.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import virtualflow as vf
from benchmarks import given_split

SAMPLES, FEATURES, CLASSES = 32_768, 256, 10


def main() -> None:
    """Train and write ``DIR/NAME.json``: of each step its number, the end, virtual nodes carried, seconds computed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=8_192)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--waits", type=lambda text: [*map(float, text.split(","))], metavar="S,S,...")
    parser.add_argument("--of", choices=("node", "step"), default="node", help="what each worker waits for")
    parser.add_argument("--profiles", type=Path, metavar="DIR")
    parser.add_argument("--times", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    name = os.environ.get("VIRTUALFLOW_WORKER", "worker-0")
    number, cores = int(name.rsplit("-", 1)[-1]), sorted(os.sched_getaffinity(0))
    if args.waits is None:
        os.sched_setaffinity(0, {cores[number % len(cores)]})
    waits = args.waits[number] if args.waits is not None else 0.0
    if args.profiles is not None:
        given_split.take(args.profiles, number)
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, FEATURES), torch.randint(CLASSES, (SAMPLES,)))
    width = args.width
    model = nn.Sequential(
        nn.Linear(FEATURES, width), nn.ReLU(), *(m for _ in range(3) for m in (nn.Linear(width, width), nn.ReLU())),
        nn.Linear(width, CLASSES),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps: list[tuple[int, float, int, float]] = []
    share = 1
    with vf.elastic(model, optimizer, data, batch_size=args.batch_size, steps=args.steps) as run:
        for step in run:
            carried, computed, began = 0, 0.0, time.monotonic()
            for x, y in step:
                time.sleep(waits if args.of == "node" else waits / share)
                F.cross_entropy(model(x), y).backward()
                carried, computed = carried + 1, time.monotonic() - began
            share = max(1, carried)
            steps.append((step.number, time.monotonic(), carried, computed))
    (args.times / f"{name}.json").write_text(json.dumps(steps))


if __name__ == "__main__":
    main()
