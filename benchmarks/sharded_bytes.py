"""What divided parameters cost in messages, and what each worker keeps, counted beside the least that there could be.

Each row is a job of processes: all that a worker sends in a step counts, headers and requests as well.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from benchmarks.jobs import LIMIT, ROOT, environment, job_command
from virtualflow.step import Shards

WIDTH, VIRTUAL_NODES, STEPS = 768, 8, 4
TEXT = """\
Eight virtual nodes, AdamW, `redundancy="none"`. *Even*: eight blocks of 2.4 MB. *Odd*: one
tensor has more than half of all elements, one is tied to another block's, one is frozen, and no shape divides by
anything. *Sent*: MB that all workers together send in a step, all included, and the least: each worker asks once a
virtual node for what it lacks of what is outside of blocks and twice for what it lacks of a block, and sends each slice
of a gradient to its keeper. *Kept*: what the worker with the most keeps of parameters and optimizer states, as a
multiple of the n-th part."""


class Odd(nn.Module):
    """A dominant tensor, a tied one, a frozen one, and shapes that no number divides."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, 769)
        self.blocks = nn.ModuleList(nn.Linear(769, 769) for _ in range(3))
        self.blocks.append(nn.Sequential(nn.Linear(769, 4_099), nn.ReLU(), nn.Linear(4_099, 769, bias=False)))
        self.blocks[2].weight = self.blocks[0].weight
        self.blocks[1].weight.requires_grad_(False)
        self.out = nn.Linear(769, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


def even() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))


def kept_bytes(shards: Shards, optimizer: torch.optim.Optimizer) -> int:
    """Of the values and the states that a worker keeps, in whatever tensors they are."""
    values, states = shards.sliced, shards._kept
    assert values is not None
    slices = [value for of in values._slices for value in of.values()]
    wholes = [values._whole[place] for place in values._here]
    cut = [value for of in states._slices.values() for state in of.values() for value in state.values()]
    own = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in (*slices, *wholes, *cut, *own) if isinstance(value, Tensor))


def train(kind: str, folder: Path) -> None:
    """One worker; it writes down what it has sent, what it keeps, and the least that all can."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))) if kind == "even" else Odd()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([parameter for parameter in parameters if parameter.requires_grad], 1e-4)
    data = TensorDataset(torch.randn(2 * VIRTUAL_NODES, WIDTH))
    sent: list[int] = []
    options: dict[str, Any] = {"shard": "parameters", "redundancy": "none", "virtual_nodes": VIRTUAL_NODES}
    with vf.elastic(model, optimizer, data, batch_size=VIRTUAL_NODES, steps=STEPS + 3, **options) as run:
        for step in run:
            for (x,) in step:
                (model(x) - x).square().mean().backward()
            session, update = run._context.session, run._context.update
            assert session.communicator is not None
            sent.append(session.communicator.traffic[0])  # of the steps before this one
        shards, sharded, rank = update.shards, update.sharded, session.rank
        assert shards is not None
        assert sharded is not None
        here = [0] * len(parameters)
        for piece in shards.row.pieces(shards.mine):
            here[piece.place] += (piece.end - piece.begin) * parameters[piece.place].itemsize
        outside = set(sharded._blocks[0].places)
        lacks = [(place, parameter, parameter.nbytes - here[place]) for place, parameter in enumerate(parameters)]
        asked = sum(size * (1 if place in outside else 2) for place, _, size in lacks)
        given = sum(size for _, parameter, size in lacks if parameter.requires_grad)
        told = {
            "sent": (sent[STEPS + 1] - sent[1]) / STEPS,
            "least": len(session.state.assigned) * (asked + given),
            "kept": kept_bytes(shards, optimizer),
        }
    (folder / f"{rank}.json").write_text(json.dumps(told))


def measure(kind: str, workers: int) -> dict[str, Any]:
    """A row of the table: a job of so many workers."""
    with tempfile.TemporaryDirectory() as directory:
        script = ["-m", "benchmarks.sharded_bytes", "--train", kind, "--folder", directory]
        counts = ["--workers", workers, "--virtual-nodes", VIRTUAL_NODES, "--rebalance-gain", 1]
        command = job_command(*counts, *script)
        subprocess.run(command, cwd=ROOT, env=environment(), check=True, timeout=LIMIT, stdout=subprocess.DEVNULL)
        found = [json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(workers)]
    sent, least = (sum(one[key] for one in found) for key in ("sent", "least"))
    most, mean = max(one["kept"] for one in found), sum(one["kept"] for one in found) / workers
    return {
        "model": kind,
        "workers": workers,
        "sent, MB": f"{sent / 1e6:.1f}",
        "least, MB": f"{least / 1e6:.1f}",
        "sent over least": f"{sent / least:.3f}" if least else "",
        "kept": f"{most / mean:.3f}",
    }


def main() -> None:
    """Measure and print; ``--json`` keeps the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three workers only")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.train:
        train(args.train, args.folder)
        return
    rows = []
    for kind in ("even", "odd"):
        for workers in (3,) if args.quick else (1, 2, 3, 4, 5):
            rows.append(measure(kind, workers))
            print("  " + "  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"text": TEXT, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
