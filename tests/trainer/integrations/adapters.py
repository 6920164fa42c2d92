"""What the tests of data adapters share: one training over any of them, its jobs, and who has read what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from elastic_jobs import ElasticJob, Trained, alone, die_here, trained

import virtualflow as vf
from virtualflow.launcher.report import merge_audit
from virtualflow.protocol.settings import ENV_AUDIT_DIR, ENV_CHECKPOINT_DIR

NODES = 4
BATCH = 8
EPOCHS = 2
WIDTH = 3

Open = Callable[[str], Any]
"""Makes what ``vf.elastic`` is given, of a directory. Its samples are (number, row), or have these names."""


def row_of(number: int) -> list[float]:
    """The data of a sample."""
    return [number / 50, number % 7 / 7, number % 3]


def augment(row: Any) -> torch.Tensor:
    """Which samples are drawn together, and how often, would show."""
    return torch.as_tensor(row, dtype=torch.float32) + 0.1 * torch.rand(WIDTH)


def train(opened: Open, directory: str, loaders: int = 0, victim: str = "") -> Trained:
    """A script: ``victim`` kills itself in the middle of an epoch, at step 4."""
    torch.manual_seed(4)
    model = torch.nn.Linear(WIDTH, 1)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    options = {"num_workers": loaders} if loaders else {}
    with vf.elastic(
        model, optimizer, opened(directory), batch_size=BATCH, epochs=EPOCHS, virtual_nodes=NODES, seed=9, **options
    ) as run:
        for step in run:
            for batch in step:
                numbers, rows = (batch["number"], batch["row"]) if isinstance(batch, dict) else batch
                loss = F.mse_loss(model(rows)[:, 0], numbers / 50)
                loss.backward()
                step.log(loss=loss)
                if step.number == 4:
                    die_here(victim)
    return trained(run, model, optimizer, run.completed_steps)


def check_orders(opened: Callable[..., Any], samples: int) -> None:
    """Each epoch and each seed has an order of its own, and none is mixed that is not to be."""
    orders = [numbers(opened(seed=seed), 0, 1, epoch) for seed in (1, 2) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert numbers(opened(shuffle=False), 0, 1, 1) == list(range(samples))


def check_jobs(opened: Open, directory: Path, start_job: Callable[..., ElasticJob], loaders: int = 0) -> None:
    """The same bits on one, two and three workers, through a join and a kill, and each sample once."""
    script = (train, opened, str(directory), loaders)
    reference, audit = alone(train, opened, str(directory)), directory.parent / f"audit-{loaders}"
    assert start_job(*script, workers=3).results() == [reference] * 3
    job = start_job(*script, "worker-1", workers=2, hold=2, environment={ENV_AUDIT_DIR: str(audit)})
    job.reach(2)
    job.join()
    assert job.results() == [reference] * 2
    rows = list(merge_audit(path.read_text().splitlines() for path in audit.iterdir()))
    assert len({row["worker"] for row in rows}) == 3
    check_rows(opened(str(directory)), rows)


def check_rows(dataset: Any, rows: list[Any]) -> None:
    """Those of an audit: each virtual node has read its shard once, from the first sample to the last."""
    for epoch in range(EPOCHS):
        mine = [row for row in rows if row["epoch"] == epoch]
        if hasattr(dataset, "__getitem__"):
            assert sorted(index for row in mine for index in row["samples"]) == list(range(len(dataset)))
            continue
        for node in range(NODES):
            read = [position for row in mine if row["virtual_node"] == node for position in row["samples"]]
            assert read == list(range(len(numbers(dataset, node, NODES, epoch))))


def check_resumption(opened: Open, directory: Path, start_job: Callable[..., ElasticJob], loaders: int = 0) -> None:
    """The same bits from a checkpoint in the middle of an epoch, on another number of workers."""
    script = (train, opened, str(directory), loaders)
    environment = {ENV_CHECKPOINT_DIR: str(directory.parent / "kept")}
    job = start_job(*script, workers=2, hold=4, environment=environment)
    job.reach(4)
    job.call("stop")
    assert {outcome.kind for outcome in job.finish().values()} == {"Drained"}
    reference = alone(train, opened, str(directory))
    assert start_job(*script, workers=3, environment=environment).results() == [reference] * 3


def numbers(dataset: Any, index: int, count: int, epoch: int = 0, start: int = 0) -> list[int]:
    """Of the samples of a shard."""
    return [_number(sample) for sample in dataset.shard(index=index, count=count, epoch=epoch, start=start)]


def _number(sample: Any) -> int:
    return int(sample["number"] if isinstance(sample, dict) else sample[0])


def check_shards(opened: Callable[[], Any], samples: int, counts: tuple[int, ...] = (1, 2, 3, 4, 8)) -> None:
    """Each sample is in one shard, and each shard can be read from any sample on, by who has read nothing before."""
    for count in counts:
        for epoch in (0, 1):
            one = opened()
            shards = [numbers(one, index, count, epoch) for index in range(count)]
            assert Counter(number for shard in shards for number in shard) == Counter(range(samples)), count
            for index, shard in enumerate(shards):
                for start in {1, len(shard) // 2, len(shard), len(shard) + 2}:
                    assert numbers(opened(), index, count, epoch, start) == shard[start:], (count, index, start)
                    assert numbers(one, index, count, epoch, start) == shard[start:], (count, index, start)


def first(dataset: Any, count: int = 8) -> list[int]:
    """The numbers of the first samples of the only shard."""
    return [_number(sample) for sample in islice(dataset.shard(index=0, count=1, epoch=0, start=0), count)]
