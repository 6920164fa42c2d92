"""Every default of the data, once.

Durations are seconds and sizes are bytes unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadingSettings:
    """Loading, with and without loader processes."""

    gathered: int = 1 << 20
    """Samples of a step that are rows of tensors are gathered at once up to so many bytes. Beyond, the calls that this
    saves no longer count beside the copying, and the memory does."""
    alignment: int = 64
    """Bytes at whose multiples PyTorch's allocator for the CPU begins a tensor."""
    grace: float = 5.0
    """How long a loader process may take to finish the batch in hand before it is killed."""
