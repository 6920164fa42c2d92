"""What sums of gradients take that wait for their other half: in memory, and in files (``vf.Memory(scratch=...)``)."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from benchmarks.jobs import LIMIT, ROOT, environment
from virtualflow.state import digests

WIDTH, LAYERS, STEPS = 1_024, 16, 3
TEXT = """\
One worker, SGD without momentum, 67 MB of gradients. Cells: the most anonymous memory beyond that of model and library,
in sizes of the gradients, with `vf.Memory(scratch="/tmp")` and without, and how much longer a step takes with it (the
fastest of three). The kernel may drop what is in files. *Digests* are equal."""


def train(virtual_nodes: int, scratch: str) -> dict[str, Any]:
    """One training in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    size = sum(parameter.nbytes for parameter in model.parameters())
    data = TensorDataset(torch.randn(virtual_nodes, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    memory = vf.Memory(scratch=scratch) if scratch else None
    options: dict[str, Any] = {"batch_size": virtual_nodes, "virtual_nodes": virtual_nodes, "memory": memory}
    before = most = anonymous()
    times, began = [], time.perf_counter()
    with vf.elastic(model, optimizer, data, steps=STEPS, **options) as run:
        for step in run:
            for (x,) in step:
                loss = model(x).square().mean()
                most = max(most, anonymous())
                loss.backward()
                most = max(most, anonymous())
            times.append(time.perf_counter() - began)
            began = time.perf_counter()
        digest = digests.digest(model.state_dict())
    return {"gradients": (most - before) / size, "seconds": min(times), "digest": digest}


def anonymous() -> int:
    """Bytes of this process that are in no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def measure(virtual_nodes: int) -> dict[str, Any]:
    """A row of the table."""
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        for scratch in ("", directory):
            command = [sys.executable, "-m", "benchmarks.waiting_sums", "--train", str(virtual_nodes)]
            done = subprocess.run(
                [*command, "--scratch", scratch],
                cwd=ROOT,
                env=environment(),
                check=True,
                timeout=LIMIT,
                capture_output=True,
                text=True,
            )
            found[bool(scratch)] = json.loads(done.stdout.splitlines()[-1])
    if found[True]["digest"] != found[False]["digest"]:
        sys.exit(f"not the same bits: {found}")
    return {
        "virtual nodes": virtual_nodes,
        "in memory": f"{found[False]['gradients']:.1f}",
        "in files": f"{found[True]['gradients']:.1f}",
        "longer": f"{found[True]['seconds'] / found[False]['seconds']:.2f}",
    }


def main() -> None:
    """Measure and print; ``--json`` keeps the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few virtual nodes only")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--train", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        print(json.dumps(train(args.train, args.scratch)))
        return
    rows = []
    for virtual_nodes in (1, 8) if args.quick else (1, 8, 64, 256):
        rows.append(measure(virtual_nodes))
        print("  " + "  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"text": TEXT, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
