"""Every default of the reduction, once.

Durations are seconds and sizes are bytes unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReductionSettings:
    """How gradients travel. None of it changes a bit of the result, except ``norm_block``."""

    alignment: int = 16
    """Every segment of a message starts at a multiple of this many bytes."""
    bucket: int = 8 << 20
    """Gradients travel in messages of at most so many bytes."""
    one_by_one: int = 1 << 16
    """Gradients of at least so many bytes on average are taken one by one while the backward pass still runs. A call
    for each smaller one costs more than it saves."""
    small_exchange: int = 1 << 20
    """Gradients that make at most so many bytes at each worker are gathered whole: there and not back again."""
    close_wait: float = 0.05
    """How long the end of a run waits for the thread that exchanges; it may hang in an abandoned communicator."""
    norm_block: int = 4_096
    """Elements of a gradient whose norm is one number of those that a clipped gradient's is made of. The same in all
    workers: it is part of what defines the bits of a job that clips by norm."""
