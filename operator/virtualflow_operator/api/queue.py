"""A ``VirtualFlowQueue`` as the operator reads and writes it: typed, with the defaults of the schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from virtualflow_operator.api.job import ApiStruct, Condition, Object
from virtualflow_operator.constants import MANAGER

DEFAULT_POLICY = "WeightedFairShare"
MAX_ALLOCATIONS = 100
"""Jobs that a queue's status lists: a summary, as the whole would grow with every job."""
MAX_UNSORTED = 32
"""Nodes of no kind that it names, likewise."""


SelectorOperator = Literal["In", "NotIn", "Exists", "DoesNotExist"]
WorkerPlacement = Literal["Any", "BinPack"]


ANY_KIND = ""
"""The name of the only kind of device of a queue that tells none apart."""


class Requirement(ApiStruct, frozen=True):
    """One of a label selector's ``matchExpressions``."""

    key: str
    operator: SelectorOperator
    values: tuple[str, ...] = ()

    def met_by(self, labels: Mapping[str, str]) -> bool:
        """Whether an object with these labels meets it; as in Kubernetes, ``NotIn`` holds for a missing label."""
        if self.operator == "Exists":
            return self.key in labels
        if self.operator == "DoesNotExist":
            return self.key not in labels
        return (labels.get(self.key) in self.values) == (self.operator == "In")


class Selector(ApiStruct, frozen=True):
    """A label selector; an empty one selects everything."""

    match_labels: dict[str, str] = msgspec.field(default_factory=dict)
    match_expressions: tuple[Requirement, ...] = ()

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        """All that it requires, in one form."""
        equal = (Requirement(key, "In", (value,)) for key, value in sorted(self.match_labels.items()))
        return (*equal, *self.match_expressions)

    def selects(self, labels: Mapping[str, str]) -> bool:
        return all(requirement.met_by(labels) for requirement in self.requirements)


class Limit(ApiStruct, frozen=True):
    """The most that a namespace's jobs have together."""

    namespace: str
    capacity: int
    kind: str = ""
    """Of which kind of device, in a queue that tells them apart."""


class KindSpec(ApiStruct, frozen=True):
    name: str
    node_selector: Selector
    rating: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """How fast it is beside the others, until jobs were measured on both."""
    price: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Of a unit for an hour, in any currency."""
    spot_price: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Of a unit on a spot node; ``None``: as on demand."""


class PackingSpec(ApiStruct, frozen=True):
    """How jobs share devices in turns."""

    max_jobs_per_device: Annotated[int, msgspec.Meta(ge=1, le=2)] = 2
    """1: none is shared. More than two cannot be: pods name the nodes that they want, and no devices there."""


class QueueSpec(ApiStruct, frozen=True):
    node_selector: Selector | None = None
    resource: str | None = None
    capacity: Annotated[int, msgspec.Meta(ge=0)] | None = None
    spot_selector: Selector | None = None
    policy: str = DEFAULT_POLICY
    limits: tuple[Limit, ...] = ()
    namespace_limit: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Of each namespace without one of its own; ``None``: none."""
    max_weight: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """The highest that counts; ``None``: any."""
    kinds: tuple[KindSpec, ...] = ()
    """Of device; a node belongs to the first that selects it."""
    thrift: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """How much the price of a step counts beside the time when a job's kind is chosen."""
    placement: WorkerPlacement = "Any"
    """On which of its nodes workers rather are."""
    packing: PackingSpec | None = None
    """``None``: jobs share no devices."""

    @property
    def jobs_per_device(self) -> int:
        """How many jobs may have a device, at most."""
        return self.packing.max_jobs_per_device if self.packing is not None else 1


class CapacityStatus(ApiStruct, frozen=True):
    """What there is to share, in units of the resource."""

    total: str
    on_demand: str
    spot: str
    used_by_others: str
    allocated: str
    nodes: int


class KindStatus(ApiStruct, frozen=True):
    """What there is of one kind of device, in units of the resource."""

    name: str
    total: str
    on_demand: str
    spot: str
    allocated: str
    nodes: int


class JobCounts(ApiStruct, frozen=True, omit_defaults=False):
    running: int = 0
    waiting: int = 0


class Given(ApiStruct, frozen=True):
    namespace: str
    name: str
    workers: int


class PastKind(ApiStruct, frozen=True):
    """Jobs that are alike and have completed."""

    namespace: str
    pattern: str
    """Their name without numbers."""
    jobs: int
    unit_seconds: str
    """What one needs, at its minimum."""
    off_by: str
    """The factor by which the next one differed from that, usually."""


class QueueStatus(ApiStruct, frozen=True):
    conditions: tuple[Condition, ...] = ()
    observed_generation: int = 0
    capacity: CapacityStatus | None = None
    kinds: tuple[KindStatus, ...] = ()
    nodes_without_kind: tuple[str, ...] = ()
    """Names of nodes that the queue selects and none of its kinds does."""
    jobs: JobCounts = JobCounts()
    allocations: tuple[Given, ...] = ()
    past: tuple[PastKind, ...] = ()
    """The latest first."""
    past_until: str | None = None
    """When the latest job completed that is counted there."""

    @property
    def ready(self) -> Condition | None:
        """Whether it gives out what it has."""
        return next((condition for condition in self.conditions if condition.type == "Ready"), None)


@dataclass(frozen=True)
class Queue:
    name: str
    uid: str
    generation: int
    spec: QueueSpec
    status: QueueStatus
    raw: Object
    fault: str = ""
    """What is wrong with the structure of ``spec``, if it cannot be read."""


def read_queue(body: Object) -> Queue:
    """Read a queue; one with a spec that cannot be read bears the reason in ``fault``."""
    metadata, fault = body["metadata"], ""
    try:
        spec = msgspec.convert(body.get("spec") or {}, QueueSpec)
    except msgspec.ValidationError as error:
        spec, fault = QueueSpec(), f"spec cannot be read: {error}; correct it."
    try:
        status = msgspec.convert(body.get("status") or {}, QueueStatus)
    except msgspec.ValidationError:
        status = QueueStatus()  # all of it can be found out again
    return Queue(metadata["name"], metadata.get("uid") or "", metadata.get("generation", 0), spec, status, body, fault)


def write_queue_status(status: QueueStatus) -> dict[str, Any]:
    written: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(status))
    return written | {"jobs": {"running": status.jobs.running, "waiting": status.jobs.waiting}}


def queue_of(body: Object) -> str | None:
    """The queue that a job names, if it is this operator's."""
    spec = body.get("spec")
    if not isinstance(spec, Mapping) or spec.get("managedBy") not in (None, "", MANAGER):
        return None
    name = spec.get("queue")
    return name if isinstance(name, str) and name else None
