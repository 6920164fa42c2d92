"""One worker of a comparison on the device: trains in turns, in plain PyTorch or with VirtualFlow.

``plain`` accumulates gradients over the same micro-batches with torch's own settings; ``deterministic`` is the same
with the kernels that a bitwise job uses, so that what the kernels cost stands beside what the library costs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from benchmarks.gpu.tasks import DeviceTask, optimizer_of, tasks
from benchmarks.tasks import VIRTUAL_NODES
from benchmarks.trainee import ENDLESS
from benchmarks.turns import Pace, Turns


class DevicePace(Pace):
    """Turns that end when the device has done what it was given."""

    def __init__(self, turns: Turns, device: torch.device) -> None:
        super().__init__(turns)
        self._device = device

    def goes_on(self) -> bool:
        """See there."""
        if self._left == 0 and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return super().goes_on()


def micro_batches(data: TensorDataset, size: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """What an ordinary loader gives, from pinned memory to the device, epoch after epoch."""
    loader = DataLoader(data, size, sampler=RandomSampler(data), drop_last=True, pin_memory=device.type == "cuda")
    while True:
        for x, y in loader:
            yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)


def train_plain(task: DeviceTask, pace: Pace, device: torch.device) -> None:
    """Without VirtualFlow."""
    model = task.model().to(device)
    optimizer = optimizer_of(model)
    stream = micro_batches(task.data(), task.batch // VIRTUAL_NODES, device)
    while pace.goes_on():
        optimizer.zero_grad()
        for _ in range(VIRTUAL_NODES):
            x, y = next(stream)
            (task.loss(model, x, y) / VIRTUAL_NODES).backward()
        optimizer.step()


def train_elastic(task: DeviceTask, pace: Pace, device: torch.device) -> None:
    """With VirtualFlow, to the bit."""
    import virtualflow as vf

    model = task.model().to(device)
    with vf.elastic(
        model,
        optimizer_of(model),
        task.data(),
        batch_size=task.batch,
        steps=ENDLESS,
        virtual_nodes=VIRTUAL_NODES,
        drop_last=True,
        device=device,
    ) as run:
        for step in run:
            if step.number and not pace.goes_on():
                break
            for x, y in step:
                task.loss(model, x, y).backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=["plain", "deterministic", "bitwise"])
    parser.add_argument("task")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(args.device)
    with Turns() as turns:
        pace, task = DevicePace(turns, device), tasks(args.small)[args.task]
        if args.side == "bitwise":
            train_elastic(task, pace, device)
            return
        if args.side == "deterministic":
            from virtualflow.device import pin

            pin(1, "bitwise")
        train_plain(task, pace, device)


if __name__ == "__main__":
    main()
