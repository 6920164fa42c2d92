"""How much memory is in use while something is computed, as far as torch's own operations show it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from virtualflow.memory.activations.module_state import Surroundings
from virtualflow.state import StayingHook


class LiveBytes(TorchDispatchMode):
    """Counts storages from the operation that makes them until nobody has them, each once.

    What a kernel takes for itself and gives back is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known: dict[int, int] = {}
        self._paused = False

    def add(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._known:
                    self._known[key] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._forget, key).atexit = False
        self.peak = max(self.peak, self.now)

    @contextmanager
    def pause(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _forget(self, key: int) -> None:
        self.now -= self._known.pop(key, 0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: it would import the compiler, which takes seconds, and compiled blocks are refused."""
        return False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if not self._paused:
            self.add(tree_leaves(made))
        return made


# What one block needs for a moment: it is computed once more by itself, forward and backward, and all is counted.

_VALUES = (Tensor, bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
"""Arguments that a call cannot change, or of which it gets a copy."""


@dataclass(frozen=True)
class Peaks:
    """The most bytes at a time beside a block's inputs, parameters and buffers."""

    forward: int
    """What is saved and the outputs are among them."""
    backward: int
    """With what is saved, and the gradients of outputs, inputs and parameters."""
    gradients: tuple[int, ...]
    """Of what holds the gradient of each tensor among its inputs: that may be a part of something larger."""


def count_peaks(
    module: nn.Module, arguments: Any, options: Any, device: torch.device, parameters: Iterable[Tensor] | None = None
) -> Peaks | None:
    """Call a block without leaving a trace; ``None``: that cannot be done.

    What kernels take for themselves and give back is not seen.

    Args:
        parameters: where they may be; ``None``: where they are.
    """
    if not _leaves_no_trace(module, tree_leaves((arguments, options))):
        return None
    arguments, options = tree_map(_apart, (arguments, options))
    given = [leaf for leaf in tree_leaves((arguments, options)) if isinstance(leaf, Tensor)]
    live = LiveBytes()
    with Surroundings(module, device).again():
        live.add([*given, *(module.parameters() if parameters is None else parameters), *module.buffers()])
        before = live.now
        with live:
            made = [leaf for leaf in tree_leaves(module.forward(*arguments, **options)) if isinstance(leaf, Tensor)]
            forward = live.peak - before
            made = [leaf for leaf in made if leaf.grad_fn is not None]
            with live.pause():
                weights = [torch.ones_like(leaf) for leaf in made]
            # The outputs themselves are there in the backward pass only if the block has saved them.
            ends = [(leaf * weight).sum() for leaf, weight in zip(made, weights, strict=True)]
            made.clear()
            live.peak = live.now
            wanted = [leaf for leaf in [*given, *module.parameters()] if leaf.requires_grad]
            found: dict[int, int] = {}
            if ends and wanted:
                gradients: Sequence[Tensor | None] = torch.autograd.grad(ends, wanted, allow_unused=True)
                found = {
                    id(leaf): gradient.untyped_storage().nbytes()
                    for leaf, gradient in zip(wanted, gradients, strict=True)
                    if gradient is not None
                }
            return Peaks(forward, live.peak - before, tuple(found.get(id(leaf), 0) for leaf in given))


def _leaves_no_trace(module: nn.Module, leaves: list[Any]) -> bool:
    """Whether one more call, and its backward pass, change nothing that is seen later.

    An object of the user's may be changed by the call. A weight that is computed from parameters (the older spectral
    norm, weight norm and pruning) hangs on a graph that the backward pass would free. A hook of a parameter would be
    told gradients that are made up, but for the library's own.
    """
    return (
        all(leaf is None or isinstance(leaf, _VALUES) for leaf in leaves)
        and all(
            isinstance(hook, StayingHook)
            for parameter in module.parameters()
            for hook in (parameter._backward_hooks or {}).values()
        )
        and not any(
            isinstance(attribute, Tensor) and attribute.grad_fn is not None
            for each in module.modules()
            for attribute in vars(each).values()
        )
    )


def _apart(leaf: Any) -> Any:
    """An input with memory of its own, which the call may change; where it has come from is of no interest."""
    if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad).clone()
