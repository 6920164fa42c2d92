"""The order of an epoch's samples where a script has a sampler: weighted, with replacement, another one every epoch.

Every worker asks its own copy of the sampler, also one that joins in the middle, so an order must follow from the seed
and the epoch alone. The global generators follow from both while a sampler is asked; then those of torch, which draw
from these, are such functions, too.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, IterableDataset

from virtualflow.data.rng import derive_seed, seeded
from virtualflow.errors import ConfigurationError
from virtualflow.protocol.wording import counted

Sampler: TypeAlias = Callable[[int, int], "Sequence[int] | Tensor"] | Iterable[int]
"""A function of (seed, epoch), or one of torch's samplers."""


def open_orders(sampler: Sampler | None, dataset: Any, seed: int) -> Orders | None:
    """The orders that ``sampler`` gives to the samples of ``dataset``; ``None`` where there is no sampler.

    Raises:
        ConfigurationError: the two do not fit together, or the sampler is no function of (seed, epoch).
    """
    if sampler is None:
        return None
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ConfigurationError(
            f"{type(dataset).__name__} has no indices that a sampler could put in order; leave out sampler=, and let "
            "shard() give the samples in their order"
        )
    return Orders(sampler, len(dataset), seed)


class Orders:
    """The orders of all epochs.

    Args:
        sampler: gives them.
        dataset_size: each index is below it.
        seed: of the job.

    Raises:
        ConfigurationError: the sampler is no function of (seed, epoch), or gives something else than indices.
    """

    def __init__(self, sampler: Sampler, dataset_size: int, seed: int) -> None:
        _check(sampler)
        self._sampler, self._dataset_size, self._seed = sampler, dataset_size, seed
        first = self._ask(0)
        self.length = len(first)
        """Samples of an epoch."""
        self.fingerprint = hashlib.sha256(first.numpy().tobytes()).hexdigest()[:16]
        """What tells a sampler from one of other orders: the hash of the first."""
        if not first.equal(self._ask(0)):
            raise ConfigurationError(
                "the sampler gives another order when it is asked for the same epoch once more, and a worker that "
                "joins has not asked before; let the order follow from the seed and the epoch alone"
            )

    def order(self, epoch: int) -> Tensor:
        """The indices of an epoch's samples, int64 ``[length]``; the same index may be there several times.

        Raises:
            ConfigurationError: they are not as many as in the first epoch, or no indices.
        """
        order = self._ask(epoch)
        if len(order) != self.length:
            raise ConfigurationError(
                f"the sampler gives {counted(len(order), 'sample')} in epoch {epoch} and {self.length} in epoch 0; "
                "give as many in each, or pass an iterable dataset with shard(), whose epochs may be of any length"
            )
        return order

    def _ask(self, epoch: int) -> Tensor:
        sampler: Any = self._sampler
        with seeded(derive_seed("sampler", self._seed, epoch)):
            if callable(sampler):
                given = sampler(self._seed, epoch)
            else:
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(epoch)
                given = list(sampler)
        return self._checked(given, epoch)

    def _checked(self, given: Any, epoch: int) -> Tensor:
        size = self._dataset_size
        try:
            order = torch.as_tensor(given).detach()
        except (TypeError, ValueError, RuntimeError):
            order = None
        if order is None or order.dim() != 1 or (len(order) and not _is_integral(order)):
            raise ConfigurationError(
                f"the sampler must give the indices of an epoch's samples, as int64 [n] or a sequence of int, and "
                f"gives a {type(given).__name__} of something else"
            )
        if len(order) == 0:
            raise ConfigurationError(f"the sampler gives no sample in epoch {epoch}; give at least 1")
        order = order.to("cpu", torch.int64, copy=True)
        wrong = order[(order < 0) | (order >= size)]
        if len(wrong):
            raise ConfigurationError(
                f"the sampler gives the index {int(wrong[0])} in epoch {epoch}, which none of the dataset's {size} "
                "samples has"
            )
        return order


def _is_integral(order: Tensor) -> bool:
    return not (order.is_floating_point() or order.is_complex() or order.dtype == torch.bool)


def _check(sampler: object) -> None:
    name = type(sampler).__name__
    if isinstance(sampler, DistributedSampler):
        raise ConfigurationError(
            f"{name} divides the samples among processes, which the library does itself; leave out sampler=, and say "
            "shuffle= to vf.elastic"
        )
    if getattr(sampler, "generator", None) is not None:
        raise ConfigurationError(
            f"{name} draws from a generator of its own, with which a worker that joins would begin anew; leave out "
            "its generator=, and it draws from one that follows from the seed and the epoch"
        )
    if not callable(sampler):
        if not isinstance(sampler, Iterable):
            raise ConfigurationError(
                f"sampler is a {name}; give a function of (seed, epoch) that returns the indices of an epoch's samples"
            )
        return
    try:
        inspect.signature(sampler).bind(0, 0)
    except ValueError:
        pass  # of something built in, which does not say what it takes
    except TypeError as error:
        raise ConfigurationError(
            f"the sampler must be a function of (seed, epoch), and does not take these two ({error})"
        ) from None
