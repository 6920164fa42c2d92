"""Caches made of weights: what must not outlive an update, nor pass from one virtual node to the next.

torch has two of its own, which last as long as a ``with`` block of the script: autocast's copies in another type, and
those of ``parametrize.cached()``. A script may open the block around its whole training, so they are emptied for each
virtual node, as if it were opened there. A cache of the script's own cannot be emptied from here, but it shows: the
backward pass of a virtual node goes through a graph that was there before its forward pass began.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from virtualflow.errors import ConfigurationError


def forget_cached_weights() -> None:
    """Empty torch's own caches of what was made of weights."""
    torch.clear_autocast_cache()
    cached: dict[Any, Any] | None = getattr(parametrize, "_cache", None)
    if cached:
        cached.clear()


class KeptGraphs:
    """Refuses a backward pass through a graph that was there before.

    Args:
        model: whose parameters are named.
    """

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
        """From now on it may."""
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
    """Those that a tensor was made of, the nearest first."""
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
