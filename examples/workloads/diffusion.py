"""Learn to draw by taking noise away, with a U-Net, on any number of workers.

python examples/workloads/diffusion.py                            a small U-Net on scikit-learn's digits
virtualflow run --workers 2 examples/workloads/diffusion.py       the same bits from two workers
virtualflow run examples/workloads/diffusion.py --size full --data FOLDER    a wide one, on a folder of images, 64 x 64

The loss is the simple one of Ho et al., "Denoising diffusion probabilistic models" (NeurIPS 2020): noise of a random
strength is added to an image, and the model says which.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

import virtualflow as vf
from workload import Length, device, due, images, parse_arguments, tell, tell_parameters

LENGTHS = {"small": Length(steps=160, batch_size=64), "full": Length(steps=500_000, batch_size=128)}
WIDTHS = {"small": (32, 64), "full": (128, 256, 256, 512)}
LEARNING_RATE = {"small": 2e-3, "full": 1e-4}
STRENGTHS = 1000  # of noise
LEFT = torch.cumprod(1 - torch.linspace(1e-4, 0.02, STRENGTHS), 0)  # of an image, under noise of each strength
TESTED = 2_000  # images at most that the model is judged by
GROUPS = 8  # of channels that are normalised together


class Residual(nn.Module):
    """Two convolutions that are told the strength of the noise, beside a short way."""

    def __init__(self, inputs: int, outputs: int, told: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(GROUPS, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.told = nn.Linear(told, outputs)
        self.second = nn.Sequential(nn.GroupNorm(GROUPS, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1))
        self.short = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, told: Tensor) -> Tensor:
        """Map [n, inputs, h, w] and [n, told] to [n, outputs, h, w]."""
        found = self.first(x) + self.told(told)[:, :, None, None]
        added: Tensor = self.second(found) + self.short(x)
        return added


class UNet(nn.Module):
    """Noisy images [n, channels, h, w] and strengths, int [n] -> their noise; each level halves h and w."""

    def __init__(self, channels: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        first, told = widths[0], 4 * widths[0]
        self.strength = nn.Sequential(nn.Linear(first, told), nn.SiLU(), nn.Linear(told, told), nn.SiLU())
        self.enter = nn.Conv2d(channels, first, 3, padding=1)
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList(Residual(here, here, told) for here in widths[:-1])
        self.shrink = nn.ModuleList(nn.Conv2d(here, below, 3, stride=2, padding=1) for here, below in pairs)
        self.middle = Residual(widths[-1], widths[-1], told)
        self.grow = nn.ModuleList(nn.ConvTranspose2d(below, here, 2, stride=2) for here, below in pairs)
        self.up = nn.ModuleList(Residual(2 * here, here, told) for here in widths[:-1])
        self.leave = nn.Sequential(nn.GroupNorm(GROUPS, first), nn.SiLU(), nn.Conv2d(first, channels, 3, padding=1))

    def forward(self, x: Tensor, strengths: Tensor) -> Tensor:
        """Return what is noise in `x`, of its shape."""
        half = self.enter.out_channels // 2
        speeds = torch.exp(-math.log(10_000) * torch.arange(half, device=x.device) / half)
        angles = strengths[:, None] * speeds
        told = self.strength(torch.cat([angles.sin(), angles.cos()], dim=1))
        x, passed = self.enter(x), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x, told)
            passed.append(x)
            x = shrink(x)
        x = self.middle(x, told)
        for block, grow in zip(reversed(self.up), reversed(self.grow), strict=True):
            x = block(torch.cat([grow(x), passed.pop()], dim=1), told)
        found: Tensor = self.leave(x)
        return found


def losses(model: nn.Module, image: Tensor, strength: Tensor, noise: Tensor) -> Tensor:
    """Return by how much the model is mistaken about the noise, shape [n]; `image` is in 0..1."""
    left = LEFT.to(image.device)[strength][:, None, None, None]
    noisy = left.sqrt() * (2 * image - 1) + (1 - left).sqrt() * noise
    return F.mse_loss(model(noisy, strength), noise, reduction="none").mean(dim=(1, 2, 3))


def held_out(test: Subset[tuple[Tensor, Tensor]]) -> TensorDataset:
    """Return test images with noise that is always the same: (image, strength, noise)."""
    draw = torch.Generator().manual_seed(0)
    clean = torch.stack([image for image, _ in test])
    return TensorDataset(
        clean,
        torch.randint(STRENGTHS, (len(clean),), generator=draw),
        torch.randn(clean.shape, generator=draw),
    )


def main() -> None:
    args = parse_arguments(__doc__, LENGTHS, "of --size full: a folder with train/CLASS/*.jpg and val/CLASS/*.jpg")
    torch.manual_seed(0)
    train, test = images(args.size, args.data, pixels=64)
    test = held_out(Subset(test, range(0, len(test), math.ceil(len(test) / TESTED))))  # of all classes
    model = UNet(channels=train[0][0].shape[0], widths=WIDTHS[args.size]).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE[args.size])
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)

    def judge(batch: tuple[Tensor, ...]) -> Tensor:
        return losses(model, *(each.to(device()) for each in batch))

    with vf.elastic(
        model, optimizer, train, batch_size=args.batch_size, steps=args.steps, scheduler=sched, device=device()
    ) as run:
        for step in run:
            for image, _ in step:
                # Random numbers follow from the virtual node, whichever worker it is that draws them.
                strength = torch.randint(STRENGTHS, (len(image),), device=image.device)
                loss = losses(model, image, strength, torch.randn_like(image)).mean()
                loss.backward()
                step.log(loss=loss)
            if due(step.number, args.steps):
                found = vf.evaluate(model, test, judge, batch_size=args.batch_size).mean().item()
                run.log(held_out_loss=found)
                if run.leader:
                    tell(step.number, "held-out loss", found)
        if run.leader:
            tell_parameters(model)


if __name__ == "__main__":
    main()
