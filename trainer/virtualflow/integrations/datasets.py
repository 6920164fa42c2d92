"""Iterable datasets of Hugging Face over virtual nodes: the library's own files and order, read from any sample on.

Samples are read in batches, which costs a fraction of reading them one by one. So nothing in the pipeline may draw from
the global random generators, which are seeded for each sample; what is random or costly is done to single samples
behind it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import datasets
import fsspec.asyn
import numpy as np
import torch
from datasets.distributed import split_dataset_by_node
from torch.utils.data import get_worker_info

from virtualflow._arguments import checked
from virtualflow.data import derive_seed
from virtualflow.errors import ConfigurationError

__all__ = ["shards"]

READ = 64
"""Samples of a batch that is read: what a batch costs beside its samples is then little."""


@checked("shards")
def shards(
    dataset: datasets.IterableDataset, *, shuffle: int = 0, seed: int = 0, transform: Callable[[Any], Any] | None = None
) -> _Shards:
    """Give an ``IterableDataset`` to ``vf.elastic``. A ``Dataset`` needs nothing of the kind.

    Args:
        dataset: as it is, also with ``map``, ``filter`` and ``shuffle(seed=)``. Its order follows from its own seeds
            and from the epoch.
        shuffle: mix each so many samples on their way; 0 does not. It is faster than ``dataset.shuffle``.
        seed: what ``shuffle`` follows from, with the epoch.
        transform: done to each sample last, and not to those in front of where reading starts: what is costly, and what
            draws random numbers.

    Raises:
        ConfigurationError: its samples would not be the same on any number of workers.
    """
    _check(dataset)
    return _Shards(dataset, shuffle, seed, transform)


class _Shards:
    def __init__(
        self, dataset: datasets.IterableDataset, shuffle: int, seed: int, transform: Callable[[Any], Any] | None
    ) -> None:
        self._dataset = dataset
        self._shuffle = shuffle
        self._seed = seed
        self._transform = transform

    def shard(self, index: int, count: int, epoch: int, start: int) -> Iterator[Any]:
        if get_worker_info() is not None:
            fsspec.asyn.reset_lock()  # its lock may have been held when this process was forked
        parts = math.gcd(self._dataset.num_shards, count)
        part = self._dataset.shard(num_shards=parts, index=index % parts, contiguous=False)
        if parts < count:
            part = split_dataset_by_node(part, rank=index // parts, world_size=count // parts, strategy="examples")
        part.set_epoch(epoch)
        samples: Iterator[Any] = chain.from_iterable(map(_rows, _undrawn(part.iter(READ))))
        if self._shuffle > 1:
            samples = _mixed(samples, self._shuffle, random.Random(derive_seed("datasets", self._seed, epoch, index)))
        for _ in islice(samples, start):  # now, since random numbers are those of the first sample afterwards
            pass
        return map(self._transform, samples) if self._transform else samples


def _rows(batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for values in zip(*batch.values(), strict=True):
        yield dict(zip(batch, values, strict=True))


def _mixed(samples: Iterator[Any], size: int, rng: random.Random) -> Iterator[Any]:
    """Each of the last ``size`` samples may be the next."""
    waiting = list(islice(samples, size))
    for sample in samples:
        place = rng.randrange(size)
        yield waiting[place]
        waiting[place] = sample
    rng.shuffle(waiting)
    yield from waiting


def _undrawn(batches: Iterator[Any]) -> Iterator[Any]:
    while True:
        before = _states()
        batch = next(batches, None)
        if _states() != before:
            raise ConfigurationError(
                "the dataset draws from the global random generators while it reads (in map() or filter()), which "
                "gives other numbers where reading starts elsewhere; give what is random as shards(dataset, transform=)"
            )
        if batch is None:
            return
        yield batch


def _states() -> tuple[Any, ...]:
    theirs: Any = np.random.get_state(legacy=False)["state"]
    return random.getstate(), theirs["pos"], theirs["key"].tobytes(), torch.get_rng_state().numpy().tobytes()


def _check(dataset: Any) -> None:
    if isinstance(dataset, datasets.Dataset):
        raise ConfigurationError("a Dataset has indices; give it to vf.elastic itself, without shards()")
    if not isinstance(dataset, datasets.IterableDataset):
        raise ConfigurationError(
            f"shards() needs an IterableDataset, and not a {type(dataset).__name__}; of several splits, give one"
        )
    if dataset._distributed is not None:
        raise ConfigurationError(
            "split_dataset_by_node() divides the samples among processes, which shards() does itself; leave it out"
        )
    if not all(map(_has_seed, _generators(dataset._ex_iterable))):
        raise ConfigurationError(
            "the dataset is shuffled or interleaved without a seed, so each worker would have another order; say "
            "shuffle(seed=) and interleave_datasets(seed=)"
        )


def _has_seed(generator: np.random.Generator) -> bool:
    sequence: Any = generator.bit_generator.seed_seq
    return not isinstance(sequence.entropy, int) or sequence.entropy < 1 << 64


def _generators(iterable: Any) -> Iterator[np.random.Generator]:
    for value in vars(iterable).values():
        if isinstance(value, np.random.Generator):
            yield value
        else:
            for inner in value if isinstance(value, list) else [value]:
                if hasattr(inner, "shard_data_sources"):
                    yield from _generators(inner)
