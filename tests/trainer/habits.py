"""A small script with a habit that breaks equal bits, by name: ``virtualflow check habits.py counter`` finds it.

Each is as short as it can be, and each is something that people write.
"""

from __future__ import annotations

import copy
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import virtualflow as vf

STEPS = 4
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "far", "away", "from")


class Plain(nn.Module):
    """A model without anything unusual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes [n, 4] -> [n, 1]."""
        return self.second(torch.relu(self.first(x)))


class Counting(Plain):
    """Warms up by the number of its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Shapes [n, 4] -> [n, 1]."""
        self.calls += 1
        return super().forward(x) * min(1.0, self.calls / 100)


class OwnGenerator(Plain):
    """Draws noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes [n, 4] -> [n, 1]."""
        return super().forward(x + 0.01 * torch.randn(x.shape, generator=self.generator))


class Recurrent(Plain):
    """Goes on from the hidden state that the last micro-batch has left."""

    hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Shapes [n, 4] -> [n, 1]."""
        mean = x.detach().mean(0)
        self.hidden = mean if self.hidden is None else 0.9 * self.hidden + 0.1 * mean
        return super().forward(x + self.hidden)


class Seeing(Plain):
    """Counts the samples that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes [n, 4] -> [n, 1]."""
        self.seen += len(x)
        return super().forward(x)


class Cached(Plain):
    """Measures its first weight once, and divides by that for ever."""

    norm: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Shapes [n, 4] -> [n, 1]."""
        if self.norm is None:
            self.norm = self.first.weight.detach().norm()
        return super().forward(x / self.norm)


class RunningLoss(nn.Module):
    """Weighs by a running mean of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Shape [] for any two equal ones."""
        loss = (x - y).square().mean()
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss / self.mean


class Words(Dataset[tuple[Tensor, Tensor]]):
    """Numbers of words; their order is that of a set."""

    def __init__(self, order: Callable[[set[str]], Any]) -> None:
        self.numbers = {word: n for n, word in enumerate(order(set(WORDS)))}

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        number = self.numbers[WORDS[index % len(WORDS)]]
        return torch.full((4,), float(number)), torch.tensor([index / 64])


class Counted(Words):
    """Remembers how many samples it has given."""

    given = 0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.given += 1
        x, y = super().__getitem__(index)
        return x + self.given, y


def ahead(batches: Iterable[Any]) -> Iterator[Any]:
    """Hold the next micro-batch in hand while one is computed."""
    source = iter(batches)
    now = next(source, None)
    while now is not None:
        following = next(source, None)
        yield now
        now = following


def main(habit: str) -> None:
    """Train for a few steps, with that habit."""
    torch.manual_seed(0)
    if habit == "unseeded":
        torch.seed()
    models: dict[str, type[Plain]] = {"counter": Counting, "generator": OwnGenerator, "recurrent": Recurrent}
    models |= {"seeing": Seeing, "cache": Cached}
    model = models.get(habit, Plain)()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9) if habit == "scheduler" else None
    criterion = RunningLoss() if habit == "criterion" else nn.MSELoss()
    average = copy.deepcopy(model) if habit == "average" else None
    dataset = (Counted if habit == "counting dataset" else Words)(list if habit == "set" else sorted)
    seen, total, made = 0, 0.0, 0
    with vf.elastic(model, optimizer, dataset, batch_size=16, steps=STEPS, virtual_nodes=2) as run:
        for step in run:
            for x, y in ahead(step) if habit == "look ahead" else step:
                wrong = model(x) - y
                loss = criterion(wrong, torch.zeros_like(wrong))
                if habit == "time":
                    loss = loss * (1 + time.monotonic() % 1)
                if habit == "draws" and random.random() < 2:
                    [random.random() for _ in range(seen)]
                loss.backward()
                seen += 1
                total += loss.item()
                if scheduler is not None:
                    scheduler.step()
                step.log(loss=total / seen if habit == "running metric" else loss)
            made += 1
            if average is not None:
                with torch.no_grad():
                    for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                        mean.lerp_(parameter, 0.1)
            if habit == "leader" and run.leader:
                with torch.no_grad():
                    model.second.bias.clamp_(-0.001, 0.001)
            if habit == "steps made":
                with torch.no_grad():
                    model.second.bias.mul_(1 + made / 100)


if __name__ == "__main__":
    main(sys.argv[1])
