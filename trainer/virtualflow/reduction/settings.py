"""Every default of the reduction, once.

Durations are seconds and sizes are bytes unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReductionSettings:
    """How gradients travel. None of it changes a bit of the result."""

    alignment: int = 16
    """Every segment of a message starts at a multiple of this many bytes."""
    bucket: int = 8 << 20
    """Gradients travel in messages of at most so many bytes."""
    one_by_one: int = 1 << 16
    """Gradients of at least so many bytes on average are added up and sent one by one while the backward pass still
    runs. A call for each smaller one costs more than it saves."""
    sums_on_device: int = 2
    """Sums of a worker that wait on an accelerator for their other half, at most; each takes as much memory as the
    gradients. The others wait in host memory."""
    fetch_ahead: int = 64 << 20
    """Bytes of such sums that are brought back before they are needed."""
    small_exchange: int = 1 << 20
    """Gradients that make at most so many bytes at each worker are gathered whole: there and not back again."""
    close_wait: float = 0.05
    """How long the end of a run waits for the thread that exchanges; it may hang in an abandoned communicator."""
