"""Which samples a virtual node gets in a step: a function of (seed, epoch, step, virtual node) alone.

Nobody keeps or sends a position in a shuffled order, so a sample can be neither lost nor repeated when
workers come and go. Where a sampler gives the order (``orders``), that holds for each position in it. Epochs
and the steps of an epoch are counted from 0 here.
"""

from __future__ import annotations

from typing import Any

import torch

from virtualflow.data.orders import Orders
from virtualflow.data.rng import derive_seed
from virtualflow.errors import ConfigurationError
from virtualflow.protocol.wording import counted

_ORDERS_KEPT = 2
"""Loading ahead crosses from one epoch into the next, and back again when a step is repeated."""


def split(samples: int, virtual_nodes: int) -> list[int]:
    """Divide a global batch of ``samples``: counts that differ by at most one, larger ones first."""
    share, extra = divmod(samples, virtual_nodes)
    return [share + (virtual_node < extra) for virtual_node in range(virtual_nodes)]


def chunks(assigned: range, width: int) -> list[range]:
    """Cut ``assigned`` into as few stretches of at most ``width`` as there can be, whose lengths differ by at most one.

    Longer ones come first.
    """
    count = -(-len(assigned) // width)
    share, extra = divmod(len(assigned), max(1, count))
    cut, first = [], assigned.start
    for index in range(count):
        length = share + (index < extra)
        cut.append(range(first, first + length))
        first += length
    return cut


def check_whole(name: str, value: Any) -> None:
    """Check that an argument is a whole number; one of NumPy's is, too.

    Raises:
        ConfigurationError: it is none.
    """
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
        """Return how many samples the global batch of a step has."""
        return min(self.batch_size, self.samples_per_epoch - epoch_step * self.batch_size)

    def size(self, epoch_step: int, virtual_node: int, virtual_nodes: int) -> int:
        """Return how many samples ``virtual_node`` gets in a step; arguments and errors as of `indices`."""
        begin, end = self._bounds(epoch_step, virtual_node, virtual_nodes)
        return end - begin

    def indices(
        self, epoch: int, epoch_step: int, virtual_node: int, virtual_nodes: int, count: int = 1
    ) -> torch.Tensor:
        """Return the indices of the samples that ``virtual_node`` gets, in order, as int64 ``[n]``; there may be none.

        With a ``count``, those of as many virtual nodes from this one on. The tensor must not be written to.

        Raises:
            ConfigurationError: the batch does not divide evenly over ``virtual_nodes``.
            IndexError: there is no such step in an epoch, or no such virtual node.
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
