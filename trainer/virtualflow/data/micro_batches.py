"""A map-style dataset whose items are whole micro-batches: read and collated, or gathered from tensors at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._utils import ExceptionWrapper
from torch.utils.data import Dataset, TensorDataset, default_collate, get_worker_info

from virtualflow.data.counting import ALL, Count, count_samples
from virtualflow.data.dataloader import Collate
from virtualflow.data.rng import derive_seed, seed_samples, seeded
from virtualflow.errors import ConfigurationError

_GATHERED = 1 << 20
"""Samples of a step that are rows of tensors are gathered at once up to so many bytes. Beyond, the calls that this
saves no longer count beside the copying, and the memory does."""
_ALIGNMENT = 64
"""Bytes at whose multiples PyTorch's allocator for the CPU begins a tensor."""
_NOT_SELECTED = (torch.uint16, torch.uint32, torch.uint64)
"""Types for which ``index_select`` is not implemented."""


class Key(NamedTuple):
    """The name of a micro-batch; keys are ordered as they are needed."""

    epoch: int
    epoch_step: int
    virtual_node: int
    together: int
    """Virtual nodes from that one on, which are loaded together."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a loader process is asked for."""

    key: Key
    indices: tuple[int, ...]
    sizes: tuple[int, ...]
    """How many of them each virtual node has."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a loader process is asked of one sample, instead of a micro-batch."""

    key: Key
    index: int
    see: Callable[[Any], Any]


class MicroBatches(Dataset[tuple[Task | Look | None, Any]]):
    """The dataset as the ``DataLoader`` sees it: an item is a whole micro-batch together with its task."""

    def __init__(self, dataset: Any, collate: Collate, seed: int) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed
        self.gathers = type(dataset) is TensorDataset and collate is default_collate
        """It draws nothing at random, so it needs no seeds, and its samples can be gathered at once."""

    @property
    def version(self) -> object:
        """Another value tells that rows of tensors were written to since, or that they are others."""
        return [(id(tensor), tensor._version) for tensor in self._dataset.tensors] if self.gathers else None

    def __getitem__(self, task: Task | Look | None) -> tuple[Task | Look | None, Any]:
        if task is None:
            return None, None
        if isinstance(task, Look):
            return task, self.look(task.index, task.see)
        if get_worker_info() is None:
            return task, self._load(task)
        try:
            return task, self._load(task)
        except Exception:  # noqa: BLE001
            # Whatever the user's code raises travels as data, so that it surfaces with the batch it belongs
            # to, if that is still wanted, and is told from the failure of a loader process.
            return task, ExceptionWrapper(where="in a loader process")  # type: ignore[no-untyped-call]

    def look(self, index: int, see: Callable[[Any], Any]) -> Any:
        """What ``see`` says of a sample, the same when it is read again; ``None``: the sample is not, or cannot be."""
        seen = []
        for _ in range(2):
            with seeded(derive_seed("look", self._seed, index)):
                try:
                    seen.append(see(self._dataset[index]))
                except Exception:  # noqa: BLE001 - it may be anybody's code; where it is needed, it says what it lacks
                    return None
        return seen[0] if seen[0] == seen[1] else None

    def _load(self, task: Task) -> tuple[Any, Count]:
        if self.gathers:
            return self.gather_one(torch.tensor(task.indices)), ALL
        epoch, epoch_step, first, _ = task.key
        return self.load(epoch, epoch_step, first, task.sizes, list(task.indices))

    def load(
        self, epoch: int, epoch_step: int, first: int, sizes: Sequence[int], indices: list[int]
    ) -> tuple[Any, Count]:
        try:
            samples = self._samples(epoch, epoch_step, first, sizes, indices)
            if self._collate is default_collate:
                stacked = _stack(samples)
                return default_collate(samples) if stacked is None else stacked, ALL
            loaded = list(samples) if isinstance(samples, list) else samples  # which collate_fn may change
            data = self._collate(samples)
            return data, count_samples(loaded, data, len(indices))
        except StopIteration as stop:
            # Let through, it would silently end some loop between here and the user.
            raise RuntimeError(f"the dataset raised StopIteration while loading {tuple(indices)}") from stop

    def _samples(self, epoch: int, epoch_step: int, first: int, sizes: Sequence[int], indices: list[int]) -> Any:
        """What ``collate_fn`` is given: a list, or what else ``__getitems__`` returns, as in torch's own fetcher."""
        samples: list[Any] = []
        passed = 0
        for node, size in enumerate(sizes, first):
            named = indices[passed : passed + size]
            passed += size
            if not named:
                continue
            seed_samples(self._seed, epoch, epoch_step, node)
            read = self._read(named)
            if len(named) == len(indices):
                return read
            if not isinstance(read, list):
                # Only a list can be put together with others; a job that fuses virtual nodes need not seed each.
                seed_samples(self._seed, epoch, epoch_step, first)
                return self._read(indices)
            samples += read
        return samples

    def _read(self, indices: list[int]) -> Any:
        together = getattr(self._dataset, "__getitems__", None)
        if together is None:
            return [self._dataset[index] for index in indices]
        samples = together(indices)
        if isinstance(samples, list) and len(samples) != len(indices):
            raise ConfigurationError(
                f"__getitems__ of {type(self._dataset).__name__} returned a list of {len(samples)} for {len(indices)} "
                "indices; it must hold one sample for each"
            )
        return samples

    def gather_one(self, indices: Tensor) -> list[Tensor]:
        return [_gather(tensor, indices) for tensor in self._dataset.tensors]

    def gathers_at_once(self, rows: int, size: int) -> bool:
        """Whether ``rows`` samples may be gathered at once, to be handed out as micro-batches of ``size``.

        They must take little memory, and each tensor must begin where one of its own would: kernels may compute other
        bits from other alignments.
        """
        widths = [tensor.nbytes // len(tensor) for tensor in self._dataset.tensors]
        return (
            rows * sum(widths) <= _GATHERED
            and all(size * width % _ALIGNMENT == 0 for width in widths)
            and all(tensor.is_cpu and not tensor.requires_grad for tensor in self._dataset.tensors)
        )

    def gather(self, indices: Tensor, size: int) -> Iterator[list[Tensor]]:
        # They share memory and nothing else; pieces of an ordinary split would share a version counter, too.
        pieces = [torch.unsafe_split(_gather(tensor, indices), size) for tensor in self._dataset.tensors]
        return (list(batch) for batch in zip(*pieces, strict=True))


def _stack(samples: Any) -> list[Tensor] | None:
    """What ``default_collate`` makes of tuples of ordinary tensors, in half its time; ``None`` for anything else."""
    if get_worker_info() is not None:
        return None  # there it stacks in shared memory
    width = len(samples[0]) if type(samples) is list and type(samples[0]) is tuple else 0
    for sample in samples if width else ():
        if type(sample) is not tuple or len(sample) != width:
            return None
        for value in sample:
            if type(value) is not Tensor or value.layout is not torch.strided or value.is_nested:
                return None
    return [torch.stack(column) for column in zip(*samples, strict=True)] if width else None


def _gather(tensor: Tensor, indices: Tensor) -> Tensor:
    """The rows at ``indices``; also those of a channels-last tensor are laid out as ``default_collate`` would."""
    if tensor.is_cpu and tensor.dim() < 5 and tensor.dtype not in _NOT_SELECTED:
        return tensor.index_select(0, indices)  # in half the time of the other
    return tensor[indices]
