"""What is loaded is the same, once each, through resizes, kills and resumption: streams and loader processes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from elastic_jobs import ElasticJob, alone, die_here, trained
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import virtualflow as vf
from tiers import nightly
from virtualflow.launcher.report import merge_audit
from virtualflow.protocol.settings import ENV_AUDIT_DIR, ENV_CHECKPOINT_DIR

SIZE = 41
EPOCHS = 3


def length(shard: int, epoch: int) -> int:
    return 14 - 3 * epoch if shard == 0 else shard * 2 if shard != 3 else 0


class Stream(IterableDataset[Tensor]):
    """Shard 0 is much longer than the others, and shorter from epoch to epoch; one of them is empty."""

    def shard(self, index: int, count: int, epoch: int, start: int) -> Iterator[Tensor]:
        for position in range(start, length(index, epoch)):
            yield torch.tensor([index, position + epoch, torch.rand(()), random.random()], dtype=torch.float32)

    def __iter__(self) -> Iterator[Tensor]:
        return self.shard(0, 1, 0, 0)


class Augmented(Dataset[Tensor]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, torch.rand(()), random.random(), np.random.rand()], dtype=torch.float32)


DATASETS = {"stream": Stream, "augmented": Augmented}


def train(kind: str, loaders: int, victim: str = "", epochs: int = EPOCHS) -> Any:
    torch.manual_seed(4)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    told = []
    options = {"num_workers": loaders} if loaders else {}
    with vf.elastic(
        model, optimizer, DATASETS[kind](), batch_size=14, epochs=epochs, virtual_nodes=7, seed=9, **options
    ) as run:
        for step in run:
            for x in step:
                loss = F.mse_loss(model(x), x[:, 2:])
                loss.backward()
                step.log(loss=loss, rows=len(x))
                if step.number == 8:
                    die_here(victim)
            told.append((step.number, step.epoch, dict(step.metrics)))
    return trained(run, model, optimizer, told[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "loaders"),
    [("stream", 1), ("augmented", 0), nightly("stream", 0), nightly("augmented", 2)],
    ids=str,
)
def test_a_resize_and_a_kill_lose_and_repeat_nothing(
    kind: str, loaders: int, tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    reference = alone(train, kind, 0)
    job = start_job(
        train, kind, loaders, "worker-1", workers=2, hold=2, environment={ENV_AUDIT_DIR: str(tmp_path / "audit")}
    )
    job.reach(2)
    job.join()
    assert job.results() == [reference] * 2
    rows = list(merge_audit(path.read_text().splitlines() for path in (tmp_path / "audit").glob("*.jsonl")))
    assert len({row["worker"] for row in rows}) == 3
    for epoch in range(EPOCHS):
        mine = [row for row in rows if row["epoch"] == epoch]
        if kind == "augmented":
            assert sorted(index for row in mine for index in row["samples"]) == list(range(SIZE))
        else:
            for node in range(7):
                read = [position for row in mine if row["virtual_node"] == node for position in row["samples"]]
                assert read == list(range(length(node, epoch)))


@pytest.mark.slow
@pytest.mark.parametrize("loaders", [nightly(0, id="in the worker"), pytest.param(1, id="in a loader process")])
def test_a_stream_is_resumed_in_the_middle(loaders: int, tmp_path: Path, start_job: Callable[..., ElasticJob]) -> None:
    reference = alone(train, "stream", 0)
    environment = {ENV_CHECKPOINT_DIR: str(tmp_path / "kept")}
    job = start_job(train, "stream", loaders, workers=2, hold=9, environment=environment)
    job.reach(9)
    job.call("stop")
    assert {outcome.kind for outcome in job.finish().values()} == {"Drained"}
    results = start_job(train, "stream", loaders, workers=3, environment=environment).results()
    assert results == [reference] * 3
