"""The digits job with each worker on a core of its own, printing step times of the first worker.

Steps 100 to 300 are ``before``; with a schedule that starts a joiner at step 300, those after it until the joiner
enters are ``during`` (without one, the same steps).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import virtualflow as vf

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

STEPS, BATCH, BOOT_STARTS = 600, 128, 300


def start_stranger(core: int) -> subprocess.Popen[bytes]:
    """A process that boots as a joiner does, on the other core, and has nothing to do with this job."""
    alone = {name: value for name, value in os.environ.items() if not name.startswith("VIRTUALFLOW_")}
    command = [sys.executable, str(EXAMPLES / "digits.py"), "--steps", "1"]
    process = subprocess.Popen(command, env=alone, stdout=subprocess.DEVNULL)
    os.sched_setaffinity(process.pid, {core})
    return process


def main() -> None:
    """Train and measure."""
    from digits_task import DigitsNet, digits

    name = os.environ.get("VIRTUALFLOW_WORKER", "worker-0")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(name.rsplit("-", 1)[-1]) % len(cores)]})
    torch.manual_seed(0)
    train, _ = digits()
    model = DigitsNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    times: dict[int, float] = {}
    stranger: subprocess.Popen[bytes] | None = None
    with vf.elastic(model, optimizer, train, batch_size=BATCH, steps=STEPS) as run:
        began = time.perf_counter()
        for step in run:
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            now = time.perf_counter()
            if step.number == BOOT_STARTS and os.environ.get("STRANGER"):
                stranger = start_stranger(cores[-1])
            if stranger is not None and stranger.poll() is not None:
                stranger = start_stranger(cores[-1])
            if len(run._context.session.state.assigned) == run._request.virtual_nodes:
                times[step.number] = 1_000 * (now - began)
            began = now
    if stranger is not None:
        stranger.kill()
        stranger.wait()
    if name == "worker-0":
        before = statistics.median(t for n, t in times.items() if 100 <= n < BOOT_STARTS)
        during = statistics.median(t for n, t in times.items() if BOOT_STARTS + 5 <= n < STEPS - 5)
        print(json.dumps({"before": before, "during": during}))


if __name__ == "__main__":
    main()
