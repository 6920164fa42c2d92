"""How a copy of a training's state travels to the coordinator's memory and back: one HTTP resource, and its header.

A body is the packed state, then its manifest: what a checkpoint on disk consists of, as one row of bytes. The
coordinator does not look into it. Whoever holds a copy knows by the header whose it is and whether it is whole.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from virtualflow.protocol.messages import Base, Count, Generation, Name

PATH = "/v1/memory-copy"
"""``PUT`` a copy; ``GET`` or ``HEAD`` the newest."""
HEADER = "VirtualFlow-Copy"
"""The HTTP header that holds a :class:`CopyHeader` as JSON."""


class CopyHeader(Base, frozen=True, tag=False):
    """What a copy is, in front of its bytes."""

    generation: Generation
    """Of the worker that made it."""
    incarnation: Name
    """That worker."""
    step: Count
    """Completed steps."""
    state: Count
    """Bytes of the packed state. The rest of the body is the manifest."""
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    """Of the whole body."""


class MemoryCopyState(Base, frozen=True, tag=False):
    """What the status tells of the newest copy that is complete."""

    step: Count
    at: float
    """When it was complete: Unix time of the coordinator."""
    size: Count
    """Bytes."""
