"""How much memory is in use while something is computed, as far as torch's own operations show it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
        """These are there."""
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
        """What is made meanwhile is somewhere else."""
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
        """Count what an operation makes."""
        made = func(*args, **(kwargs or {}))
        if not self._paused:
            self.add(tree_leaves(made))
        return made
