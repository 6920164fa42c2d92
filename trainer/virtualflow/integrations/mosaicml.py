"""MosaicML Streaming over virtual nodes: shard files dealt to them, in an order of their own, read from any sample on.

A ``StreamingDataset`` deals by ranks and keeps what it has downloaded in shared memory of the machine, which a process
that is killed leaves behind. So this reads the ``Stream``s below it: an index says how many samples each file has, and
a file that is there gives any of them.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock
from streaming import Stream
from streaming.base.format import get_index_basename
from streaming.base.world import World

from virtualflow._arguments import checked
from virtualflow.data import derive_seed
from virtualflow.errors import ConfigurationError
from virtualflow.integrations.loaders import deal

__all__ = ["shards"]

_ALONE = World(num_nodes=1, ranks_per_node=1, workers_per_rank=1, worker=0)
"""Each process sees for itself that a file is there, under a lock, and waits for no rank."""
_DEFAULTS = {"split": None, "download_retry": 2, "download_timeout": 60.0, "validate_hash": None, "keep_zip": False}
"""Those of ``StreamingDataset``."""
_WEIGHTS = ("proportion", "repeat", "choose")


@checked("shards")
def shards(
    *streams: Stream,
    shuffle: bool = False,
    seed: int = 0,
    transform: Callable[[dict[str, Any]], Any] | None = None,
    allow_unsafe_types: bool = False,
) -> _Shards:
    """Give the ``Stream``s of a ``StreamingDataset`` to ``vf.elastic``.

    Args:
        streams: their samples together, each once in an epoch. Workers of a machine may share a ``local`` directory.
        shuffle: mix files, and the samples in each; the order follows from ``seed`` and the epoch.
        seed: see ``shuffle``.
        transform: done to each sample last, and not to those in front of where reading starts.
        allow_unsafe_types: also read columns that are pickled, from whom you trust.

    Raises:
        ConfigurationError: what is given is no ``Stream``, or weighs its samples.
    """
    if not streams or not all(isinstance(stream, Stream) for stream in streams):
        given = ", ".join(type(stream).__name__ for stream in streams) or "nothing"
        raise ConfigurationError(
            f"shards() needs Streams, and not {given}; give Stream(remote=..., local=...) as to StreamingDataset"
        )
    for stream in streams:
        weights = [name for name in _WEIGHTS if hasattr(stream, name)]
        if weights:
            raise ConfigurationError(
                f"{weights[0]}= has samples count more than once or not at all in an epoch; leave it out"
            )
    return _Shards([_unused(stream) for stream in streams], shuffle, seed, transform, allow_unsafe_types)


def _unused(stream: Stream) -> Stream:
    """A stream of its own with all defaults: its connections are shared with no process or shard."""
    stream = copy.deepcopy(stream)
    stream.apply_default(_DEFAULTS)
    return stream


class _Shards:
    def __init__(
        self,
        streams: list[Stream],
        shuffle: bool,
        seed: int,
        transform: Callable[[dict[str, Any]], Any] | None,
        allow_unsafe_types: bool,
    ) -> None:
        self._streams = streams
        self._shuffle, self._seed, self._transform = shuffle, seed, transform
        self._files = [
            (place, file)
            for place, stream in enumerate(streams)
            for file in _index(copy.deepcopy(stream), allow_unsafe_types)
        ]

    def shard(self, index: int, count: int, epoch: int, start: int) -> Iterator[Any]:
        samples = self._samples(index, count, epoch, start)
        return map(self._transform, samples) if self._transform is not None else samples

    def _samples(self, index: int, count: int, epoch: int, start: int) -> Iterator[dict[str, Any]]:
        streams = copy.deepcopy(self._streams)
        files = self._mixed(len(self._files), epoch, "files")
        for part in deal(len(files), index, count):
            number = files[part.file]
            place, file = self._files[number]
            positions = self._mixed(file.samples, epoch, number)[part.offset :: part.step]
            if start < len(positions):
                _fetch(streams[place], file)
            yield from map(file.get_item, positions[start:])
            start = max(0, start - len(positions))

    def _mixed(self, count: int, epoch: int, what: str | int) -> list[int]:
        numbers = list(range(count))
        if self._shuffle:
            random.Random(derive_seed("mosaicml", self._seed, epoch, what)).shuffle(numbers)
        return numbers


def _index(stream: Stream, allow_unsafe_types: bool) -> list[Any]:
    index = Path(stream.local, stream.split, get_index_basename())
    if index.exists() or not stream.remote:
        files = stream.get_shards(_ALONE, allow_unsafe_types)
    else:
        with _alone(index):
            files = stream.get_shards(_ALONE, allow_unsafe_types)
    return list(files)


def _fetch(stream: Stream, file: Any) -> None:
    wanted = [Path(stream.local, stream.split, raw.basename) for raw, _ in file.file_pairs]
    if not all(path.exists() for path in wanted):
        with _alone(wanted[0]):
            stream.prepare_shard(file)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which the library writes under one name beside it, whoever does so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Who tries a download again draws a random pause, and those of the sample behind it are seeded already.
    before = random.getstate()
    try:
        with FileLock(f"{path}.lock"):
            yield
    finally:
        random.setstate(before)
