"""What the tests of loading share: datasets whose samples tell how they were loaded, and the reference."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate

from virtualflow.data import LoaderOptions, MicroBatch, Source, dataloader, open_source
from virtualflow.data.map_source import MapSource
from virtualflow.data.rng import seed_samples, seed_stream_sample
from virtualflow.data.sampling import SamplePlan

SEED = 7
NODES = 6
BATCH = 12
SIZE = 67  # five full batches and one of 7, which is 2, 1, 1, 1, 1, 1


class Augmented(Dataset[torch.Tensor]):
    """Every draw depends on all draws since the last seeding, from each of the three libraries."""

    def __init__(self, size: int = SIZE, log: Path | None = None) -> None:
        self.size = size
        self.log = log

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.log is not None:
            with self.log.open("a") as log:
                log.write(f"{index}\n")
        noise = [float(torch.rand(1)), random.random(), float(np.random.rand())]
        return torch.tensor([float(index), *noise], dtype=torch.float64)


class Stripes(IterableDataset[torch.Tensor]):
    """Shards of unequal length: every ``count``-th sample, augmented."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self.shard(0, 1, 0, 0)

    def shard(self, index: int, count: int, epoch: int, start: int) -> Iterator[torch.Tensor]:
        for sample in range(index + start * count, self.size, count):
            noise = [float(torch.rand(1)), random.random(), float(np.random.rand())]
            yield torch.tensor([float(sample), float(epoch), *noise], dtype=torch.float64)


def plan_of(size: int = SIZE) -> SamplePlan:
    return SamplePlan(size, BATCH, SEED, shuffle=True, drop_last=False)


@contextmanager
def opened(dataset: Any, *, epochs: int | None = None, **options: Any) -> Iterator[Source]:
    source = open_source(
        dataset,
        batch_size=BATCH,
        virtual_nodes=NODES,
        seed=SEED,
        shuffle=True,
        drop_last=False,
        epochs=epochs,
        options=LoaderOptions(**options),
    )
    try:
        yield source
    finally:
        source.close()


def reference(epoch: int, step: int, node: int) -> MicroBatch:
    """Load straight away what a `MapSource` over `Augmented` must give."""
    samples = []
    indices = plan_of().indices(epoch, step, node, NODES).tolist()
    seed_samples(SEED, epoch, step, node)
    for index in indices:
        samples.append(Augmented()[index])
    return MicroBatch(node, default_collate(samples) if samples else None, tuple(indices))


def stream_reference(epoch: int, step: int, node: int) -> MicroBatch:
    """Load straight away what a `StreamSource` over `Stripes` must give."""
    share = BATCH // NODES
    samples, ordinals = [], []
    for ordinal in range(step * share, (step + 1) * share):
        seed_stream_sample(SEED, epoch, node, ordinal)
        for sample in Stripes().shard(node, NODES, epoch, ordinal):
            samples.append(sample)
            ordinals.append(ordinal)
            break
    return MicroBatch(node, default_collate(samples) if samples else None, tuple(ordinals))


def assert_same(got: MicroBatch, wanted: MicroBatch) -> None:
    assert (got.virtual_node, got.samples, got.size) == (wanted.virtual_node, wanted.samples, wanted.size)
    if wanted.data is None:
        assert got.data is None
    else:
        assert torch.equal(got.data, wanted.data)


def follow_a_random_script(
    source: Source, draw: random.Random, steps_per_epoch: int, expected: Callable[[int, int, int], MicroBatch]
) -> None:
    """Two epochs with resizes, failed attempts and results scribbled over by the user, each checked."""

    def some_range() -> range:
        first = draw.randrange(NODES)
        return range(first, draw.randint(first + 1, NODES))

    assigned = some_range()
    source.assign(assigned, 0, 0)
    for epoch in range(2):
        for step in range(steps_per_epoch):
            while draw.random() < 0.4:
                for node in assigned[: draw.randint(0, len(assigned))]:  # an attempt that fails half way
                    micro = source.fetch(epoch, step, node)
                    if micro.data is not None:
                        micro.data.zero_()
                if draw.random() < 0.7:
                    assigned = some_range()
                source.assign(assigned, epoch, step)
            for node in assigned:
                assert_same(source.fetch(epoch, step, node), expected(epoch, step, node))


def wait_until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.005)


class Where(Dataset[int]):
    """Tells the process that loads."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return os.getpid()


class Stuck(Where):
    """All but the first sample take for ever."""

    def __getitem__(self, index: int) -> int:
        if index:
            threading.Event().wait()
        return index


@contextmanager
def opened_in_order(dataset: Any, *, virtual_nodes: int = 1, **options: Any) -> Iterator[MapSource]:
    plan = SamplePlan(SIZE, virtual_nodes, SEED, shuffle=False, drop_last=False)
    source = MapSource(
        dataset,
        plan,
        virtual_nodes=virtual_nodes,
        epochs=1,
        options=LoaderOptions(**options),
    )
    with patch.object(dataloader, "GRACE", 0.2):
        try:
            yield source
        finally:
            source.close()


_SERVERS = ("resource_tracker", "forkserver", "etcd", "kube-", "chromium")
"""Children of a process of tests that are there for all of them."""


def loader_processes() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if not any(server in " ".join(child.cmdline()) for server in _SERVERS)]
