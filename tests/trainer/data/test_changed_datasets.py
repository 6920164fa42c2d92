"""What a script sets on its dataset while it trains reaches loader processes too, which have copies of it."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from elastic_jobs import ElasticJob, Trained, alone, die_here, trained
from loaded_samples import BATCH, NODES, opened
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Subset

import virtualflow as vf
from virtualflow.data.dataloader import Watched

PROCESSES = pytest.mark.parametrize("processes", [0, 1, 2])


class Scaled(Dataset[Tensor]):
    """A sample is its index, times what the script has set."""

    def __init__(self, size: int = 6 * BATCH) -> None:
        self.size, self.scale = size, 1
        self.transform = SimpleNamespace(shift=0)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index * self.scale + self.transform.shift], dtype=torch.float32)


class ScaledStream(IterableDataset[Tensor]):
    def __init__(self, size: int = 6 * BATCH) -> None:
        self.size, self.scale, self.transform = size, 1, SimpleNamespace(shift=0)

    def shard(self, index: int, count: int, epoch: int, start: int) -> Iterator[Tensor]:
        for sample in range(index + start * count, self.size, count):
            yield torch.tensor([sample * self.scale + self.transform.shift], dtype=torch.float32)

    def __iter__(self) -> Iterator[Tensor]:
        return self.shard(0, 1, 0, 0)


@PROCESSES
@pytest.mark.parametrize("kind", [Scaled, ScaledStream])
def test_samples_are_those_of_the_dataset_as_the_script_has_it(kind: type[Any], processes: int) -> None:
    dataset, plain = kind(), kind()
    with opened(dataset, num_workers=processes) as source, opened(plain) as other:
        for each in (source, other):
            each.assign(range(NODES), 0, 0)
        dataset.scale = 3  # behind the start of the loader processes
        for epoch in range(2):
            for step in range(6):
                if step == 4:
                    dataset.transform.shift = 1 + epoch
                for node in range(NODES):
                    got, wanted = source.fetch(epoch, step, node), other.fetch(epoch, step, node)
                    assert got.samples == wanted.samples
                    assert torch.equal(got.data, wanted.data * dataset.scale + dataset.transform.shift)
            dataset.scale, dataset.transform = 10 + epoch, SimpleNamespace(shift=7)
            for each in (source, other):
                each.assign(range(NODES), epoch + 1, 0)


def test_what_was_loaded_ahead_of_a_change_is_told_to_be_old() -> None:
    dataset = Scaled()
    with opened(dataset, num_workers=1) as source:
        source.assign(range(NODES), 0, 0)
        ahead = source.version
        assert source.version == ahead
        dataset.scale = 2
        assert source.version != ahead


def test_a_change_within_an_epoch_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    dataset = Scaled()
    with caplog.at_level(logging.WARNING, "virtualflow"), opened(dataset, num_workers=1) as source:
        source.assign(range(NODES), 0, 0)
        for step in range(4):
            dataset.scale += 1
            source.fetch(0, step, 0)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert said[0].startswith("the script has changed Scaled.scale within an epoch, and loader processes begin anew")


def curriculum(loaders: int, dies: str = "") -> Trained:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    dataset, options = Scaled(24), {"num_workers": loaders} if loaders else {}
    with vf.elastic(model, optimizer, dataset, batch_size=12, epochs=5, virtual_nodes=6, **options) as run:
        for step in run:
            dataset.scale = 1 + step.epoch
            for x in step:
                F.mse_loss(model(x), x).backward()
                if step.number == 7:
                    die_here(dies)
    return trained(run, model, optimizer)


@pytest.mark.slow
def test_a_curriculum_is_the_same_with_loader_processes_that_others_start_later(
    start_job: Callable[..., ElasticJob],
) -> None:
    reference = alone(curriculum, 0)
    job = start_job(curriculum, 1, "worker-1", workers=2, hold=5)
    job.reach(5)
    job.join()
    assert job.results() == [reference] * 2


def ragged() -> np.ndarray[Any, Any]:
    made = np.empty(2, dtype=object)
    made[:] = [np.arange(2), np.arange(3)]
    return made


class Held:
    """As datasets hold things: plain values, objects, containers."""

    def __init__(self) -> None:
        self.level, self.name, self.limit = 1, "train", float("nan")
        self.rows, self.weights = [1, 2, 3], torch.zeros(3)
        self.parts = [SimpleNamespace(p=0.5), SimpleNamespace(p=0.1)]
        self.model = nn.Linear(2, 2)
        self.itself = self
        self.sparse, self.meta, self.ragged = torch.eye(2).to_sparse(), torch.zeros(2, device="meta"), ragged()
        self.file, self.order, self.seed, self.lock = None, np.arange(4), np.int64(3), threading.Lock()
        self.shared, self.gone = torch.zeros(2).share_memory_(), weakref.proxy(nn.Linear(1, 1))


def grow(held: Held) -> None:
    held.rows.append(4)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda held: None, None),
        (lambda held: setattr(held, "level", 1), None),
        (lambda held: setattr(held, "level", 2), "Held.level"),
        (lambda held: setattr(held, "level", True), "Held.level"),
        (lambda held: setattr(held, "new", 1), "Held.new"),
        (lambda held: delattr(held, "name"), "Held.name"),
        (lambda held: setattr(held, "rows", [1, 2, 3]), None),
        (lambda held: setattr(held, "rows", [1, 2, 4]), "Held.rows"),
        (lambda held: setattr(held, "weights", torch.zeros(3)), None),
        (lambda held: setattr(held, "weights", torch.ones(3)), "Held.weights"),
        (lambda held: setattr(held, "seed", np.int64(3)), None),
        (lambda held: setattr(held, "order", np.arange(4)), None),
        (lambda held: setattr(held, "order", np.arange(4)[::-1]), "Held.order"),
        (lambda held: setattr(held, "file", threading.Lock()), None),
        (lambda held: setattr(held, "parts", SimpleNamespace(p=0.5)), "Held.parts"),
        (grow, "Held.rows"),
        (lambda held: held.shared.add_(1), None),
        (lambda held: setattr(held, "lock", threading.Lock()), "Held.lock"),  # as a file of another epoch would be
        (lambda held: setattr(held, "ragged", ragged()), "Held.ragged"),  # which cannot be compared
        (lambda held: setattr(held, "sparse", torch.eye(2).to_sparse()), "Held.sparse"),
        (lambda held: setattr(held, "meta", torch.zeros(2, device="meta")), "Held.meta"),
        (lambda held: held.weights.add_(1), "Held.weights"),
        (lambda held: setattr(held.parts[1], "p", 0.2), "SimpleNamespace.p"),
        (lambda held: setattr(held.model, "training", False), None),
    ],
)
def test_an_attribute_that_was_set_is_named(change: Callable[[Held], Any], named: str | None) -> None:
    held = Held()
    watched = Watched(Subset([held], [0]), len)  # type: ignore[arg-type]
    change(held)
    assert watched.changed == named
    assert watched.have_changed(within_epoch=False) == (named is not None)
    assert watched.changed is None
