"""Micro-batches of iterable datasets: one stream a virtual node, resumable at any sample.

An iterable dataset has no indices that could be dealt out, so it deals itself out: `Shardable` is all that it
has to implement. A stream belongs to a virtual node, not to a worker; whoever is assigned the virtual
node reads on where it stands.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import IterableDataset, default_collate

from virtualflow.data.counting import ALL, Count, count_samples
from virtualflow.data.dataloader import (
    Collate,
    Early,
    LoaderOptions,
    MicroBatch,
    Watched,
    check_options,
    close_loader,
    collate_of,
    open_loader,
    read,
)
from virtualflow.data.rng import seed_stream_sample
from virtualflow.data.sampling import micro_batch
from virtualflow.errors import ConfigurationError

_OPENING = -1
"""In place of a sample's position, for what a dataset draws while it opens a shard."""


class Shardable(Protocol):
    """An iterable dataset that can be read in shards, from any position."""

    def shard(self, index: int, count: int, epoch: int, start: int) -> Iterator[Any]:
        """Iterate over shard ``index`` of ``count`` in ``epoch``, beginning with its ``start``-th sample.

        Together, the shards hold every sample of an epoch once; they may differ in length. Their contents and
        order follow from ``index``, ``count`` and ``epoch`` alone. The global random generators are seeded
        anew before each sample, so augmentation may draw from them, and the order must not; whoever skips to
        ``start`` skips without augmenting.

        A sequence read in stripes::

            def shard(self, index, count, epoch, start):
                for position in range(index + start * count, len(self.lines), count):
                    yield self.tokenize(self.lines[position])
        """


class StreamSource:
    """Micro-batches of a `Shardable` dataset. Implements `Source`.

    Virtual node ``v`` of ``V`` reads ``shard(v, V, epoch, start)`` in pieces of ``batch_size / V``. Where a
    shard is shorter than others, its micro-batches become short and then empty; an epoch is over when all are
    empty. With ``num_workers`` of at least 1, each assigned virtual node has a loader process for its open
    stream.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        virtual_nodes: int,
        seed: int,
        options: LoaderOptions,
    ) -> None:
        """Open the source over ``dataset``; the arguments are those of `map_source.open_source`.

        Raises:
            ConfigurationError: the dataset has no suitable ``shard``, or the sizes or options do not fit
                together.
        """
        check_options(options)
        _check_shardable(dataset)
        self._dataset: Shardable = dataset
        self._micro = micro_batch(batch_size, virtual_nodes)
        self._virtual_nodes = virtual_nodes
        self._seed = seed
        self._processes = min(1, options.get("num_workers", 0))
        self._options = options.copy()
        self._options["num_workers"] = self._processes
        self._collate = _WithPositions(collate_of(options))
        self._watched = Watched(dataset, collate_of(options)) if self._processes else None
        self._assigned: Sequence[int] = range(0)
        self._streams: dict[int, _Stream] = {}
        self._closed = False

    @property
    def steps_per_epoch(self) -> None:
        return None

    def samples(self, epoch_step: int) -> None:
        return

    @property
    def fuses(self) -> bool:
        """See `Source.fuses`: what the default ``collate_fn`` made can be put together as if it had made it at once."""
        return self._collate.collate is default_collate and not self._options.get("pin_memory", False)

    @property
    def early(self) -> Early:
        """See `Source.early`: a stream is read in its order, by the user's code."""
        return "nothing"

    @property
    def version(self) -> object:
        return None

    def assign(self, virtual_nodes: Sequence[int], epoch: int, epoch_step: int, width: int = 1) -> None:
        """See `Source.assign`. A stream that stands at the position is read on; others are closed."""
        self._assigned = virtual_nodes
        for virtual_node, stream in list(self._streams.items()):
            if virtual_node not in virtual_nodes or not stream.stands_at(epoch, epoch_step):
                self._drop(virtual_node)

    def fetch(self, epoch: int, epoch_step: int, virtual_node: int, count: int = 1) -> MicroBatch:
        if count > 1:
            nodes = range(virtual_node, virtual_node + count)
            return fuse([self.fetch(epoch, epoch_step, node) for node in nodes])
        if self._closed:
            raise RuntimeError("the source of samples is closed")
        if self._watched is not None and self._watched.have_changed(within_epoch=epoch_step > 0):
            for each in list(self._streams):
                self._drop(each)
        stream = self._place(virtual_node, epoch, epoch_step)
        if self._processes:
            # Those that come next in this step begin to load meanwhile, each in its own process.
            for following in self._assigned:
                if following > virtual_node:
                    self._place(following, epoch, epoch_step)
        stream.position = None  # until all went well: after an error the stream is opened again
        try:
            (positions, data, counted), stream.ends_seen = read(stream.batches, stream.ends_seen)
        except StopIteration:
            positions, data, counted = _END
        stream.position = epoch_step + 1
        if virtual_node not in self._assigned:  # read once, in the place of a worker that was lost
            self._drop(virtual_node)
        # Pinning memory makes lists of them.
        return MicroBatch(virtual_node, data, tuple(positions), count=Count(*counted))

    def read_again(self, batch: MicroBatch, epoch: int, epoch_step: int) -> tuple[MicroBatch, MicroBatch] | None:
        """See `Source.read_again`: the following micro-batch, read on, and from a stream that is opened there.

        Whoever is far within an epoch would read all of it up to there.
        """
        if epoch_step:
            return None
        node = batch.virtual_node
        return self.fetch(epoch, epoch_step + 1, node), self.fetch(epoch, epoch_step + 1, node)

    def look(self, index: int, see: Callable[[Any], Any]) -> Any:
        return None

    def close(self) -> None:
        self._closed = True
        for virtual_node in list(self._streams):
            self._drop(virtual_node)

    def _place(self, virtual_node: int, epoch: int, epoch_step: int) -> _Stream:
        """Return the stream of ``virtual_node`` at this position, opened anew if it stands elsewhere."""
        stream = self._streams.get(virtual_node)
        if stream is not None and stream.stands_at(epoch, epoch_step):
            return stream
        self._drop(virtual_node)
        reader = _Reader(
            self._dataset,
            self._seed,
            index=virtual_node,
            count=self._virtual_nodes,
            epoch=epoch,
            start=epoch_step * self._micro,
        )
        batches = open_loader(
            reader, self._dataset, self._options, collate=self._collate, sampler=None, batch_size=self._micro
        )
        stream = self._streams[virtual_node] = _Stream(batches, epoch, epoch_step)
        return stream

    def _drop(self, virtual_node: int) -> None:
        stream = self._streams.pop(virtual_node, None)
        if stream is not None:
            close_loader(stream.batches)


