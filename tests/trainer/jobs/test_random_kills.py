"""The repeated work of kills at random moments, counted in virtual nodes, is at most that of the dead.

Run with ``-s`` to see the numbers; ``KILLS`` in the environment says how many there are for each size.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from broken_collectives import Counting
from elastic_jobs import EXCHANGE, ElasticJob
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow.protocol.http_api import Status
from virtualflow.protocol.settings import ENV_AUDIT_DIR

WORKERS = 4
KILLS = int(os.environ.get("KILLS", "10"))


def train(virtual_nodes: int) -> None:
    """Train until killed, some milliseconds for each virtual node."""
    torch.manual_seed(0)
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    dataset = TensorDataset(torch.randn(8 * virtual_nodes, 4), torch.randn(8 * virtual_nodes))
    with vf.elastic(
        model, optimizer, dataset, batch_size=2 * virtual_nodes, steps=1 << 30, virtual_nodes=virtual_nodes
    ) as run:
        for step in run:
            for x, y in step:
                time.sleep(0.003)
                F.mse_loss(model(x), y).backward()


def complete(status: Status) -> bool:
    training = [worker for worker in status.workers if worker.first < worker.last]
    return status.phase == "training" and len(training) == WORKERS and all(w.state == "training" for w in training)


def computed(directory: Path) -> Counter[tuple[int, int]]:
    """How often each (step, virtual node) was."""
    counts: Counter[tuple[int, int]] = Counter()
    for path in directory.iterdir():
        for line in path.read_text().splitlines():
            if line.startswith('{"computed"') and line.endswith("}"):
                fact = json.loads(line)["computed"]
                counts[fact["step"], fact["virtual_node"]] += 1
    return counts


@pytest.mark.nightly
@pytest.mark.parametrize("exchange", ["early", ""])
@pytest.mark.parametrize("each", [2, 4, 8])
def test_a_kill_at_any_moment_repeats_at_most_what_the_dead_had(
    each: int, exchange: str, start_job: Callable[..., ElasticJob], tmp_path: Path
) -> None:
    audit, draw = tmp_path / "audit", random.Random(each)
    environment = {EXCHANGE: exchange, ENV_AUDIT_DIR: str(audit)}
    job = start_job(train, WORKERS * each, workers=WORKERS, environment=environment)
    for _ in range(KILLS):
        step = job.wait_for(complete, "all workers").step
        job.wait_for(lambda status: status.step >= step + 3, "a few steps")  # noqa: B023
        time.sleep(draw.uniform(0, 0.1))
        alive = [name for name, worker in job.workers.items() if worker.process.exitcode is None]
        victim = job.workers[draw.choice(alive)].process
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        before = job.wait_for(lambda status: not complete(status), "news of the loss").step
        job.wait_for(lambda status: status.step > before, "a step without it")  # noqa: B023
        job.start_worker()
    job.wait_for(complete, "all workers")
    repeated: Counter[int] = Counter()
    for (step, _), count in computed(audit).items():
        repeated[step] += count - 1
    costs = sorted(count for count in repeated.values() if count)
    costs = [0] * (KILLS - len(costs)) + costs
    print(
        f"\n{each} virtual nodes a worker, {KILLS} kills: median {statistics.median(costs)}, worst {costs[-1]}: {costs}"
    )
    assert len(costs) == KILLS
    assert costs[-1] <= each
