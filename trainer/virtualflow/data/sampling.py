"""Which samples a virtual node gets in a step: a function of (seed, epoch, step, virtual node) alone.

Nobody keeps or sends a position in a shuffled order, so a sample can be neither lost nor repeated when
workers come and go. Where a sampler gives the order (:class:`Orders`), that holds for each position in it. Epochs
and the steps of an epoch are counted from 0 here.
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

# The order of an epoch's samples where a script has a sampler: weighted, with replacement, another one every epoch.
#
# Every worker asks its own copy of the sampler, also one that joins in the middle, so an order must follow from the
# seed and the epoch alone. The global generators follow from both while a sampler is asked; then those of torch, which
# draw from these, are such functions, too.

Sampler: TypeAlias = Callable[[int, int], "Sequence[int] | Tensor"] | Iterable[int]
"""A function of (seed, epoch), or one of torch's samplers."""


def has_indices(dataset: Any) -> bool:
    """Whether samples are asked for by their number, of which there are so many."""
    return not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def open_orders(sampler: Sampler | None, dataset: Any, seed: int) -> Orders | None:
    """The orders that ``sampler`` gives to the samples of ``dataset``; ``None`` where there is no sampler.

    Raises:
        ConfigurationError: the two do not fit together, or the sampler is no function of (seed, epoch).
    """
    if sampler is None:
        return None
    if not has_indices(dataset):
        raise ConfigurationError(
            f"{type(dataset).__name__} has no indices that a sampler could put in order; leave out sampler=, and let "
            "shard() give the samples in their order"
        )
    return Orders(sampler, len(dataset), seed)


class Orders:
    """The orders of all epochs.

    Args:
        dataset_size: each index is below it.

    Raises:
        ConfigurationError: the sampler is no function of (seed, epoch), or gives something else than indices.
    """

    def __init__(self, sampler: Sampler, dataset_size: int, seed: int) -> None:
        _check(sampler)
        self._sampler, self._dataset_size, self._seed = sampler, dataset_size, seed
        first = self._ask(0)
        self.length = len(first)
        self.fingerprint = hashlib.sha256(first.numpy().tobytes()).hexdigest()[:16]
        """What tells a sampler from one of other orders: the hash of the first."""
        if not first.equal(self._ask(0)):
            raise ConfigurationError(
                "the sampler gives another order when it is asked for the same epoch once more, and a worker that "
                "joins has not asked before; let the order follow from the seed and the epoch alone"
            )

    def order(self, epoch: int) -> Tensor:
        """The indices of an epoch's samples, int64 ``[length]``; the same index may be there several times."""
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


_ORDERS_KEPT = 2
"""Loading ahead crosses from one epoch into the next, and back again when a step is repeated."""


def split(samples: int, virtual_nodes: int) -> list[int]:
    """Divide a global batch of ``samples``: counts that differ by at most one, larger ones first."""
    share, extra = divmod(samples, virtual_nodes)
    return [share + (virtual_node < extra) for virtual_node in range(virtual_nodes)]


