"""Hooks on a user's modules that stay behind when the model is copied or written: the copy is somebody else's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class StayingHook:
    """A hook that does nothing on a copy.

    Args:
        call: what it does on the model itself.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        """Do it."""
        self._call(*arguments)

    def __reduce__(self) -> tuple[object, ...]:
        return StayingHook, (_ignore,)


def _ignore(*arguments: Any) -> None:
    """What a copy's hooks do."""
