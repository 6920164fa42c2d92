"""litData's datasets over virtual nodes: chunks dealt to them, in an order of their own, read from any sample on.

A ``StreamingDataset`` knows how many samples each chunk has, and reads any: nothing in front of ``start`` is read.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
from litdata import StreamingDataset
from litdata.streaming.sampler import ChunkedIndex

from virtualflow.data import derive_seed
from virtualflow.errors import ConfigurationError
from virtualflow.integrations.loaders import deal

__all__ = ["shards"]


def shards(dataset: StreamingDataset) -> _Shards:
    """Give a ``StreamingDataset`` to ``vf.elastic``, with its ``shuffle``, ``seed`` and ``transform``.

    Raises:
        ConfigurationError: it is none, or would leave out samples.
    """
    if not isinstance(dataset, StreamingDataset):
        raise ConfigurationError(
            f"shards() needs a StreamingDataset, and not a {type(dataset).__name__}; give the dataset itself, and not "
            "its StreamingDataLoader, and train on one dataset"
        )
    if dataset.drop_last:
        raise ConfigurationError("drop_last=True leaves out samples by the number of processes; leave it out")
    return _Shards(dataset)


class _Shards:
    def __init__(self, dataset: StreamingDataset) -> None:
        self._dataset = dataset
        len(dataset)  # reads the index
        self._shuffler = dataset.shuffler
        intervals = self._shuffler.cache.get_chunk_intervals()
        self._chunks = [(each.roi_start_idx, each.roi_end_idx) for each in intervals]

    def shard(self, index: int, count: int, epoch: int, start: int) -> Iterator[Any]:
        # Each reads by itself: files that are open are not shared with another process or shard.
        dataset = copy.copy(self._dataset)
        dataset.cache = None
        return map(dataset.__getitem__, self._order(index, count, epoch, start))

    def _order(self, index: int, count: int, epoch: int, start: int) -> Iterator[ChunkedIndex]:
        chunks = list(range(len(self._chunks)))
        if self._dataset.shuffle:
            random.Random(derive_seed("litdata", self._dataset.seed, epoch)).shuffle(chunks)
        for part in deal(len(chunks), index, count):
            chunk = chunks[part.file]
            # In a chunk it is the library's own order: it decodes blocks of samples at once, and keeps to them.
            ordered = self._shuffler(np.arange(*self._chunks[chunk]), len(chunks), epoch, chunk)
            positions = ordered[part.offset :: part.step]
            for position in positions[start:]:
                yield ChunkedIndex(position, chunk)
            start = max(0, start - len(positions))