def chunks(assigned: Sequence[int], width: int) -> list[range]:
    """Cut ``assigned`` into as few stretches of at most ``width`` as there can be, whose lengths differ by at most one.

    Longer ones come first. Virtual nodes that are no range run one by one.
    """
    if not isinstance(assigned, range):
        return [range(node, node + 1) for node in assigned]
    count = -(-len(assigned) // width)
    share, extra = divmod(len(assigned), max(1, count))
    cut, first = [], assigned.start
    for index in range(count):
        length = share + (index < extra)
        cut.append(range(first, first + length))
        first += length
    return cut


def check_whole(name: str, value: Any) -> None:
    """Check that an argument is a whole number; one of NumPy's is, too."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ConfigurationError(f"{name} is {value!r}; it must be a whole number, an int")


def micro_batch(batch_size: int, virtual_nodes: int) -> int:
    """Return how many samples of a full global batch each virtual node gets.

    Raises:
        ConfigurationError: it does not come out even, or one of the two is no whole number or below 1.
    """
    check_whole("batch_size", batch_size)
    check_whole("virtual_nodes", virtual_nodes)
    if virtual_nodes < 1:
        raise ConfigurationError(f"virtual_nodes is {virtual_nodes}; a job needs at least 1")
    if batch_size < 1:
        raise ConfigurationError(f"batch_size is {batch_size}; a step needs at least 1 sample")
    share, extra = divmod(batch_size, virtual_nodes)
    if extra:
        below, above = share * virtual_nodes, (share + 1) * virtual_nodes
        raise ConfigurationError(
            f"batch_size {batch_size} does not divide evenly over {counted(virtual_nodes, 'virtual node')}; "
            f"use {f'{below} or {above}' if below else above}"
        )
    return share


class SamplePlan:
    """The global batches of every epoch over a dataset, and each virtual node's slice of them."""

    def __init__(
        self,
        dataset_size: int,
        batch_size: int,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        orders: Orders | None = None,
    ) -> None:
        """Plan batches of ``batch_size``; ``drop_last`` leaves out a last short one of an epoch.

        Where there are ``orders`` of a sampler's, an epoch goes through one of these instead of all samples.

        Raises:
            ConfigurationError: there is no sample, no whole batch where one is required, or ``batch_size`` is
                below 1.
        """
        if batch_size < 1:
            raise ConfigurationError(f"batch_size is {batch_size}; a step needs at least 1 sample")
        if dataset_size < 1:
            raise ConfigurationError("the dataset is empty; give one with at least 1 sample")
        samples, of = (dataset_size, "a dataset") if orders is None else (orders.length, "an epoch")
        if drop_last and samples < batch_size:
            raise ConfigurationError(
                f"drop_last leaves no batch of {batch_size} in {of} of {counted(samples, 'sample')}; use a batch_size "
                f"of at most {samples} or drop_last=False"
            )
        self.samples_per_epoch = samples
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.steps_per_epoch = samples // batch_size if drop_last else -(-samples // batch_size)
        self._divided = 0
        """A number of virtual nodes over which the batch is known to divide evenly."""
        self._given = orders
        self._orders: dict[int, torch.Tensor] = {}

    def samples(self, epoch_step: int) -> int:
        return min(self.batch_size, self.samples_per_epoch - epoch_step * self.batch_size)

    def size(self, epoch_step: int, virtual_node: int, virtual_nodes: int) -> int:
        begin, end = self._bounds(epoch_step, virtual_node, virtual_nodes)
        return end - begin

    def indices(
        self, epoch: int, epoch_step: int, virtual_node: int, virtual_nodes: int, count: int = 1
    ) -> torch.Tensor:
        """Return the indices of the samples that ``virtual_node`` gets, in order, as int64 ``[n]``; there may be none.

        With a ``count``, those of as many virtual nodes from this one on. The tensor must not be written to.
        """
        begin, end = self._bounds(epoch_step, virtual_node, virtual_nodes)
        if count > 1:
            end = self._bounds(epoch_step, virtual_node + count - 1, virtual_nodes)[1]
        if self._given is None and not self.shuffle:
            return torch.arange(begin, end)
        return self._order(epoch)[begin:end]

    def _bounds(self, epoch_step: int, virtual_node: int, virtual_nodes: int) -> tuple[int, int]:
        if virtual_nodes != self._divided:
            micro_batch(self.batch_size, virtual_nodes)
            self._divided = virtual_nodes
        if not 0 <= epoch_step < self.steps_per_epoch:
            raise IndexError(f"step {epoch_step} of an epoch that has {self.steps_per_epoch}")
        if not 0 <= virtual_node < virtual_nodes:
            raise IndexError(f"virtual node {virtual_node} of {virtual_nodes}")
        first = epoch_step * self.batch_size
        share, extra = divmod(self.samples(epoch_step), virtual_nodes)
        begin = first + virtual_node * share + min(virtual_node, extra)
        return begin, begin + share + (virtual_node < extra)

    def _order(self, epoch: int) -> torch.Tensor:
        order = self._orders.get(epoch)
        if order is None:
            if self._given is None:
                generator = torch.Generator().manual_seed(derive_seed("epoch", self.seed, epoch))
                order = torch.randperm(self.samples_per_epoch, generator=generator)
            else:
                order = self._given.order(epoch)
            self._orders[epoch] = order
            if len(self._orders) > _ORDERS_KEPT:
                del self._orders[next(iter(self._orders))]
        return order
