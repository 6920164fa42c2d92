"""The coordinator of a job: a server at the edge, and in the middle pure decisions about who is in the next generation
and which worker is assigned which virtual nodes. It has no torch and no disk; whatever it knows can be learned again
from the workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from virtualflow._imports import load

if TYPE_CHECKING:
    from virtualflow.coordinator.server import serve

__all__ = ["serve"]


def __getattr__(name: str) -> Any:
    # The command line reads this package's settings at each start, and must not wait for the server's imports.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return load("virtualflow.coordinator.server", name)
