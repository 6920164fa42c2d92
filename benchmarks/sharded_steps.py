"""Steps with divided parameters beside FSDP2 (``torch.distributed.fsdp.fully_shard``), at equal workers and batches.

Both sides live at once and take turns; see ``benchmarks.turns``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.jobs import free_port, job_command
from benchmarks.turns import Pace, Side, Turns, compare

TOKENS = 256
"""Different ones."""
ENDLESS = 10_000_000
"""Steps; the turns end the training."""
SMALL, LARGE = "25 M", "100 M, short steps"
CASES = {
    # name: width, layers, tokens of a sample, samples of a virtual node
    SMALL: (512, 8, 64, 1),
    LARGE: (1_024, 8, 8, 1),
}
ROWS = ((SMALL, 2, 2), (SMALL, 2, 8), (SMALL, 4, 4), (SMALL, 4, 8), (LARGE, 2, 2), (LARGE, 4, 4))
"""Which model, how many workers, how many micro-batches."""
TEXT = """\
A transformer, AdamW, one thread a worker, over loopback. FSDP2 shards each layer and the rest of the model, as its
tutorial does, and accumulates over a worker's micro-batches; the job has `shard="parameters"`, with the bits of one
worker or (*statistical*) without. *Micro-batches*: of a step, all workers together. *Speed*: steps a second over
FSDP2's, the median of rounds in which both sides make the same steps one after the other."""


class Transformer(nn.Module):
    """Layers of the same size between an embedding and a head."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.into = nn.Embedding(TOKENS, width)
        self.places = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.out = nn.Linear(width, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores [n, context, TOKENS] of tokens [n, context]."""
        x = self.into(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def make(case: str) -> tuple[Transformer, TensorDataset, int]:
    """The same in every process: a model, samples, and how many of them a virtual node has."""
    width, layers, context, samples = CASES[case]
    torch.manual_seed(0)
    return Transformer(width, layers, context), TensorDataset(torch.randint(TOKENS, (512, context + 1))), samples


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train_fsdp2(case: str, virtual_nodes: int, pace: Pace) -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model, data, samples = make(case)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
    share = virtual_nodes // world
    stream = endless(data, samples, world, rank)
    while pace.goes_on():
        optimizer.zero_grad()
        for _ in range(share):
            (loss_of(model, next(stream)) / share).backward()
        optimizer.step()
    dist.destroy_process_group()


def endless(data: TensorDataset, samples: int, world: int, rank: int) -> Iterator[Tensor]:
    loader = DataLoader(data, batch_size=samples, sampler=DistributedSampler(data, world, rank), drop_last=True)
    while True:
        for (tokens,) in loader:
            yield tokens


def train_elastic(case: str, virtual_nodes: int, pace: Pace, **mode: Any) -> None:
    import virtualflow as vf

    model, data, samples = make(case)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
    options: dict[str, Any] = {"virtual_nodes": virtual_nodes, "drop_last": True, "redundancy": "none", **mode}
    batch = samples * virtual_nodes
    with vf.elastic(model, optimizer, data, batch_size=batch, steps=ENDLESS, shard="parameters", **options) as run:
        for step in run:
            if step.number and not pace.goes_on():
                break
            for (tokens,) in step:
                loss_of(model, tokens).backward()


def sides(case: str, workers: int, virtual_nodes: int, modes: list[str]) -> Iterator[Side]:
    """All that take turns."""
    program = [sys.executable, "-m", "benchmarks.sharded_steps", "--case", case, "--virtual-nodes", str(virtual_nodes)]
    place: dict[str, str | int] = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": workers}
    ranks = [{**place, "RANK": rank} for rank in range(workers)]
    yield Side("fsdp2", [[*program, "--train", "fsdp2"]] * workers, workers, ranks)
    for mode in modes:
        script = ["-m", *program[2:], "--train", mode]
        counts = ["--workers", workers, "--virtual-nodes", virtual_nodes]
        yield Side(mode, [job_command(*counts, *script)], workers)


def measure(case: str, workers: int, virtual_nodes: int, modes: list[str], *, quick: bool) -> dict[str, Any]:
    """A row of the table."""
    rounds, seconds = (4, 1.0) if quick else (8, 2.0)
    _, times = compare(list(sides(case, workers, virtual_nodes, modes)), rounds, seconds, (2, 4))
    row: dict[str, Any] = {"model": case, "workers": workers, "micro-batches": virtual_nodes}
    row["FSDP2, ms"] = f"{statistics.median(times['fsdp2']):.0f}"
    for mode in ("bitwise", "statistical"):
        if mode not in modes:
            row |= {f"{mode}, ms": "", f"{mode}, speed": ""}
            continue
        ratios = [theirs / ours for theirs, ours in zip(times["fsdp2"], times[mode], strict=True)]
        row[f"{mode}, ms"] = f"{statistics.median(times[mode]):.0f}"
        row[f"{mode}, speed"] = f"{statistics.median(ratios):.2f}"
    return row


def main() -> None:
    """Measure and print; ``--json`` keeps the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short turns")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--case", choices=list(CASES), help="this model only")
    parser.add_argument("--workers", type=int, help="this many only")
    parser.add_argument("--virtual-nodes", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.train:
        with Turns() as turns:
            if args.train == "fsdp2":
                train_fsdp2(args.case, args.virtual_nodes, Pace(turns))
            else:
                train_elastic(args.case, args.virtual_nodes, Pace(turns), reproducibility=args.train)
        return
    rows = []
    for case, workers, virtual_nodes in ROWS:
        if args.case in (None, case) and args.workers in (None, workers):
            # Three sides at once take the memory of the machine, and fusing takes 48 steps to be chosen.
            modes = ["bitwise", "statistical"] if (case, virtual_nodes) == (SMALL, workers) else ["bitwise"]
            rows.append(measure(case, workers, virtual_nodes, modes, quick=args.quick))
            print("  " + "  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"text": TEXT, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
