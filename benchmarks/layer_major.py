"""What layer-major order costs: blocks come to the device one after the other, by a throttled copy engine.

The CPU stands in for a device. Copies take as long as they would at a given bandwidth, and nothing overlaps with them,
so a step cannot be shorter than computing it plus its copies.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow.memory.activations.chain import Carrier
from virtualflow.worker import setup

BLOCKS, WIDTH, SAMPLES = 12, 768, 32
"""Blocks of a perceptron, and the samples of a virtual node."""
BANDWIDTH = 2e9
"""Bytes a second, each way."""
NODES = (2, 8)
WARM_UP = 2
TEXT = """\
One worker, a perceptron of 12 blocks, one of them at a time on the stand-in device; CPU time, copies at 2 GB/s.
*Bound*: four thirds of the ordinary step plus all copies. *Node by node*: if each virtual node copied them itself.
*All*: with activations, gradients and samples."""


class Throttled(Carrier):
    """Copies at :data:`BANDWIDTH`."""

    def bring(self, tensor: Tensor) -> Tensor:
        """As slowly."""
        with _At(tensor.nbytes):
            return super().bring(tensor)

    def take(self, tensor: Tensor) -> Tensor:
        """As slowly."""
        with _At(tensor.nbytes):
            return super().take(tensor)


class _At:
    def __init__(self, size: int) -> None:
        self._until = time.process_time() + size / BANDWIDTH

    def __enter__(self) -> None:
        """The copy begins."""

    def __exit__(self, *_: object) -> None:
        while time.process_time() < self._until:
            pass


def train(nodes: int, steps: int, *, layers: bool) -> tuple[float, Carrier | None, str]:
    """Seconds of a step at the median, what has carried its tensors, and the last loss."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(BLOCKS)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    batch = nodes * SAMPLES
    data = TensorDataset(torch.randn(batch, WIDTH), torch.randn(batch, WIDTH))
    memory = vf.Memory("1GiB", order="layer-major") if layers else None
    took = []
    arguments: dict[str, Any] = {"virtual_nodes": nodes, "memory": memory, "steps": WARM_UP + steps}
    with vf.elastic(model, optimizer, data, batch_size=batch, **arguments) as run:
        carrier = run._context.layers[1].carrier if run._context.layers is not None else None
        began = time.process_time()
        for step in run:
            if layers:
                step.layer_major(F.mse_loss)
            else:
                for x, y in step:
                    loss = F.mse_loss(model(x), y)
                    loss.backward()
                    step.log(loss=loss)
            took.append(time.process_time() - began)
            began = time.process_time()
    return statistics.median(took[WARM_UP:]), carrier, repr(step.metrics)


def measure(nodes: int, steps: int) -> dict[str, Any]:
    """A row."""
    kept, _, loss = train(nodes, steps, layers=False)
    streamed, carrier, same = train(nodes, steps, layers=True)
    assert carrier is not None
    assert loss == same, "the order has changed the result"
    rounds = WARM_UP + steps
    weights, everything = carrier.weight_bytes / rounds, (carrier.bytes_in + carrier.bytes_out) / rounds
    bound = kept * 4 / 3 + everything / BANDWIDTH
    return {
        "virtual_nodes": nodes,
        "kept_ms": 1_000 * kept,
        "layer_major_ms": 1_000 * streamed,
        "weights_mb": weights / 1e6,
        "node_major_mb": nodes * weights / 1e6,
        "all_mb": everything / 1e6,
        "bound_ms": 1_000 * bound,
        "ratio": streamed / bound,
    }


def main() -> None:
    """Measure and print; ``--json`` keeps the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps")
    parser.add_argument("--json", type=Path, help="where the figures go")
    args = parser.parse_args()
    setup.Carrier = Throttled  # type: ignore[misc]
    rows = []
    for nodes in NODES:
        rows.append(measure(nodes, 3 if args.quick else 8))
        told = (
            f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}" for key, value in rows[-1].items()
        )
        print("  " + "  ".join(told), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"text": TEXT, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
