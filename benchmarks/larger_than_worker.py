"""A model that one worker has no memory for: divided over workers under a limit of the kernel's, resized and killed.

First one worker trains it without a limit, and the kernel says how much memory that takes. A fourth of it is the limit
of each worker of the job that follows (a memory cgroup each, so root is needed). The worker that goes over it is killed
by the kernel, which would be one change more than was asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.jobs import run_job

WIDTH, LAYERS, VIRTUAL_NODES = 448, 144, 8
STEPS, EVERY = 8, 3
SCHEDULE = "2:=5,4:=8,7:kill"
GROUPS = Path("/sys/fs/cgroup/memory")
PAUSE = 0.02
"""Seconds between two looks at what a worker uses."""
TEXT = """\
Perceptron blocks on the `meta` device, AdamW, eight virtual nodes, `shard="parameters"` with `redundancy="checkpoint"`
and a checkpoint every third step. *One worker* is the most that the kernel has counted for a job of one (without files
that it could drop); the limit of each worker of the other job is a fourth of it (a memory cgroup). That job begins with
six workers, goes on with five and with eight, and loses one of those by SIGKILL: all begin anew from the last
checkpoint. *Most* is the largest figure of any worker. The *pauses* are those of the changes before
that: three workers that join need not come at once."""


def train(groups: str, limit: int, folder: Path) -> None:
    """One worker, in a memory cgroup of its own from the beginning."""
    group = Path(groups) / f"{os.environ['VIRTUALFLOW_WORKER']}-{os.getpid()}"
    group.mkdir()
    if limit:
        (group / "memory.limit_in_bytes").write_text(str(limit))
    (group / "cgroup.procs").write_text(str(os.getpid()))

    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    import virtualflow as vf
    from virtualflow.atomic_file import write_whole

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(self.act(self.up(self.norm(x))))

    most = 0

    def look() -> None:
        nonlocal most
        while True:
            most = max(most, *(int(line[4:]) for line in (group / "memory.stat").open() if line.startswith("rss ")))
            time.sleep(PAUSE)

    threading.Thread(target=look, daemon=True).start()
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, 1))
    data = TensorDataset(torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    saved = vf.CheckpointPolicy(folder / "checkpoints", every_steps=EVERY)
    options: dict[str, Any] = {"shard": "parameters", "redundancy": "checkpoint", "checkpoint": saved}
    with vf.elastic(model, optimizer, data, batch_size=VIRTUAL_NODES, steps=STEPS, **options) as run:
        for step in run:
            for (x,) in step:
                model(x).square().mean().backward()
            told = {"most": most, "model": sum(parameter.nbytes for parameter in model.parameters())}
            write_whole(folder / f"{group.name}.json", json.dumps(told).encode())


def run(groups: Path, limit: int, folder: Path, workers: int, *options: str) -> tuple[dict[str, Any], int, int]:
    """Train once: the job's report, the most that any worker had, and the size of the model, in bytes."""
    folder.mkdir()
    script = ("-m", "benchmarks.larger_than_worker", "--train", groups, "--limit", limit, "--folder", folder)
    counts = ("--workers", workers, "--virtual-nodes", VIRTUAL_NODES)
    report, _ = run_job(*counts, *options, *map(str, script))
    told = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return report, max(each["most"] for each in told), told[0]["model"]


def measure(folder: Path) -> dict[str, Any]:
    """The row of the table."""
    groups = GROUPS / f"virtualflow-{os.getpid()}"
    groups.mkdir()
    try:
        alone, needed, model = run(groups, 0, folder / "alone", 1)
        limit = needed // 4
        divided, most, _ = run(groups, limit, folder / "divided", 6, "--schedule", SCHEDULE)
    finally:
        for group in groups.iterdir():
            if group.is_dir():
                group.rmdir()
        groups.rmdir()
    changes = divided["changes"]
    if divided["digest"] != alone["digest"] or changes[-1]["cause"] != "restart":
        sys.exit(f"not the same: {alone['digest']} and {divided['digest']}, after {changes}")
    return {
        "parameters, MB": f"{model / 1e6:.0f}",
        "one worker, MB": f"{needed / 1e6:.0f}",
        "limit, MB": f"{limit / 1e6:.0f}",
        "most, MB": f"{most / 1e6:.0f}",
        "workers": " → ".join(map(str, [6, *(change["to"] for change in changes)])),
        "pauses, s": ", ".join(
            f"{change['pause_ms'] / 1e3:.1f}" for change in changes if change["pause_ms"] is not None
        ),
        "repeated steps": divided["repeated_steps"],
        "digests": "equal",
    }


def main() -> None:
    """Measure and print; ``--json`` keeps the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.train, args.limit, args.folder)
        return
    if not os.access(GROUPS, os.W_OK):
        found: dict[str, Any] = {"rows": [], "skipped": f"{GROUPS} cannot be written to"}
    else:
        with tempfile.TemporaryDirectory() as directory:
            found = {"text": TEXT, "rows": [measure(Path(directory))]}
        print("  " + "  ".join(f"{key} {value}" for key, value in found["rows"][0].items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
