"""The most memory that a step uses beyond model and optimizer, with few virtual nodes and with many."""

from __future__ import annotations

import torch

import virtualflow as vf
from benchmarks.gpu.parts import Note, Setting
from benchmarks.gpu.tasks import DeviceTask, optimizer_of, tasks
from virtualflow.device import MemoryGauge

VIRTUAL_NODES = (8, 64)
STEPS = 4
"""The last two are measured: memory that is made in the first ones stays."""


def measure(setting: Setting, note: Note) -> None:
    """Train the large transformer alone, with micro-batches of one size."""
    device = torch.device(setting.device)
    task = tasks(setting.small)["large"]
    for virtual_nodes in VIRTUAL_NODES:
        used, gradients = peak(task, device, virtual_nodes)
        note(
            {
                "virtual nodes": virtual_nodes,
                "gradients, MiB": gradients / 2**20,
                "peak beyond model and optimizer, MiB": "unknown" if used is None else used / 2**20,
                "in gradients": "" if used is None else used / gradients,
            }
        )


def peak(task: DeviceTask, device: torch.device, virtual_nodes: int) -> tuple[int | None, int]:
    """The most bytes of a step beyond what was in use before, and those of all gradients."""
    model = task.model().to(device)
    gauge = MemoryGauge(device)
    used: int | None = None
    with vf.elastic(
        model,
        optimizer_of(model),
        task.data(),
        batch_size=2 * virtual_nodes,
        steps=STEPS,
        virtual_nodes=virtual_nodes,
        device=device,
    ) as run:
        for step in run:
            if step.number == STEPS - 1:
                for parameter in model.parameters():
                    parameter.grad = None  # of the step before, so that they do not count as in use
                gauge.begin()
            for x, y in step:
                task.loss(model, x, y).backward()
        gauge.wait()
        usage = gauge.end()
        used = None if usage is None else usage.used
    return used, sum(parameter.nbytes for parameter in model.parameters())
