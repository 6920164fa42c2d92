"""What a queue has to share: nodes that are fit for work, less what other pods request there. Pure.

Everything is counted in whole units: thousandths of a CPU, else the resource's own (GPUs, bytes). What a worker
requests is rounded up, what a node can give down.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

from virtualflow.protocol.wording import counted
from virtualflow_operator.api import (
    ANY_KIND,
    JobSpec,
    Node,
    Object,
    QueueSpec,
    WorkerGroup,
    parse_quantity,
    pod_requests,
    total,
)
from virtualflow_operator.jobs.node_fit import tolerated_keys, unfitness
from virtualflow_operator.queues.kinds import kind_of, kinds_of


def scale_of(resource: str | None) -> int:
    """Units in one of the resource."""
    return 1_000 if resource == "cpu" else 1


def in_units(amount: str | float | Decimal, resource: str | None, *, up: bool) -> int:
    """A quantity in units; 0 for what is none."""
    number = amount if isinstance(amount, Decimal) else parse_quantity(amount)
    scaled = (number or Decimal(0)) * scale_of(resource)
    return int(scaled.to_integral_value(ROUND_CEILING if up else ROUND_FLOOR))


def shown(units: int, resource: str | None) -> str:
    scale = scale_of(resource)
    return f"{units / scale:.10g}" if scale > 1 else str(units)


def in_words(units: int, resource: str | None) -> str:
    if resource is None:
        return counted(units, "worker")
    if resource == "memory":
        return f"{units / 2**30:.4g}Gi of memory"
    return f"{shown(units, resource)} {resource}"


def requested(requests: Iterable[Mapping[str, str]], resource: str) -> int:
    """Units that a pod requests; 0 if that is less, which the API server refuses."""
    return max(in_units(total(requests, resource), resource, up=True), 0)


def worker_units(spec: JobSpec, resource: str | None) -> int:
    """Units of one worker, by the group that asks for most; 0: none asks for the resource."""
    if resource is None:
        return 1
    return max((_template_units(group.template, resource) for group in _used(spec)), default=0)


def _used(spec: JobSpec) -> list[WorkerGroup]:
    return [group for group in spec.worker_groups if group.max_replicas != 0]


def _template_units(template: Object, resource: str) -> int:
    return requested(pod_requests(template.get("spec")), resource)


def tolerated(spec: JobSpec) -> frozenset[str]:
    """Keys of the taints that a job's workers tolerate; the empty key stands for all."""
    return frozenset(key for group in _used(spec) for key in tolerated_keys(group.template.get("spec")))


@dataclass(frozen=True)
class KindCapacity:
    """What a queue has of one kind of device, in units."""

    on_demand: int = 0
    spot: int = 0
    nodes: frozenset[str] = frozenset()
    """Those that are fit for work."""

    @property
    def total(self) -> int:
        return self.on_demand + self.spot


@dataclass(frozen=True)
class QueueCapacity:
    """What a queue has, in units."""

    kinds: Mapping[str, KindCapacity] = field(default_factory=dict)
    """By name, in the order in which the queue names them; a queue that tells none apart has one without a name."""
    used_by_others: int = 0
    selected: int = 0
    """Nodes that its selector selects."""
    unfit: Mapping[str, str] = field(default_factory=dict)
    """Why some of these do not count."""
    unsorted: tuple[str, ...] = ()

    @property
    def on_demand(self) -> int:
        return sum(kind.on_demand for kind in self.kinds.values())

    @property
    def spot(self) -> int:
        return sum(kind.spot for kind in self.kinds.values())

    @property
    def total(self) -> int:
        return self.on_demand + self.spot

    @property
    def nodes(self) -> frozenset[str]:
        return frozenset().union(*(kind.nodes for kind in self.kinds.values()))


def measure_capacity(
    spec: QueueSpec,
    nodes: Mapping[str, Node],
    *,
    others: Mapping[str, int],
    alive: Mapping[str, int],
    tolerations: Collection[frozenset[str]],
    grain: int = 1,
    leaving: Collection[str] = (),
) -> QueueCapacity:
    """Count what a queue has.

    Args:
        others: units that pods which are not workers of the queue request on each node.
        alive: units of workers of the queue that train on nodes which look lost. After an outage of the API server all
            nodes look lost: those workers show that theirs are not.
        tolerations: keys of the taints that each job of the queue tolerates.
        grain: no worker takes less than a multiple of this, so less than that on a node is of no use.
        leaving: keys of taints that announce a node's loss, beside the well-known ones.
    """
    if spec.resource is None:
        return QueueCapacity({ANY_KIND: KindCapacity(spec.capacity or 0)})
    selected = {
        name: node
        for name, node in nodes.items()
        if not node.gone and (spec.node_selector is None or spec.node_selector.selects(node.labels))
    }
    kinds = {kind.name: _Count() for kind in kinds_of(spec)}
    used, unfit, unsorted = 0, {}, []
    for name, node in selected.items():
        kind = kind_of(spec, node.labels)
        if kind is None:
            unsorted.append(name)
            continue
        count, amount = kinds[kind], alive.get(name, 0)
        fault = unfitness(node, tolerations, leaving)
        if not fault:
            count.nodes.add(name)
            allocatable = in_units(node.allocatable.get(spec.resource, "0"), spec.resource, up=False)
            used += min(others.get(name, 0), allocatable)
            amount = max(allocatable - others.get(name, 0), 0) // grain * grain
        else:
            unfit[name] = fault
            if node.ready or not amount:
                continue
            count.nodes.add(name)
        if spec.spot_selector is not None and spec.spot_selector.selects(node.labels):
            count.spot += amount
        else:
            count.on_demand += amount
    if spec.capacity is not None and not spec.kinds:
        most, count = spec.capacity * scale_of(spec.resource), kinds[ANY_KIND]
        count.on_demand = min(count.on_demand, most)
        count.spot = min(count.spot, most - count.on_demand)
    there = {name: KindCapacity(n.on_demand, n.spot, frozenset(n.nodes)) for name, n in kinds.items()}
    return QueueCapacity(there, used, len(selected), unfit, tuple(sorted(unsorted)))


@dataclass
class _Count:
    on_demand: int = 0
    spot: int = 0
    nodes: set[str] = field(default_factory=set)
