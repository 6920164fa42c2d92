"""Whether a virtual node comes to the same gradients when it is computed twice, as it must wherever it is computed.

The library seeds the global generators and puts buffers back. What else a script keeps from one micro-batch to the next
it cannot see: a counter in ``forward``, a hidden state, a generator of the script's own, a criterion with running
statistics. But it shows: the second time they are not what they were the first time, or the backward pass goes through
a graph of the first time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from virtualflow.errors import ConfigurationError
from virtualflow.step.caches import KeptGraphs
from virtualflow.step.guard import add_bits

LOOKS_AHEAD = (
    "the script asks for the next micro-batch of a step before it has run backward for the one before (a prefetcher, "
    "zip, pairwise, peekable, or one backward pass for several micro-batches), so gradients would count for the wrong "
    "virtual node and the last ones for none; run backward for each micro-batch before the next one is asked for: "
    "for batch in step: ...; vf.elastic loads ahead by num_workers= and copies ahead by device="
)


class Repetition:
    """Compares two computations of one virtual node.

    Args:
        model: whose gradients.
    """

    def __init__(self, model: nn.Module) -> None:
        self._named = list(model.named_parameters())
        self._first: list[Tensor | None] | None = None
        self._graphs = KeptGraphs(model)

    @property
    def under_way(self) -> bool:
        """Whether the second computation is to come."""
        return self._first is not None

    def note(self) -> None:
        """The first one is there."""
        self._first = self._gradients()
        self._graphs.watch()

    def forget(self) -> None:
        """The second one is not to come: the attempt is another one."""
        self._first = None
        self._graphs.forget()

    def compare(self) -> None:
        """The second one is there.

        Raises:
            ConfigurationError: it is another one.
        """
        assert self._first is not None
        found = self._gradients()
        if all(before is None for before in self._first) and any(now is not None for now in found):
            raise ConfigurationError(LOOKS_AHEAD)
        for (name, _), before, now in zip(self._named, self._first, found, strict=True):
            if (before is None) != (now is None) or (
                before is not None and now is not None and not torch.equal(before, now)
            ):
                raise ConfigurationError(
                    f"the gradient of {name} was another one when a virtual node was computed again: the script keeps "
                    "something from one micro-batch to the next (a counter in forward, a hidden state, a generator of "
                    "its own, a criterion with running statistics, a loop that asks for the next micro-batch ahead); "
                    "make it a buffer of the model, or compute it from the micro-batch and step.number"
                )
        self.forget()

    def _gradients(self) -> list[Tensor | None]:
        found = (parameter.grad for _, parameter in self._named)
        return [None if grad is None or grad.is_sparse else add_bits(grad) for grad in found]


def copy_data(data: Any) -> Any:
    """A micro-batch with tensors of its own, which code may change in place."""
    return pytree.tree_map_only(Tensor, torch.clone, data)
