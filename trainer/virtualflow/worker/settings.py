"""Every default of the worker, once.

Durations are seconds and sizes are bytes unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from virtualflow.protocol.settings import DRAIN_GRACE, STOP_GRACE
from virtualflow.reduction.settings import ReductionSettings
from virtualflow.state.checkpointing import VolumeSettings
from virtualflow.state.memory_copies import MemoryCopySettings
from virtualflow.step.guard import GuardSettings
from virtualflow.step.state_watch import StateWatchSettings
from virtualflow.transport.settings import CommunicatorSettings, CopySettings, LinkSettings, TurnSettings

if TYPE_CHECKING:
    from virtualflow.memory.activations import ActivationSettings

MAX_STEP_TIMES = 4_096
"""Latest step durations that a worker keeps for the median."""


@dataclass(frozen=True)
class TrackingSettings:
    """How often the leader writes to experiment trackers, and what all workers keep of it until then."""

    seconds: float = 1.0
    """Between two writes, at least,"""
    steps: int = 128
    """or so many steps, at most."""
    kept: int = 512
    """Latest steps that a worker keeps in case it comes to lead; each leader that is lost before it has written takes
    one more step than the last."""
    most: int = 65_536
    """Steps that a leader keeps while a tracker cannot be written to; then it forgets the oldest."""


@dataclass(frozen=True)
class PredictionSettings:
    """How much of a prediction becomes one file of each virtual node."""

    steps: int = 4
    """Global batches in it, at most; so many are computed again for a worker that is lost, and up to so many before one
    that drains may leave."""
    bytes: int = 64 << 20
    """In the files of all virtual nodes, at most; until they are written, workers hold them in memory."""


@dataclass(frozen=True)
class WorkerSettings:
    """All that a worker is set to."""

    link: LinkSettings = field(default_factory=LinkSettings)
    communicator: CommunicatorSettings = field(default_factory=CommunicatorSettings)
    copy: CopySettings = field(default_factory=CopySettings)
    turns: TurnSettings = field(default_factory=TurnSettings)
    memory_copy: MemoryCopySettings = field(default_factory=MemoryCopySettings)
    reduction: ReductionSettings = field(default_factory=ReductionSettings)
    volume: VolumeSettings = field(default_factory=VolumeSettings)
    watch: StateWatchSettings = field(default_factory=StateWatchSettings)
    guard: GuardSettings = field(default_factory=GuardSettings)
    activations: ActivationSettings | None = None
    """``None``: those of the package, which is imported where memory is planned."""
    tracking: TrackingSettings = field(default_factory=TrackingSettings)
    prediction: PredictionSettings = field(default_factory=PredictionSettings)
    report_limit: float = 10.0
    """How long a worker that cannot begin tries to reach the coordinator to tell it why; the user has read it by
    then."""
    drain_grace: float = DRAIN_GRACE
    """The deadline of a drain that names none."""
    stop_grace: float = STOP_GRACE
    """How long a drain of the whole job may take."""
