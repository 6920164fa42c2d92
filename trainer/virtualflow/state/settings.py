"""Every default of the state, once.

Durations are seconds and sizes are bytes unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryCopySettings:
    """How often the only worker of a job copies the state to the coordinator's memory."""

    share: float = 0.05
    """The time that a copy takes from the training is at most this share of the time between two of them."""
    interval: float = 0.05
    """They begin at least this far apart."""
    retry_first: float = 0.5
    """The first wait after one that did not get there; it doubles."""
    retry_most: float = 30.0
    """The longest such wait."""
    attempts: int = 3
    """How often a worker that begins asks for the newest copy before an older checkpoint counts."""


@dataclass(frozen=True)
class VolumeSettings:
    """How long a volume is waited for that fails just now, by who begins from a checkpoint or sets one aside."""

    patience: float = 60.0
    """Well below ``TransferSettings.message_timeout``: the other workers of the first generation wait, too."""
    retry_first: float = 0.1
    """The first wait between two tries; it doubles."""
    retry_most: float = 2.0
    """The longest such wait."""


@dataclass(frozen=True)
class TransferSettings:
    """A state on its way to those who lack it."""

    stripe: int = 1 << 16
    """A tensor of a state with at least so many bytes travels by itself, striped over all donors; smaller ones go in
    one block, since each message has a cost of its own."""
    piece: int = 32 << 20
    """The most bytes of a state in one message."""
    message_timeout: float = 120.0
    """The last resort for one such message, counted from the one before it."""
    staged: int = 4
    """Pieces of a state that pass through host memory at a time where its tensors are on an accelerator."""
    reserve_wait: float = 2.5
    """How long a joiner holds its next generation back to make memory for the state that will come. Well below
    ``CommunicatorSettings.connect_timeout``: the others are waiting for its connections, though training."""
