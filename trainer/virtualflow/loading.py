"""Micro-batches of a map-style dataset, loaded ahead by a real ``DataLoader`` that no resize restarts.

Where there are neither loader processes nor a thread that pins memory, nothing can be loaded ahead, and a micro-batch
is put together when it is asked for, without a ``DataLoader`` in between. Otherwise:

The ``DataLoader`` gets a sampler that never ends and that we steer: it names the next wanted batch of the
virtual nodes that this worker carries now. So one set of loader processes serves the whole job, over epochs
and resizes; what is in flight at a resize is kept where it is still wanted, and every batch carries the name
of what was really loaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._utils import ExceptionWrapper
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate, get_worker_info

from virtualflow.errors import ConfigurationError
from virtualflow.loaders import (
    Collate,
    LoaderOptions,
    MicroBatch,
    Source,
    check_options,
    close_loader,
    collate_of,
    open_loader,
)
from virtualflow.randomness import seed_samples
from virtualflow.sampling import Plan, micro_batch
from virtualflow.settings import LoadingSettings
from virtualflow.streams import Shardable, StreamSource
from virtualflow.tuning import chunks

__all__ = ["LoaderOptions", "MapSource", "MicroBatch", "Shardable", "Source", "StreamSource", "open_source"]


def open_source(
    dataset: Any,
    *,
    batch_size: int,
    virtual_nodes: int,
    seed: int,
    shuffle: bool,
    drop_last: bool,
    epochs: int | None,
    options: LoaderOptions,
    close_grace: float,
) -> Source:
    """Open the source that fits ``dataset``: a `MapSource` where samples have indices, else a `StreamSource`.

    Args:
        dataset: map-style (``__getitem__`` and ``__len__``), or `Shardable`.
        batch_size: samples of a global batch.
        virtual_nodes: how many share it.
        seed: of the job; the order of the samples and the randomness inside the dataset follow from it.
        shuffle: a new order every epoch. Streams come in the order of their shards, whatever this says.
        drop_last: leave out a last short batch (map-style only).
        epochs: nothing is loaded ahead beyond them; ``None`` for no end.
        options: passed through to the ``DataLoader``.
        close_grace: seconds that `Source.close` gives a loader process to finish the batch in hand.

    Raises:
        ConfigurationError: the dataset, the sizes or the options do not fit together.
    """
    check_options(options)
    if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__"):
        if not hasattr(dataset, "__len__"):
            raise ConfigurationError(
                f"{type(dataset).__name__} has no __len__, so its samples cannot be put in order; define it"
            )
        plan = Plan(len(dataset), batch_size, seed, shuffle, drop_last)
        return MapSource(
            dataset,
            plan,
            virtual_nodes=virtual_nodes,
            epochs=epochs,
            options=options,
            close_grace=close_grace,
        )
    return StreamSource(
        dataset,
        batch_size=batch_size,
        virtual_nodes=virtual_nodes,
        seed=seed,
        options=options,
        close_grace=close_grace,
    )


_NOT_SELECTED = (torch.uint16, torch.uint32, torch.uint64)
"""Types for which ``index_select`` is not implemented."""


class _Key(NamedTuple):
    """The name of a micro-batch; keys are ordered as they are needed."""

    epoch: int
    epoch_step: int
    virtual_node: int
    together: int
    """Virtual nodes from that one on, which are loaded together."""


@dataclass(frozen=True, slots=True)
class _Task:
    """What a loader process is asked for."""

    key: _Key
    indices: tuple[int, ...]
    sizes: tuple[int, ...]
    """How many of them each virtual node has."""


class MapSource:
    """Micro-batches of a dataset with indices. Implements `Source`.

    Loader processes start with the source, so that they boot, and fork, before there is anything that they
    would delay or inherit; they idle until the first assignment.
    """

    def __init__(
        self,
        dataset: Any,
        plan: Plan,
        *,
        virtual_nodes: int,
        epochs: int | None,
        options: LoaderOptions,
        close_grace: float,
    ) -> None:
        """Open the source over ``dataset``; the arguments and errors are those of `open_source`."""
        check_options(options)
        micro_batch(plan.batch_size, virtual_nodes)
        self._plan = plan
        self._virtual_nodes = virtual_nodes
        self._epochs = epochs
        self._close_grace = close_grace
        processes = options.get("num_workers", 0)
        self._slots = processes * (options.get("prefetch_factor") or 2)
        """Tasks that the ``DataLoader`` keeps in flight (torch's default: two a process)."""
        self._chunks: list[range] = []
        """Virtual nodes that this worker carries, as they are loaded together."""
        self._gathered: dict[_Key, MicroBatch] = {}
        """Those of the present step that need only be handed out, without a ``DataLoader``."""
        self._counts: dict[int, int] = {}
        """Of each chunk: its first virtual node, and how many it has."""
        self._wanted: Iterator[_Task] = iter(())
        self._passed = _Key(0, 0, -1, 0)
        """The latest key handed out: nothing up to it is loaded ahead."""
        self._due: _Task | None = None
        self._in_flight: deque[_Key | None] = deque()
        self._arrived: dict[_Key, tuple[_Task, Any]] = {}
        self._closed = False
        self._failed = False
        self._loading = _Loading(dataset, collate_of(options), plan.seed)
        self._ahead_of_need = processes > 0 or options.get("pin_memory", False)
        self._batches: Iterator[Any] = iter(())
        if self._ahead_of_need:
            self._batches = open_loader(
                self._loading, dataset, options, collate=_as_it_is, sampler=_Tasks(self), batch_size=None
            )

    @property
    def steps_per_epoch(self) -> int:
        """Steps in an epoch."""
        return self._plan.steps_per_epoch

    def samples(self, epoch_step: int) -> int:
        """See `Source.samples`."""
        return self._plan.samples(epoch_step)

    @property
    def fuses(self) -> bool:
        """See `Source.fuses`."""
        return True

    def assign(self, virtual_nodes: range, epoch: int, epoch_step: int, width: int = 1) -> None:
        """See `Source.assign`. What is in flight or waiting and still wanted is kept."""
        wanted = chunks(virtual_nodes, width)
        self._chunks = wanted
        self._gathered = {}
        self._counts = {chunk.start: len(chunk) for chunk in wanted}
        self._passed = _Key(epoch, epoch_step, -1, 0)
        self._wanted = self._sequence(wanted, epoch, epoch_step)
        self._drop_unwanted()

    def fetch(self, epoch: int, epoch_step: int, virtual_node: int, count: int = 1) -> MicroBatch:
        """See `Source.fetch`."""
        if self._closed:
            raise RuntimeError("the source of samples is closed")
        key = _Key(epoch, epoch_step, virtual_node, count)
        gathered = self._gathered.pop(key, None)
        if gathered is not None:
            return gathered
        nodes = range(virtual_node, virtual_node + count)
        sizes = tuple([self._plan.size(epoch_step, node, self._virtual_nodes) for node in nodes])
        if not self._ahead_of_need and any(sizes):
            return self._load_here(key, sizes)
        self._passed = max(self._passed, key)
        if not any(sizes):
            return MicroBatch(virtual_node, None, (), sizes)
        task, outcome = self._arrived.pop(key) if key in self._arrived else self._await(key)
        self._drop_unwanted()
        self._look_ahead()
        if isinstance(outcome, ExceptionWrapper):
            outcome.reraise()  # type: ignore[no-untyped-call]
        return MicroBatch(virtual_node, outcome, task.indices, sizes)

    def close(self) -> None:
        """See `Source.close`."""
        if not self._closed:
            self._closed = True
            self._gathered = {}
            self._arrived.clear()
            close_loader(self._batches, self._close_grace)
            self._batches = iter(())

    def _load_here(self, key: _Key, sizes: tuple[int, ...]) -> MicroBatch:
        """Load without a ``DataLoader``; small tensors are gathered for the rest of the step at once."""
        epoch, epoch_step, first, count = key
        indices = self._plan.indices(epoch, epoch_step, first, self._virtual_nodes, count)
        if not self._loading.gathers:
            return MicroBatch(
                first, self._loading.load(epoch, epoch_step, first, sizes, indices.tolist()), indices, sizes
            )
        rest = [chunk for chunk in self._chunks if chunk.start >= first]
        if len(rest) > 1 and rest[0] == range(first, first + count):
            together = rest[-1].stop - first
            all_indices = self._plan.indices(epoch, epoch_step, first, self._virtual_nodes, together)
            size, rows = len(indices), len(all_indices)
            # As many samples for each chunk, so as many virtual nodes of as many samples.
            if rows == size * len(rest) and self._loading.gathers_at_once(rows, size):
                batches, names = self._loading.gather(all_indices, size), torch.split(all_indices, size)
                self._gathered = {
                    _Key(epoch, epoch_step, chunk.start, len(chunk)): MicroBatch(chunk.start, data, loaded, sizes)
                    for chunk, data, loaded in zip(rest, batches, names, strict=True)
                }
                return self._gathered.pop(key)
        return MicroBatch(first, self._loading.gather_one(indices), indices, sizes)

    def _await(self, key: _Key) -> tuple[_Task, Any]:
        if key not in self._in_flight:
            self._due = self._task(key)
        while True:
            task, outcome = self._receive()
            if task is None:
                continue
            if task.key == key:
                return task, outcome
            if self._is_wanted(task.key):
                self._arrived[task.key] = (task, outcome)

    def _receive(self) -> tuple[_Task | None, Any]:
        """Take the next batch from the ``DataLoader``, which asks `_next_task` for another one meanwhile."""
        if self._failed:
            raise RuntimeError("a loader process failed before; open a new source")
        # The user's errors arrive as data from loader processes: whatever is raised here broke the loader.
        self._failed = self._slots > 0
        try:
            task, outcome = next(self._batches)
        finally:
            self._in_flight.popleft()
        self._failed = False
        return task, outcome

    def _look_ahead(self) -> None:
        """Exchange idle tasks at the front, which are answered at once, for wanted ones, if there is room."""
        for _ in range(self._slots):
            if self._in_flight[0] is not None or self._ahead() >= self._slots:
                return
            self._receive()
            if self._in_flight[-1] is None:
                return  # the end of the last epoch

    def _next_task(self) -> _Task | None:
        """Name what to load next; ``None`` is an idle task, which keeps the ``DataLoader`` going."""
        task, self._due = self._due, None
        # One in flight is being received while this is asked, hence no "or equal".
        if task is None and not self._ahead() > self._slots:
            for candidate in self._wanted:
                key = candidate.key
                if key > self._passed and key not in self._arrived and key not in self._in_flight:
                    task = candidate
                    break
        self._in_flight.append(None if task is None else task.key)
        return task

    def _ahead(self) -> int:
        return len(self._arrived) + sum(key is not None and self._is_wanted(key) for key in self._in_flight)

    def _is_wanted(self, key: _Key) -> bool:
        return key > self._passed and self._counts.get(key.virtual_node) == key.together

    def _drop_unwanted(self) -> None:
        for key in [key for key in self._arrived if not self._is_wanted(key)]:
            del self._arrived[key]

    def _sequence(self, wanted: list[range], epoch: int, epoch_step: int) -> Iterator[_Task]:
        while wanted and (self._epochs is None or epoch < self._epochs):
            for step in range(epoch_step, self._plan.steps_per_epoch):
                for chunk in wanted:
                    task = self._task(_Key(epoch, step, chunk.start, len(chunk)))
                    if task.indices:
                        yield task
            epoch, epoch_step = epoch + 1, 0

    def _task(self, key: _Key) -> _Task:
        epoch, step, first, count = key
        indices = self._plan.indices(epoch, step, first, self._virtual_nodes, count).tolist()
        sizes = (self._plan.size(step, node, self._virtual_nodes) for node in range(first, first + count))
        return _Task(key, tuple(indices), tuple(sizes))


class _Tasks:
    """The never-ending sampler: whatever the source wants next."""

    def __init__(self, source: MapSource) -> None:
        self._source = source

    def __iter__(self) -> Iterator[_Task | None]:
        while True:
            yield self._source._next_task()


class _Loading(Dataset[tuple[_Task | None, Any]]):
    """The dataset as the ``DataLoader`` sees it: an item is a whole micro-batch together with its task."""

    def __init__(self, dataset: Any, collate: Collate, seed: int) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed
        self.gathers = type(dataset) is TensorDataset and collate is default_collate
        """It draws nothing at random, so it needs no seeds, and its samples can be gathered at once."""

    def __getitem__(self, task: _Task | None) -> tuple[_Task | None, Any]:
        if task is None:
            return None, None
        if get_worker_info() is None:
            return task, self._load(task)
        try:
            return task, self._load(task)
        except Exception:  # noqa: BLE001
            # Whatever the user's code raises travels as data, so that it surfaces with the batch it belongs
            # to, if that is still wanted, and is told from the failure of a loader process.
            return task, ExceptionWrapper(where="in a loader process")  # type: ignore[no-untyped-call]

    def _load(self, task: _Task) -> Any:
        if self.gathers:
            return self.gather_one(torch.tensor(task.indices))
        epoch, epoch_step, first, _ = task.key
        return self.load(epoch, epoch_step, first, task.sizes, list(task.indices))

    def load(self, epoch: int, epoch_step: int, first: int, sizes: Sequence[int], indices: list[int]) -> Any:
        """What ``collate_fn`` makes of the samples at ``indices``: ``sizes`` of the virtual nodes from ``first`` on.

        As in torch's own fetcher, a dataset that has ``__getitems__`` is asked for all samples of a virtual node at
        once.
        """
        samples: list[Any] = []
        passed = 0
        try:
            for node, size in enumerate(sizes, first):
                named = indices[passed : passed + size]
                passed += size
                if not named:
                    continue
                seed_samples(self._seed, epoch, epoch_step, node)
                samples += self._samples(named)
            stacked = _stack(samples) if self._collate is default_collate else None
            return self._collate(samples) if stacked is None else stacked
        except StopIteration as stop:
            # Let through, it would silently end some loop between here and the user.
            raise RuntimeError(f"the dataset raised StopIteration while loading {tuple(indices)}") from stop

    def _samples(self, indices: list[int]) -> list[Any]:
        together = getattr(self._dataset, "__getitems__", None)
        if together is None:
            return [self._dataset[index] for index in indices]
        samples = together(indices)
        if not isinstance(samples, list) or len(samples) != len(indices):
            raise ConfigurationError(
                f"__getitems__ of {type(self._dataset).__name__} must return a list with one sample for each of the "
                f"{len(indices)} indices; it returned {_described(samples)}"
            )
        return samples

    def gather_one(self, indices: Tensor) -> list[Tensor]:
        """The rows at ``indices`` as one micro-batch."""
        return [_gather(tensor, indices) for tensor in self._dataset.tensors]

    def gathers_at_once(self, rows: int, size: int) -> bool:
        """Whether ``rows`` samples may be gathered at once, to be handed out as micro-batches of ``size``.

        They must take little memory, and each tensor must begin where one of its own would: kernels may compute other
        bits from other alignments.
        """
        widths = [tensor[0].nbytes for tensor in self._dataset.tensors]
        return (
            rows * sum(widths) <= LoadingSettings.gathered
            and all(size * width % LoadingSettings.alignment == 0 for width in widths)
            and all(tensor.is_cpu and not tensor.requires_grad for tensor in self._dataset.tensors)
        )

    def gather(self, indices: Tensor, size: int) -> Iterator[list[Tensor]]:
        """The rows at ``indices`` as micro-batches of ``size``."""
        # They share memory and nothing else; pieces of an ordinary split would share a version counter, too.
        pieces = [torch.unsafe_split(_gather(tensor, indices), size) for tensor in self._dataset.tensors]
        return (list(batch) for batch in zip(*pieces, strict=True))


def _stack(samples: list[Any]) -> list[Tensor] | None:
    """What ``default_collate`` makes of tuples of ordinary tensors, in half its time; ``None`` for anything else."""
    if get_worker_info() is not None:
        return None  # there it stacks in shared memory
    width = len(samples[0]) if type(samples[0]) is tuple else 0
    for sample in samples:
        if type(sample) is not tuple or len(sample) != width:
            return None
        for value in sample:
            if type(value) is not Tensor or value.layout is not torch.strided or value.is_nested:
                return None
    return [torch.stack(column) for column in zip(*samples, strict=True)] if width else None


def _described(samples: Any) -> str:
    return f"a list of {len(samples)}" if isinstance(samples, list) else type(samples).__name__


def _gather(tensor: Tensor, indices: Tensor) -> Tensor:
    """The rows at ``indices``; also those of a channels-last tensor are laid out as ``default_collate`` would."""
    if tensor.is_cpu and tensor.dim() < 5 and tensor.dtype not in _NOT_SELECTED:
        return tensor.index_select(0, indices)  # in half the time of the other
    return tensor[indices]


def _as_it_is(batch: Any) -> Any:
    return batch
