"""What a copy of the state in the coordinator's memory costs a job of one worker: memory, bandwidth and time.

Without ``--workload`` it runs this very file as jobs of several sizes, with ``--checkpoint-memory`` and without, by
turns. The worker tells how long it was held up by its copies and how long each was on its way, and reads from the
kernel what its coordinator has computed, and how much memory both had at most.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.jobs import run_job

LAYERS = 6
WIDTHS = (128, 650, 2_048)
"""Perceptrons with 1.2, 30 and 302 MB of state: parameters, and AdamW's two moments of them."""
SAMPLES, BATCH, VIRTUAL_NODES = 64, 8, 4
WARM_UP = 5
"""Steps that do not count."""
TEXT = """\
One worker on loopback, with `--checkpoint-memory` and without, in turns. *longer*: how much longer a step takes with
copies, median and range of the rounds. Per copy, *held_up_ms* is the training's wait while it is packed, *sending_ms*
its way behind the training, *coordinator_ms* the coordinator's CPU time. *mb_per_s* is the average network traffic.
*worker_mb* and *coordinator_mb* are peak memory beyond that without copies."""


def train(width: int, seconds: float) -> dict[str, Any]:
    """The workload: a training of about so many seconds, and what it found."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import TensorDataset

    import virtualflow as vf
    from virtualflow.state import MemoryCopies
    from virtualflow.transport import CopyClient

    held_up = _timed(MemoryCopies, "copy_if_due")
    sent = _timed(CopyClient, "put")
    torch.manual_seed(0)
    model = nn.Sequential(*(module for _ in range(LAYERS) for module in (nn.Linear(width, width), nn.ReLU())))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    data = TensorDataset(torch.randn(SAMPLES, width), torch.randn(SAMPLES, width))
    steps = WARM_UP + max(10, round(seconds / _guess(model, data.tensors)))
    coordinator = _coordinator()
    began = cpu = 0.0
    with vf.elastic(model, optimizer, data, batch_size=BATCH, steps=steps, virtual_nodes=VIRTUAL_NODES) as run:
        for step in run:
            if step.number == WARM_UP:
                held_up.clear()
                sent.clear()
                began, cpu = time.perf_counter(), _cpu_seconds(coordinator)
            for x, y in step:
                F.mse_loss(model(x), y).backward()
        wall = time.perf_counter() - began
        cpu = _cpu_seconds(coordinator) - cpu
        memory = _peak(os.getpid()), _peak(coordinator)
    return {
        "state_mb": 12 * sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        "step_ms": 1_000 * wall / (steps - WARM_UP),
        "seconds": wall,
        "held_up_s": sum(held_up),
        "sent_s": sent,
        "coordinator_s": cpu,
        "worker_bytes": memory[0],
        "coordinator_bytes": memory[1],
    }


def _timed(kind: type, name: str) -> list[float]:
    """The seconds of each call of that method from now on."""
    method: Callable[..., Any] = getattr(kind, name)
    seconds: list[float] = []

    def timed(*args: Any) -> Any:
        began = time.perf_counter()
        answer = method(*args)
        seconds.append(time.perf_counter() - began)
        return answer

    setattr(kind, name, timed)
    return seconds


def _guess(model: Any, tensors: Sequence[Any]) -> float:
    """Seconds of the forward and backward passes of a step."""
    took = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(VIRTUAL_NODES):
            model(tensors[0][: BATCH // VIRTUAL_NODES]).sum().backward()
        took.append(time.perf_counter() - began)
    model.zero_grad()
    return min(took)


def _coordinator() -> int:
    """The process of this job's coordinator: the command line has started it, as it has this one."""
    parent = os.getppid()
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    for child in children:
        if b"coordinator" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
            return int(child)
    raise SystemExit("the coordinator of this job is not to be found")


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak(pid: int) -> int:
    """The most bytes that a process had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))


def measure(width: int, seconds: float) -> dict[str, dict[str, Any]]:
    """One round of one size: a job without copies and one with them."""
    script = [str(Path(__file__).resolve()), "--workload", "--width", str(width), "--seconds", str(seconds)]
    found = {}
    for side, flags in (("without", []), ("with", ["--checkpoint-memory"])):
        _, printed = run_job("--workers", 1, *flags, *script)
        told = next(line for line in printed.splitlines() if '"state_mb"' in line)
        found[side] = json.loads(told[told.index("{") :])
    return found


def summarize(rounds: Sequence[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """The row of a size.

    Raises:
        ValueError: no copy was made.
    """
    without, copied = [found["without"] for found in rounds], [found["with"] for found in rounds]
    sent = [seconds for side in copied for seconds in side["sent_s"]]
    if not sent:
        raise ValueError("no copy was made: the training is too short, or there is too little memory")
    state = copied[0]["state_mb"]
    seconds = sum(side["seconds"] for side in copied)
    shares = [100 * (b["step_ms"] / a["step_ms"] - 1) for a, b in zip(without, copied, strict=True)]
    return {
        "state_mb": state,
        "step_ms": statistics.median(side["step_ms"] for side in without),
        "longer": f"{statistics.median(shares):.1f} % ({min(shares):.1f} to {max(shares):.1f})",
        "copies": len(sent),
        "every_s": seconds / len(sent),
        "mb_per_s": state * len(sent) / seconds,
        "held_up_ms": 1_000 * sum(side["held_up_s"] for side in copied) / len(sent),
        "sending_ms": 1_000 * statistics.median(sent),
        "coordinator_ms": 1_000 * (_total(copied, "coordinator_s") - _total(without, "coordinator_s")) / len(sent),
        "worker_mb": _more(copied, without, "worker_bytes"),
        "coordinator_mb": _more(copied, without, "coordinator_bytes"),
    }


def _total(sides: Sequence[dict[str, Any]], key: str) -> float:
    return float(sum(side[key] for side in sides))


def _more(sides: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]], key: str) -> float:
    """Megabytes that these had more than the others, at the median."""
    return (statistics.median(s[key] for s in sides) - statistics.median(s[key] for s in others)) / 1e6


def main() -> None:
    """Measure and print; ``--json`` keeps the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--workload", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, default=WIDTHS[0], help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=30.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.workload:
        print(json.dumps(train(args.width, args.seconds)), flush=True)
        return
    rounds, seconds = (1, 4.0) if args.quick else (3, args.seconds)
    rows, single = [], {}
    for width in WIDTHS[:2] if args.quick else WIDTHS:
        single[width] = [measure(width, seconds) for _ in range(rounds)]
        rows.append(summarize(single[width]))
        told = (f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items())
        print("  " + "  ".join(told), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"text": TEXT, "rows": rows, "rounds": single}, indent=1) + "\n")


if __name__ == "__main__":
    main()
