"""Which devices share the virtual nodes of a job, how, and which of them are worth asking for. Pure.

VirtualFlow (Or, Zhang and Freedman, MLSys 2022, arXiv 2009.09523, section 5.3) solves the same before a heterogeneous
job: from times measured beforehand on each type of device, the split of the batch with the shortest step; and it uses
one type alone where that is faster. Here the split is in whole virtual nodes, whose number is fixed; a device may run
several of them as one micro-batch (*fused*, in a ``statistical`` job), which makes them faster; and devices that bring
nothing are left out.

While a job runs, its coordinator splits by measured paces (``virtualflow.coordinator.assignment``). The two agree where
every virtual node of a device takes the same time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product

from virtualflow.errors import ConfigurationError
from virtualflow.protocol.tree import subtrees
from virtualflow.protocol.wording import counted

# Which devices are worth asking for.

WORTH = 0.01
"""A set of fewer devices is asked for if its step is at most this share longer than the shortest."""
COMBINATIONS = 4_096
"""The most sets of devices that are compared; of more, fewer numbers of each type are tried."""


@dataclass(frozen=True)
class DeviceType:
    """Devices of one type that could be had.

    Raises:
        ConfigurationError: there is none, or nothing was measured.
    """

    name: str
    count: int
    seconds: Mapping[int, float]
    """Of a micro-batch, by how many virtual nodes are fused into it; 1 is among them. Between two of these numbers
    times lie on the line between them, and above the largest nothing is fused."""
    beside: float = 0.0
    """Of a step, beside its micro-batches: the update, for one."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigurationError(f"{self.name}: at least one device is needed")
        if 1 not in self.seconds or min(self.seconds) < 1 or min(self.seconds.values()) <= 0:
            raise ConfigurationError(f"{self.name}: the seconds of one virtual node are needed, above 0")


@dataclass(frozen=True)
class Interconnect:
    """What gradients travel over."""

    sum_bytes: int
    """A sum of all gradients."""
    bytes_per_second: float
    """That a worker sends, and receives meanwhile."""
    by_tree: bool = True
    """Whether sums have the shape of the tree; a worker of a ``statistical`` job has one sum."""

    def seconds(self, given: Sequence[int]) -> float:
        """An exchange by slices, none of it hidden beside the backward pass, without latency.

        A worker sends its slice of each of its sums to every other one, of which there are as many as its range has
        nodes of the tree; and the total of its own slice to all (``reduction.schedule`` predicts so).

        Args:
            given: virtual nodes of each worker, in the order of their ranges.
        """
        workers, nodes = len(given), sum(given)
        ranges = pairwise(accumulate(given, initial=0))
        rows = [len(subtrees(nodes, range(first, end))) if self.by_tree else 1 for first, end in ranges]
        out = max(max(own * (workers - 1), sum(rows) - own) for own in rows)
        return (out + workers - 1) / workers * self.sum_bytes / self.bytes_per_second


@dataclass(frozen=True)
class Share:
    """What the devices of one type get."""

    name: str
    virtual_nodes: tuple[int, ...]
    """Of each device, at least one."""
    fused: int
    """How many virtual nodes a device fuses at most; 1: none."""
    seconds: float
    """The slowest of them in a step, without the exchange."""


@dataclass(frozen=True)
class Division:
    """How virtual nodes are divided."""

    shares: tuple[Share, ...]
    seconds: float
    """A step: the slowest device's, and the exchange if the network is known."""
    exchange: float = 0.0
    """The exchange's part of it."""

    @property
    def devices(self) -> int:
        return sum(len(share.virtual_nodes) for share in self.shares)


@dataclass(frozen=True)
class Advice:
    """Which devices to ask for."""

    best: Division
    """With all devices that bring something."""
    everything: Division | None
    """With all devices, whether they bring something or not; ``None``: they are more than the virtual nodes."""
    alone: tuple[Division, ...]
    """With each type alone."""
    reason: str


