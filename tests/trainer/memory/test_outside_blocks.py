"""What autograd saves outside of blocks is there whatever the plan, so it counts in the budget."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import virtualflow as vf
from virtualflow.memory import Planner
from virtualflow.memory.activations import Activations, ActivationSettings
from virtualflow.memory.activations.live_bytes import LiveBytes
from virtualflow.memory.settings import PlannerSettings

CPU = torch.device("cpu")
SETTINGS = ActivationSettings(probe=1 << 16, copies=3, planner=PlannerSettings(rungs=2, moves=200))
PLENTY = "1GiB"
CLASSES = 600


def convolutions(into: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(into, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(), nn.Conv2d(out, out, 3, padding=1), nn.GELU()
    )


class Ladder(nn.Module):
    """A U-Net whose poolings, concatenations and middle are in no block."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([convolutions(3, 5), convolutions(5, 7), convolutions(7, 11)])
        self.middle = convolutions(11, 11)
        self.up = nn.ModuleList([convolutions(22, 11), convolutions(18, 7), convolutions(12, 5)])
        self.head = nn.Conv2d(5, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            skips.append(down(x))
            x = F.avg_pool2d(skips[-1], 2)
        x = self.middle(x)
        for up in self.up:
            x = up(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        return self.head(x)  # type: ignore[no-any-return]


class Language(nn.Module):
    """Its loss needs more than its layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 12)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(12), nn.Linear(12, width), nn.Tanh(), nn.Linear(width, 12))
            for width in (20, 130, 70, 200, 35)
        )
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).transpose(1, 2)  # type: ignore[no-any-return]


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 24, 24), torch.randint(0, 4, (4, 24, 24))


def words() -> tuple[Tensor, Tensor]:
    return torch.randint(0, CLASSES, (4, 19)), torch.randint(0, CLASSES, (4, 19))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "poolings between blocks": (Ladder, images),
    "a loss over many words": (Language, words),
}


def planned(model: nn.Module, batch: tuple[Tensor, Tensor], device: str | int) -> Activations:
    memory = vf.Memory(device)
    made = Activations(model, CPU, memory, micro_batch=4, virtual_nodes=1, optimizer_bytes=lambda: 0, settings=SETTINGS)
    for _ in range(SETTINGS.warm_up + SETTINGS.samples):
        run(made, model, batch)
    made.committed()
    return made


def run(activations: Activations, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    x, y = batch
    activations.begin()
    F.cross_entropy(model(x), y).backward()
    activations.end(len(x))
    model.zero_grad()


@pytest.mark.parametrize("name", MODELS)
def test_a_pass_stays_within_the_budget_and_near_what_was_predicted(name: str) -> None:
    torch.manual_seed(5)
    build, draw = MODELS[name]
    model, batch = build().train(), draw()
    first = planned(model, batch, PLENTY)
    first.close()
    assert first.profile is not None
    planner, budget = Planner(first.profile, SETTINGS.planner), vf.Memory(PLENTY, 0).budget
    least, most = planner.smallest(budget), planner.keep_bytes(budget)
    for share in (0.0, 0.5, 1.0):
        made = planned(model, batch, least + int(share * (most - least)))
        assert made.plan is not None
        run(made, model, batch)  # who shares what with whom is known from the second pass on
        live = LiveBytes()
        live.add([*model.parameters(), *model.buffers(), *batch])
        with live:
            run(made, model, batch)
        made.close()
        assert 0.75 * made.plan.peak_bytes < live.peak <= made.plan.peak_bytes, (share, live.peak, made.plan.peak_bytes)


def test_nothing_is_left_open_around_the_script_between_micro_batches() -> None:
    model = Language()
    made = planned(model, words(), PLENTY)
    seen: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(1) or tensor, lambda tensor: tensor):
        made.begin()
        (torch.ones(2, requires_grad=True) ** 2).sum()
        made.end(4)
        inside = len(seen)
        (torch.ones(2, requires_grad=True) ** 2).sum()
    made.close()
    assert len(seen) > inside
