"""A ``VirtualFlowJob`` as the operator reads and writes it: typed, with the defaults of the schema.

The API server has validated it before; an object of an older schema may be another one, and is a fault if it cannot be
read.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

import msgspec

from virtualflow.protocol.settings import (
    CHECKPOINT_KEEP,
    CHECKPOINT_SECONDS,
    DRAIN_GRACE,
    HEARTBEAT_LIMIT,
    MANIFEST_BACKOFF_LIMIT,
    VIRTUAL_NODES,
    WORKERS,
    BackwardSpec,
    OnNonFinite,
)

Reproducibility = Literal["Bitwise", "Statistical"]
Activations = Literal["Auto", "Keep", "Recompute", "Swap"]
OptimizerPlacement = Literal["Device", "Host"]
ShardedPart = Literal["Parameters", "Optimizer", "None"]
Redundancy = Literal["Peer", "Checkpoint", "None"]
Ground = Literal["Any", "OnDemand"]
"""Where ``minReplicas`` workers are to run."""
AcrossKinds = Literal["Stay", "Move", "Mix"]
"""What a job may do where its queue has several kinds of device: stay on the one on which it began, be on another one
later, be on several at once."""
Object = dict[str, Any]
"""An object of the API server, as JSON has it."""


class ApiStruct(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Common ground: immutable, camelCase outside, unknown fields ignored (a newer schema may have more)."""


class WorkerMemory(ApiStruct, frozen=True):
    """How much memory a worker may use, as quantities."""

    device: str
    host: str | None = None
    activations: Activations | None = None


class WorkerGroup(ApiStruct, frozen=True):
    """Workers made from one pod template; groups stand in order of preference."""

    name: str
    template: Object
    max_replicas: int | None = None
    device_type: str | None = None
    profile: str | None = None
    memory: WorkerMemory | None = None


class CoordinatorSpec(ApiStruct, frozen=True):
    """What the user wants different about the coordinator's pod."""

    template: Object = {}


class Elasticity(ApiStruct, frozen=True):
    """How long changes of the membership may take (seconds), and how far and on what the job grows."""

    drain_grace_seconds: int = int(DRAIN_GRACE)
    startup_grace_seconds: int = 30
    startup_deadline_seconds: int | None = None
    scale_down_delay_seconds: int = 0
    heartbeat_limit_seconds: int = int(HEARTBEAT_LIMIT)
    hang_seconds: int | None = None
    min_efficiency: int = 0
    """Percent."""
    min_replicas_on: Ground = "Any"
    across_kinds: AcrossKinds | None = None
    """``None``: as its reproducibility allows."""


class Checkpoint(ApiStruct, frozen=True):
    """Where checkpoints go, how often, how many stay, and how long a suspension waits for the last one (seconds)."""

    volume: Object
    directory: str | None = None
    every_steps: int | None = None
    every_seconds: int = int(CHECKPOINT_SECONDS)
    keep: int = CHECKPOINT_KEEP
    timeout_seconds: int = 300
    memory: bool = False
    """Whether a lone worker keeps a copy of the state in the coordinator's memory, too."""


class Verify(ApiStruct, frozen=True):
    """How often workers check one another."""

    sample: Annotated[float, msgspec.Meta(ge=0, le=1)]
    """In which share of the steps one virtual node is computed by a second worker."""


class Sharding(ApiStruct, frozen=True):
    """What is divided over the workers, and who else has a worker's share."""

    what: ShardedPart
    redundancy: Redundancy | None = None
    """``None``: the script says."""


class Security(ApiStruct, frozen=True):
    """How its pods know each other."""

    plaintext: bool = False
    """Whether they do without certificates: nothing is encrypted."""


