"""Canonical reduction: sums over virtual nodes whose bits do not depend on who is assigned which of them.

Every sum has the shape of one balanced binary tree over the virtual nodes (``tree``). A worker adds up what it is
assigned as it goes and holds only the maximal subtrees of its range (:class:`Accumulator`). Between workers, each
bucket of tensors takes the way that the schedule has for it (``schedule``): in slices, the traffic of a ring all-reduce
when ranges are subtrees, or whole. On every way the same additions happen in the same order, element by element, so
sums depend neither on the way nor on the number of workers.

A tensor that a virtual node does not contribute counts as +0.0 everywhere, also where it could be left out: x + 0.0 is
not always x (-0.0 + 0.0 is 0.0), so leaving it out here and adding it there would give different bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from virtualflow.protocol.tree import Key
from virtualflow.reduction.accumulation import (
    Accumulator,
    Parts,
    Summation,
    Tensors,
    add_arrived,
    multiply,
    sum_up,
)
from virtualflow.reduction.bucket_exchange import Buffers, ReductionPlan
from virtualflow.reduction.buckets import (
    Bucket,
    Keys,
    Reach,
    divide_sums,
    most_delivered,
    plan_buckets,
    rows_of,
)
from virtualflow.reduction.offload import Landing
from virtualflow.reduction.ownership import Portion, Portions
from virtualflow.reduction.pipeline import Early, Pipeline
from virtualflow.reduction.schedule import Choice, Choose, Shape, Terms, choose_ways, combine
from virtualflow.reduction.settings import NETWORK_SIZE, Exchange, Network, ProbeSettings, ReductionSettings
from virtualflow.reduction.traffic import ExchangeLog, Passage, planned_bytes
from virtualflow.transport import Collectives, Exchanger, GroupCollectives

_SCHEDULES = 64
"""Remembered, those used last: a script may leave out other parameters in every step."""


@dataclass(frozen=True)
class Scheduled:
    """A bucket, and how it travels."""

    bucket: Bucket
    shape: Shape
    choice: Choice
    portions: Portions | None
    """For each place who needs what of its sum; ``None``: all need all."""

    def moved(self, rank: int) -> tuple[int, int]:
        """Bytes that a worker sends and receives for it."""
        return planned_bytes(self.bucket, self.choice.way, self.portions, rank)


class Reducer:
    """Reduces between workers; keeps its buffers from step to step, since fresh large ones cost page faults.

    Args:
        landing: which sums come to host memory; ``None``: each to where its tensors are.
    """

    def __init__(
        self,
        summation: Summation,
        settings: ReductionSettings,
        choose: Choose = choose_ways,
        landing: Landing | None = None,
    ) -> None:
        self._summation = summation
        self._settings = settings
        self._choose = choose
        self._landing = landing
        self.wish = settings.exchange
        self.wish_number = self.wish.to_number()
        self.terms = Terms(settings.exchange, settings.network)
        self._groups: GroupCollectives | None = None
        """By which messages travel; ``None``: by the communicator of the generation."""
        self._buffers = Buffers()
        self._shared: Portions | None = None
        self._exchanger: Exchanger | None = None
        self._holdings: tuple[Sequence[Sequence[int]], Keys] = (), []
        self._schedules: dict[tuple[object, ...], list[Scheduled]] = {}
        self._begun: tuple[list[Scheduled], list[ExchangeLog]] = [], []
        self.schedule: list[Scheduled] = []
        """How the buckets of the last complete reduction have travelled."""
        self._templates: Sequence[Tensor] = ()
        self._logs: list[ExchangeLog] = []

    def passages(self) -> list[Passage]:
        """What was measured of each bucket of the last complete reduction, in the order of :attr:`schedule`."""
        return [passage for log in self._logs for passage in log.passages()]

    def schedule_if_whole(self) -> list[Scheduled]:
        """How the same would have travelled if no backward pass had ended early."""
        _, keys = self._holdings
        places = [place for one in self.schedule for place in one.bucket.places]
        return self._schedule(keys, self._templates, places, None, final=False)

    def close(self) -> None:
        self._leave_thread(self._settings.close_wait)

    def _leave_thread(self, patience: float) -> None:
        if self._exchanger is not None:
            self._exchanger.close(patience)
            self._exchanger = None

    def share(self, portions: Portions | None) -> None:
        """Bring the sums of the first places to those only who need them; those of further places to all.

        Of a place of which a worker does not need all, it gets what it needs, one stretch behind the other: ``[n]``.
        """
        self._shared = portions
        self._schedules.clear()

    def agree(
        self,
        collectives: Collectives,
        wish: Exchange,
        holdings: Sequence[Sequence[int]],
        templates: Sequence[Tensor],
        *,
        spare: bool,
        groups: GroupCollectives | None = None,
    ) -> None:
        """A generation begins: settle what all schedules of it follow from, with all its members alike.

        Args:
            spare: whether a thread that exchanges takes nothing from those that compute here.
            groups: by which messages are to travel; ``None``: by ``collectives``.
        """
        self.forget()
        self._groups = groups
        known = self.terms.network if self.terms.measured else None
        self.terms = Terms(wish, self._settings.network)
        if collectives.size == 1:
            return
        rows = sum(len(nodes) for nodes in self._keys(holdings))
        size = rows * sum(template.numel() * template.itemsize for template in templates)
        if size >= self._settings.probe.worthwhile:
            network = agree_on_network(collectives, self._settings.probe, known, spare=spare)
            self.terms = Terms(wish, network, measured=True)

    def _portions(self, templates: Sequence[Tensor], size: int) -> Portions | None:
        if self._shared is None:
            return None
        count = len(self._shared)
        orders = [tuple((first + rank) % size for rank in range(size)) for first in range(size)]
        rest = [
            (Portion(0, template.numel(), orders[place % size]),) for place, template in enumerate(templates[count:])
        ]
        return (*self._shared, *rest)

    def release_unused(self) -> None:
        self._buffers.release_unused()

    def forget(self) -> None:
        """Another communicator comes: free the buffers, and leave the thread to what it does in the former one."""
        self._buffers.clear()
        self._schedules.clear()
        self.schedule, self._logs = [], []
        self.abandon()
        self._leave_thread(0.0)

    def abandon(self) -> None:
        """What has begun, if anything, is no part of the next reduction."""
        self._begun = [], []

    def reduce(
        self,
        collectives: Collectives,
        holdings: Sequence[Sequence[int]],
        parts: Parts,
        *,
        templates: Sequence[Tensor],
        present: Sequence[bool],
        scale: float,
        reach: Reach | None = None,
    ) -> Tensors:
        """Sum over all virtual nodes, times ``scale``, on every worker that needs it (see :meth:`share`).

        Args:
            holdings: the virtual nodes of each of its members, ascending, in the order of their ranks.
            parts: what an :class:`Accumulator` has of this worker's; they are used up where it is alone.
            templates: one tensor per place, with its shape, dtype and device.
            present: which places any virtual node of the job contributed to; the others come back as ``None``,
                as do those of whose sums this worker needs nothing (see :meth:`share`).
            scale: the factor of the sum, the same on every worker.
            reach: which virtual nodes may contribute to the first places: what others have there does not travel, and
                counts as +0.0. The same on every worker; ``None``: all may contribute to all.

        Returns:
            One contiguous tensor per present place, views of buffers that the next call overwrites. What comes to host
            memory (see :class:`Landing`) must not be read before that memory has finished.
        """
        result: Tensors = [None] * len(templates)
        places = tuple(place for place, there in enumerate(present) if there)
        if collectives.size == 1:
            total = sum_up(self._summation, parts)
            # What is present was contributed by this worker: there is no other.
            found = [tensor.contiguous() for tensor in (total[place] for place in places) if tensor is not None]
            multiply(found, scale)
            landing = self._landing
            for place, tensor in zip(places, found, strict=True):
                lands = landing is not None and place < landing.places
                result[place] = landing.memory.store(tensor) if landing is not None and lands else tensor
            return result
        scheduled = self._scheduled(holdings, templates, places[::-1], reach, final=False) if places else []
        (begun, self._logs), self._begun = self._begun, ([], [])
        self.schedule, self._templates = [*begun, *scheduled], templates
        if scheduled:
            plan = self._plan(collectives, holdings, templates, scheduled, scale)
            pipeline = Pipeline(plan, self._buffers, "late", beside=False)
            for index, bucket in enumerate(plan.buckets):
                for row, (_, tensors) in enumerate(parts):
                    pipeline.write_row(index, row, [tensors[place] for place in bucket.places])
                pipeline.submit(index)
            pipeline.close(None)
            pipeline.carry_out_here()
            self._logs.append(pipeline.log)
            for index in range(len(plan.buckets)):
                for place, tensor in pipeline.result(index).items():
                    result[place] = tensor
        return result

    def multiply(self, found: Mapping[int, Tensor], factors: Mapping[int, float]) -> None:
        """Multiply sums that have come by factors of their own, in place; what has none stays as it is."""
        if not factors:
            return
        if self._landing is not None:
            self._landing.memory.finish()
        for place in found.keys() & factors.keys():
            multiply([found[place]], factors[place])

    def begin(
        self,
        collectives: Collectives,
        holdings: Sequence[Sequence[int]],
        accumulator: Accumulator,
        *,
        last: int,
        count: int = 1,
        weight: float,
        templates: Sequence[Tensor],
        places: Sequence[int],
        scale: float | None,
        reach: Reach | None = None,
    ) -> Early | None:
        """Begin to reduce before the last virtual node's tensors are there; ``None`` if that is not worth it.

        All workers call this at the same place of the same synchronization, or none does.

        Args:
            places: which of them are reduced, in the order in which they are expected; the same on all workers.
            scale: the factor of the sum; ``None``: not known yet, so sums come without it.
            reach: see :meth:`reduce`.
        """
        begun = self._overlapped(collectives, holdings, templates, places, reach)
        if not begun:
            return None
        plan = self._plan(collectives, holdings, templates, begun, 1.0 if scale is None else scale)
        pipeline = Pipeline(plan, self._buffers, "early", beside=True)
        self._begun = begun, [pipeline.log]
        accumulator.await_offloaded()  # what is not added to any more is written to messages
        early = Early(pipeline, plan.buckets, accumulator.prepare(last, count, weight=weight))
        self._thread().submit(pipeline.run)
        return early

    def overlaps(
        self,
        collectives: Collectives,
        holdings: Sequence[Sequence[int]],
        templates: Sequence[Tensor],
        reach: Reach | None = None,
    ) -> bool:
        return bool(self._overlapped(collectives, holdings, templates, range(len(templates))[::-1], reach))

    def _overlapped(
        self,
        collectives: Collectives,
        holdings: Sequence[Sequence[int]],
        templates: Sequence[Tensor],
        places: Sequence[int],
        reach: Reach | None,
    ) -> list[Scheduled]:
        if collectives.size == 1 or not places:
            return []
        return [one for one in self._scheduled(holdings, templates, places, reach, final=True) if one.choice.overlapped]

    def _thread(self) -> Exchanger:
        if self._exchanger is None:
            self._exchanger = Exchanger()
        return self._exchanger

    # --- what travels how ---------------------------------------------------------------------------------------------

    def _scheduled(
        self,
        holdings: Sequence[Sequence[int]],
        templates: Sequence[Tensor],
        places: Sequence[int],
        reach: Reach | None,
        *,
        final: bool,
    ) -> list[Scheduled]:
        keys = self._keys(holdings)
        sizes = tuple((templates[place].numel(), templates[place].dtype) for place in places)
        rows = tuple(map(len, keys)) if reach is None else (reach, *map(tuple, keys))
        key = (tuple(places), sizes, rows, final)
        found = self._schedules.pop(key, None)
        if found is None:
            found = self._schedule(keys, templates, places, reach, final=final)
            if len(self._schedules) >= _SCHEDULES:
                del self._schedules[next(iter(self._schedules))]
        self._schedules[key] = found  # what was used last stands last
        return found

    def _schedule(
        self, keys: Keys, templates: Sequence[Tensor], places: Sequence[int], reach: Reach | None, *, final: bool
    ) -> list[Scheduled]:
        settings, size = self._settings, len(keys)
        limit = self.terms.exchange.bucket_bytes or settings.bucket
        rows, portions = rows_of(keys, reach, len(templates)), self._portions(templates, size)
        contributed = [place for place in places if any(rows[place])]
        buckets = plan_buckets(templates, contributed, rows, alignment=settings.alignment, limit=limit)
        if reach is not None and portions is None:
            buckets = divide_sums(buckets, list(map(len, keys)), settings.alignment)
        shapes = [
            Shape(
                bucket.total * bucket.dtype.itemsize,
                bucket.counts,
                None if portions is None else most_delivered(bucket, portions, size),
                () if reach is None else tuple(piece * bucket.dtype.itemsize for piece in bucket.pieces),
            )
            for bucket in buckets
        ]
        choices = self._choose(shapes, final, self.terms, settings)
        return [Scheduled(*each, portions) for each in zip(buckets, shapes, choices, strict=True)]

    def _plan(
        self,
        collectives: Collectives,
        holdings: Sequence[Sequence[int]],
        templates: Sequence[Tensor],
        scheduled: Sequence[Scheduled],
        scale: float,
    ) -> ReductionPlan:
        def total(arrived: Mapping[Key, Tensor | None]) -> Tensor:
            whole = self._summation.add_up(arrived, add_arrived)
            assert whole is not None
            return whole if scale == 1.0 else whole.mul_(scale)

        return ReductionPlan(
            self._groups or collectives,
            self._keys(holdings),
            total,
            templates,
            self._results(templates),
            [one.bucket for one in scheduled],
            [one.choice.way for one in scheduled],
            self._portions(templates, collectives.size),
        )

    def _results(self, templates: Sequence[Tensor]) -> Sequence[Tensor]:
        if self._landing is None:
            return templates
        count = self._landing.places
        return [
            *(torch.empty((), dtype=like.dtype).expand(like.shape) for like in templates[:count]),
            *templates[count:],
        ]

    def _keys(self, holdings: Sequence[Sequence[int]]) -> Keys:
        if self._holdings[0] != holdings:
            self._holdings = holdings, [self._summation.parts_of(holding) for holding in holdings]
        return self._holdings[1]


# Measures what messages take between the members of a generation, by a few of them.

_PASSES = 4
"""So often each byte passes through memory at least: to the kernel and from it, and under a checksum at either end."""


def agree_on_network(collectives: Collectives, probe: ProbeSettings, known: Network | None, *, spare: bool) -> Network:
    """What messages take, as all members have it from a generation before, or else measured now; the same for all.

    So a generation that nobody joins waits for nothing but this question.

    Args:
        spare: whether a thread that exchanges takes nothing from those that compute here.
    """
    told = _tell(collectives, bytes(NETWORK_SIZE) if known is None else known.to_bytes())
    if known is not None and len(set(told)) == 1:
        return known
    mine = _measure(collectives, probe, spare=spare)
    return combine([Network.from_bytes(raw) for raw in _tell(collectives, mine.to_bytes())])


def _tell(collectives: Collectives, raw: bytes) -> list[bytes]:
    block = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return [row.numpy().tobytes() for row in collectives.all_gather(block)]


def _measure(collectives: Collectives, probe: ProbeSettings, *, spare: bool) -> Network:
    took = dict.fromkeys((probe.small, probe.large), (math.inf, 0.0))
    # In turns, so that what else the machine does for a moment disturbs both alike.
    for size in [*took] * probe.rounds:
        took[size] = min(took[size], _time(partial(_gather, collectives, size)))
    left, right = (torch.ones(probe.added // 4, dtype=torch.float32) for _ in range(2))
    add_byte = min(_time(lambda: left.add_(right))[0] for _ in range(probe.rounds)) / probe.added
    (small, _), (large, busy) = took.values()
    byte = max(_PASSES * add_byte, (large - small) / (probe.large - probe.small))
    return Network(small, byte, add_byte, hidden=1.0 if spare else max(0.0, 1.0 - busy / large))


def _gather(collectives: Collectives, size: int) -> None:
    collectives.all_gather(torch.zeros(max(1, size // (collectives.size - 1)), dtype=torch.uint8))


def _time(act: Callable[[], object]) -> tuple[float, float]:
    """Seconds that it takes, and those in which this thread's processor is busy with it."""
    busy, began = time.thread_time(), time.perf_counter()
    act()
    seconds = time.perf_counter() - began
    return seconds, time.thread_time() - busy