def costs(device: DeviceType, virtual_nodes: int) -> list[float]:
    """The seconds of a step of such a device with no virtual node, with one, and so on; never falling.

    Virtual nodes are cut into as few micro-batches as the width that is fused admits, of equal lengths as far as can
    be: so does a worker (``virtualflow.data.chunks``). The width is the fastest one for each number.
    """
    single = _widths(device.seconds, virtual_nodes)

    def cost(number: int, width: int) -> float:
        share, longer = divmod(number, -(-number // width))
        micro_batches = -(-number // width)
        return longer * (single[share + 1] if longer else 0.0) + (micro_batches - longer) * single[share]

    widths = sorted({min(width, virtual_nodes) for width in device.seconds})
    table = [min(cost(number, width) for width in widths) for number in range(1, virtual_nodes + 1)]
    return [0.0, *(device.beside + each for each in accumulate(table, max))]


def divide(virtual_nodes: int, devices: Sequence[DeviceType]) -> Division:
    """The division with the shortest step over all these devices, each of which gets at least one virtual node.

    Exact: the shortest step is one of the times that some device takes for some number of virtual nodes, and a time is
    long enough if the most that each device computes in it add up to all of them.

    Raises:
        ConfigurationError: there are more devices than virtual nodes, or none.
    """
    return _divide(virtual_nodes, [(device, costs(device, virtual_nodes)) for device in devices])


def advise(virtual_nodes: int, devices: Sequence[DeviceType], network: Interconnect | None = None) -> Advice:
    """Which of these devices shorten the step, with the division over them.

    Of all sets the fastest counts, and of those as fast, but for ``WORTH``, that of the fewest devices.

    Args:
        network: between the devices, so that the exchange counts among the sets; how one of them divides the virtual
            nodes depends on computing alone. ``None``: the exchange takes no time.
    """
    if not devices:
        raise ConfigurationError("name at least one type of device")
    tables = [costs(device, virtual_nodes) for device in devices]

    def division(counts: Sequence[int]) -> Division | None:
        used = [
            (replace(device, count=count), table)
            for device, table, count in zip(devices, tables, counts, strict=True)
            if count
        ]
        if not used or sum(counts) > virtual_nodes:
            return None
        divided = _divide(virtual_nodes, used)
        if network is None:
            return divided
        took = network.seconds([each for share in divided.shares for each in share.virtual_nodes])
        return replace(divided, seconds=divided.seconds + took, exchange=took)

    found = [each for counts in _sets(devices, COMBINATIONS) if (each := division(counts)) is not None]
    fastest = min(each.seconds for each in found)
    good = [each for each in found if each.seconds <= fastest * (1 + WORTH)]
    best = min(good, key=lambda each: (each.devices, each.seconds))
    alone = [
        division([min(device.count, virtual_nodes) if other is device else 0 for other in devices])
        for device in devices
    ]
    singles = tuple(each for each in alone if each is not None)
    everything = division([device.count for device in devices])
    reason = _explain(best, singles, devices)
    if network is None and len(found) > 1:
        reason += "; the exchange between devices is not counted (--bandwidth)"
    return Advice(best, everything, singles, reason)


def _widths(seconds: Mapping[int, float], most: int) -> list[float]:
    """The seconds of a micro-batch of 0, 1, 2, ... virtual nodes, up to the most that were measured or are there."""
    known = sorted(seconds)
    line = [0.0]
    for width in range(1, min(most, known[-1]) + 1):
        above = bisect_left(known, width)
        high, low = known[above], known[max(0, above - 1)]
        part = 0.0 if high == low else (width - low) / (high - low)
        line.append(max(line[-1], seconds[low] + part * (seconds[high] - seconds[low])))
    return line


def _divide(virtual_nodes: int, devices: Sequence[tuple[DeviceType, list[float]]]) -> Division:
    number = sum(device.count for device, _ in devices)
    if not 0 < number <= virtual_nodes:
        raise ConfigurationError(
            f"{counted(number, 'device')} cannot share {counted(virtual_nodes, 'virtual node')}: each needs one"
        )
    first = max(table[1] for _, table in devices)
    times = sorted({time for _, table in devices for time in table if time >= first})

    def most(time: float) -> list[int]:
        return [bisect_right(table, time) - 1 for _, table in devices]

    def enough(time: float) -> bool:
        return sum(device.count * each for (device, _), each in zip(devices, most(time), strict=True)) >= virtual_nodes

    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(times[middle]) else (middle + 1, high)
    counts = [[each] * device.count for (device, _), each in zip(devices, most(times[low]), strict=True)]
    _take_back(counts, [table for _, table in devices], virtual_nodes)
    shares = [
        Share(device.name, tuple(given), _fused(device, table, given), max(table[each] for each in given))
        for (device, table), given in zip(devices, counts, strict=True)
    ]
    return Division(tuple(shares), max(share.seconds for share in shares))


def _take_back(counts: list[list[int]], tables: list[list[float]], virtual_nodes: int) -> None:
    for _ in range(sum(map(sum, counts)) - virtual_nodes):
        _, kind, device = max(
            (tables[kind][count], kind, device)
            for kind, given in enumerate(counts)
            for device, count in enumerate(given)
            if count > 1
        )
        counts[kind][device] -= 1


def _fused(device: DeviceType, table: list[float], given: Sequence[int]) -> int:
    """The width that comes to the seconds of the table for the largest of these numbers."""
    number = max(given)
    for width in sorted(device.seconds):
        narrow = {known: seconds for known, seconds in device.seconds.items() if known <= width}
        if costs(replace(device, seconds=narrow), number)[number] <= table[number]:
            return min(width, number)
    return 1


def _sets(devices: Sequence[DeviceType], most: int) -> Iterator[tuple[int, ...]]:
    """How many of each type: all sets, or in larger steps where these would be too many."""
    steps = max(device.count for device in devices)
    while True:
        ranges = [sorted({device.count * step // steps for step in range(steps + 1)}) for device in devices]
        number = 1
        for each in ranges:
            number *= len(each)
        if number <= most or steps == 1:
            return product(*ranges)
        steps = (steps + 1) // 2


def _explain(best: Division, alone: Sequence[Division], devices: Sequence[DeviceType]) -> str:
    asked = " and ".join(f"{len(share.virtual_nodes)} {share.name}" for share in best.shares)
    fastest = min(alone, key=lambda each: each.seconds)
    used = {share.name: len(share.virtual_nodes) for share in best.shares}
    spare = [
        f"{device.count - used.get(device.name, 0)} {device.name}"
        for device in devices
        if used.get(device.name, 0) < device.count
    ]
    gain = f", {fastest.seconds / best.seconds:.2f} times the speed of {fastest.shares[0].name} alone"
    left = f"; {' and '.join(spare)} would not shorten the step" if spare else ""
    return f"ask for {asked}: a step takes {best.seconds:.3g} s{gain if len(best.shares) > 1 else ''}{left}"
