"""One worker of the comparison of exchanges: steps whose gradients have a given size and cost next to nothing."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from benchmarks.tasks import VIRTUAL_NODES
from benchmarks.turns import Pace, Turns

ENDLESS = 10_000_000
"""Steps; the turns end the training."""


class Plain(nn.Module):
    """So many parameters of equal size, each of which is read once."""

    def __init__(self, size: int, tensors: int) -> None:
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(torch.zeros(size // (4 * tensors))) for _ in range(tensors)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(value * x.mean()).sum() for value in self.values]).sum()


def exchange_of(side: str) -> vf.Exchange:
    """The exchange of a side: its algorithm, and whether it begins early."""
    algorithm, _, when = side.partition(" ")
    return vf.Exchange(algorithm, overlap={"": None, "early": True, "late": False}[when])  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side")
    parser.add_argument("size", type=int)
    parser.add_argument("tensors", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = Plain(args.size, args.tensors)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    data = TensorDataset(torch.ones(VIRTUAL_NODES * 64, 1))
    with Turns() as turns:
        pace = Pace(turns)
        with vf.elastic(
            model,
            optimizer,
            data,
            batch_size=VIRTUAL_NODES,
            steps=ENDLESS,
            virtual_nodes=VIRTUAL_NODES,
            exchange=exchange_of(args.side),
        ) as run:
            for step in run:
                if step.number and not pace.goes_on():
                    break
                for (x,) in step:
                    model(x).backward()


if __name__ == "__main__":
    main()
