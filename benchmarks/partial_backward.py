"""What backward passes that end early buy: quality after equal computing time, beside other ways to compute less.

One worker trains small tasks with several recipes and seeds. How much longer a step of one recipe takes than that of
another is measured first; each then makes as many steps as fit into the time of the whole backward pass's.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

import virtualflow as vf
from charlm_task import CharacterModel, windows
from digits_task import DigitsNet, digits

NODES = 8
TRIAL = 24
"""Steps by which the time of a recipe's step is measured."""
PERIOD = 5
"""Steps for which the random choice of blocks stays."""
TEXT = """\
One worker, eight virtual nodes, AdamW, three seeds. Each recipe makes as many steps as fit into the CPU time of
*whole*, by short trials of both in turns, since a core's speed changes within minutes. Cells: step time relative to
*whole*, by the trials; final held-out loss (mean, range), and its mean difference to *whole*.

| recipe | meaning |
| --- | --- |
| partial | fractions 1, 0.75, 0.5 and 0.25 rotate |
| fewer samples | six of the eight virtual nodes |
| frozen | the first half of the model trains for a third of its steps |
| random blocks | half of the blocks, drawn every five steps (LISA) |"""

Data = Dataset[Any]


@dataclass(frozen=True)
class Task:
    """Something to train."""

    make: Callable[[], nn.Module]
    data: Callable[[], tuple[Data, Data]]
    batch: int
    steps: int
    """Of whole backward passes."""
    rate: float
    blocks: Sequence[str] | None = None
    first: Sequence[str] = ()
    """What is in front of the blocks."""


def perceptron() -> nn.Module:
    """Six layers."""
    widths = [64, *[128] * 5]
    layers = (nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths))
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(128, 10))


@cache
def characters() -> tuple[Data, Data]:
    """A part of the text, and what was held out."""
    train, test = windows(None)
    return Subset(train, range(4_000)), Subset(test, range(256))


TASKS = {
    "digits CNN": Task(DigitsNet, digits, 128, 160, 3e-3, ["0", "4", "10"]),
    "digits MLP, 6 layers": Task(perceptron, digits, 128, 160, 1e-3),
    "char transformer, 4 layers": Task(
        lambda: CharacterModel(layers=4), characters, 32, 80, 3e-3, first=["character", "position"]
    ),
}


def blocks_of(task: Task, model: nn.Module) -> list[nn.Module]:
    """Those that have parameters, as the library finds them."""
    if task.blocks is not None:
        return [model.get_submodule(name) for name in task.blocks]
    chain = model.blocks if isinstance(model, CharacterModel) else model
    return [block for block in chain.children() if next(block.parameters(), None) is not None]


@dataclass(frozen=True)
class Recipe:
    """A way to compute less."""

    backward: vf.PartialBackward | None = None
    nodes: int = NODES
    frozen: bool = False
    drawn: bool = False


RECIPES = {
    "whole": Recipe(),
    "partial, mean": Recipe(vf.PartialBackward()),
    "partial, sum": Recipe(vf.PartialBackward(scale="sum")),
    "fewer samples": Recipe(nodes=6),
    "frozen": Recipe(frozen=True),
    "random blocks": Recipe(drawn=True),
}


def freeze(task: Task, recipe: Recipe, model: nn.Module, step: int, steps: int, seed: int) -> None:
    """Choose what is trained in a step: a function of its number."""
    blocks = blocks_of(task, model)
    half = len(blocks) // 2
    trained, first = set(range(len(blocks))), True
    if recipe.frozen and step > steps // 3:
        trained, first = set(range(half, len(blocks))), False
    if recipe.drawn:
        draw = random.Random(f"{seed} {step // PERIOD}")
        trained = set(draw.sample(range(len(blocks)), len(blocks) - half))
    for number, block in enumerate(blocks):
        block.requires_grad_(number in trained)
    for name in task.first:
        model.get_submodule(name).requires_grad_(first)


def train(task: Task, recipe: Recipe, seed: int, steps: int) -> tuple[float, nn.Module]:
    """CPU seconds of a training, and what came of it."""
    torch.manual_seed(seed)
    model = task.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate)
    batch = task.batch // NODES * recipe.nodes
    backward = recipe.backward
    if backward is not None and task.blocks is not None:
        backward = vf.PartialBackward(scale=backward.scale, blocks=task.blocks)
    arguments: dict[str, Any] = {"virtual_nodes": recipe.nodes, "seed": seed, "steps": steps, "backward": backward}
    with vf.elastic(model, optimizer, task.data()[0], batch_size=batch, drop_last=True, **arguments) as run:
        began = time.process_time()
        for step in run:
            if recipe.frozen or recipe.drawn:
                freeze(task, recipe, model, step.number, steps, seed)
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
        took = time.process_time() - began
    return took, model


def held_out_loss(task: Task, model: nn.Module) -> float:
    """The mean over what is not trained on."""
    model.eval()
    total, samples = 0.0, 0
    with torch.no_grad():
        for x, y in DataLoader(task.data()[1], batch_size=64):
            total += float(F.cross_entropy(model(x), y)) * len(x)
            samples += len(x)
    return total / samples


def seconds_per_step(task: Task, recipe: Recipe) -> float:
    """By a short training."""
    return train(task, recipe, 0, TRIAL)[0] / TRIAL


def measure(name: str, quick: bool) -> list[dict[str, Any]]:
    """The rows of a task."""
    task, rows = TASKS[name], []
    train(task, RECIPES["whole"], 0, TRIAL)  # warms up
    whole_steps, seeds = task.steps // (2 if quick else 1), range(3)
    reference: list[float] = []
    for title, recipe in RECIPES.items():
        # Twice in turn, since a machine's speed changes.
        ratios = [
            seconds_per_step(task, recipe) / seconds_per_step(task, RECIPES["whole"]) if title != "whole" else 1.0
            for _ in range(1 if quick else 3)
        ]
        ratio = statistics.median(ratios)
        steps = round(whole_steps / ratio)
        ended = [train(task, recipe, seed, steps) for seed in seeds]
        losses = [held_out_loss(task, model) for _, model in ended]
        reference = reference or losses
        rows.append(
            {
                "task": name,
                "recipe": title,
                "time of a step": f"{ratio:.2f}",
                "steps": steps,
                "loss": f"{statistics.mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})",
                "beside whole": f"{statistics.mean(a - b for a, b in zip(losses, reference, strict=True)):+.3f}",
                "cpu s": f"{statistics.mean(seconds for seconds, _ in ended):.1f}",
            }
        )
        print("  " + "  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    return rows


def main() -> None:
    """Measure and print; ``--json`` keeps the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="half of the steps, fewer trials")
    parser.add_argument("--json", type=Path, help="where the figures go")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for name in TASKS for row in measure(name, args.quick)]
    if args.json:
        args.json.write_text(json.dumps({"text": TEXT, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
