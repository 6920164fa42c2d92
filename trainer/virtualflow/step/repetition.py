"""Whether a virtual node comes to the same gradients when it is computed twice, as it must wherever it is computed.

The library seeds the global generators and puts buffers back. What else a script keeps from one micro-batch to the next
it cannot see: a counter in ``forward``, a hidden state, a generator of the script's own, a criterion with running
statistics. But it shows: the second time they are not what they were the first time, or the backward pass goes through
a graph of the first time.

Caches made of weights must not outlive an update, nor pass from one virtual node to the next. torch's own are emptied
(``forget_cached_weights``). One of the script's own cannot be emptied from here, but it shows: the backward pass of a
virtual node goes through a graph that was there before its forward pass began.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from virtualflow.errors import ConfigurationError
from virtualflow.step.guard import add_bits

LOOKS_AHEAD = (
    "the script asks for the next micro-batch of a step before it has run backward for the one before (a prefetcher, "
    "zip, pairwise, peekable, or one backward pass for several micro-batches), so gradients would count for the wrong "
    "virtual node and the last ones for none; run backward for each micro-batch before the next one is asked for: "
    "for batch in step: ...; vf.elastic loads ahead by num_workers= and copies ahead by device="
)
_REPEATED = 2
"""Virtual nodes of a worker. A running mean that begins with the first one's value stays when that comes again."""


class Repetition:
    """Compares two computations of one virtual node, for the first two of a worker."""

    def __init__(self, model: nn.Module) -> None:
        self._named = list(model.named_parameters())
        self._left = _REPEATED
        self._first: list[Tensor | None] | None = None
        self._logged: frozenset[str] = frozenset()
        self._graphs = KeptGraphs(model)

    @property
    def under_way(self) -> bool:
        return self._first is not None

    @property
    def is_over(self) -> bool:
        return not self._left

    def note(self, logged: Collection[str] = ()) -> None:
        """Take note of the first computation, and of the names of what the script has logged in it."""
        self._first, self._logged = self._gradients(), frozenset(logged)
        self._graphs.watch()

    def forget(self) -> None:
        """The second one is not to come: the attempt is another one."""
        self._first = None
        self._graphs.forget()

    def compare(self, logged: Collection[str] = ()) -> None:
        """Compare the second one with it.

        Raises:
            ConfigurationError: they differ; the sentence says in what, and what to do.
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
                    "its own, a criterion with running statistics, the time, a loop that asks for the next micro-batch "
                    "ahead); make it a buffer of the model, or compute it from the micro-batch and step.number"
                )
        odd = sorted(self._logged.symmetric_difference(logged))
        if odd:
            raise ConfigurationError(
                f"step.log told of {', '.join(odd)} in one computation of a virtual node and not in another: the "
                "script counts micro-batches to log some of them (enumerate, a counter), and each worker has others; "
                "log in each micro-batch, of which step.metrics has the mean, or choose steps by step.number"
            )
        self._left -= 1
        self.forget()

    def _gradients(self) -> list[Tensor | None]:
        found = (parameter.grad for _, parameter in self._named)
        return [None if grad is None or grad.is_sparse else add_bits(grad) for grad in found]


def copy_data(data: Any) -> Any:
    """A micro-batch of its own, which code may change in place."""
    return pytree.tree_map(_copy_part, data)


def _copy_part(part: Any) -> Any:
    if isinstance(part, Tensor):
        return part.clone()
    try:
        return copy.deepcopy(part)  # a class of the script's own, which may hold tensors
    except (TypeError, RuntimeError, copy.Error):
        return part  # it holds something that cannot be copied, such as an open file


class KeptGraphs:
    """Refuses a backward pass through a graph that was there before."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._hooks: list[Any] = []

    def watch(self) -> None:
        """From now on no backward pass may go through a graph that is there now."""
        # By class: properties of foreign objects must not run. A view shows what has become of its weights.
        alive = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in alive:
                if not tensor._is_view() and tensor.grad_fn is not None:
                    text = _describe(tensor, self._names)
                    self._hooks.append(tensor.grad_fn.register_prehook(_Refusal(text)))

    def forget(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class _Refusal:
    def __init__(self, text: str) -> None:
        self._text = text

    def __call__(self, gradients: Any) -> None:
        raise ConfigurationError(
            f"{self._text} was kept from one micro-batch to the next, and a backward pass went through it again: "
            "after an update it would still be made of what was there before; make it anew for each micro-batch, and "
            "open or clear a cache within the loop over the micro-batches"
        )


def _describe(tensor: Tensor, names: Mapping[int, str]) -> str:
    made_of = next(_parameters_of(tensor, names), None)
    return f"a tensor of shape {list(tensor.shape)}" + (f" made of parameter {made_of}" if made_of else "")


def _parameters_of(tensor: Tensor, names: Mapping[int, str]) -> Iterator[str]:
    front, seen = [tensor.grad_fn], set()
    while front:
        node = front.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        name = names.get(id(getattr(node, "variable", None)))
        if name is not None:
            yield name
        front += [following for following, _ in node.next_functions]
