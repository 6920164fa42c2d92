"""Different devices in one job, by simulation: the solver's split, an even split, and the fast devices alone.

Nothing is measured here. The throughputs of single devices are published ones (ResNet-50 on ImageNet), the split is the
one that a coordinator would make (``virtualflow.assignment.assign``), and the exchange is modelled:

- A device computes a virtual node in (samples of a virtual node) / (its images per second), whatever else it carries.
- A step takes as long as the slowest worker computes, then the exchange; nothing overlaps, which is against us.
- The exchange moves 2 (n - 1) / n of the gradients' bytes over each worker's link, and takes a latency for each of its
  2 log2(n) rounds. With one worker it takes nothing. ``--gigabits 0`` leaves it out.

What it leaves out: the update, loading, the noise of real machines, and that a device may be slower or faster with
micro-batches of other sizes than the published ones.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from virtualflow.coordinator.assignment import assign

PARAMETERS = 25_557_032
"""Of ResNet-50; its gradients are sent in single precision."""

LATENCY = 50e-6
"""Seconds of a round between machines of one rack."""

PAPER = 1.42
"""VirtualFlow (Or, Zhang and Freedman, MLSys 2022, arXiv 2009.09523): "up to 42% higher throughput with heterogeneous
training"."""


@dataclass(frozen=True)
class Device:
    """A type of device, and its published throughput in training."""

    name: str
    images_per_second: float
    source: str


_NVIDIA = (
    "NVIDIA DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5/README.md, training performance, 1 GPU, "
    "pytorch-21.03"
)
_TENSORFLOW = (
    "TensorFlow, Benchmarks (site/en/r1/guide/performance/benchmarks.md of tensorflow/docs), DGX-1, 1 GPU, synthetic "
    "data, batch size 64, May 2017"
)
_MLPERF = (
    "the A100 in mixed precision, times 14.4 min / 7.8 min: MLPerf Training 3.0, ResNet-50, two submissions by Dell "
    "with 16 GPUs each (by silvertonconsulting.com, 12 July 2023)"
)

V100 = Device("V100", 367, f"{_NVIDIA}, V100 16 GB, FP32")
V100_MIXED = Device("V100 mixed", 1_200, f"{_NVIDIA}, V100 16 GB, mixed precision")
P100 = Device("P100", 219, f"{_TENSORFLOW}, P100, FP32")
A100 = Device("A100", 2_470, f"{_NVIDIA}, A100 80 GB, mixed precision")
H100 = Device("H100", 2_470 * 14.4 / 7.8, _MLPERF)

PAIRS = ((V100, P100), (V100_MIXED, P100), (A100, V100_MIXED), (H100, A100))
"""The paper's pair with the same precision on both, and with the V100's tensor cores in use; and two later ones."""

COUNTS = ((2, 2), (2, 4), (2, 8), (4, 4), (8, 8))
"""How many of the fast device and of the slow one."""


@dataclass(frozen=True)
class Comparison:
    """The three ways to use the same devices, in images per second."""

    fast: str
    slow: str
    fast_count: int
    slow_count: int
    virtual_nodes_fast: int
    """That each fast device carries in the solver's split, at most."""
    virtual_nodes_slow: int
    split: float
    even: float
    fast_alone: float
    bound: float
    """What all devices compute together, without any exchange or rounding."""


def step_seconds(counts: Sequence[int], devices: Sequence[Device], samples: int, gigabits: float) -> float:
    """How long a step takes.

    Args:
        counts: virtual nodes of each worker.
        devices: of each worker.
        samples: of a virtual node.
        gigabits: per second of each worker's link; 0 for an exchange that takes no time.
    """
    slowest = max(count * samples / device.images_per_second for count, device in zip(counts, devices, strict=True))
    workers = len(devices)
    if workers == 1 or gigabits == 0:
        return slowest
    moved = 2 * (workers - 1) / workers * 4 * PARAMETERS
    return slowest + moved * 8 / (gigabits * 1e9) + LATENCY * 2 * math.ceil(math.log2(workers))


def compare(
    fast: Device, slow: Device, counts: tuple[int, int], virtual_nodes: int, samples: int, gigabits: float
) -> Comparison:
    """Compare the three ways for one set of devices; arguments as of ``step_seconds``."""
    devices = [fast] * counts[0] + [slow] * counts[1]
    images = virtual_nodes * samples

    def throughput(used: Sequence[Device], speeds: Sequence[float]) -> tuple[float, list[int]]:
        shares = [len(carried) for carried in assign(virtual_nodes, speeds)]
        return images / step_seconds(shares, used, samples, gigabits), shares

    split, shares = throughput(devices, [device.images_per_second for device in devices])
    even, _ = throughput(devices, [1.0] * len(devices))
    alone, _ = throughput(devices[: counts[0]], [1.0] * counts[0])
    return Comparison(
        fast.name,
        slow.name,
        *counts,
        max(shares[: counts[0]]),
        max(shares[counts[0] :]),
        split,
        even,
        alone,
        sum(device.images_per_second for device in devices),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="benchmarks.heterogeneous"
    )
    parser.add_argument("--virtual-nodes", type=int, default=64, metavar="V", help="of the job (default 64)")
    parser.add_argument("--samples", type=int, default=128, metavar="N", help="of a virtual node (default 128)")
    parser.add_argument("--gigabits", type=float, default=25.0, metavar="G", help="per second, each link (default 25)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything there, with the sources")
    given = parser.parse_args(arguments)
    found = [
        compare(fast, slow, counts, given.virtual_nodes, given.samples, given.gigabits)
        for fast, slow in PAIRS
        for counts in COUNTS
    ]
    print(
        f"ResNet-50, {given.virtual_nodes} virtual nodes of {given.samples} images, links of {given.gigabits:g} "
        "Gbit/s; images per second (simulated)"
    )
    print(f"{'devices':30}  {'split':>7}  {'fast alone':>16}  {'even':>16}  {'bound':>7}  virtual nodes each")
    for row in found:
        name = f"{row.fast_count} {row.fast} + {row.slow_count} {row.slow}"
        print(
            f"{name:30}  {row.split:7.0f}  {row.fast_alone:7.0f} ({row.split / row.fast_alone - 1:+5.0%})  "
            f"{row.even:7.0f} ({row.split / row.even - 1:+5.0%})  {row.bound:7.0f}  "
            f"{row.virtual_nodes_fast} and {row.virtual_nodes_slow}"
        )
    gains = [row.split / row.fast_alone for row in found if row.slow == P100.name]
    within = sum(gain >= PAPER for gain in gains)
    print(
        f"V100 with P100: {min(gains) - 1:+.0%} to {max(gains) - 1:+.0%} over the V100 alone; the paper measured up to "
        f"{PAPER - 1:+.0%} ({within} of {len(gains)} rows reach that)"
    )
    if given.json is not None:
        devices = {device.name: asdict(device) for pair in PAIRS for device in pair}
        content = {
            "simulated": True,
            "virtual_nodes": given.virtual_nodes,
            "samples": given.samples,
            "gigabits": given.gigabits,
            "latency_seconds": LATENCY,
            "devices": devices,
            "rows": [asdict(row) for row in found],
        }
        given.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
