"""The memory of messages, kept from step to step."""

from __future__ import annotations

import torch
from torch import Tensor


class Buffers:
    """Message buffers, kept from step to step: fresh large ones cost page faults."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], Tensor] = {}
        self._used: set[tuple[object, ...]] = set()

    def get(self, name: tuple[object, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The buffer of that name; zeros when it is new."""
        key = (*name, dtype)
        self._used.add(key)
        kept = self._kept.get(key)
        if kept is None or kept.shape != shape:
            kept = self._kept[key] = torch.zeros(shape, dtype=dtype)
        return kept

    def release_unused(self) -> None:
        """Free what was not asked for since the last call."""
        self._kept = {key: kept for key, kept in self._kept.items() if key in self._used}
        self._used.clear()

    def clear(self) -> None:
        """Free them. Messages under way keep their own alive."""
        self._kept = {}