_END: tuple[tuple[int, ...], Any, Count] = ((), None, ALL)


@dataclass
class _Stream:
    """An open stream and the step that it is ready for."""

    batches: Iterator[tuple[tuple[int, ...], Any, Count]]
    epoch: int
    position: int | None
    ends_seen: int = 0

    def stands_at(self, epoch: int, epoch_step: int) -> bool:
        return self.epoch == epoch and self.position == epoch_step


class _Reader(IterableDataset[tuple[int, Any]]):
    """A shard from some position on, as the ``DataLoader`` sees it: numbered samples, each seeded."""

    def __init__(self, dataset: Shardable, seed: int, *, index: int, count: int, epoch: int, start: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._index = index
        self._count = count
        self._epoch = epoch
        self._start = start

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        seed_stream_sample(self._seed, self._epoch, self._index, _OPENING)
        samples = iter(self._dataset.shard(index=self._index, count=self._count, epoch=self._epoch, start=self._start))
        position = self._start
        while True:
            seed_stream_sample(self._seed, self._epoch, self._index, position)
            try:
                sample = next(samples)
            except StopIteration:
                return
            yield position, sample
            position += 1


@dataclass(frozen=True)
class _WithPositions:
    collate: Collate

    def __call__(self, numbered: list[tuple[int, Any]]) -> tuple[tuple[int, ...], Any, Count]:
        positions, samples = tuple(position for position, _ in numbered), [sample for _, sample in numbered]
        data = self.collate(list(samples))
        count = ALL if self.collate is default_collate else count_samples(samples, data, len(samples))
        return positions, data, count


def fuse(batches: Sequence[MicroBatch]) -> MicroBatch:
    """Put micro-batches of neighbouring virtual nodes, made by the default ``collate_fn``, together as one."""
    if len(batches) == 1:
        return batches[0]
    filled = [batch.data for batch in batches if batch.size]
    return MicroBatch(
        batches[0].virtual_node,
        _concatenate(filled) if filled else None,
        tuple(sample for batch in batches for sample in batch.samples),
        tuple(batch.size for batch in batches),
    )


def _concatenate(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        joined = {name: _concatenate([part[name] for part in parts]) for name in first}
        if type(first) is dict or not isinstance(first, MutableMapping):
            return joined
        filled = copy.copy(first)
        filled.update(joined)
        return filled
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(_concatenate(column) for column in zip(*parts, strict=True)))
    if first and isinstance(first[0], str | bytes):
        return type(first)(text for part in parts for text in part)
    return [_concatenate(column) for column in zip(*parts, strict=True)]


def _check_shardable(dataset: object) -> None:
    name = type(dataset).__name__
    shard = getattr(dataset, "shard", None)
    if not callable(shard):
        raise ConfigurationError(
            f"{name} has no indices, so virtual nodes must read it in shards: give it a method "
            "shard(index, count, epoch, start) that returns an iterator over the samples of shard index of "
            "count in that epoch, from its start-th sample on"
        )
    try:
        inspect.signature(shard).bind(index=0, count=1, epoch=0, start=0)
    except TypeError as error:
        raise ConfigurationError(
            f"{name}.shard must take the arguments index, count, epoch and start ({error}); "
            f"wrap {name} in a dataset of your own whose shard does"
        ) from None
