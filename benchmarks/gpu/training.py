"""An elastic training whose tensors are on the device: what ``virtualflow run`` runs in the parts about jobs."""

from __future__ import annotations

import argparse

import torch

import virtualflow as vf
from benchmarks.gpu.tasks import optimizer_of, tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    task = tasks(args.small)[args.task]
    model = task.model().to(args.device)
    with vf.elastic(
        model,
        optimizer_of(model),
        task.data(),
        batch_size=task.batch,
        steps=args.steps,
        device=torch.device(args.device),
        clip_grad_norm=1.0,
    ) as run:
        for step in run:
            for x, y in step:
                loss = task.loss(model, x, y)
                loss.backward()
                step.log(loss=loss)


if __name__ == "__main__":
    main()
