"""Micro-batches of a map-style dataset, loaded ahead by a real ``DataLoader`` that no resize restarts.

Where there are neither loader processes nor a thread that pins memory, nothing can be loaded ahead, and a micro-batch
is put together when it is asked for, without a ``DataLoader`` in between. Otherwise:

The ``DataLoader`` gets a sampler that never ends and that we steer: it names the next wanted batch of the virtual nodes
that this worker is assigned now. So one set of loader processes serves the whole job, over epochs and resizes, unless
the script changes its dataset; what is in flight at a resize is kept where it is still wanted, and every batch bears
the name of what was really loaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, IterableDataset

from virtualflow.data.counting import Count
from virtualflow.data.dataloader import (
    Early,
    LoaderOptions,
    MicroBatch,
    Source,
    Watched,
    check_options,
    close_loader,
    collate_of,
    open_loader,
    read,
)
from virtualflow.data.iterable_source import StreamSource
from virtualflow.data.micro_batches import Key, Look, MicroBatches, Task
from virtualflow.data.sampling import Orders, SamplePlan, chunks, micro_batch
from virtualflow.errors import ConfigurationError
from virtualflow.protocol.wording import counted

_LOOKED_AT = -1
"""In place of an epoch, for a sample that is looked at and not trained on."""


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
    orders: Orders | None = None,
) -> Source:
    """Open the source that fits ``dataset``: a `MapSource` where samples have indices, else a `StreamSource`.

    Args:
        dataset: map-style (``__getitem__`` and ``__len__``), or `Shardable`.
        seed: of the job; the order of the samples and the randomness inside the dataset follow from it.
        shuffle: a new order every epoch. Streams come in the order of their shards, whatever this says.
        epochs: nothing is loaded ahead beyond them; ``None`` for no end.
        orders: of a sampler, instead of shuffling (map-style only).

    Raises:
        ConfigurationError: the dataset, the sizes or the options do not fit together.
    """
    check_options(options)
    check_dataset(dataset)
    if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__"):
        if not hasattr(dataset, "__len__"):
            raise ConfigurationError(
                f"{type(dataset).__name__} has no __len__, so its samples cannot be put in order; define it"
            )
        plan = SamplePlan(len(dataset), batch_size, seed, shuffle, drop_last, orders)
        return MapSource(dataset, plan, virtual_nodes=virtual_nodes, epochs=epochs, options=options)
    return StreamSource(dataset, batch_size=batch_size, virtual_nodes=virtual_nodes, seed=seed, options=options)


class MapSource:
    """Micro-batches of a dataset with indices. Implements `Source`.

    Loader processes start with the source, so that they boot, and fork, before there is anything that they
    would delay or inherit; they idle until the first assignment.
    """

    def __init__(
        self,
        dataset: Any,
        plan: SamplePlan,
        *,
        virtual_nodes: int,
        epochs: int | None,
        options: LoaderOptions,
    ) -> None:
        check_options(options)
        micro_batch(plan.batch_size, virtual_nodes)
        self._plan = plan
        self._dataset, self._dataset_size = dataset, len(dataset)
        self._epoch = 0
        """The one under way, as far as is known."""
        self._virtual_nodes = virtual_nodes
        self._epochs = epochs
        processes = options.get("num_workers", 0)
        self._slots = processes * (options.get("prefetch_factor") or 2)
        """Tasks that the ``DataLoader`` keeps in flight (torch's default: two a process)."""
        self._chunks: list[range] = []
        """Virtual nodes that this worker is assigned, as they are loaded together."""
        self._gathered: dict[Key, MicroBatch] = {}
        """Those of the present step that need only be handed out, without a ``DataLoader``."""
        self._counts: dict[int, int] = {}
        """Of each chunk: its first virtual node, and how many it has."""
        self._wanted: Iterator[Task] = iter(())
        self._passed = Key(0, 0, -1, 0)
        """The latest key handed out: nothing up to it is loaded ahead."""
        self._due: Task | Look | None = None
        self._in_flight: deque[Key | None] = deque()
        self._arrived: dict[Key, tuple[Task | Look, Any]] = {}
        self._closed = False
        self._failed = False
        self._ends_seen = 0
        self._loading = MicroBatches(dataset, collate_of(options), plan.seed)
        self._ahead_of_need = processes > 0 or options.get("pin_memory", False)
        self._options = options
        self._batches: Iterator[Any] = iter(())
        if self._ahead_of_need:
            self._open()
        self._watched = Watched(dataset, collate_of(options)) if processes else None

    def _open(self) -> None:
        self._batches = open_loader(
            self._loading, self._dataset, self._options, collate=_as_it_is, sampler=_Tasks(self), batch_size=None
        )

    def _open_anew(self, epoch: int, epoch_step: int) -> None:
        """The script has changed its dataset: what loader processes have loaded is old."""
        close_loader(self._batches)
        self._in_flight.clear()
        self._arrived.clear()
        self._due, self._ends_seen = None, 0
        self._wanted = self._sequence(self._chunks, epoch, epoch_step)
        self._open()

    @property
    def steps_per_epoch(self) -> int:
        return self._plan.steps_per_epoch

    def samples(self, epoch_step: int) -> int:
        return self._plan.samples(epoch_step)

    @property
    def fuses(self) -> bool:
        return True

    @property
    def early(self) -> Early:
        """See `Source.early`: rows of tensors are at hand, and loader processes have begun with them already."""
        if not self._ahead_of_need:
            return "epoch" if self._loading.gathers else "nothing"
        return "step" if self._slots else "nothing"

    @property
    def version(self) -> object:
        changed = self._watched is not None and self._watched.changed is not None
        return object() if changed else self._loading.version

    def assign(self, virtual_nodes: Sequence[int], epoch: int, epoch_step: int, width: int = 1) -> None:
        """See `Source.assign`. What is in flight or waiting and still wanted is kept."""
        wanted = chunks(virtual_nodes, width)
        self._chunks = wanted
        self._gathered = {}
        self._counts = {chunk.start: len(chunk) for chunk in wanted}
        self._passed = Key(epoch, epoch_step, -1, 0)
        self._wanted = self._sequence(wanted, epoch, epoch_step)
        self._drop_unwanted()

    def fetch(self, epoch: int, epoch_step: int, virtual_node: int, count: int = 1) -> MicroBatch:
        if self._closed:
            raise RuntimeError("the source of samples is closed")
        if epoch != self._epoch:
            self._begin_epoch(epoch)
        if self._watched is not None and self._watched.have_changed(within_epoch=epoch_step > 0):
            self._open_anew(epoch, epoch_step)
        key = Key(epoch, epoch_step, virtual_node, count)
        gathered = self._gathered.pop(key, None)
        if gathered is not None:
            return gathered
        nodes = range(virtual_node, virtual_node + count)
        sizes = tuple([self._plan.size(epoch_step, node, self._virtual_nodes) for node in nodes])
        if not self._ahead_of_need and any(sizes):
            return self._load_here(key, sizes)
        if virtual_node in self._counts:  # one of another worker's is not in the way of what is loaded ahead
            self._passed = max(self._passed, key)
        if not any(sizes):
            return MicroBatch(virtual_node, None, (), sizes)
        if key not in self._arrived and key not in self._in_flight:
            self._due = self._task(key)
        task, outcome = self._arrived.pop(key) if key in self._arrived else self._await(key)
        self._drop_unwanted()
        self._look_ahead()
        if isinstance(outcome, ExceptionWrapper):
            outcome.reraise()  # type: ignore[no-untyped-call]
        assert isinstance(task, Task)
        data, counted = outcome
        return MicroBatch(virtual_node, data, task.indices, sizes, Count(*counted))  # pinning memory makes a list of it

    def read_again(self, batch: MicroBatch, epoch: int, epoch_step: int) -> tuple[MicroBatch, MicroBatch] | None:
        if self._loading.gathers:
            return None
        return batch, self.fetch(epoch, epoch_step, batch.virtual_node, len(batch.counts))

    def look(self, index: int, see: Callable[[Any], Any]) -> Any:
        if not self._ahead_of_need:
            return self._loading.look(index, see)
        self._due = Look(Key(_LOOKED_AT, 0, index, 1), index, see)
        return self._await(self._due.key)[1]

    def _begin_epoch(self, epoch: int) -> None:
        """See that the dataset is as long as before: else some samples would be left out, or there would be none."""
        samples, self._epoch = len(self._dataset), epoch
        if samples != self._dataset_size:
            raise ConfigurationError(
                f"the dataset has {counted(samples, 'sample')} in epoch {epoch} and had {self._dataset_size} at the "
                "start; let its length stay the same, or pass an iterable dataset with shard(), whose epochs may be "
                "of any length"
            )

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._gathered = {}
            self._arrived.clear()
            close_loader(self._batches)
            self._batches = iter(())

    def _load_here(self, key: Key, sizes: tuple[int, ...]) -> MicroBatch:
        """Load without a ``DataLoader``; small tensors are gathered for the rest of the step at once."""
        epoch, epoch_step, first, count = key
        indices = self._plan.indices(epoch, epoch_step, first, self._virtual_nodes, count)
        if not self._loading.gathers:
            data, counted = self._loading.load(epoch, epoch_step, first, sizes, indices.tolist())
            return MicroBatch(first, data, indices, sizes, counted)
        rest = [chunk for chunk in self._chunks if chunk.start >= first]
        if len(rest) > 1 and rest[0] == range(first, first + count):
            together = rest[-1].stop - first
            all_indices = self._plan.indices(epoch, epoch_step, first, self._virtual_nodes, together)
            size, rows = len(indices), len(all_indices)
            # As many samples for each chunk, so as many virtual nodes of as many samples.
            if rows == size * len(rest) and self._loading.gathers_at_once(rows, size):
                batches, names = self._loading.gather(all_indices, size), torch.split(all_indices, size)
                self._gathered = {
                    Key(epoch, epoch_step, chunk.start, len(chunk)): MicroBatch(chunk.start, data, loaded, sizes)
                    for chunk, data, loaded in zip(rest, batches, names, strict=True)
                }
                return self._gathered.pop(key)
        return MicroBatch(first, self._loading.gather_one(indices), indices, sizes)

    def _await(self, key: Key) -> tuple[Task | Look, Any]:
        while True:
            task, outcome = self._receive()
            if task is None:
                continue
            if task.key == key:
                return task, outcome
            if isinstance(task, Task) and self._is_wanted(task.key):
                self._arrived[task.key] = (task, outcome)

    def _receive(self) -> tuple[Task | Look | None, Any]:
        """Take the next batch from the ``DataLoader``, which asks `_next_task` for another one meanwhile."""
        if self._failed:
            raise RuntimeError("a loader process failed before; open a new source")
        # The user's errors arrive as data from loader processes: whatever is raised here broke the loader.
        self._failed = self._slots > 0
        try:
            (task, outcome), self._ends_seen = read(self._batches, self._ends_seen)
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

    def _next_task(self) -> Task | Look | None:
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

    def _is_wanted(self, key: Key) -> bool:
        return key > self._passed and self._counts.get(key.virtual_node) == key.together

    def _drop_unwanted(self) -> None:
        for key in [key for key in self._arrived if not self._is_wanted(key)]:
            del self._arrived[key]

    def _sequence(self, wanted: list[range], epoch: int, epoch_step: int) -> Iterator[Task]:
        while wanted and (self._epochs is None or epoch < self._epochs):
            for step in range(epoch_step, self._plan.steps_per_epoch):
                for chunk in wanted:
                    task = self._task(Key(epoch, step, chunk.start, len(chunk)))
                    if task.indices:
                        yield task
            epoch, epoch_step = epoch + 1, 0

    def _task(self, key: Key) -> Task:
        epoch, step, first, count = key
        indices = self._plan.indices(epoch, step, first, self._virtual_nodes, count).tolist()
        sizes = (self._plan.size(step, node, self._virtual_nodes) for node in range(first, first + count))
        return Task(key, tuple(indices), tuple(sizes))


class _Tasks:
    def __init__(self, source: MapSource) -> None:
        self._source = source

    def __iter__(self) -> Iterator[Task | Look | None]:
        while True:
            yield self._source._next_task()


def _as_it_is(batch: Any) -> Any:
    return batch


# What is given in place of a dataset, by mistake, is recognised before anything is read of it.


def check_dataset(dataset: Any) -> None:
    """Check that ``dataset`` is something that has samples."""
    instead = _instead(dataset)
    if instead is not None:
        raise ConfigurationError(f"the dataset is {instead}")


def _instead(dataset: Any) -> str | None:
    """What it is and what to give, if it is no dataset."""
    name = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        return (
            "a DataLoader, which makes batches, as the library does itself; give the dataset that it was made of "
            "(loader.dataset), with batch_size=, shuffle=, collate_fn= and num_workers= beside it"
        )
    if dataset is None or isinstance(dataset, str | bytes | int | float):
        return f"{dataset!r:.60}; give an object with samples: dataset[index] is one, and len(dataset) their number"
    if isinstance(dataset, type):
        return f"the class {dataset.__name__}; give an object of it: {dataset.__name__}(...)"
    if isinstance(dataset, Mapping) and 0 not in dataset:
        keys = ", ".join(repr(key) for key in [*dataset][:4])
        return (
            f"a {name} with the keys {keys or '(none)'}, not samples by index; give one of its datasets, such as "
            'data["train"], or TensorDataset(*data.values()) if they are columns'
        )
    if hasattr(dataset, "iloc"):
        return (
            f"a {name} of pandas, whose [index] is a column or a label; give "
            "TensorDataset(torch.tensor(frame.values)), "
            "or a dataset of your own whose __getitem__ returns what it makes of frame.iloc[index]"
        )
    if isinstance(dataset, Iterator) and not hasattr(dataset, "shard"):
        return (
            f"a {name}, which can be gone through once; give a list of its samples, or a dataset of your own, with "
            "__getitem__ and __len__ or with shard(index, count, epoch, start)"
        )
    if isinstance(dataset, tuple) and _are_columns(dataset):
        return (
            f"a tuple of {len(dataset)} {type(dataset[0]).__name__}s, one for each column; give "
            "torch.utils.data.TensorDataset(*columns), whose samples are their rows"
        )
    return None


def _are_columns(given: tuple[Any, ...]) -> bool:
    """Whether they are tensors or arrays with as many rows each, and more than there are of them."""
    lengths = {shape[0] if (shape := getattr(each, "shape", ())) else 0 for each in given}
    return len(lengths) == 1 and lengths.pop() > len(given) > 1
