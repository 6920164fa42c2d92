"""What layer-major order costs: blocks come to the device one after the other, over a link of a given bandwidth.

The CPU plays the device. One worker: its time is the CPU seconds of the thread that computes, and what it waits for
copies. A step without copies ahead cannot be shorter than computing it plus its copies. Two workers: a real job whose
network has the speed of a real one, by the clock on the wall.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from benchmarks.jobs import LIMIT, ROOT, environment, job_command
from benchmarks.overlap import NoNetworkError, in_namespace, shaping_for
from benchmarks.throttled_copies import Clock, ThrottledCopies
from virtualflow.memory import activations
from virtualflow.memory.activations.chain import Carrier
from virtualflow.worker.run import Run

BLOCKS, WIDTH, SAMPLES = 12, 768, 32
"""Blocks of a perceptron, and the samples of a virtual node."""
BANDWIDTH = 2e9
"""Bytes a second, each way."""
NODES = (2, 8)
MEGABITS = 1_000
"""A second, each way: of the network between two workers."""
WARM_UP = 2
TEXT = """\
A perceptron of 12 blocks, one or two of them at a time on the played device; copies at 2 GB/s. *Estimate*: four thirds
of the ordinary step plus all copies, one after the other. *Ahead*: the next block's weights come beside the
computation. *Node by node*: if each virtual node copied them itself. *All*: with activations, gradients and samples.
Two workers: a job over 1 Gbit/s, by the wall clock, weights always ahead; *phased*: the exchange begins with the last
block's gradients. The two kinds of steps alternate in one run; medians."""


class Lanes(ThrottledCopies):
    """A link on which what is waited for at once passes what comes ahead."""

    def pass_by(self, lane: str, size: int) -> None:
        """Wait as long as a copy of so many bytes takes; those on their way are later by it."""
        now, took = self._clock.now(), size / BANDWIDTH
        if lane == "in":
            self._bringing = [carried for carried in self._bringing if carried.end > now]
            for carried in self._bringing:
                carried.end += took
        self._free[lane] = max(self._free[lane], now) + took
        self._clock.wait(now + took)


