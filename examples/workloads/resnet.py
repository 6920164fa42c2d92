"""Classify images with a ResNet, on any number of workers.

python examples/workloads/resnet.py                          a narrow ResNet-18 on scikit-learn's digits
virtualflow run --workers 2 examples/workloads/resnet.py     the same bits from two workers
virtualflow run examples/workloads/resnet.py --size full --data FOLDER    ResNet-50 on a folder of images

The model is that of He et al., "Deep residual learning for image recognition" (CVPR 2016), with the stride of a
bottleneck in its middle convolution, as torchvision has it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import virtualflow as vf
from workload import Length, device, due, images, parse_arguments, tell, tell_parameters

LENGTHS = {"small": Length(steps=96, batch_size=128), "full": Length(steps=450_000, batch_size=256)}
LEARNING_RATE = {"small": 0.1, "full": 0.1}
LOADERS = {"small": 0, "full": 8}


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution that keeps the size (but for its stride), and a batch norm."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs))


class Block(nn.Module):
    """Two convolutions, or three around a bottleneck, beside a short way."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        if bottleneck:
            shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        else:
            shapes = [(inputs, width, 3, stride), (width, outputs, 3, 1)]
        self.layers = nn.ModuleList(convolution(*shape) for shape in shapes)
        same = inputs == outputs and stride == 1
        self.short = nn.Identity() if same else convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, inputs, h, w] to [n, outputs, h / stride, w / stride]."""
        *first, last = self.layers
        found = x
        for layer in first:
            found = F.relu(layer(found))
        return F.relu(last(found) + self.short(x))


class ResNet(nn.Sequential):
    """Images [n, channels, h, w] -> logits [n, classes]."""

    def __init__(
        self, blocks: tuple[int, ...], width: int, *, channels: int, classes: int, bottleneck: bool, large: bool
    ) -> None:
        """Stages of so many blocks, each twice as wide as the one before; `large` images are first shrunk to a 16th."""
        entry = [convolution(channels, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        layers: list[nn.Module] = entry if large else [convolution(channels, width, 3), nn.ReLU()]
        inputs = width
        for stage, count in enumerate(blocks):
            for place in range(count):
                stride = 2 if stage > 0 and place == 0 else 1
                layers.append(Block(inputs, width << stage, stride, bottleneck))
                inputs = (width << stage) * (4 if bottleneck else 1)
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def build(size: str, classes: int = 10) -> ResNet:
    """Return ResNet-50 in full, or ResNet-18 with a quarter of its width, for tiny images."""
    if size == "full":
        return ResNet((3, 4, 6, 3), 64, channels=3, classes=classes, bottleneck=True, large=True)
    return ResNet((2, 2, 2, 2), 16, channels=1, classes=classes, bottleneck=False, large=False)


def main() -> None:
    args = parse_arguments(__doc__, LENGTHS, "of --size full: a folder with train/CLASS/*.jpg and val/CLASS/*.jpg")
    torch.manual_seed(0)
    train, test = images(args.size, args.data, pixels=224, shifted=True)
    classes = 10 if args.size == "small" else len(train.classes)
    model = build(args.size, classes).to(device())
    optimizer = torch.optim.SGD(
        model.parameters(), lr=LEARNING_RATE[args.size], momentum=0.9, nesterov=True, weight_decay=1e-4
    )
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    loaders = LOADERS[args.size]

    def correct(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = (each.to(device()) for each in batch)
        return (model(x).argmax(dim=1) == y).float()

    with vf.elastic(
        model,
        optimizer,
        train,
        batch_size=args.batch_size,
        steps=args.steps,
        scheduler=sched,
        device=device(),
        num_workers=loaders,
    ) as run:
        for step in run:
            for x, y in step:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                step.log(loss=loss)
            if due(step.number, args.steps):
                hits = vf.evaluate(model, test, correct, batch_size=args.batch_size, num_workers=loaders)
                run.log(test_accuracy=hits.mean().item())
                if run.leader:
                    tell(step.number, "test accuracy", hits.mean().item())
        if run.leader:
            tell_parameters(model)


if __name__ == "__main__":
    main()
