"""Every default of the worker, once.

Durations are seconds and sizes are bytes unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from virtualflow.data.dataloader import LoadingSettings
from virtualflow.device.memory_gauge import MemorySettings
from virtualflow.protocol.settings import DRAIN_GRACE, STOP_GRACE
from virtualflow.reduction.settings import ReductionSettings
from virtualflow.state.checkpointing import VolumeSettings
from virtualflow.state.memory_copies import MemoryCopySettings
from virtualflow.state.transfer import TransferSettings
from virtualflow.step.fusion_tuner import FusionSettings
from virtualflow.step.guard import GuardSettings
from virtualflow.step.state_watch import StateWatchSettings
from virtualflow.transport.settings import CommunicatorSettings, CopySettings, LinkSettings, TurnSettings

if TYPE_CHECKING:
    from virtualflow.memory.activations import ActivationSettings

MAX_STEP_TIMES = 4_096
"""Latest step durations that a worker keeps for the median."""


@dataclass(frozen=True)
class PaceSettings:
    """How a worker measures its own computing time per virtual node, and when it tells of it."""

    sample: float = 0.05
    """A sample covers at least this long: shorter steps are put together. The interruptions of a slowed process (a CPU
    quota is granted by the tenth of a second) must average out within few samples."""
    window: int = 10
    """Latest samples that the estimate is made of."""
    fewest: int = 5
    """Samples before there is an estimate."""
    skipped: int = 2
    """First steps after an entry that are left out: loaders and caches warm up again."""
    change: float = 0.05
    """The coordinator is told when the estimate has changed by this share."""
    interval: float = 0.25
    """And at most this often,"""
    interval_per_member: float = 0.004
    """or this often times the members, so that all of them together tell at most 250 times a second."""


@dataclass(frozen=True)
class ProfilingSettings:
    """``virtualflow profile``: how much is measured for each size of micro-batches."""

    warm_up: int = 3
    """Micro-batches that do not count: kernels are chosen and memory is taken in them."""
    samples: int = 200
    """Micro-batches that are timed at the most: the median no longer moves much."""
    least: int = 5
    """That are timed in any case: with fewer, quartiles mean nothing."""
    seconds: float = 3.0
    """When this has passed and the least are timed, a size is done."""
    longest: float = 60.0
    """A size that would take longer, by what the last one took, is not begun."""
    memory: float = 0.8
    """The share of free memory up to which a size is tried: an estimate may be wrong, and others use memory, too."""


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
class ContentSettings:
    """How workers find at the start that they do not have the same data."""

    samples: int = 8
    """Of a map-style dataset that are hashed, from its first to its last."""
    seconds: float = 1.0
    """After so long no further one is read."""
    indices: int = 10_000_000
    """Of a ``Subset`` that are hashed; a longer one is compared by its samples only."""


@dataclass(frozen=True)
class WorkerSettings:
    """All that a worker is set to."""

    link: LinkSettings = field(default_factory=LinkSettings)
    communicator: CommunicatorSettings = field(default_factory=CommunicatorSettings)
    copy: CopySettings = field(default_factory=CopySettings)
    turns: TurnSettings = field(default_factory=TurnSettings)
    memory_copy: MemoryCopySettings = field(default_factory=MemoryCopySettings)
    loading: LoadingSettings = field(default_factory=LoadingSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    reduction: ReductionSettings = field(default_factory=ReductionSettings)
    transfer: TransferSettings = field(default_factory=TransferSettings)
    volume: VolumeSettings = field(default_factory=VolumeSettings)
    fusion: FusionSettings = field(default_factory=FusionSettings)
    watch: StateWatchSettings = field(default_factory=StateWatchSettings)
    guard: GuardSettings = field(default_factory=GuardSettings)
    pace: PaceSettings = field(default_factory=PaceSettings)
    profiling: ProfilingSettings = field(default_factory=ProfilingSettings)
    activations: ActivationSettings | None = None
    """``None``: those of the package, which is imported where memory is planned."""
    tracking: TrackingSettings = field(default_factory=TrackingSettings)
    contents: ContentSettings = field(default_factory=ContentSettings)
    report_limit: float = 10.0
    """How long a worker that cannot begin tries to reach the coordinator to tell it why; the user has read it by
    then."""
    drain_grace: float = DRAIN_GRACE
    """The deadline of a drain that names none."""
    stop_grace: float = STOP_GRACE
    """How long a drain of the whole job may take."""