class Played(Carrier):
    """Copies at :data:`BANDWIDTH`."""

    wall = False

    def __init__(self, device: torch.device) -> None:
        self.clock = Clock(wall=self.wall)
        self.lanes = Lanes(self.clock, BANDWIDTH)
        super().__init__(device, self.lanes)

    def bring(self, tensor: Tensor) -> Tensor:
        """As slowly."""
        return self._pass_by("in", super().bring, tensor)

    def take(self, tensor: Tensor) -> Tensor:
        """As slowly."""
        return self._pass_by("out", super().take, tensor)

    def _pass_by(self, lane: str, copy: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
        with self.clock.stopped():
            made = copy(tensor)
        self.lanes.pass_by(lane, tensor.nbytes)
        return made


def begin(nodes: int, steps: int, *, layers: bool) -> tuple[nn.Module, Run]:
    """A run of a perceptron."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(BLOCKS)))
    batch = nodes * SAMPLES
    data = TensorDataset(torch.randn(batch, WIDTH), torch.randn(batch, WIDTH))
    memory = vf.Memory("1GiB", order="layer-major") if layers else None
    arguments: dict[str, Any] = {"virtual_nodes": nodes, "memory": memory, "steps": WARM_UP + steps}
    arguments["exchange"] = vf.Exchange(overlap=True)
    return model, vf.elastic(model, torch.optim.SGD(model.parameters(), 0.01), data, batch_size=batch, **arguments)


def medians(took: list[float]) -> tuple[float, float]:
    """Of the even steps, and of the odd ones between them."""
    return statistics.median(took[WARM_UP::2]), statistics.median(took[WARM_UP + 1 :: 2])


def train_kept(nodes: int, steps: int) -> tuple[float, str]:
    """Seconds of a step in the ordinary order at the median, and the last loss."""
    took = []
    model, opened = begin(nodes, steps, layers=False)
    with opened as run:
        began = time.thread_time()
        for step in run:
            for x, y in step:
                loss = F.mse_loss(model(x), y)
                loss.backward()
                step.log(loss=loss)
            took.append(time.thread_time() - began)
            began = time.thread_time()
    return statistics.median(took[WARM_UP:]), repr(step.metrics)


def train_streamed(nodes: int, steps: int) -> tuple[tuple[float, float], Played, str]:
    """Seconds of a step with weights ahead and of one without, what has carried its tensors, and the last loss."""
    took = []
    _, opened = begin(nodes, steps, layers=True)
    with opened as run:
        carrier = played(run)
        began = carrier.clock.now()
        for step in run:
            carrier.lanes.beside = len(took) % 2 == 0
            step.layer_major(F.mse_loss)
            took.append(carrier.clock.now() - began)
            began = carrier.clock.now()
    return medians(took), carrier, repr(step.metrics)


def played(run: Run) -> Played:
    """What carries the tensors of a run in layer-major order."""
    assert run._context.layers is not None
    carrier = run._context.layers[1].carrier
    assert isinstance(carrier, Played)
    return carrier


def measure(nodes: int, steps: int) -> dict[str, Any]:
    """One worker."""
    kept, loss = train_kept(nodes, steps)
    (ahead, streamed), carrier, same = train_streamed(nodes, steps)
    assert loss == same, "the order has changed the result"
    rounds = WARM_UP + steps
    weights, everything = carrier.weight_bytes / rounds, (carrier.bytes_in + carrier.bytes_out) / rounds
    estimate = kept * 4 / 3 + everything / BANDWIDTH
    return {
        "workers": 1,
        "virtual_nodes": nodes,
        "kept_ms": 1_000 * kept,
        "layer_major_ms": 1_000 * streamed,
        "estimate_ms": 1_000 * estimate,
        "ratio": streamed / estimate,
        "ahead_ms": 1_000 * ahead,
        "weights_mb": weights / 1e6,
        "node_major_mb": nodes * weights / 1e6,
        "all_mb": everything / 1e6,
    }


def measure_job(nodes: int, steps: int) -> dict[str, Any]:
    """Two workers."""
    shaping, _ = shaping_for(MEGABITS)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "seconds.json"
        arguments = ("--workers", 2, "--virtual-nodes", nodes, "benchmarks/layer_major.py", "--json", path, "--worker")
        command = in_namespace(shaping, *job_command(*map(str, arguments), str(steps)))
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False, timeout=LIMIT
        )
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
        phased, behind = json.loads(path.read_text())
    return {
        "workers": 2,
        "virtual_nodes": nodes,
        "layer_major_ms": 1_000 * behind,
        "phased_ms": 1_000 * phased,
        "phased_ratio": phased / behind,
    }


def work(steps: int, path: Path) -> None:
    """What each worker of the job runs."""
    Played.wall = True
    took, begun = [], []
    _, opened = begin(NODES[-1], steps, layers=True)
    with opened as run:
        overlap = run._context.update.sync._overlap
        played(run)  # or it would be faster than any device
        began = time.perf_counter()
        for step in run:
            if len(took) % 2:
                overlap._expected = ()  # as if a step had surprised somebody, in all workers alike
            begun.append(bool(overlap._expected))
            step.layer_major(F.mse_loss)
            took.append(time.perf_counter() - began)
            began = time.perf_counter()
        if run.leader:
            assert begun[WARM_UP:] == [number % 2 == 0 for number in range(WARM_UP, len(begun))]
            path.write_text(json.dumps(medians(took)))


def main() -> None:
    """Measure and print; ``--json`` keeps the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--worker", type=int, metavar="STEPS", help="be a worker of a job")
    args = parser.parse_args()
    activations.Carrier = Played  # type: ignore[misc]
    if args.worker is not None:
        work(args.worker, args.json)
        return
    steps = 6 if args.quick else 20
    rows = [measure(nodes, steps) for nodes in NODES]
    try:
        rows.append(measure_job(NODES[-1], steps))
    except NoNetworkError as error:
        print(f"  two workers: {error}", file=sys.stderr)
    for row in rows:
        told = (f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
        print("  " + "  ".join(told), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"text": TEXT, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
