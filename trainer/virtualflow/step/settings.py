"""Every default of the step, once.

Durations are seconds and sizes are bytes unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

FORWARD_SHARE = 1 / 3
"""Of computing a virtual node, the forward pass: a backward pass multiplies twice as often."""


@dataclass(frozen=True)
class StateWatchSettings:
    """How often workers compare their states."""

    sweep: int = 64
    """Every byte of the state is compared once in so many steps, in so many parts at most."""
    part: int = 1 << 18
    """No part has fewer bytes of parameters and buffers: what each tensor costs would outweigh its bytes."""


@dataclass(frozen=True)
class FusionSettings:
    """How a worker of a statistical job finds out how many virtual nodes to run as one micro-batch."""

    warm_up: int = 1
    """Attempts with a new size whose time does not count: kernels are chosen and memory is taken in them. On a CPU
    memory is measured in the first one."""
    attempts: int = 3
    """Attempts whose median time counts: one bad one does not."""
    rounds: int = 3
    """How often every size is measured; its best time counts, since a machine's other work only makes it slower."""
    tolerance: float = 0.03
    """A smaller size that is slower than the fastest by no more than this share is as good: it needs less memory."""
    hopeless: float = 0.25
    """Beyond a size that is slower than the fastest by more than this share, larger ones are not tried."""


@dataclass(frozen=True)
class GuardSettings:
    """How often the contents of parameters are compared, to find code that changes them inside of a step.

    What torch counts (``tensor._version``) is looked at behind the last virtual node of every attempt, and behind each
    one where contents are compared. Code can get round that, by ``parameter.data``.
    """

    first: int = 3
    """Attempts at the beginning whose contents are compared."""
    every: int = 100
    """Later, those of one attempt in as many are."""
