"""A ``VirtualFlowJob`` as the operator reads it: typed, with the defaults of the schema.

The API server has validated it before; an object of an older schema may be another one, and is a fault if it cannot be
read.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

import msgspec

from virtualflow.protocol.backward import BackwardSpec
from virtualflow.protocol.settings import (
    CHECKPOINT_KEEP,
    CHECKPOINT_SECONDS,
    DRAIN_GRACE,
    HEARTBEAT_LIMIT,
    VIRTUAL_NODES,
    WORKERS,
    OnNonFinite,
)

Reproducibility = Literal["Bitwise", "Statistical"]
Activations = Literal["Auto", "Keep", "Recompute", "Swap"]
OptimizerPlacement = Literal["Device", "Host"]
Ground = Literal["Any", "OnDemand"]
"""Where ``minReplicas`` workers are to run."""
AcrossKinds = Literal["Stay", "Move", "Mix"]
"""What a job may do where its queue has several kinds of device: stay on the one on which it began, be on another one
later, be on several at once."""
Object = dict[str, Any]
"""An object of the API server, as JSON has it."""


class Base(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Common ground: immutable, camelCase outside, unknown fields ignored (a newer schema may have more)."""


class WorkerMemory(Base, frozen=True):
    """How much memory a worker may use, as quantities."""

    device: str
    host: str | None = None
    activations: Activations | None = None


class WorkerGroup(Base, frozen=True):
    """Workers made from one pod template; groups stand in order of preference."""

    name: str
    template: Object
    max_replicas: int | None = None
    device_type: str | None = None
    profile: str | None = None
    memory: WorkerMemory | None = None


class CoordinatorSpec(Base, frozen=True):
    """What the user wants different about the coordinator's pod."""

    template: Object = {}


class Elasticity(Base, frozen=True):
    """How long changes of the membership may take (seconds), and how far and on what the job grows."""

    drain_grace_seconds: int = int(DRAIN_GRACE)
    startup_grace_seconds: int = 30
    scale_down_delay_seconds: int = 0
    heartbeat_limit_seconds: int = int(HEARTBEAT_LIMIT)
    hang_seconds: int | None = None
    min_efficiency: int = 0
    """Percent."""
    min_replicas_on: Ground = "Any"
    across_kinds: AcrossKinds | None = None
    """``None``: as its reproducibility allows."""


class Checkpoint(Base, frozen=True):
    """Where checkpoints go, how often, how many stay, and how long a suspension waits for the last one (seconds)."""

    volume: Object
    directory: str | None = None
    every_steps: int | None = None
    every_seconds: int = int(CHECKPOINT_SECONDS)
    keep: int = CHECKPOINT_KEEP
    timeout_seconds: int = 300
    memory: bool = False
    """Whether a lone worker keeps a copy of the state in the coordinator's memory, too."""


class Verify(Base, frozen=True):
    """How often workers check one another."""

    sample: Annotated[float, msgspec.Meta(ge=0, le=1)]
    """In which share of the steps one virtual node is computed by a second worker."""


class JobSpec(Base, frozen=True, dict=True):
    """``spec`` of a job."""

    worker_groups: Annotated[tuple[WorkerGroup, ...], msgspec.Meta(min_length=1)]
    virtual_nodes: int = VIRTUAL_NODES
    reproducibility: Reproducibility = "Bitwise"
    optimizer_placement: OptimizerPlacement | None = None
    """Fixed; ``None``: the script says."""
    backward: BackwardSpec | None = None
    """Likewise."""
    replicas: int = WORKERS
    min_replicas: int = 1
    max_replicas: int | None = None
    queue: str | None = None
    priority: int = 0
    weight: int = 1
    coordinator: CoordinatorSpec = CoordinatorSpec()
    elasticity: Elasticity = Elasticity()
    checkpoint: Checkpoint | None = None
    suspend: bool = False
    on_non_finite: OnNonFinite = "Continue"
    verify: Verify | None = None
    backoff_limit: int = 3
    active_deadline_seconds: int | None = None
    ttl_seconds_after_finished: int | None = None
    managed_by: str | None = None

    @property
    def across_kinds(self) -> AcrossKinds:
        """What it may do across kinds of device: the bits of a bitwise job are those of the kind on which it began."""
        return self.elasticity.across_kinds or ("Stay" if self.reproducibility == "Bitwise" else "Move")

    @cached_property
    def most(self) -> int:
        """The most workers that the job may have."""
        limits = [self.virtual_nodes]
        if self.max_replicas is not None:
            limits.append(self.max_replicas)
        if all(group.max_replicas is not None for group in self.worker_groups):
            limits.append(sum(group.max_replicas or 0 for group in self.worker_groups))
        return min(limits)

    @cached_property
    def least(self) -> int:
        """The fewest workers with which the job trains."""
        return min(self.min_replicas, self.most)

    @cached_property
    def desired(self) -> int:
        """How many workers the job is to have."""
        return max(min(self.replicas, self.most), self.least)


def read_spec(spec: Mapping[str, Any]) -> JobSpec:
    """Read ``spec`` of a job.

    Raises:
        msgspec.ValidationError: the structure is not that of the schema.
    """
    return msgspec.convert(spec, JobSpec)


def without_nulls(value: Any) -> Any:
    """A copy without the fields that are null, which the API server leaves out as well."""
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value
