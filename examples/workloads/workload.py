"""What the workloads share: their command line, the images that two of them learn from, and what they print."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import above  # noqa: F401 - what follows is there
from arguments import positive
from digits_task import digits

LINES = 12  # about so many numbers are printed in a training

Samples = Dataset[tuple[Tensor, ...]]


@dataclass(frozen=True)
class Length:
    """How long a training of one size is, unless the command line says otherwise."""

    steps: int
    batch_size: int


def parse_arguments(
    description: str | None, lengths: Mapping[str, Length], data: str, **more: tuple[Any, str]
) -> argparse.Namespace:
    """Parse --size, --steps, --batch-size and --data, and whatever else a workload takes: its default and its help."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=[*lengths], default="small", help="of model and data (small)")
    parser.add_argument("--steps", type=positive, metavar="N", help="updates to make (the size's)")
    parser.add_argument("--batch-size", type=positive, metavar="N", help="samples a step (the size's)")
    parser.add_argument("--data", metavar="PLACE", help=data)
    for name, (default, text) in more.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{text} ({default})")
    args = parser.parse_args()
    args.steps = args.steps or lengths[args.size].steps
    args.batch_size = args.batch_size or lengths[args.size].batch_size
    return args


def device() -> str:
    """Name what computes here."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def due(step: int, steps: int) -> bool:
    """Say whether the training is to be judged behind this step: every now and then, and behind the last one."""
    return step % max(1, steps // LINES) == 0 or step == steps


def tell(step: int, what: str, value: float) -> None:
    """Print how good the model is by now; for the leader to call."""
    print(f"step {step}: {what} {value:.4f}", flush=True)


def tell_parameters(model: nn.Module) -> None:
    """Print how large it is; for the leader to call when all is done."""
    print(f"trained {sum(each.numel() for each in model.parameters()):,} parameters", flush=True)


class Shifted(Samples):
    """Images of another dataset, each moved by up to a pixel at random: new ones in every epoch."""

    def __init__(self, images: TensorDataset) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        image, *rest = self._images[index]
        # The global generators are seeded for each virtual node of a step.
        down, right = torch.randint(-1, 2, (2,)).tolist()
        return image.roll((down, right), (1, 2)), *rest


def images(size: str, folder: str | None, pixels: int, *, shifted: bool = False) -> tuple[Any, Any]:
    """Return (training set, test set) of images with their classes: float [channels, h, w] in 0..1, and an int.

    Small ones are scikit-learn's digits, [1, 8, 8]. Full ones are in `folder`, as torchvision's ImageFolder has them
    (`train/CLASS/*.jpg`, `val/CLASS/*.jpg`), cut to [3, pixels, pixels].
    """
    if size == "small":
        train, test = digits()
        return Shifted(train) if shifted else train, test
    if folder is None:
        raise SystemExit("--size full takes --data FOLDER, with train/CLASS/*.jpg and val/CLASS/*.jpg")
    try:
        from torchvision import datasets, transforms
    except ImportError:
        raise SystemExit("--size full reads images with torchvision: install the one that fits your torch") from None
    learnt = [transforms.RandomResizedCrop(pixels), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    tested = [transforms.Resize(pixels * 8 // 7), transforms.CenterCrop(pixels), transforms.ToTensor()]
    parts = (("train", learnt), ("val", tested))
    train, test = (datasets.ImageFolder(Path(folder) / name, transforms.Compose(each)) for name, each in parts)
    return train, test
