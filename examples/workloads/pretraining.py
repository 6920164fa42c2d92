"""Pretrain a causal transformer on a stream of text shards, on any number of workers.

python examples/workloads/pretraining.py                          a small one; it writes its shards itself
virtualflow run --workers 2 examples/workloads/pretraining.py     the same bits from two workers
virtualflow run examples/workloads/pretraining.py --size full --data FOLDER    12 layers, on shards of yours

Virtual node v of V reads the files v, v + V, ... of the folder, whoever computes it, and goes on where it was after a
resize, a restart or a repeated step.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import above  # noqa: F401 - what follows is there
import virtualflow as vf
from charlm_task import CONTEXT, CharacterModel, docstrings, warm_up_then_cosine, window_losses, windows
from workload import Length, device, due, parse_arguments, tell, tell_parameters

LENGTHS = {"small": Length(steps=200, batch_size=64), "full": Length(steps=100_000, batch_size=512)}
LEARNING_RATE = {"small": 6e-3, "full": 6e-4}
SHARDS = 16  # that are written for the small size: as many virtual nodes at most
TEXT_BYTES = 800_000
HELD_OUT = "held-out.txt"


class TextShards:
    """Windows of text files: (bytes [CONTEXT], the byte after each [CONTEXT]), shuffled within each shard."""

    def __init__(self, files: list[Path]) -> None:
        self._windows = [(file, (file.stat().st_size - 1) // CONTEXT) for file in files]

    def shard(self, index: int, count: int, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the windows of shard `index` of `count`, beginning with its `start`-th."""
        if len(self._windows) % count:
            raise SystemExit(
                f"{len(self._windows)} files are not for {count} virtual nodes: choose a number that divides"
            )
        places = [(file, place) for file, windows in self._windows[index::count] for place in range(windows)]
        order = torch.randperm(len(places), generator=torch.Generator().manual_seed(epoch * count + index))
        for chosen in order[start:].tolist():
            file, place = places[chosen]
            with file.open("rb") as text:
                text.seek(place * CONTEXT)
                window = torch.frombuffer(bytearray(text.read(CONTEXT + 1)), dtype=torch.uint8).long()
            yield window[:-1], window[1:]


def write_shards(folder: Path) -> None:
    """Cut Python's documentation strings into files. All workers do: whoever is last writes what was there."""
    text = docstrings(TEXT_BYTES)
    folder.mkdir(parents=True, exist_ok=True)
    size = len(text) // (SHARDS + 1)
    names = [*(f"shard-{number:03d}.txt" for number in range(SHARDS)), HELD_OUT]
    for number, name in enumerate(names):
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(text[number * size : (number + 1) * size])
        os.replace(file.name, folder / name)  # as a whole, since others may be reading it


def build(size: str) -> CharacterModel:
    """Return a transformer of 2 layers, or one as large as GPT-2 was at first."""
    if size == "full":
        return CharacterModel(width=768, heads=12, layers=12)
    return CharacterModel()


def main() -> None:
    args = parse_arguments(__doc__, LENGTHS, "a folder of shard-*.txt and held-out.txt (small: written to text-shards)")
    if args.size == "full" and args.data is None:
        raise SystemExit(f"--size full takes --data FOLDER, with shard-*.txt and {HELD_OUT}")
    folder = Path(args.data or "text-shards")
    if args.size == "small" and not (folder / HELD_OUT).exists():
        write_shards(folder)
    files = sorted(folder.glob("shard-*.txt"))
    if not files:
        raise SystemExit(f"{folder} has no shard-*.txt")
    torch.manual_seed(0)
    held_out, _ = windows(folder / HELD_OUT)
    model = build(args.size).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE[args.size], betas=(0.9, 0.99))
    sched = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_cosine(args.steps))

    def judge(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = (each.to(device()) for each in batch)
        return window_losses(model, (x, y))

    with vf.elastic(
        model,
        optimizer,
        TextShards(files),
        batch_size=args.batch_size,
        steps=args.steps,
        scheduler=sched,
        device=device(),
    ) as run:
        for step in run:
            for x, y in step:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                step.log(loss=loss)
            if due(step.number, args.steps):
                found = vf.evaluate(model, held_out, judge, batch_size=args.batch_size).mean().item()
                run.log(held_out_loss=found)
                if run.leader:
                    tell(step.number, "held-out loss", found)
        if run.leader:
            tell_parameters(model)


if __name__ == "__main__":
    main()
