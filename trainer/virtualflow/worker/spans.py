"""Spans of a step for ``torch.profiler``: virtual node, exchange, update, commit. Without one, a look each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

_NOTHING = nullcontext()

profiled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
"""Whether a profiler is at work."""


def span(name: str, virtual_node: int | None = None) -> AbstractContextManager[object]:
    """What runs in it appears under ``virtualflow: name`` where a profiler is at work; of a virtual node, with it."""
    # Entering a span costs some microseconds, profiler or not.
    if not profiled():
        return _NOTHING
    told = None if virtual_node is None else str(virtual_node)
    return torch.profiler.record_function(f"virtualflow: {name}", told)
