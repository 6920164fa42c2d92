"""What the script that iterates over a run has at hand, as far as it says by its type that it ought to be known."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

from torch.optim.swa_utils import AveragedModel

from virtualflow.errors import ConfigurationError

_OURS = "virtualflow."


def check_averages(known: Callable[[object], bool]) -> None:
    """See that no average of weights in reach of the script would be left behind.

    Args:
        known: whether an object's state travels.

    Raises:
        ConfigurationError: there is one that a joiner would not get.
    """
    for name, value in _variables(sys._getframe(1)):
        if isinstance(value, AveragedModel) and not known(value):
            raise ConfigurationError(
                f"the script keeps an average of weights in {name}, which a worker that joins or a checkpoint would "
                f'not have; pass it to vf.elastic: state={{"{name}": {name}}}'
            )


def _variables(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """The variables of the script's functions that are running, and the attributes of the objects in them."""
    while frame is not None:
        if not str(frame.f_globals.get("__name__", "")).startswith(_OURS):
            for name, value in [*frame.f_locals.items()]:
                yield name, value
                if not isinstance(value, ModuleType | type):
                    yield from getattr(value, "__dict__", {}).items()
        frame = frame.f_back