class JobSpec(ApiStruct, frozen=True, dict=True):
    worker_groups: Annotated[tuple[WorkerGroup, ...], msgspec.Meta(min_length=1)]
    virtual_nodes: int = VIRTUAL_NODES
    reproducibility: Reproducibility = "Bitwise"
    optimizer_placement: OptimizerPlacement | None = None
    """Fixed; ``None``: the script says."""
    backward: BackwardSpec | None = None
    sharding: Sharding | None = None
    """Fixed; ``None``: the script says."""
    replicas: int = WORKERS
    min_replicas: int = 1
    max_replicas: int | None = None
    processes_per_worker: int = 1
    queue: str | None = None
    priority: int = 0
    weight: int = 1
    coordinator: CoordinatorSpec = CoordinatorSpec()
    elasticity: Elasticity = Elasticity()
    checkpoint: Checkpoint | None = None
    suspend: bool = False
    on_non_finite: OnNonFinite = "Continue"
    verify: Verify | None = None
    security: Security = Security()
    backoff_limit: int = MANIFEST_BACKOFF_LIMIT
    active_deadline_seconds: int | None = None
    ttl_seconds_after_finished: int | None = None
    managed_by: str | None = None

    @property
    def across_kinds(self) -> AcrossKinds:
        """What it may do across kinds of device: the bits of a bitwise job are those of the kind on which it began."""
        return self.elasticity.across_kinds or ("Stay" if self.reproducibility == "Bitwise" else "Move")

    @cached_property
    def most(self) -> int:
        limits = [max(1, self.virtual_nodes // max(1, self.processes_per_worker))]
        if self.max_replicas is not None:
            limits.append(self.max_replicas)
        if all(group.max_replicas is not None for group in self.worker_groups):
            limits.append(sum(group.max_replicas or 0 for group in self.worker_groups))
        return min(limits)

    @cached_property
    def least(self) -> int:
        return min(self.min_replicas, self.most)

    @cached_property
    def desired(self) -> int:
        return max(min(self.replicas, self.most), self.least)


def read_spec(spec: Mapping[str, Any]) -> JobSpec:
    """Read ``spec`` of a job."""
    return msgspec.convert(spec, JobSpec)


def without_nulls(value: Any) -> Any:
    """A copy without the fields that are null, which the API server leaves out as well."""
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


# --- its status ------------------------------------------------------------------------------------------------------

Phase = Literal["Pending", "Running", "Suspending", "Suspended", "BackOff", "Complete", "Failed"]
PHASES: tuple[Phase, ...] = ("Pending", "Running", "Suspending", "Suspended", "BackOff", "Complete", "Failed")
ConditionType = Literal[
    "Ready",
    "Progressing",
    "Degraded",
    "NonFinite",
    "CheckpointFailed",
    "DoesNotFit",
    "FitsWithOffload",
    "Suspended",
    "Allocated",
    "Complete",
    "Failed",
    "Reconciling",
    "Stalled",
]
Truth = Literal["True", "False", "Unknown"]


class Condition(ApiStruct, frozen=True):
    """One aspect of the job, as by the API conventions."""

    type: str
    status: Truth
    reason: str
    message: str
    last_transition_time: str
    observed_generation: int = 0


class WorkerShare(ApiStruct, frozen=True):
    """The virtual nodes that are assigned to a worker."""

    worker: str
    virtual_nodes: str
    """A range, such as ``0-3``."""
    node: str = ""


class OfKind(ApiStruct, frozen=True):
    kind: str
    workers: int


class AllocationStatus(ApiStruct, frozen=True):
    """What its queue has given the job."""

    queue: str
    workers: int
    reason: str
    since: str
    """When it began to run, or to wait."""
    resized_time: str
    waited_seconds: int = 0
    """How long the wait was that ended when it began to run."""
    kind: str = ""
    """The kind of device in whose share it is, or for which it waits, where its queue tells them apart."""
    kinds: tuple[OfKind, ...] = ()
    """Its workers by kind; those of another kind than its own are lent."""
    host: str = ""
    """Namespace and name of the job on whose devices they compute, in turns with it; empty: they have their own."""
    lodgers: tuple[str, ...] = ()
    """Those of jobs that compute on its own devices."""


class Measured(ApiStruct, frozen=True):
    """How fast the job was with so many workers."""

    workers: int
    steps_per_second: str
    kind: str = ""
    """Of device, where its queue tells them apart: all of these workers were on it."""
    computing_milliseconds: str = ""
    """For how much of a step the slowest of them computed; empty: not measured."""


class LastChange(ApiStruct, frozen=True):
    before: int = msgspec.field(name="from")
    to: int
    cause: str
    reason: str
    step: int
    pause_milliseconds: int | None = None
    repeated_steps: int = 0
    repeated_virtual_nodes: int = 0
    generation: int = 0
    incarnation: int = 0
    """Of the coordinator that made the generation: together they grow for ever."""


class Unfit(ApiStruct, frozen=True):
    """A worker group into whose memory nothing fits."""

    group: str
    template: str
    """Hash of the template that its workers were made from: with another one, it is tried again."""
    message: str
    """What does not fit, and what would."""


class Failures(ApiStruct, frozen=True):
    """Crashes without progress in between, and what is needed to count each once."""

    count: int = 0
    """Crashes in a row without a step between them; what ``backoffLimit`` limits."""
    streak: int = 0
    """Crashes close to each other; what the back-off grows with."""
    step: int = 0
    """The step that the job had reached at the latest crash."""
    last_time: str | None = None
    retry_time: str | None = None
    """No worker is started before then."""
    message: str = ""
    counted: tuple[str, ...] = ()
    """Uids of the crashed pods, still present, that are counted already."""
    nodes: tuple[str, ...] = ()
    """Where the latest workers ran that were found to be wrong; new ones keep off these nodes."""
    unfit: tuple[Unfit, ...] = ()
    """Worker groups in which no worker is made, as it would be refused again."""


class EndedRun(ApiStruct, frozen=True):
    """A run of the script that was followed by another one."""

    run: int
    steps: int
    digest: str = ""


class CertificateStatus(ApiStruct, frozen=True):
    """The certificates of the job's pods, as they were issued or replaced together last."""

    renewal_time: str
    """When they are replaced."""
    expiry_time: str
    """When the first of them would expire."""
    keys: tuple[str, ...] = ()
    """Fingerprints of the operator's keys whose authorities the pods believe."""


class JobStatus(ApiStruct, frozen=True):
    phase: Phase = "Pending"
    conditions: tuple[Condition, ...] = ()
    observed_generation: int = 0
    replicas: int = 0
    ready_replicas: int = 0
    selector: str = ""
    workers: str = ""
    """Training and wanted workers, such as ``2/3``."""
    generation: int = 0
    virtual_nodes: int | None = None
    reproducibility: Reproducibility | None = None
    allocation: AllocationStatus | None = None
    scaling: tuple[Measured, ...] = ()
    """The latest first."""
    assignment: tuple[WorkerShare, ...] = ()
    run: int | None = None
    """Of the script, which may train several times."""
    ended_runs: tuple[EndedRun, ...] = ()
    """Those before it, the latest."""
    earlier_steps: int = 0
    """Steps of all of them."""
    step: int | None = None
    """Completed steps of this run."""
    total_steps: int | None = None
    epoch: int | None = None
    loss: str | None = None
    steps_per_second: str | None = None
    step_milliseconds: str | None = None
    predicted_step_milliseconds: str | None = None
    goodput: str | None = None
    checkpoint_step: int | None = None
    """Of the newest complete checkpoint."""
    checkpoint_time: str | None = None
    memory_copy_step: int | None = None
    """Of the copy of a lone worker's state in the coordinator's memory."""
    memory_copy_time: str | None = None
    memory_copy_bytes: int | None = None
    last_change: LastChange | None = None
    changes: int = 0
    repeated_steps: int = 0
    attempt: int = 0
    failures: Failures = Failures()
    template_hash: str | None = None
    coordinator: str | None = None
    coordinator_image: str | None = None
    """The operator's when the job began to run; its own template may name another one."""
    plaintext: bool | None = None
    """Whether its pods do without certificates, from when it begins until it is suspended; ``None``: not begun, or
    begun under an operator that had none."""
    certificates: CertificateStatus | None = None
    start_ticket: int | None = None
    """The coordinator process that may begin without a word about others: the first of the attempt."""
    scale_down_since: str | None = None
    start_time: str | None = None
    training_time: str | None = None
    """When it began to train after that; ``None``: not yet."""
    completion_time: str | None = None
    digest: str | None = None
    optimizer_digest: str | None = None

    @property
    def finished(self) -> bool:
        """Whether the job is over for good."""
        return self.phase in ("Complete", "Failed")

    def condition(self, kind: ConditionType) -> Condition | None:
        """The condition of that type, if it was ever set."""
        return next((condition for condition in self.conditions if condition.type == kind), None)


def read_status(status: Mapping[str, Any] | None) -> JobStatus:
    """Read ``status`` of a job; one that is not of the schema counts as empty: all of it can be found out again."""
    try:
        return msgspec.convert(status or {}, JobStatus)
    except msgspec.ValidationError:
        return JobStatus()


def write_status(status: JobStatus) -> dict[str, Any]:
    written: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(status))
    # What people and autoscalers look at is there from the beginning, also where it has its default.
    shown = {"phase": status.phase, "replicas": status.replicas, "readyReplicas": status.ready_replicas}
    return written | shown | {"changes": status.changes, "repeatedSteps": status.repeated_steps}


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch (RFC 7386) that turns ``old`` into ``new``; empty when they are equal."""
    patch: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            inner = merge_patch(before, value)
            if inner:
                patch[key] = inner
        elif key not in old or before != value:
            patch[key] = value
    return patch
